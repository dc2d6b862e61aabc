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
import math
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import BinaryIO, Final

import msgspec

from expert_store.errors import CheckpointNotFound
from expert_store.safetensors_header import (
    DTYPE_BITS,
    HeaderEntry,
    JsonObject,
    corrupt,
    decode_header,
    failed,
    parse_json,
)

INDEX_NAME: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 64 * 2**20
"""The official FP8 layout has 152 k tensors; in one file its header is 20 MB."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as it was when its header was read; `FileSource` compares on every read."""

    path: Path
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `offset` counts from the start of the file, `length` is in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    length: int


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
    root = _allowed_root(directory)
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
        info, header = _read_header(directory, root, name)
        files.append(info)
        digest.update(b"%s\0%d\0%d\0" % (name.encode(), info.size, len(header)))
        digest.update(header)
        _add_tensors(tensors, header, file=file, info=info, name=name, names=names, weight_map=weight_map)
    if weight_map is not None and len(weight_map) != len(tensors):
        missing = next(tensor for tensor in weight_map if tensor not in tensors)
        raise corrupt(
            f"Index names a tensor that its shard lacks: {missing} in {weight_map[missing]}",
            file=weight_map[missing],
            tensor=missing,
        )
    return TensorTable(directory, tuple(files), MappingProxyType(tensors), digest.hexdigest())


def _allowed_root(directory: Path) -> Path:
    """Return the folder that files may resolve into: the directory, or its `models--*` Hub cache folder."""
    real = directory.resolve()
    for parent in real.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent
    return real


def _inside(directory: Path, root: Path, name: str) -> Path:
    """Return the real path of a file of the checkpoint, or refuse it (X4)."""
    pure = PurePosixPath(name)
    if (
        not name
        or "\0" in name
        or "\\" in name
        or pure.is_absolute()
        or ".." in pure.parts
        or str(pure) != name
    ):
        raise corrupt(f"File name in the index is not a plain relative name: {name!r}", file=name)
    path = directory / name
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        what = "a dangling link" if path.is_symlink() else "missing"
        raise corrupt(f"Shard is {what}: {name}", hint="fetch this file again", file=name) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, up to Python 3.12
        raise corrupt(f"Shard cannot be resolved: {name}: {error}", file=name) from error
    if not real.is_relative_to(root):
        raise corrupt(
            f"File leaves the model folder: {name} -> {real}",
            hint="copy the file into the folder, or give the folder that really holds the files",
            file=name,
        )
    return real


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: msgspec.Raw | None = None


_INDEX_DECODER: Final = msgspec.json.Decoder(_Index)


def _read_index(directory: Path, root: Path) -> dict[str, str] | None:
    """Return `weight_map` (tensor -> file name), or None when there is no index file."""
    if not os.path.lexists(directory / INDEX_NAME):
        return None
    path = _inside(directory, root, INDEX_NAME)
    with _open_regular(path, INDEX_NAME) as (stream, status):
        if status.st_size > MAX_HEADER_BYTES:
            raise corrupt(f"Index is larger than {MAX_HEADER_BYTES} bytes: {status.st_size}", file=INDEX_NAME)
        text = _read_exactly(stream, status.st_size, INDEX_NAME, 0)
    try:
        index = _INDEX_DECODER.decode(text)
        quotes = 2 + 4 * len(index.weight_map)
        if index.metadata is not None:
            quotes += 2 + bytes(index.metadata).count(b'"')
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


