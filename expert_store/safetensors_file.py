"""One safetensors file: its header read, every entry checked against the file. Entry: `read_header`, `place`.

What `place` returns obeys:
    X1  every tensor lies inside the file, after the header; together they cover it, no two overlap;
    X2  length equals the product of the shape times the width of the dtype.
No tensor data is read.
"""

from __future__ import annotations

import math
import os
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from expert_store.errors import CheckpointCorrupt
from expert_store.safetensors_header import DTYPE_BITS, HeaderEntry, corrupt, decode_header, failed

MAX_HEADER_BYTES: Final = 64 * 2**20
"""The official FP8 layout has 152 k tensors; in one file its header is 20 MB."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as it was when its header was read; `FileSource` compares on every read."""

    path: Path
    size: int
    mtime_ns: int
    inode: int


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor lies. `offset` counts from the start of the file, `length` is in bytes.

    A struct, not a dataclass: the FP8 layout makes 152 k of them, a frozen dataclass takes ten times as long
    to create, and the garbage collector need not walk these.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    length: int


@contextmanager
def open_regular(path: Path, name: str) -> Generator[tuple[BinaryIO, os.stat_result]]:
    """Open a regular file for reading; never a pipe or a device, which could block for ever.

    Args:
        path: The real path.
        name: What messages call it.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise corrupt(f"Not a regular file: {name}", file=name)
        stream = path.open("rb")
    except OSError as error:
        raise failed(error, name, 0) from error
    with stream:
        yield stream, os.fstat(stream.fileno())


def read_exactly(stream: BinaryIO, length: int, name: str, offset: int) -> bytes:
    """Return the next `length` bytes, or say where the file ends."""
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


def read_header(path: Path, real: Path) -> tuple[FileInfo, bytes]:
    """Return the identity of a file and its header bytes.

    Args:
        path: The path in the checkpoint directory, kept for later opens and messages.
        real: The same file with links resolved and checked; this one is opened.
    """
    name = path.name
    with open_regular(real, name) as (stream, status):
        size = status.st_size
        if size < 8:
            raise corrupt(
                f"File is too short for a header length: {name} has {size} bytes", file=name, size=size
            )
        length = int.from_bytes(read_exactly(stream, 8, name, 0), "little")
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
        header = read_exactly(stream, length, name, 8)
    return FileInfo(path, size, status.st_mtime_ns, status.st_ino), header


def place(header: bytes, info: FileInfo, file: int) -> list[TensorInfo]:
    """Decode the header of one file and return where its tensors lie, in the order of the header.

    Raises:
        CheckpointCorrupt: Anything that breaks X1 or X2, with the tensor and the numbers.
    """
    name = info.path.name
    start = 8 + len(header)
    data_bytes = info.size - start
    lengths: dict[tuple[str | None, tuple[int, ...] | None], int] = {}
    placed: list[TensorInfo] = []
    covered, in_order = 0, True
    for tensor, entry in decode_header(header, name).items():
        dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
        length = lengths.get((dtype, shape))
        if length is None:
            length = lengths[dtype, shape] = _length(tensor, entry, name)
        if offsets is None or dtype is None or shape is None:
            raise corrupt(f"Header entry has no data_offsets: {tensor} in {name}", file=name, tensor=tensor)
        begin, end = offsets
        if begin < 0 or end > data_bytes or end - begin != length:
            raise _misplaced(tensor, entry, begin, end, data_bytes, name)
        placed.append(TensorInfo(tensor, sys.intern(dtype), shape, file, start + begin, length))
        in_order = in_order and begin == covered
        covered = end
    if not in_order:
        covered = _check_cover(placed, start, name)
    if covered != data_bytes:
        raise corrupt(
            f"Header of {name} lists {covered} data bytes, the file holds {data_bytes}",
            file=name,
            wanted=covered,
            got=data_bytes,
        )
    return placed


def _length(tensor: str, entry: HeaderEntry, name: str) -> int:
    """Return the bytes that dtype and shape ask for (X2)."""
    dtype, shape = entry.dtype, entry.shape
    if dtype is None or shape is None:
        lacking = "dtype" if dtype is None else "shape"
        raise corrupt(f"Header entry has no {lacking}: {tensor} in {name}", file=name, tensor=tensor)
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise corrupt(
            f"Unknown dtype: {dtype!r} of {tensor} in {name}", file=name, tensor=tensor, dtype=dtype
        )
    if any(size < 0 for size in shape):
        raise corrupt(f"Shape is negative: {shape} of {tensor} in {name}", file=name, tensor=tensor)
    length, rest = divmod(math.prod(shape) * bits, 8)
    if rest:
        raise corrupt(
            f"Shape is not whole bytes: {dtype} {shape} of {tensor} in {name}", file=name, tensor=tensor
        )
    return length


def _misplaced(
    tensor: str, entry: HeaderEntry, begin: int, end: int, data_bytes: int, name: str
) -> CheckpointCorrupt:
    """Say which of its numbers puts a tensor in the wrong place."""
    if not 0 <= begin <= end:
        message = f"Offsets are negative or reversed: [{begin}, {end}] of {tensor} in {name}"
    elif end > data_bytes:
        message = f"Tensor ends beyond its file: {tensor} in {name} ends at {end} of {data_bytes} data bytes"
    else:
        shape = f"{entry.dtype} {entry.shape}"
        message = f"Length does not fit the shape: {tensor} in {name} has {end - begin} bytes for {shape}"
    return corrupt(message, file=name, tensor=tensor, offset=begin)


def _check_cover(placed: list[TensorInfo], start: int, name: str) -> int:
    """Check that tensors listed in any order neither overlap nor leave holes; return the bytes they cover."""
    covered = 0
    for tensor in sorted(placed, key=lambda tensor: (tensor.offset, tensor.length)):
        begin = tensor.offset - start
        if begin != covered:
            hole = f"leaves a hole of {begin - covered} bytes before it"
            fault = "overlaps the one before it" if begin < covered else hole
            raise corrupt(
                f"Tensor {fault}: {tensor.name} in {name} begins at {begin}",
                file=name,
                tensor=tensor.name,
                offset=begin,
            )
        covered = begin + tensor.length
    return covered
