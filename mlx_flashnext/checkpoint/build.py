"""Tells builds of a model apart without reading them whole. Entry: `build_digest`.

Drafts, calibrations and capture sets name the build of the target that they were made with.
Source: dflash2.md 7 (cheap digests).
"""

from __future__ import annotations

import hashlib

from expert_store.errors import CheckpointCorrupt
from expert_store.safetensors_index import TensorTable
from expert_store.source import FileSource

EDGE_BYTES = 64 << 10


def build_digest(config: bytes, table: TensorTable, source: FileSource) -> str:
    """Return the digest of a checkpoint or a draft.

    Returns:
        SHA-256 of the config, of names, sizes and headers, and of both ends of every file.

    Raises:
        StoreError: a file could not be read, or is shorter than it was when it was listed.
    """
    digest = hashlib.sha256(config)
    digest.update(table.digest.encode())
    for number, info in enumerate(table.files):
        length = min(EDGE_BYTES, info.size)
        for offset in (0, info.size - length):
            edge = bytearray(length)
            fill(source, number, offset, memoryview(edge))
            digest.update(edge)
    return digest.hexdigest()


def fill(source: FileSource, file: int, offset: int, view: memoryview) -> None:
    """Read exactly as many bytes as `view` takes.

    Raises:
        StoreError: they could not be read, or are not there.
    """
    got = source.read_into(file, offset, [view])
    if got != len(view):
        raise CheckpointCorrupt(
            f"File is cut short: {source.name(file)} wanted {len(view)} bytes at {offset}, got {got}",
            hint="fetch this file again",
            file=source.name(file),
            offset=offset,
        )
