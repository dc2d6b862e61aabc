"""Reads the small files of a checkpoint: whole, and never anything that is not a file.

Entry point: `read_regular`. A path from a stranger may name a pipe or a device, whose reading never ends.
"""

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 64 << 20


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
