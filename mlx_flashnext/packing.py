"""Makes a pack of a checkpoint, and compares one with its digests.

Entry points: `pack_checkpoint`, `verify_pack`.

Invariants:
1. A pack holds every byte of its source that opening it uses, and what opening skips too: nothing is lost, so
   the source may be deleted.
2. Before a pack gets its name it has been opened like any checkpoint, and some of its records have been read
   back and compared (P84, P85).

No MLX here. Format: `expert_store/pack.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128

from expert_store.errors import CheckpointCorrupt, RecordCorrupt, StoreError
from expert_store.pack import MANIFEST_NAME, Manifest, PackComponent, PackLayer, has_manifest, read_manifest
from expert_store.pack_writer import LayerToPack, PackWriter, RowsToPack
from expert_store.safetensors_file import open_regular
from expert_store.safetensors_index import INDEX_NAME, TensorInfo
from expert_store.source import ByteSource, FileSource, read_failed
from expert_store.staging import StagedDirectory
from expert_store.verified import VerifiedSource
from mlx_flashnext.checkpoint import Checkpoint, Component, ExpertLayout, NgramLayout, open_checkpoint
from mlx_flashnext.checkpoint.build import build_digest
from mlx_flashnext.config import read_config_file
from mlx_flashnext.documents import MAX_DOCUMENT_BYTES, small_documents
from mlx_flashnext.errors import ModelError, UnsupportedCheckpoint

Progress = Callable[[str, int, int], None]

SPOT_CHECKS = 8
CHUNK_BYTES = 8 << 20


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What `pack_checkpoint` made.

    Attributes:
        directory: Where it is.
        identity: Of its manifest.
        num_records: Experts of all layers.
        num_bytes: Its size, but for the manifest.
        reads_before: Reads that one expert of the source takes, at most; one of the pack takes one.
        left: Folders in the source's, by name: a draft, a near map. They are no part of a pack, and fit it as
            they fit the source.
    """

    directory: Path
    identity: str
    num_records: int
    num_bytes: int
    reads_before: int
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify_pack` found.

    Attributes:
        identity: Of the manifest.
        num_records: Records compared.
        num_files: Other files compared.
        num_bytes: Bytes read.
        damaged: One error for each record or file that differs; empty if the pack is whole.
    """

    identity: str
    num_records: int
    num_files: int
    num_bytes: int
    damaged: tuple[StoreError, ...]


def pack_checkpoint(
    directory: Path,
    target: Path,
    *,
    progress: Progress = _silent,
    wrap_source: Callable[[ByteSource], ByteSource] = lambda source: source,
) -> Packed:
    """Write a checkpoint as a pack; goes on where a run that was cut short has stopped.

    Args:
        directory: A checkpoint in any layout that opens.
        target: What is to appear; must not exist.
        progress: Called with (stage, bytes done, bytes in all).
        wrap_source: Wraps the source's files, to count, throttle or break reads.

    Raises:
        StoreError: The source is damaged or changes, the target is taken, the disk is full or refuses.
        ModelError: The source is not a checkpoint this program runs.
    """
    if has_manifest(directory):
        raise UnsupportedCheckpoint(f"This is a pack already: {directory}", hint="use it as it is")
    checkpoint = open_checkpoint(directory)
    with FileSource(checkpoint.table.files) as files:
        writer = PackWriter(
            wrap_source(files),
            checkpoint.digest,
            build_digest(read_config_file(directory), checkpoint.table, files),
            [_layer(layout) for layout in checkpoint.expert_layouts(mtp=True).values()],
            _other_tensors(checkpoint),
            small_documents(directory, without=(INDEX_NAME, MANIFEST_NAME)),
            lambda done, total: progress("packing", done, total),
            _rows(checkpoint.ngram),
        )
        stamps = [(info.path.name, info.size, info.mtime_ns) for info in checkpoint.table.files]
        with StagedDirectory(target, writer.plan(stamps)) as staged:
            manifest = writer.write(staged)
            try:
                _spot_check(staged.partial, manifest)
            except StoreError:
                staged.begin_anew()  # or the next run would take up what is wrong
                raise
            staged.publish()
    num_records = sum(layer.num_experts for layer in manifest.layers)
    reads = max(len(layout.record.reads(0)) for layout in checkpoint.experts.values())
    left = tuple(sorted(path.name for path in directory.iterdir() if _is_left(path, target)))
    return Packed(target, manifest.identity, num_records, writer.total_bytes, reads, left)


def _is_left(path: Path, target: Path) -> bool:
    """Return whether this is a folder of the model that a person may want beside the pack."""
    return path.is_dir() and not path.name.startswith(".") and not path.samefile(target)


def verify_pack(directory: Path, *, progress: Progress = _silent) -> Verified:
    """Read a whole pack and compare every record and every other file with its digest.

    Args:
        directory: A pack.
        progress: Called with (stage, bytes done, bytes in all).

    Raises:
        StoreError: It is no pack, or so damaged that it does not open.
        ModelError: It does not open for another reason.
    """
    if not has_manifest(directory):
        raise UnsupportedCheckpoint(
            f"This is not a pack: {directory} has no {MANIFEST_NAME}", hint="make one with flashnext pack"
        )
    manifest = read_manifest(directory)
    total = sum(layer.stride * layer.num_experts for layer in manifest.layers)
    total += sum(file.size for file in manifest.files)
    damaged: list[StoreError] = []
    done = 0
    for file in manifest.files:
        damaged += _check_file(directory, file.name, file.size, file.digest)
        done += file.size
        progress("verifying", done, total)
    try:
        checkpoint = open_checkpoint(directory)
    except (StoreError, ModelError):
        if damaged:  # a damaged config does not open, and is the answer
            return Verified(manifest.identity, 0, len(manifest.files), done, tuple(damaged))
        raise
    layers = {layer.layer: layer for layer in manifest.layers}
    layouts = checkpoint.expert_layouts(mtp=True)
    with FileSource(checkpoint.table.files, cache="bypass") as files:
        for number, layout in layouts.items():
            layer = layers[number]
            for expert in range(layer.num_experts):
                damaged += _check_record(files, layout, layer, expert)
                done += layer.stride
                progress("verifying", done, total)
    num_records = sum(layer.num_experts for layer in manifest.layers)
    return Verified(manifest.identity, num_records, len(manifest.files), done, tuple(damaged))


def _layer(layout: ExpertLayout) -> LayerToPack:
    return LayerToPack(layout.record, _components(layout.components, layout.record.component_lengths))


def _rows(layout: NgramLayout) -> RowsToPack | None:
    """Return the n-gram table if its rows are to lie in one piece; plain rows do as they are."""
    if len(layout.components) == 1:
        return None
    components = _components(layout.components, layout.record.component_lengths)
    return RowsToPack(layout.record, components, layout.numbers)


def _components(components: Sequence[Component], lengths: Sequence[int]) -> tuple[PackComponent, ...]:
    return tuple(
        PackComponent(part.name, part.dtype, part.shape, length)
        for part, length in zip(components, lengths, strict=True)
    )


def _other_tensors(checkpoint: Checkpoint) -> list[TensorInfo]:
    gathered = {"experts", "mtp experts"}
    if _rows(checkpoint.ngram) is not None:
        gathered.add("ngram")
    names = [name for line in checkpoint.account() if line.category not in gathered for name in line.names]
    return [checkpoint.table.tensors[name] for name in names]


def _spot_check(directory: Path, manifest: Manifest) -> None:
    """Open what was written, and compare a few records of it, the first and the last of some layers.

    Raises:
        StoreError: What is on the disk is not what was written.
    """
    checkpoint = open_checkpoint(directory)
    assert checkpoint.records is not None
    layouts = list(checkpoint.expert_layouts(mtp=True).values())
    step = max(1, len(layouts) * 2 // SPOT_CHECKS)
    with closing(VerifiedSource(FileSource(checkpoint.table.files), checkpoint.records)) as source:
        for layout in layouts[::step]:
            for expert in (0, layout.record.num_experts - 1):
                _read_record(source, layout, expert)
    for file in manifest.files:
        if file.size <= MAX_DOCUMENT_BYTES and not file.name.endswith(".safetensors"):
            for error in _check_file(directory, file.name, file.size, file.digest):
                raise error


def _read_record(source: ByteSource, layout: ExpertLayout, expert: int) -> memoryview:
    """Return the bytes of one record."""
    record = layout.record
    whole = memoryview(bytearray(record.record_bytes))
    runs = record.reads(expert)
    got = source.read_into(runs[0].file, runs[0].offset, [whole])
    if got != record.record_bytes:
        raise RecordCorrupt(
            f"Record is cut short: expert {expert} of layer {record.layer}: {got} of {record.record_bytes}",
            hint="make the pack again",
            layer=record.layer,
            expert=expert,
        )
    return whole


def _check_record(
    source: ByteSource, layout: ExpertLayout, layer: PackLayer, expert: int
) -> Iterator[StoreError]:
    run = layout.record.reads(expert)[0]
    stored = memoryview(bytearray(layer.stride))
    got = source.read_into(run.file, run.offset, [stored])
    found = xxh3_128(stored[: layer.record_bytes]).hexdigest()
    where = f"expert {expert} of layer {layer.layer} in {layer.file} at {run.offset}"
    context = {"layer": layer.layer, "expert": expert, "file": layer.file, "offset": run.offset}
    if got != layer.stride:
        what = f"Record is cut short: {where}: {got} of {layer.stride} bytes"
    elif found != layer.digests[expert]:
        what = f"Record is damaged: {where}: digest {found}, the pack says {layer.digests[expert]}"
    elif any(stored[layer.record_bytes :]):
        what = f"Record is followed by something: {where}"
    else:
        return
    yield RecordCorrupt(what, hint="make the pack again", **context)


def _check_file(directory: Path, name: str, size: int, digest: str) -> Iterator[StoreError]:
    hasher, count = xxh3_128(), 0
    try:
        with open_regular(directory / name, name) as (stream, _):
            while part := stream.read(CHUNK_BYTES):
                hasher.update(part)
                count += len(part)
    except OSError as error:
        yield read_failed(error, name, count)
        return
    except StoreError as error:
        yield error
        return
    if (count, hasher.hexdigest()) != (size, digest):
        yield CheckpointCorrupt(
            f"File is damaged: {name}: {count} bytes of digest {hasher.hexdigest()}, the pack says {size} of "
            f"{digest}",
            hint="make the pack again",
            file=name,
        )
