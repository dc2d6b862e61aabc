"""The small files beside a checkpoint's tensors: config, tokenizer, template, licence. Nothing executable."""

from __future__ import annotations

import errno
from collections.abc import Collection
from pathlib import Path

from expert_store.safetensors_index import allowed_root, check_inside
from mlx_flashnext.errors import DocumentCorrupt
from mlx_flashnext.regular_file import document_failed, read_regular

SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
MAX_DOCUMENT_BYTES = 128 << 20


def small_documents(directory: Path, *, without: Collection[str]) -> dict[str, bytes]:
    """Return the documents of a checkpoint directory by name, in name order.

    Args:
        directory: Where they are.
        without: Names to leave out: what is written anew.

    Raises:
        ModelError: One of them is no regular file, or larger than `MAX_DOCUMENT_BYTES`.
        CheckpointCorrupt: One is a link out of the folder: what that names is not the model's to publish.
    """
    found: dict[str, bytes] = {}
    root = allowed_root(directory)
    for path in sorted(directory.iterdir()):
        is_text = path.suffix in SUFFIXES or path.name.startswith("LICENSE")
        if is_text and path.name not in without and path.is_file():
            check_inside(path, root)
            try:
                found[path.name] = read_regular(path, MAX_DOCUMENT_BYTES)
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise document_failed(error, path) from error
                raise DocumentCorrupt(
                    f"{path.name} is no document: {error.strerror}",
                    hint="move it out of the folder",
                    path=str(path),
                ) from error
    return found
