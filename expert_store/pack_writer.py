"""Copies a checkpoint into a pack, one shard at a time. Entry: `PackWriter`.

Records are gathered from wherever the source has them, read ahead by one while the last is hashed and
written; everything else is copied byte for byte. What goes where is decided before anything is written, so
two runs over one source write the same bytes, and a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import BinaryIO, Final

import msgspec
from xxhash import xxh3_128

from expert_store.layout import RecordLayout
from expert_store.pack import (
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    Manifest,
    PackComponent,
    PackFile,
    PackLayer,
    padded,
    record_name,
    shard_header,
)
from expert_store.safetensors_index import INDEX_NAME, TensorInfo
from expert_store.source import ByteSource, cut_short
from expert_store.staging import StagedDirectory, write_all

SHARD_BYTES: Final = 4 * 2**30
"""A shard of other tensors is closed before it passes this; a larger tensor has one of its own."""
_CHUNK_BYTES: Final = 8 * 2**20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerToPack:
    """Where the records of a layer lie, and what their components are."""

    record: RecordLayout
    components: tuple[PackComponent, ...]


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
        layers: Sequence[LayerToPack],
        others: Sequence[TensorInfo],
        documents: Mapping[str, bytes],
        progress: Progress | None = None,
    ) -> None:
        """Decide what goes where.

        Args:
            source: The source's data files.
            source_digest: Identity of the source.
            layers: Layers with routed experts, in order.
            others: All other tensors.
            documents: Small files that a checkpoint has beside its tensors, by name.
            progress: Called with (bytes done, bytes in all).
        """
        self._source = source
        self._source_digest = source_digest
        self._layers = tuple(layers)
        self._progress = progress
        self._num_done = 0
        self._tensor_shards: dict[str, str] = {}
        shards = [self._experts(layer) for layer in self._layers]
        shards += [self._others(number, group) for number, group in enumerate(_grouped(others), start=1)]
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
        what = (FORMAT, VERSION, self._source_digest, self._documents_digest)
        text = msgspec.json.encode((what, sizes, tuple(stamps)))
        return xxh3_128(text).hexdigest()

    def write(self, staged: StagedDirectory) -> Manifest:
        """Write what is not there yet, the manifest last; publishing is the caller's.

        Raises:
            StoreError: The source cannot be read or has changed, the disk is full or refuses.
        """
        staged.check_space({shard.name: shard.size for shard in self._shards})
        digests: dict[str, tuple[str, ...]] = {}
        for shard in self._shards:
            if staged.digests_of(shard.name) is not None:
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
        manifest = Manifest(FORMAT, VERSION, self._source_digest, layers, tuple(files)).sealed()
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


def _grouped(tensors: Sequence[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Yield the tensors of each shard, in the order of the source's files."""
    group: list[TensorInfo] = []
    used = 0
    for info in sorted(tensors, key=lambda info: (info.file, info.offset, info.name)):
        if group and used + info.length > SHARD_BYTES:
            yield group
            group, used = [], 0
        group.append(info)
        used += info.length
    if group:
        yield group


def _fill_document(data: bytes, stream: BinaryIO) -> tuple[str, ...]:
    write_all(stream, data)
    return (xxh3_128(data).hexdigest(),)
