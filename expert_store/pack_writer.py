"""Copies a checkpoint into a pack, one shard at a time. Entry: `PackWriter`.

Records are gathered from wherever the source has them, read ahead by one while the last is hashed and
written; rows of a quantised n-gram table are put together a few megabytes at a time; everything else is
copied byte for byte. What goes where is decided before anything is written, so two runs over one source write
the same bytes, and a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import BinaryIO, Final, Literal, TypeVar

import msgspec
from xxhash import xxh3_128

from expert_store.layout import RecordLayout, RowLayout, RowPart
from expert_store.pack import (
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    Manifest,
    PackComponent,
    PackFile,
    PackLayer,
    PackRowPart,
    PackRows,
    padded,
    record_name,
    rows_name,
    shard_header,
)
from expert_store.safetensors_index import INDEX_NAME, TensorInfo
from expert_store.source import ByteSource, cut_short
from expert_store.staging import StagedDirectory, write_all

SHARD_BYTES: Final = 4 * 2**30
"""A shard of other tensors is closed before it passes this; a larger tensor has one of its own."""
_CHUNK_BYTES: Final = 8 * 2**20
_UNITS: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""Formats of a memoryview by width."""

_T = TypeVar("_T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerToPack:
    """Where the records of a layer lie, and what their components are."""

    record: RecordLayout
    components: tuple[PackComponent, ...]


@dataclass(frozen=True, slots=True)
class RowsToPack:
    """Where the rows of the n-gram table lie, what their components are, and the number of each part."""

    layout: RowLayout
    components: tuple[PackComponent, ...]
    numbers: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file that is to be: its name, its size, and who writes it."""

    name: str
    size: int
    fill: Callable[[BinaryIO], tuple[str, ...]]


class PackWriter:
    """Writes one pack."""

    def __init__(
        self,
        source: ByteSource,
        source_digest: str,
        build: str,
        layers: Sequence[LayerToPack],
        others: Sequence[TensorInfo],
        documents: Mapping[str, bytes],
        progress: Progress | None = None,
        rows: RowsToPack | None = None,
    ) -> None:
        """Decide what goes where.

        Args:
            source: The source's data files.
            source_digest: Identity of the source.
            build: Digest by which drafts and captures know the source.
            layers: Layers with routed experts, in order.
            others: All other tensors.
            documents: Small files that a checkpoint has beside its tensors, by name.
            progress: Called with (bytes done, bytes in all).
            rows: The n-gram table, if its rows are to lie in one piece; else it is among `others`.
        """
        self._source = source
        self._source_digest = source_digest
        self._build = build
        self._layers = tuple(layers)
        self._rows = rows
        self._progress = progress
        self._num_done = 0
        self._tensor_shards: dict[str, str] = {}
        shards = [self._experts(layer) for layer in self._layers]
        shards += self._row_shards()
        in_order = sorted(others, key=lambda info: (info.file, info.offset, info.name))
        groups = _grouped(in_order, lambda info: info.length)
        shards += [self._others(number, group) for number, group in enumerate(groups, start=1)]
        index = {
            "metadata": {"total_size": sum(shard.size for shard in shards)},
            "weight_map": dict(sorted(self._tensor_shards.items())),
        }
        small = {**documents, INDEX_NAME: msgspec.json.encode(index)}
        for name, data in sorted(small.items()):
            shards.append(_Shard(name, len(data), partial(_fill_document, data)))
        self._documents_digest = xxh3_128(msgspec.json.encode(sorted(small.items()))).hexdigest()
        self._shards = tuple(shards)

    @property
    def total_bytes(self) -> int:
        """Return the size of the pack without its manifest."""
        return sum(shard.size for shard in self._shards)

    def plan(self, stamps: Sequence[tuple[str, int, int]]) -> str:
        """Return what two runs share if and only if they write the same bytes.

        Args:
            stamps: Name, size and modification time of the source's files: a source that was edited between
                two runs must not be mixed.
        """
        sizes = [(shard.name, shard.size) for shard in self._shards]
        what = (FORMAT, VERSION, self._source_digest, self._build, self._documents_digest)
        text = msgspec.json.encode((what, sizes, tuple(stamps)))
        return xxh3_128(text).hexdigest()

    def write(self, staged: StagedDirectory) -> Manifest:
        """Write what is not there yet, the manifest last; publishing is the caller's.

        Raises:
            StoreError: The source cannot be read or has changed, the disk is full or refuses.
        """
        staged.check_space({shard.name: shard.size for shard in self._shards})
        digests: dict[str, tuple[str, ...]] = {}
        counts = [layer.record.num_experts for layer in self._layers]
        for number, shard in enumerate(self._shards):
            noted = staged.digests_of(shard.name)
            if noted is not None and len(noted) != (counts[number] if number < len(counts) else 1):
                staged.forget(shard.name)
            elif noted is not None:
                self._advance(shard.size)
            digests[shard.name] = staged.write(shard.name, shard.size, shard.fill)
        num_layers = len(self._layers)
        layers = tuple(
            PackLayer(layer.record.layer, shard.name, padded(layer.record.record_bytes), layer.components,
                      digests[shard.name])
            for layer, shard in zip(self._layers, self._shards, strict=False)
        )  # fmt: skip
        rest = self._shards[num_layers:]
        files = [PackFile(shard.name, shard.size, digests[shard.name][0]) for shard in rest]
        files.sort(key=lambda file: file.name)
        table = msgspec.UNSET if self._rows is None else _manifest_rows(self._rows)
        manifest = Manifest(
            FORMAT, VERSION, self._source_digest, layers, tuple(files), rows=table, build=self._build
        ).sealed()
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        staged.write(MANIFEST_NAME, len(text), partial(_fill_document, text))
        return manifest

    def _experts(self, layer: LayerToPack) -> _Shard:
        record = layer.record
        stride, number = padded(record.record_bytes), record.layer
        name = f"experts-{number:03d}.safetensors"
        tensors = {
            record_name(number, expert): ("U8", (stride,), stride) for expert in range(record.num_experts)
        }
        self._tensor_shards.update(dict.fromkeys(tensors, name))
        header = shard_header(tensors, aligned=True)
        size = len(header) + stride * record.num_experts
        return _Shard(name, size, partial(self._fill_experts, record, header, stride))

    def _row_shards(self) -> Iterator[_Shard]:
        """Yield the shards of the n-gram table: parts as they follow, up to `SHARD_BYTES` together."""
        if self._rows is None:
            return
        row_bytes = self._rows.layout.row_bytes
        parts = list(enumerate(self._rows.layout.parts))
        for index, group in enumerate(_grouped(parts, lambda part: part[1].num_rows * row_bytes), start=1):
            name = f"rows-{index:03d}.safetensors"
            tensors = {
                rows_name(number): ("U8", (part.num_rows, row_bytes), part.num_rows * row_bytes)
                for number, part in group
            }
            self._tensor_shards.update(dict.fromkeys(tensors, name))
            header = shard_header(tensors, aligned=True)
            size = len(header) + sum(length for _, _, length in tensors.values())
            yield _Shard(name, size, partial(self._fill_rows, [part for _, part in group], header))

    def _others(self, number: int, group: Sequence[TensorInfo]) -> _Shard:
        name = f"other-{number:03d}.safetensors"
        tensors = {info.name: (info.dtype, info.shape, info.length) for info in group}
        self._tensor_shards.update(dict.fromkeys(tensors, name))
        header = shard_header(tensors, aligned=False)
        size = len(header) + sum(info.length for info in group)
        return _Shard(name, size, partial(self._fill_others, group, header))

    def _fill_experts(
        self, record: RecordLayout, header: bytes, stride: int, stream: BinaryIO
    ) -> tuple[str, ...]:
        buffers = [_RecordBuffer(record, stride) for _ in range(2)]
        write_all(stream, header)
        digests: list[str] = []
        with ThreadPoolExecutor(1, thread_name_prefix="pack-reader") as ahead:
            reading = ahead.submit(buffers[0].read, self._source, 0)
            for expert in range(record.num_experts):
                reading.result()
                buffer = buffers[expert % 2]
                if expert + 1 < record.num_experts:
                    reading = ahead.submit(buffers[(expert + 1) % 2].read, self._source, expert + 1)
                digests.append(xxh3_128(buffer.record).hexdigest())
                write_all(stream, buffer.whole)
                self._advance(stride)
        return tuple(digests)

    def _fill_rows(self, parts: Sequence[RowPart], header: bytes, stream: BinaryIO) -> tuple[str, ...]:
        assert self._rows is not None
        digest = xxh3_128(header)
        write_all(stream, header)
        buffer = _RowBuffer(self._rows.layout)
        for part in parts:
            for first in range(0, part.num_rows, buffer.num_rows):
                rows = buffer.read(self._source, part, first)
                digest.update(rows)
                write_all(stream, rows)
                self._advance(rows.nbytes)
        return (digest.hexdigest(),)

    def _fill_others(self, group: Sequence[TensorInfo], header: bytes, stream: BinaryIO) -> tuple[str, ...]:
        digest = xxh3_128(header)
        write_all(stream, header)
        staging = memoryview(bytearray(_CHUNK_BYTES))
        for info in group:
            for start in range(0, info.length, _CHUNK_BYTES):
                part, at = staging[: min(_CHUNK_BYTES, info.length - start)], info.offset + start
                got = self._source.read_into(info.file, at, [part])
                if got != part.nbytes:
                    raise cut_short(self._source, info.name, info.file, at, part.nbytes, got)
                digest.update(part)
                write_all(stream, part)
                self._advance(part.nbytes)
        return (digest.hexdigest(),)

    def _advance(self, num_bytes: int) -> None:
        self._num_done += num_bytes
        if self._progress is not None:
            self._progress(min(self._num_done, self.total_bytes), self.total_bytes)


class _RecordBuffer:
    """Memory for one record: its components in order, then zeros."""

    def __init__(self, layout: RecordLayout, stride: int) -> None:
        self._layout = layout
        self.whole = memoryview(bytearray(stride))
        self.record = self.whole[: layout.record_bytes]
        ends = [0]
        for length in layout.component_lengths:
            ends.append(ends[-1] + length)
        self._views = [self.whole[begin:end] for begin, end in pairwise(ends)]

    def read(self, source: ByteSource, expert: int) -> None:
        runs = self._layout.reads(expert)
        got = source.read_runs(runs, self._views)
        if got != self._layout.record_bytes:
            name = f"expert {expert} of layer {self._layout.layer}"
            raise cut_short(source, name, runs[0].file, runs[0].offset, self._layout.record_bytes, got)


class _RowBuffer:
    """Memory for some rows: components as the source has them, and side by side."""

    def __init__(self, layout: RowLayout) -> None:
        self._lengths = layout.component_lengths
        self.num_rows = max(1, _CHUNK_BYTES // layout.row_bytes)
        self._apart = [memoryview(bytearray(self.num_rows * length)) for length in self._lengths]
        self._rows = memoryview(bytearray(self.num_rows * layout.row_bytes))
        self._width = math.gcd(8, *self._lengths)  # a copy with strides takes a time for each unit

    def read(self, source: ByteSource, part: RowPart, first: int) -> memoryview:
        """Return rows of a part from `first` on, as many as fit."""
        count = min(self.num_rows, part.num_rows - first)
        rows = self._rows[: count * sum(self._lengths)]
        into, step, at = rows.cast(_UNITS[self._width]), sum(self._lengths) // self._width, 0
        for span, length, apart in zip(part.spans, self._lengths, self._apart, strict=True):
            stored, offset = apart[: count * length], span.offset + first * length
            got = source.read_into(span.file, offset, [stored])
            if got != stored.nbytes:
                what = f"rows of {source.name(span.file)}"
                raise cut_short(source, what, span.file, offset, stored.nbytes, got)
            units, num_units = stored.cast(_UNITS[self._width]), length // self._width
            for unit in range(num_units):
                into[at + unit :: step] = units[unit::num_units]
            at += num_units
        return rows


def _manifest_rows(rows: RowsToPack) -> PackRows:
    parts = zip(rows.numbers, rows.layout.parts, strict=True)
    return PackRows(rows.components, tuple(PackRowPart(number, part.num_rows) for number, part in parts))


def _grouped(items: Iterable[_T], num_bytes: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield what goes into each shard, in order."""
    group: list[_T] = []
    used = 0
    for item in items:
        length = num_bytes(item)
        if group and used + length > SHARD_BYTES:
            yield group
            group, used = [], 0
        group.append(item)
        used += length
    if group:
        yield group


def _fill_document(data: bytes, stream: BinaryIO) -> tuple[str, ...]:
    write_all(stream, data)
    return (xxh3_128(data).hexdigest(),)
