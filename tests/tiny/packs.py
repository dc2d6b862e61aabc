"""Packs of tiny checkpoints, and ways to damage them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from expert_store.pack import MANIFEST_NAME, Manifest


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def edit_manifest(
    directory: Path, change: Callable[[dict[str, Any]], object], *, reseal: bool = True
) -> None:
    """Change the manifest as a document; a careful forger seals it anew."""
    path = directory / MANIFEST_NAME
    document = msgspec.json.decode(path.read_bytes())
    change(document)
    if reseal:
        with contextlib.suppress(msgspec.ValidationError):  # what cannot be read cannot be sealed
            document["identity"] = msgspec.convert(document, Manifest).computed_identity()
    path.write_bytes(msgspec.json.encode(document))


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x55
    path.write_bytes(data)
