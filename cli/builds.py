"""Directories that `pack` and `convert` made, wherever they are, so that `list` can show them.

Entry points: `note_build`, `noted_builds`. One small file a directory, named by the digest of its path:
several commands may write at once. Nothing depends on them; without them `list` shows the Hub's cache alone.
"""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from cli.cached import trouble_of
from cli.settings import builds
from expert_store.published import publish

FORMAT: Final = "flashnext-build"
VERSION: Final = 1
Kind = Literal["pack", "conversion"]


class _Note(msgspec.Struct, frozen=True):
    format: str
    version: int
    kind: Kind
    directory: str
    source: str


@dataclass(frozen=True, slots=True)
class Build:
    """A directory that is there.

    Attributes:
        directory: where it is, absolute.
        kind: what made it.
        source: what its source was called.
        num_bytes: of its files.
        trouble: why it does not run, "" if it may.
    """

    directory: Path
    kind: Kind
    source: str
    num_bytes: int
    trouble: str


def note_build(directory: Path, kind: Kind, source: str) -> None:
    """Remember what was made. A disk that refuses costs a line of `list` and nothing else."""
    place = directory.absolute()
    note = _Note(FORMAT, VERSION, kind, str(place), source)
    path = builds() / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, UnicodeEncodeError):  # a path of stray bytes has no JSON
        publish(path, msgspec.json.encode(note))


def noted_builds() -> list[Build]:
    """Return what is still there, by path. Notes of what was deleted go too, unless its drive is away."""
    folder = builds()
    noted = map(noted_build, folder.glob("*.json") if folder.is_dir() else ())
    return sorted((build for build in noted if build is not None), key=lambda build: build.directory)


def noted_build(path: Path) -> Build | None:
    """Return the build of a note, None if it is gone or the file is no note of one."""
    note = _read(path)
    if note is None:
        return None
    place = Path(note.directory)
    with contextlib.suppress(OSError):  # a name that no directory can have, one that may not be looked into
        if place.is_dir():
            sizes = (file.stat().st_size for file in place.iterdir() if file.is_file())
            return Build(place, note.kind, note.source, sum(sizes), trouble_of(place))
        if place.parent.is_dir():
            path.unlink()
    return None


def _read(path: Path) -> _Note | None:
    """Return the note of a file; None for anything else."""
    from mlx_flashnext.regular_file import read_regular

    try:
        note = msgspec.json.decode(read_regular(path, 1 << 16), type=_Note)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_known = (note.format, note.version) == (FORMAT, VERSION) and Path(note.directory).is_absolute()
    return note if is_known and "\0" not in note.directory else None
