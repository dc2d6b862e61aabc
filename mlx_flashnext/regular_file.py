"""Reads the small files of a checkpoint: whole, and never anything that is not a file.

Entry points: `read_regular`, `document_failed`. A path from a stranger may name a pipe or a device, whose
reading never ends.
"""

from pathlib import Path

from drafter.files import MAX_BYTES, NO_PLAIN_FILE, read_regular
from mlx_flashnext.errors import DocumentCorrupt, DocumentUnreadable

__all__ = ["MAX_BYTES", "NO_PLAIN_FILE", "document_failed", "read_regular"]


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
