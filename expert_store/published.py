"""Replacing a small file whole: a reader finds the old one or the new one. Entry: `publish`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def publish(path: Path, data: bytes) -> None:
    """Write a file beside its name, wait for the drive, and rename it.

    Args:
        path: Its directory is made if it is not there.
        data: All of it.

    Raises:
        OSError: It cannot be written (a full disk, no permission), and names the file; the old one is
            untouched, and nothing is left beside it.
    """
    beside = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    except BaseException as error:  # Ctrl-C as well: nothing is left beside
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # of a write the system does not say it
        # Where nothing can be written, nothing can be left either.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def check_place(path: Path) -> None:
    """Find out whether `publish` could write here now, and leave nothing.

    Raises:
        OSError: It could not: no directory, no permission, a name that is too long.
    """
    beside = _beside(path)
    beside.touch()
    beside.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.new")
