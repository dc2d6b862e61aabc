"""The small files beside a checkpoint's tensors: config, tokenizer, template, licence. Nothing executable."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mlx_flashnext.regular_file import read_regular

SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
MAX_DOCUMENT_BYTES = 128 << 20


def small_documents(directory: Path, *, without: Collection[str]) -> dict[str, bytes]:
    """Return the documents of a checkpoint directory by name, in name order.

    Args:
        directory: Where they are.
        without: Names to leave out: what is written anew.

    Raises:
        ModelError: One of them is no regular file, or larger than `MAX_DOCUMENT_BYTES`.
    """
    found: dict[str, bytes] = {}
    for path in sorted(directory.iterdir()):
        is_text = path.suffix in SUFFIXES or path.name.startswith("LICENSE")
        if is_text and path.name not in without and path.is_file():
            found[path.name] = read_regular(path, MAX_DOCUMENT_BYTES)
    return found
