"""A draft directory as the gate and the loader want it: listed from headers, digested, read tensor by tensor.

Entry point: `open_draft`. The gate (`drafter/compat.py`) opens nothing itself and `drafter` knows no files:
this is where the two meet. Headers, links and file identity are held to the rules of the expert store: a file
that was replaced after it was listed stops the load.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Self

import mlx.core as mx
import numpy as np

from drafter import calibration, contract, promotion
from drafter.facts import DraftListing, TensorFacts
from drafter.loading import FLOATING, canonical_name
from expert_store.errors import CheckpointCorrupt, CheckpointNotFound, SourceFailed
from expert_store.safetensors_index import TensorTable, read_tensor_table
from expert_store.source import FileSource
from mlx_flashnext.checkpoint.build import build_digest, fill
from mlx_flashnext.regular_file import NO_PLAIN_FILE, read_regular

CONFIG = "config.json"
CARD = "README.md"
_LICENCE = re.compile(r"^license(?:_name)?:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)


def open_draft(directory: Path) -> DraftFiles:
    """List a draft directory; no tensor is read but for the ends of its files.

    Args:
        directory: holds `config.json`, safetensors files, and a contract, a calibration record, or both.

    Raises:
        CheckpointNotFound: no such directory, no config, or no safetensors file.
        CheckpointCorrupt: a header, a link or an index contradicts its files.
        SourceFailed: a file could not be read.
    """
    if not directory.is_dir():
        raise CheckpointNotFound(
            f"There is no such draft: {directory}", hint="give the directory of a draft", path=str(directory)
        )
    table = read_tensor_table(directory)
    config = _document(directory / CONFIG)
    if config is None:
        raise CheckpointNotFound(
            f"Draft has no {CONFIG}: {directory}",
            hint="give the directory that holds the draft's config.json",
            path=str(directory),
        )
    source = FileSource(table.files)
    try:
        listing = DraftListing(
            config=config,
            contract=_document(directory / contract.FILE),
            calibration=_document(directory / calibration.FILE),
            tensors={name: TensorFacts(info.dtype, info.shape) for name, info in table.tensors.items()},
            digest=build_digest(config, table, source),
            licence=_licence(directory / CARD),
            promotion=_document(directory / promotion.FILE),
        )
    except BaseException:
        source.close()
        raise
    return DraftFiles(listing, table, source)


class DraftFiles:
    """The open files of one draft.

    Attributes:
        listing: for the gate.
    """

    def __init__(self, listing: DraftListing, table: TensorTable, source: FileSource) -> None:
        self.listing = listing
        self._source = source
        self._tensors = {canonical_name(name): info for name, info in table.tensors.items()}

    def read(self, name: str) -> mx.array:
        """Return a tensor by its canonical name, as it is stored. Blocks for the file.

        Raises:
            StoreError: it could not be read, or the file changed since it was listed.
        """
        info = self._tensors[name]
        data = bytearray(info.length)
        fill(self._source, info.file, info.offset, memoryview(data))
        if info.dtype == "BF16":
            return mx.array(np.frombuffer(data, np.uint16).reshape(info.shape)).view(FLOATING[info.dtype])
        kind = np.float16 if info.dtype == "F16" else np.float32
        return mx.array(np.frombuffer(data, kind).reshape(info.shape))

    def close(self) -> None:
        """Close the files; what was read stays."""
        self._source.close()

    def __enter__(self) -> Self:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _document(path: Path) -> bytes | None:
    """Return the bytes of a small file, None if there is none; what is too long is the gate's to refuse."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        kind = CheckpointCorrupt if error.errno in NO_PLAIN_FILE else SourceFailed
        raise kind(
            f"Cannot read {path.name} of the draft: {error.strerror}",
            hint="fetch the draft again",
            errno=error.errno,
            file=path.name,
        ) from error


def _licence(card: Path) -> str | None:
    """Return what the front matter of a model card says of the licence, or None."""
    text = (_document(card) or b"").decode("utf-8", "replace")
    if not text.startswith("---"):
        return None
    found = _LICENCE.search(text[3:].split("\n---", 1)[0])
    return found.group(1).strip("\"'") if found else None
