"""The tensor table of a checkpoint directory, from safetensors headers alone. Entry: `read_tensor_table`.

Data files are safetensors (format: safetensors_header.py). Several are joined by
`model.safetensors.index.json`, whose `weight_map` says which file holds a tensor. No tensor data is read.

Everything here is hostile until shown otherwise. What this module hands out obeys:
    X1  every tensor lies inside its file, after the header; together they cover it, no two overlap;
    X2  length equals the product of the shape times the width of the dtype;
    X3  a name is listed once, in one file, and the index (if any) agrees with the files;
    X4  no file lies outside the model folder (a Hub cache links `snapshots/` to `blobs/` of one model's
        folder: allowed).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

import msgspec

from expert_store.errors import CheckpointNotFound
from expert_store.safetensors_file import (
    MAX_HEADER_BYTES,
    FileInfo,
    TensorInfo,
    open_regular,
    place,
    read_exactly,
    read_header,
)
from expert_store.safetensors_header import JsonObject, corrupt, parse_json

__all__ = ["FileInfo", "TensorInfo", "TensorTable", "read_tensor_table"]

INDEX_NAME: Final = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorTable:
    """Every tensor of a checkpoint. `TensorInfo.file` indexes `files`.

    Attributes:
        directory: The directory as it was given.
        files: Data files, in name order.
        tensors: Name to place.
        digest: SHA-256 over (file name, size, header bytes) in name order; the identity of the checkpoint.
    """

    directory: Path
    files: tuple[FileInfo, ...]
    tensors: Mapping[str, TensorInfo]
    digest: str

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Sizes of the files in bytes, as layouts want them for their bounds."""
        return tuple(info.size for info in self.files)


def read_tensor_table(directory: Path) -> TensorTable:
    """Index a checkpoint directory without reading tensor data.

    Args:
        directory: Holds `model.safetensors.index.json` and its shards, or else any `*.safetensors`.

    Raises:
        CheckpointNotFound: No such directory, or nothing in it to index.
        CheckpointCorrupt: A file breaks one of X1 to X4, or is missing or cut short.
        SourceFailed: The operating system refused to open or read a file.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointNotFound(
            f"Checkpoint {what}: {directory}",
            hint="give the directory that holds the .safetensors files",
            path=str(directory),
        )
    root = allowed_root(directory)
    weight_map = _read_index(directory, root)
    if weight_map is None:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    else:
        names = sorted(set(weight_map.values()))
    if not names:
        raise CheckpointNotFound(
            f"No .safetensors file in: {directory}",
            hint="check the path, or fetch the model again",
            path=str(directory),
        )
    files: list[FileInfo] = []
    tensors: dict[str, TensorInfo] = {}
    digest = hashlib.sha256()
    for file, name in enumerate(names):
        info, header = read_header(directory / name, _inside(directory, root, name))
        files.append(info)
        digest.update(b"%s\0%d\0%d\0" % (name.encode(), info.size, len(header)))
        digest.update(header)
        placed = {tensor.name: tensor for tensor in place(header, info, file)}
        if weight_map is not None:
            _check_listed(placed, weight_map, name)
        if not placed.keys().isdisjoint(tensors.keys()):
            twice = next(tensor for tensor in placed if tensor in tensors)
            raise corrupt(
                f"Tensor is in two files: {twice} in {names[tensors[twice].file]} and {name}",
                file=name,
                tensor=twice,
            )
        tensors.update(placed)
    if weight_map is not None and len(weight_map) != len(tensors):
        missing = next(tensor for tensor in weight_map if tensor not in tensors)
        raise corrupt(
            f"Index names a tensor that its shard lacks: {missing} in {weight_map[missing]}",
            file=weight_map[missing],
            tensor=missing,
        )
    return TensorTable(directory, tuple(files), MappingProxyType(tensors), digest.hexdigest())


def allowed_root(directory: Path) -> Path:
    """Return the folder that files may resolve into: the directory, or its `models--*` Hub cache folder."""
    real = directory.resolve()
    for parent in real.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent
    return real


def _inside(directory: Path, root: Path, name: str) -> Path:
    """Return the real path of a file of the checkpoint, or refuse it (X4)."""
    pure = PurePosixPath(name)
    is_plain = pure.parts and not pure.is_absolute() and ".." not in pure.parts and str(pure) == name
    # Not printable: control characters, and surrogates, which no file name on disk can be compared with.
    if not is_plain or not name.isprintable() or "\\" in name:
        raise corrupt(f"File name in the index is not a plain relative name: {name!r}", file=name)
    path = directory / name
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        what = "a dangling link" if path.is_symlink() else "missing"
        raise corrupt(f"Shard is {what}: {name}", hint="fetch this file again", file=name) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, up to Python 3.12
        reason = getattr(error, "strerror", None) or error
        raise corrupt(f"Shard cannot be resolved: {name}: {reason}", file=name) from error
    check_inside(real, root, name)
    return real


def check_inside(path: Path, root: Path, name: str | None = None) -> None:
    """Refuse a file that a link leads out of where the files of a checkpoint may lie (X4).

    Args:
        path: The file; it is there.
        root: As of `allowed_root`.
        name: What messages call it; its own name if left out.
    """
    name, real = path.name if name is None else name, path.resolve()
    if not real.is_relative_to(root):
        raise corrupt(
            f"File leaves the model folder: {name} -> {real}",
            hint="copy the file into the folder, or give the folder that really holds the files",
            file=name,
        )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: msgspec.Raw = msgspec.Raw(b"")


_INDEX_DECODER: Final = msgspec.json.Decoder(_Index)


def _read_index(directory: Path, root: Path) -> dict[str, str] | None:
    """Return `weight_map` (tensor -> file name), or None when there is no index file."""
    if not os.path.lexists(directory / INDEX_NAME):
        return None
    path = _inside(directory, root, INDEX_NAME)
    with open_regular(path, INDEX_NAME) as (stream, status):
        if status.st_size > MAX_HEADER_BYTES:
            raise corrupt(f"Index is larger than {MAX_HEADER_BYTES} bytes: {status.st_size}", file=INDEX_NAME)
        text = read_exactly(stream, status.st_size, INDEX_NAME, 0)
    try:
        index = _INDEX_DECODER.decode(text)
        quotes = 2 + 4 * len(index.weight_map)
        metadata = bytes(index.metadata)
        quotes += 2 + metadata.count(b'"') if metadata else 0
        if b"\\" in text or text.count(b'"') != quotes:
            return _index_strict(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return _index_strict(text)
    return index.weight_map


def _index_strict(text: bytes) -> dict[str, str]:
    document = parse_json(text, INDEX_NAME)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, JsonObject):
        raise corrupt("Index has no weight_map object", file=INDEX_NAME)
    names: dict[str, str] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise corrupt(f"Index gives no file name for {tensor}: {name!r}", file=INDEX_NAME, tensor=tensor)
        names[tensor] = name
    return names


def _check_listed(placed: Mapping[str, TensorInfo], weight_map: dict[str, str], name: str) -> None:
    """Refuse a tensor that the index does not place in the file it was found in (X3)."""
    for tensor in placed:
        where = weight_map.get(tensor)
        if where != name:
            said = "does not list" if where is None else f"places in {where}"
            raise corrupt(
                f"Shard {name} holds a tensor that the index {said}: {tensor}", file=name, tensor=tensor
            )
