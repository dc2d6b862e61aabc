"""Reads the small files of a checkpoint: whole, and never anything that is not a file.

Entry points: `read_regular`, `document_failed`. A path from a stranger may name a pipe or a device, whose
reading never ends.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Final

from mlx_flashnext.errors import DocumentCorrupt, DocumentUnreadable

MAX_BYTES = 64 << 20
NO_PLAIN_FILE: Final = frozenset((errno.EISDIR, errno.EFBIG, errno.ELOOP, errno.ENXIO, errno.EINVAL))
"""What the system, or `read_regular`, says of a path that is there and is no file to read."""


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: Links are followed.
        max_bytes: Refuse a larger file.

    Raises:
        OSError: It cannot be read, is no regular file, or is too large; `strerror` says which.
    """
    # Without O_NONBLOCK, opening a pipe waits for somebody to write.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as stream:
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"Larger than {max_bytes} bytes: {status.st_size}", str(path))
        return stream.read(status.st_size)  # asking for more would allocate it


def document_failed(error: OSError, path: Path) -> DocumentCorrupt | DocumentUnreadable:
    """Return the error for a small file that is there and could not be read: its fault, or the system's."""
    reason = error.strerror or str(error)
    if error.errno in NO_PLAIN_FILE:
        return DocumentCorrupt(
            f"{path.name} cannot be read: {reason}", hint="download the file again", path=str(path)
        )
    return DocumentUnreadable(
        f"{path.name} cannot be read: {reason}", hint="check the drive and the permissions", path=str(path)
    )
