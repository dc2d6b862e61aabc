"""Hostile files for every reader of a format: damaged bytes, and documents that are well spelled and wrong.

Entry points: `Format` (what is read, from what seeds, and how it refuses), `run_cases`; the formats are in
fuzzed_formats.py. A case fails if a reader raises what it does not promise, takes long, allocates more than
`MOST_BYTES`, returns something that is not the whole document, or refuses with words of the stranger's own
that are longer than a line.
"""

import json
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20
MOST_SECONDS = 10.0
MOST_WORD = 250
STRETCH = 100
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**40, 10**400, -(2**63), 0.5, -0.0, 1e308, 5e-324,
    "", "x", "\x00", "../../etc/passwd", "\u202e", "a" * 300, [], {}, [[]], [None], {"": None}, [0] * 300,
)  # fmt: skip
TOKENS = (
    b"NaN", b"Infinity", b"-", b"1e999", b"[" * 2000, b'{"a":' * 500, b'"\\ud800"', b"\xff\xfe", b"\x00",
    b"9" * 5000, b"9" * 400, b",", b"}", b"]", b"\n", b'"digest":""', b"0.1e-400",
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Attributes:
        name: of the format.
        seeds: good files.
        read: returns the document, or raises one of `refusals`.
        refusals: what a reader may raise.
        repair: makes checksums anew, so that the meaning is read.
        rewrite: the bytes of what was read; they must hold all that the file says. None: not compared.
        is_binary: there are no lines of JSON to change.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], Any]
    refusals: tuple[type[Exception], ...]
    repair: Callable[[bytes], bytes] = lambda data: data
    rewrite: Callable[[Any], bytes] | None = None
    is_binary: bool = False


def run_cases(form: Format, num_cases: int, seed: int) -> dict[str, int]:
    """Read so many hostile files; return how many were accepted and refused.

    The peak of memory is that of the process where the system tells it: tracing every allocation takes five
    times as long, and is left to the stretches whose peak is suspicious.

    Raises:
        AssertionError: names the case: format, seed and number make it again.
    """
    counts = {"accepted": 0, "refused": 0}
    for start in range(0, num_cases, STRETCH):
        numbers = range(start, min(start + STRETCH, num_cases))
        before = _forget_peak()
        for number in numbers:
            counts[_run_case(form, seed, number, is_traced=before is None)] += 1
        if before is not None and _memory("VmHWM") - before > MOST_BYTES // 2:
            for number in numbers:
                _run_case(form, seed, number, is_traced=True)
    return counts


def _run_case(form: Format, seed: int, number: int, *, is_traced: bool) -> str:
    data = case(form, seed, number)
    where = f"{form.name}, seed {seed}, case {number}"
    refusal, value = "", None
    if is_traced:
        tracemalloc.start()
    began = time.thread_time()  # others may stop this process, and wall time with it
    try:
        value = form.read(data)
    except form.refusals as error:
        refusal = str(error) or "no reason"
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        took = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= MOST_BYTES, f"{where}: {peak} bytes"
    assert took <= MOST_SECONDS, f"{where}: {took:.1f} s"
    assert len(refusal) < 4000, f"{where}: a refusal of {len(refusal)} characters"
    word = max(refusal.split() or [""], key=len)
    assert len(word) <= MOST_WORD, f"{where}: a refusal with a word of {len(word)} characters: {word[:80]}"
    assert "\n" not in refusal, f"{where}: a refusal of two lines: {refusal[:400]}"
    if form.rewrite is not None and not refusal:
        assert holds(json_lines(form.rewrite(value)), json_lines(data)), f"{where}: loaded in part"
    return "refused" if refusal else "accepted"


def _forget_peak() -> int | None:
    """Let the peak of this process begin anew; return its bytes now, None where there is no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _memory("VmRSS")
    except OSError:
        return None


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def case(form: Format, seed: int, number: int) -> bytes:
    """Return one hostile file."""
    chance = random.Random(f"{form.name} {seed} {number}")
    data = chance.choice(list(form.seeds))
    if chance.random() < 0.5 and not form.is_binary:
        lines = data.splitlines(keepends=True)
        at = chance.randrange(len(lines))
        lines[at] = _other_document(lines[at], chance)
        data = b"".join(lines)
    else:
        for _ in range(chance.randint(1, 4)):
            data = _other_bytes(data, chance)
    return form.repair(data) if chance.random() < 0.6 else data


def json_lines(data: bytes) -> list[Any]:
    """Return the documents of a file, for comparing what two files say."""
    lines = data.splitlines() if data.startswith(b'{"kind"') else [data]
    # As floats: where a fraction may stand a whole number may too, and 10^40 is none that floats have.
    return [json.loads(line, parse_int=float) for line in lines]


def holds(whole: Any, said: Any) -> bool:
    """Return whether a document says all that another one does; defaults may be added."""
    if isinstance(whole, dict) and isinstance(said, dict):
        return all(key in whole and holds(whole[key], said[key]) for key in said)
    if isinstance(whole, list) and isinstance(said, list):
        return len(whole) == len(said) and all(map(holds, whole, said))
    return bool(whole == said)


def _other_document(line: bytes, chance: random.Random) -> bytes:
    """Return a line of JSON with one value, key or length changed."""
    document = json.loads(line)
    holders: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict | list) and value:
            holders.append(value)
            for inner in value.values() if isinstance(value, dict) else value:
                collect(inner)

    collect(document)
    holder = chance.choice(holders)
    key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    action = chance.randrange(5)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder.extend([holder[key]] * chance.choice((1, 3, 2000)))
    elif action == 2 and isinstance(holder, dict):
        holder[chance.choice(("", "more", "__class__", f"{key}x"))] = holder[key]
    elif isinstance(holder[key], int) and chance.random() < 0.5:
        holder[key] = holder[key] + chance.choice((-1, 1, 256, -256))
    else:
        holder[key] = chance.choice(HOSTILE)
    return json.dumps(document, separators=(",", ":")).encode() + (b"\n" if line.endswith(b"\n") else b"")


def _other_bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 2, 16, 400)))
    action = chance.randrange(7)
    if action == 0:
        return data[:at]
    if action == 1:
        return data[:at] + data[end:]
    if action == 2:
        return data[:at] + bytes(chance.randrange(256) for _ in range(end - at)) + data[end:]
    if action == 3:
        return data[:at] + chance.choice(TOKENS) + data[end:]
    if action == 4:
        return data[:at] + data[at:end] * 2 + data[end:]
    if action == 5 and chance.random() < 0.03:
        return data[:at] + data[at:end] * (1 + (3 << 20) // max(1, end - at)) + data[end:]
    return (
        data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if at < len(data) else data
    )
