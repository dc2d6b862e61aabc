"""Reads JSON from strangers: one object, bounded, nothing overlooked.

Entry points: `read_document`, `parse_object`, `check_version`, `unusable`. Refused: more than 1 MiB, anything
but UTF-8, nesting that exhausts the parser, a key listed twice, NaN and infinities (which JSON does not have
but many parsers take), absurdly long numbers, half of a surrogate pair (a string that no file and no terminal
can hold).
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import NoReturn

from drafter.errors import DamagedDocument, DrafterError, ForeignDocument
from drafter.files import MAX_BYTES as FILE_BYTES_MAX
from drafter.files import NO_PLAIN_FILE, read_regular
from drafter.reasons import one_line, shown

MAX_BYTES = 1 << 20
_MESSAGE_MAX = 500
_WORD_KEPT = 80
_LONG_WORD = re.compile(r"\S{160,}")


class DocumentRefused(Exception):
    """The bytes are not one plain JSON object; the message is one line, however long what was wrong is."""

    def __init__(self, message: str) -> None:
        super().__init__(brief(message))


def brief(message: str) -> str:
    """Return a message for people: parsers repeat names and numbers of strangers, whatever their length."""
    text = _LONG_WORD.sub(lambda word: f"{word[0][:_WORD_KEPT]}...", one_line(message))
    return text if len(text) <= _MESSAGE_MAX else f"{text[: _MESSAGE_MAX - 3]}..."


class VersionRefused(DocumentRefused):
    """The document is of another format or version."""


def unusable(what: str, error: Exception, *, hint: str) -> DrafterError:
    """Return the error for people of a document that a command needs, and that was refused.

    Args:
        what: cannot be used, such as "No sound capture set".
        error: why; shortened, for python repeats what a stranger wrote.
        hint: what would help.
    """
    kind = ForeignDocument if isinstance(error, VersionRefused) else DamagedDocument
    return kind(f"{what}: {brief(str(error))}", hint=hint)


def parse_object(data: bytes, name: str, *, max_bytes: int = MAX_BYTES) -> dict[str, object]:
    """Return the one object of a JSON document.

    Args:
        data: the whole file.
        name: of the file, for the message.
        max_bytes: refuse a longer one.

    Raises:
        DocumentRefused: see the module.
    """
    if len(data) > max_bytes:
        raise DocumentRefused(f"{name} is larger than {max_bytes} bytes: {len(data)}")
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_distinct,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
        if b"\\u" in data:
            json.dumps(document, ensure_ascii=False).encode(
                "utf-8"
            )  # halves of pairs come from escapes alone
    except (ValueError, RecursionError, DocumentRefused) as error:
        raise DocumentRefused(f"{name} is not a plain JSON document: {error}") from None
    if not isinstance(document, dict):
        raise DocumentRefused(f"{name} does not hold an object: {type(document).__name__}")
    return document


def read_document(path: Path, max_bytes: int = FILE_BYTES_MAX) -> bytes:
    """Return the bytes of a document.

    Raises:
        DocumentRefused: there is something, and it is no plain file, or too large.
        OSError: it is not there, or the system refuses.
    """
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        if error.errno not in NO_PLAIN_FILE:
            raise
        raise DocumentRefused(f"{path.name}: {error.strerror}") from None


def check_version(name: str, said: tuple[object, object], wanted: tuple[str, int]) -> None:
    """Refuse a document of another format or version; what it says instead is repeated in part.

    Raises:
        VersionRefused: it is another.
        DocumentRefused: it does not say.
    """
    if said == wanted and type(said[1]) is int:
        return
    is_another = isinstance(said[0], str) and type(said[1]) is int
    kind = VersionRefused if is_another else DocumentRefused
    raise kind(
        f"{name} is {shown(said[0])!r} version {shown(said[1])}, wanted {wanted[0]!r} version {wanted[1]}"
    )


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise DocumentRefused(f"a key is listed twice: {twice!r}")
    return result


def _no_constant(text: str) -> NoReturn:
    raise DocumentRefused(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise DocumentRefused(f"a number is beyond every float: {text[:40]}")
    return value