class _open_regular:  # noqa: N801 - used as a function
    """Open a regular file for reading; never a pipe or device, which could block for ever."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def __enter__(self) -> tuple[BinaryIO, os.stat_result]:
        try:
            if not stat.S_ISREG(self._path.stat().st_mode):
                raise corrupt(f"Not a regular file: {self._name}", file=self._name)
            self._stream = self._path.open("rb")
        except OSError as error:
            raise failed(error, self._name, 0) from error
        return self._stream, os.fstat(self._stream.fileno())

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _read_exactly(stream: BinaryIO, length: int, name: str, offset: int) -> bytes:
    try:
        data = stream.read(length)
    except OSError as error:
        raise failed(error, name, offset) from error
    if len(data) != length:
        raise corrupt(
            f"File is cut short: {name} wanted {length} bytes at {offset}, got {len(data)}",
            file=name,
            offset=offset,
        )
    return data


def _read_header(directory: Path, root: Path, name: str) -> tuple[FileInfo, bytes]:
    """Return the file's identity and its header bytes; the file is opened by its real, checked path."""
    with _open_regular(_inside(directory, root, name), name) as (stream, status):
        size = status.st_size
        if size < 8:
            raise corrupt(
                f"File is too short for a header length: {name} has {size} bytes", file=name, size=size
            )
        length = int.from_bytes(_read_exactly(stream, 8, name, 0), "little")
        if length > size - 8:
            raise corrupt(
                f"Header of {name} is longer than the file: {length} bytes, the file has {size}",
                file=name,
                header=length,
            )
        if length > MAX_HEADER_BYTES:
            raise corrupt(
                f"Header of {name} is larger than {MAX_HEADER_BYTES} bytes: {length}",
                hint="this is not a checkpoint this program can index",
                file=name,
                header=length,
            )
        header = _read_exactly(stream, length, name, 8)
    return FileInfo(directory / name, size, status.st_mtime_ns, status.st_ino), header


def _add_tensors(
    tensors: dict[str, TensorInfo],
    header: bytes,
    *,
    file: int,
    info: FileInfo,
    name: str,
    names: list[str],
    weight_map: dict[str, str] | None,
) -> None:
    """Check one file's entries (X1 to X3) and add them to the table."""
    entries = decode_header(header, name)
    start = 8 + len(header)
    data_bytes = info.size - start
    intervals: list[tuple[int, int, str]] = []
    for tensor, entry in entries.items():
        place = _checked(tensor, entry, file, start, data_bytes, name)
        if tensor in tensors:
            raise corrupt(
                f"Tensor is in two files: {tensor} in {names[tensors[tensor].file]} and {name}",
                file=name,
                tensor=tensor,
            )
        if weight_map is not None and weight_map.get(tensor) != name:
            where = weight_map.get(tensor)
            said = "does not list" if where is None else f"places in {where}"
            raise corrupt(
                f"Shard {name} holds a tensor that the index {said}: {tensor}", file=name, tensor=tensor
            )
        tensors[tensor] = place
        begin = place.offset - start
        intervals.append((begin, begin + place.length, tensor))
    intervals.sort()
    covered = 0
    for begin, end, tensor in intervals:
        if begin != covered:
            fault = (
                "overlaps the one before it"
                if begin < covered
                else f"leaves a hole of {begin - covered} bytes before it"
            )
            raise corrupt(
                f"Tensor {fault}: {tensor} in {name} begins at {begin}",
                file=name,
                tensor=tensor,
                offset=begin,
            )
        covered = end
    if covered != data_bytes:
        raise corrupt(
            f"Header of {name} lists {covered} data bytes, the file holds {data_bytes}",
            file=name,
            wanted=covered,
            got=data_bytes,
        )


def _checked(
    tensor: str, entry: HeaderEntry, file: int, start: int, data_bytes: int, name: str
) -> TensorInfo:
    """Return the place of one tensor after checking its own numbers (X1, X2)."""
    dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
    if dtype is None or shape is None or offsets is None:
        lacking = "dtype" if dtype is None else "shape" if shape is None else "data_offsets"
        raise corrupt(f"Header entry has no {lacking}: {tensor} in {name}", file=name, tensor=tensor)
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise corrupt(
            f"Unknown dtype: {dtype!r} of {tensor} in {name}", file=name, tensor=tensor, dtype=dtype
        )
    begin, end = offsets
    if not 0 <= begin <= end:
        raise corrupt(
            f"Offsets are negative or reversed: {offsets} of {tensor} in {name}", file=name, tensor=tensor
        )
    if end > data_bytes:
        raise corrupt(
            f"Tensor ends beyond its file: {tensor} in {name} ends at {end} of {data_bytes} data bytes",
            file=name,
            tensor=tensor,
            offset=begin,
        )
    if shape and min(shape) < 0:
        raise corrupt(f"Shape is negative: {shape} of {tensor} in {name}", file=name, tensor=tensor)
    if math.prod(shape) * bits != 8 * (end - begin):
        raise corrupt(
            f"Length does not fit the shape: {tensor} in {name} has {end - begin} bytes for {dtype} {shape}",
            file=name,
            tensor=tensor,
        )
    return TensorInfo(tensor, sys.intern(dtype), shape, file, start + begin, end - begin)
