"""Writes the official weights as a quantised MLX checkpoint. Entry point: `convert_checkpoint`.

Invariants:
1. Memory is a few pieces, whatever the size of the source: two of them as stored, one as it becomes.
2. The output appears whole or not at all, and a run that was cut short goes on with the shard it was at
   (`expert_store/staging.py`); what was begun from another source, recipe or version of MLX is refused.
3. Before the output gets its name it has been opened like any checkpoint, and pieces of every part have been
   read back and compared with a conversion made anew (P85).

The report is `flashnext-conversion.json`, written into the output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, Final

import mlx.core as mx

from expert_store.pack import MANIFEST_NAME, shard_header
from expert_store.safetensors_index import INDEX_NAME
from expert_store.source import ByteSource, FileSource
from expert_store.staging import StagedDirectory, write_all
from expert_store.verified import VerifiedSource
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.config import LAYER_KINDS
from mlx_flashnext.conversion.arranging import Arrangement, Section, arrange
from mlx_flashnext.conversion.checking import LayerError, check_written
from mlx_flashnext.conversion.recipe import Recipe
from mlx_flashnext.conversion.works import Work, convert_piece, read_run
from mlx_flashnext.documents import small_documents
from mlx_flashnext.stored_numbers import float32_values

FORMAT = "flashnext-conversion"
VERSION = 1
REPORT_NAME: Final = "flashnext-conversion.json"
OFFICIAL_KINDS: Final = {"gdn": "linear_attention", "qsa": "full_attention"}
CACHE_BYTES: Final = 64 << 20
"""What MLX may keep of the memory it gave back."""

Progress = Callable[[str, int, int], None]


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert_checkpoint` made.

    Attributes:
        directory: Where it is.
        digest: Identity of the new checkpoint.
        source_bytes: Tensors of the source that were read.
        num_bytes: Size of the new shards.
        errors: Relative error of what was quantised, by part and layer.
        left_plain: Matrices that stayed plain because the group size does not divide their width.
        dropped: Stored names of the source that the output lacks.
    """

    directory: Path
    digest: str
    source_bytes: int
    num_bytes: int
    errors: tuple[LayerError, ...]
    left_plain: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file that is to be: its name, header, size, and the works in it."""

    name: str
    header: bytes
    size: int
    works: tuple[Work, ...]


def convert_checkpoint(
    directory: Path,
    target: Path,
    recipe: Recipe,
    *,
    progress: Progress = _silent,
    wrap_source: Callable[[ByteSource], ByteSource] = lambda source: source,
) -> Converted:
    """Quantise a checkpoint; goes on where a run that was cut short has stopped.

    Args:
        directory: The official BF16 or FP8 weights, or any other checkpoint of plain numbers.
        target: What is to appear; must not exist.
        recipe: What its parts become.
        progress: Called with (stage, bytes done, bytes in all) after each piece.
        wrap_source: Wraps the source's files, to count, throttle or break reads.

    Raises:
        StoreError: The source is damaged or changes, the target is taken, the disk is full or refuses.
        ModelError: The source is not a checkpoint this program runs, is quantised already, or holds values
            that are not finite.
    """
    checkpoint = open_checkpoint(directory)
    with _opened(checkpoint, wrap_source) as source, _small_cache():
        arrangement = arrange(checkpoint, recipe, _table_scale(checkpoint, source))
        shards = _shards(arrangement)
        documents = _documents(directory, arrangement.quantization, shards)
        plan = _plan(checkpoint, documents)
        with StagedDirectory(target, plan) as staged:
            sizes = {shard.name: shard.size for shard in shards}
            staged.check_space({**sizes, **{name: len(data) for name, data in documents.items()}})
            _write(staged, source, shards, progress)
            for name, data in documents.items():
                staged.write(name, len(data), partial(_fill_document, data))
            errors, digest = check_written(staged.partial, arrangement.works, source, progress)
            report = _report(checkpoint, recipe, arrangement, errors)
            staged.write(REPORT_NAME, len(report), partial(_fill_document, report))
            staged.publish()
    return Converted(
        target,
        digest,
        sum(line.num_bytes for line in checkpoint.account()),
        sum(sizes.values()),
        errors,
        arrangement.left_plain,
        _dropped(checkpoint, recipe),
    )


@contextmanager
def _opened(checkpoint: Checkpoint, wrap_source: Callable[[ByteSource], ByteSource]) -> Iterator[ByteSource]:
    source = wrap_source(FileSource(checkpoint.table.files, cache="bypass"))
    if checkpoint.records is not None:
        source = VerifiedSource(source, checkpoint.records, verify="every")
    try:
        yield source
    finally:
        source.close()


@contextmanager
def _small_cache() -> Iterator[None]:
    before = mx.set_cache_limit(CACHE_BYTES)
    try:
        yield
    finally:
        mx.clear_cache()
        mx.set_cache_limit(before)


def _table_scale(checkpoint: Checkpoint, source: ByteSource) -> float | None:
    scale = checkpoint.ngram.scale
    if scale is None:
        return None
    return float(float32_values(read_run(source, scale, 0, scale.length), scale.dtype)[0])


def _shards(arrangement: Arrangement) -> tuple[_Shard, ...]:
    count = len(arrangement.shards)
    shards: list[_Shard] = []
    for number, works in enumerate(arrangement.shards, start=1):
        outputs = [output for work in works for output in work.outputs]
        tensors = {output.name: (output.dtype, output.shape, output.length) for output in outputs}
        assert len(tensors) == len(outputs), "two works write one tensor"
        header = shard_header(tensors, aligned=False, origin="mlx")
        size = len(header) + sum(output.length for output in outputs)
        shards.append(_Shard(f"model-{number:05d}-of-{count:05d}.safetensors", header, size, works))
    return tuple(shards)


def _documents(directory: Path, section: Section | None, shards: Sequence[_Shard]) -> dict[str, bytes]:
    """Return the small files of the output: those of the source, with another config and index."""
    documents = small_documents(directory, without=(INDEX_NAME, MANIFEST_NAME, REPORT_NAME))
    config = json.loads(documents["config.json"])
    text = config.get("text_config", config)
    for place in (config, text):
        place.pop("quantization", None)
        place.pop("quantization_config", None)
    for place in (text, text.get("mtp", {})):
        if "layer_types" in place:  # transformers saves a name of its own, which mlx-vlm does not know
            place["layer_types"] = [OFFICIAL_KINDS[LAYER_KINDS[name]] for name in place["layer_types"]]
    if section is not None:
        config |= {"quantization": section, "quantization_config": section}
    names = {output.name: shard.name for shard in shards for work in shard.works for output in work.outputs}
    total = sum(output.length for shard in shards for work in shard.works for output in work.outputs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    return {
        **documents,
        "config.json": json.dumps(config, indent=2).encode(),
        INDEX_NAME: json.dumps(index, indent=2).encode(),
    }


def _plan(checkpoint: Checkpoint, documents: Mapping[str, bytes]) -> str:
    """Return what two runs share if and only if they write the same bytes.

    The documents tell recipes apart: every tensor is in the index, every quantisation in the config. The
    device and MLX's version are in it, since either may round a scale otherwise.
    """
    facts = {
        "source": checkpoint.digest,
        "files": [(info.path.name, info.size, info.mtime_ns) for info in checkpoint.table.files],
        "mlx": version("mlx"),
        "device": str(mx.default_device()),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, data in sorted(documents.items()):
        digest.update(b"%s\0%d\0%s" % (name.encode(), len(data), data))
    return f"{FORMAT} {VERSION} {digest.hexdigest()}"


def _write(staged: StagedDirectory, source: ByteSource, shards: Sequence[_Shard], progress: Progress) -> None:
    total, done = sum(shard.size for shard in shards), 0
    with ThreadPoolExecutor(1, thread_name_prefix="convert-reader") as ahead:
        for shard in shards:
            base = done

            def advance(num_bytes: int, base: int = base) -> None:
                progress("converting", base + num_bytes, total)

            staged.write(shard.name, shard.size, partial(_fill, shard, source, ahead, advance))
            done += shard.size
            progress("converting", done, total)


def _fill(
    shard: _Shard,
    source: ByteSource,
    ahead: ThreadPoolExecutor,
    advance: Callable[[int], None],
    stream: BinaryIO,
) -> tuple[str, ...]:
    """Write a shard; the tensors of a work grow side by side, since a piece has bytes for each of them."""
    write_all(stream, shard.header)
    done = begin = len(shard.header)
    pieces = [(work, piece) for work in shard.works for piece in range(work.num_pieces)]
    reading = ahead.submit(pieces[0][0].read, source, 0)
    ends: list[int] = []
    for number, (work, piece) in enumerate(pieces):
        raw = reading.result()
        if number + 1 < len(pieces):
            following, index = pieces[number + 1]
            reading = ahead.submit(following.read, source, index)
        if piece == 0:
            ends = []
            for output in work.outputs:
                ends.append(begin)
                begin += output.length
        for part, data in enumerate(convert_piece(work, piece, raw)):
            stream.seek(ends[part])
            write_all(stream, data)
            ends[part] += data.nbytes
            done += data.nbytes
        advance(done)
    return ()


def _fill_document(data: bytes, stream: BinaryIO) -> tuple[str, ...]:
    write_all(stream, data)
    return ()


def _report(
    checkpoint: Checkpoint, recipe: Recipe, arrangement: Arrangement, errors: Sequence[LayerError]
) -> bytes:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "source": checkpoint.digest,
        "recipe": recipe.to_dict(),
        "errors": [error.to_dict() for error in errors],
        "left_plain": list(arrangement.left_plain),
        "dropped": list(_dropped(checkpoint, recipe)),
    }
    return json.dumps(document, indent=1).encode()


def _dropped(checkpoint: Checkpoint, recipe: Recipe) -> tuple[str, ...]:
    """Return the tensors of the source that the output lacks: all that is neither kept nor asked for."""
    categories = {"unused"}
    if not recipe.keep_mtp:
        categories |= {"mtp", "mtp experts"}
    if not recipe.keep_vision:
        categories.add("vision")
    return tuple(name for line in checkpoint.account() if line.category in categories for name in line.names)
