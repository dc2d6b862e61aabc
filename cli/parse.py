"""Text that people type to values: sizes, contexts, JSON objects."""

import re
from typing import Any

import typer

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20,
    "g": 1 << 30, "gib": 1 << 30, "t": 1 << 40, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
# More digits than any machine needs would overflow on the way to bytes.
_SIZE = re.compile(r"\s*([+-]?[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]*)\s*")
_COUNT = re.compile(r"\s*([+-]?[0-9]{1,18})\s*([kK]?)\s*")


def parse_size(text: str) -> int:
    """Return a size in bytes: `12GiB`, `12G` (the same), `12GB` (decimal), `1.5g`, plain bytes."""
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise typer.BadParameter(f"not a size: {text!r} (write 12GiB, 1.5G or bytes)")
    value = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if value <= 0:
        raise typer.BadParameter(f"a size must be positive: {text!r}")
    return value


def parse_memory(text: str) -> int:
    """Return a budget in bytes; a number without its unit is the likeliest slip."""
    value = parse_size(text)
    if value < 1 << 20:
        raise typer.BadParameter(f"{value} bytes hold no model: {text!r} (write 12GiB)")
    return value


def parse_count(text: str) -> int:
    """Return a positive number, as of tokens: `4096`, or `32k` for 32 * 1024."""
    match = _COUNT.fullmatch(text)
    if match is None:
        what = "too large" if re.fullmatch(r"\s*[0-9]+\s*[kK]?\s*", text) else "not a whole number"
        raise typer.BadParameter(f"{what}: {text!r} (write 4096 or 32k)")
    value = int(match[1]) * (1024 if match[2] else 1)
    if value <= 0:
        raise typer.BadParameter(f"must be positive: {text!r}")
    return value


def parse_number(text: str) -> float:
    """Return a number."""
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"not a number: {text!r}") from error


def parse_whole(text: str) -> int:
    """Return a whole number of any sign."""
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"not a whole number: {text!r}") from error


def parse_json_object(text: str) -> dict[str, Any]:
    """Return a JSON object."""
    import msgspec

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise typer.BadParameter(f"not a JSON object: {text!r} ({error})") from error
