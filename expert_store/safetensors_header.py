"""One safetensors header: JSON bytes to entries. Entry: `decode_header`.

A file is: 8 bytes, little endian, header length N; N bytes of JSON, name -> {dtype, shape, data_offsets},
optionally `__metadata__` (string -> string); then the data.
Source: README of huggingface/safetensors, "Format".

A header is decoded twice at most: `_decode_fast` accepts regular headers at C speed and proves that it
overlooked nothing; whatever it does not accept goes to `_decode_strict`, which names the fault. The two agree
on every header that both accept (a test compares them).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from expert_store.errors import CheckpointCorrupt, SourceFailed, brief

_METADATA: Final = "__metadata__"
_FETCH_AGAIN: Final = "the download is incomplete or damaged: fetch this file again"

DTYPE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("F4",), 4),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        **dict.fromkeys(
            ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
        ),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
        **dict.fromkeys(("U32", "I32", "F32"), 32),
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    }
)
"""Width of one element of every dtype tag that safetensors defines."""


class HeaderEntry(msgspec.Struct, gc=False):
    """One tensor as its header lists it; None where the header has no such field."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    data_offsets: tuple[int, int] | None = None


class _Metadata(msgspec.Struct):
    values: dict[str, str] | None = msgspec.field(default=None, name=_METADATA)


MAX_MESSAGE: Final = 1000
_METADATA_DECODER: Final = msgspec.json.Decoder(_Metadata)
_ENTRIES_DECODER: Final = msgspec.json.Decoder(dict[str, HeaderEntry])


def decode_header(header: bytes, name: str) -> dict[str, HeaderEntry]:
    """Return the entries of one header, in file order, without `__metadata__`.

    Args:
        header: The JSON bytes.
        name: File name, for messages.

    Raises:
        CheckpointCorrupt: Not UTF-8, not JSON, a key listed twice, or a field of the wrong type. Numbers are
            not judged here.
    """
    entries = _decode_fast(header)
    return _decode_strict(header, name) if entries is None else entries


def _decode_fast(header: bytes) -> dict[str, HeaderEntry] | None:
    """Decode a regular header, or return None when it is not certain that nothing was overlooked.

    A decoder keeps the last of two equal keys and skips unknown ones. Without backslashes every string holds
    exactly two quotes, and a full entry has five strings: name, three field names, dtype. All three fields
    present and the quotes of the whole header adding up therefore leave no room for one key more.
    """
    if b"\\" in header:
        return None
    try:
        entries = _ENTRIES_DECODER.decode(header)
        metadata = _METADATA_DECODER.decode(header).values
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    entries.pop(_METADATA, None)
    quotes = 10 * len(entries) + (0 if metadata is None else 2 + 4 * len(metadata))
    if header.count(b'"') != quotes:
        return None
    if any(e.dtype is None or e.shape is None or e.data_offsets is None for e in entries.values()):
        return None
    return entries


class JsonObject(dict[str, object]):
    """A JSON object whose keys were distinct."""


def _distinct(pairs: list[tuple[str, object]]) -> JsonObject:
    result = JsonObject(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(key)
            seen.add(key)
    return result


class _Duplicate(Exception):
    """Two equal keys in one JSON object."""


def parse_json(text: bytes, name: str) -> JsonObject:
    """Parse one JSON object; say what is wrong with it otherwise."""
    try:
        document: object = json.loads(text.decode("utf-8"), object_pairs_hook=_distinct)
    except UnicodeDecodeError as error:
        raise corrupt(f"Not UTF-8: {name} at byte {error.start} of its JSON", file=name) from error
    except _Duplicate as error:
        raise corrupt(f"Key is listed twice: {error} in {name}", file=name, tensor=str(error)) from None
    except (ValueError, RecursionError) as error:
        raise corrupt(f"Not valid JSON: {name}: {error}", file=name) from error
    if not isinstance(document, JsonObject):
        raise corrupt(f"JSON is not an object: {name} holds {type(document).__name__}", file=name)
    return document


def _decode_strict(header: bytes, name: str) -> dict[str, HeaderEntry]:
    """Decode any header slowly; raise with the name of what is wrong."""
    document = parse_json(header, name)
    metadata = document.pop(_METADATA, None)
    if metadata is None:  # MLX writes null where it was given none, and the format's own reader takes it
        metadata = JsonObject()
    if not isinstance(metadata, JsonObject) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt(f"Metadata is not a map of strings: {name}", file=name)
    entries: dict[str, HeaderEntry] = {}
    for tensor, value in document.items():
        try:
            tensor.encode()
            entries[tensor] = msgspec.convert(value, HeaderEntry)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise corrupt(
                f"Header entry is malformed: {tensor!r} in {name}: {error}", file=name, tensor=tensor
            ) from error
    return entries


def corrupt(message: str, *, hint: str = _FETCH_AGAIN, **context: object) -> CheckpointCorrupt:
    """Return the error for files that contradict themselves; names in them may be of any length."""
    return CheckpointCorrupt(brief(message, MAX_MESSAGE), hint=hint, **context)


def failed(error: OSError, name: str, offset: int) -> SourceFailed | CheckpointCorrupt:
    """Return the error for a file that the operating system would not read, or that is none."""
    if error.errno in (errno.ELOOP, errno.EISDIR):
        return corrupt(f"Not a file: {name}: {error.strerror}", file=name)
    return SourceFailed(
        f"Cannot read {name}: {error.strerror or error}",
        hint="check the disk and the permissions of the model folder",
        errno=error.errno,
        file=name,
        offset=offset,
    )
