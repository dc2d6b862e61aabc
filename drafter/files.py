"""Files of drafts and of their training: replaced whole, and named in every error of the system.

Entry points: `replacing`, `replace_file`, `read_regular`, `naming`. What the system says of a read or a write
through an open file carries no name; whoever reads the message needs one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

MAX_BYTES: Final = 64 << 20
PARTIAL: Final = ".partial."
"""Before the name of a file in the making."""
NO_PLAIN_FILE: Final = frozenset((errno.EISDIR, errno.EFBIG, errno.ELOOP, errno.ENXIO, errno.EINVAL))
"""What the system, or `read_regular`, says of a path that is there and is no file to read."""


@contextmanager
def naming(path: Path | str) -> Generator[None]:
    """Within: an error of the system that names no file is of this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(place: Path) -> Generator[BinaryIO]:
    """Within: what is written goes beside a file, and becomes it at the end; an error leaves the old one.

    Args:
        place: its directory is there.

    Raises:
        OSError: names the file.
    """
    partial = place.with_name(PARTIAL + place.name)
    try:
        with naming(place):
            with partial.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(place)
            _directory_to_disk(place.parent)
    except BaseException:
        with suppress(OSError):  # a disk that is full needs the room; one that is gone has none
            partial.unlink(missing_ok=True)
        raise


def replace_file(place: Path, data: bytes) -> None:
    """Write a file beside its name, wait for the disk, and rename it: the old one or the new one is there."""
    with replacing(place) as stream:
        stream.write(data)


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: links are followed.
        max_bytes: refuse a larger file.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large: `strerror` says which of which file.
    """
    # Without O_NONBLOCK, opening a pipe waits for somebody to write.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with naming(path):
            status = os.fstat(number)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "Not a regular file")
            if status.st_size > max_bytes:
                raise OSError(errno.EFBIG, f"Larger than {max_bytes} bytes: {status.st_size}")
            # No more is asked for than there is: it would be allocated.
            with os.fdopen(number, "rb", closefd=False) as stream:
                return stream.read(status.st_size)
    finally:
        os.close(number)


def _directory_to_disk(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
