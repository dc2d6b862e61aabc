"""What a conversion writes, decided before anything is written. Entry point: `arrange`.

Names, shapes and the `quantization` section are those of MLX packs; the MTP module keeps its official names,
which mlx-vlm leaves out and this program reads.

Source: qwen4exp.md 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from expert_store.safetensors_index import TensorInfo
from mlx_flashnext.checkpoint import Checkpoint, ExpertLayout, StoredTensor
from mlx_flashnext.checkpoint.quantization import AFFINE_GROUPS, MICRO_SCALED
from mlx_flashnext.config import Fp8Blocks, QuantSpec
from mlx_flashnext.conversion.recipe import Recipe, spell
from mlx_flashnext.conversion.values import Blocks, Decoder, Output, Plain, Scaled
from mlx_flashnext.conversion.works import CopyWork, ExpertsWork, MatrixWork, Work
from mlx_flashnext.errors import UnsupportedCheckpoint
from mlx_flashnext.names import HASH_BUFFERS, NGRAM_TABLE, VISION_PREFIXES, layer_of

SHARD_BYTES: Final = 1 << 30
"""A shard of other tensors is closed before it passes this; a larger tensor has one of its own."""
BARE: Final = ("A_log", "dt_bias", *HASH_BUFFERS)
"""Parameters that are stored without `.weight`."""

Section = dict[str, object]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """All there is to write.

    Attributes:
        works: In the order in which they are written.
        shards: Works that share a file.
        quantization: The section of config.json; None where nothing is quantised.
        left_plain: Canonical names of matrices that a group size does not divide.
    """

    works: tuple[Work, ...]
    shards: tuple[tuple[Work, ...], ...]
    quantization: Section | None
    left_plain: tuple[str, ...]


def arrange(checkpoint: Checkpoint, recipe: Recipe, table_scale: float | None) -> Arrangement:
    """Decide what a checkpoint becomes.

    Args:
        checkpoint: The source: BF16, FP16, float32 or the official FP8.
        recipe: What is wanted.
        table_scale: The one scale of an FP8 table.

    Raises:
        UnsupportedCheckpoint: The source is quantised already, or a group size does not divide the experts or
            the table's rows.
    """
    _check_plain(checkpoint)
    layouts = dict(checkpoint.experts)
    tensors = list(checkpoint.tensors.values())
    works: list[Work] = [_tensor(tensor, recipe) for tensor in tensors]
    works += _table(checkpoint, recipe.table, table_scale)
    works += [_experts(checkpoint, layout, recipe, mtp=False) for layout in layouts.values()]
    if recipe.keep_mtp and checkpoint.mtp_experts is not None:
        works += [_tensor(tensor, recipe) for tensor in checkpoint.mtp.values()]
        works.append(_experts(checkpoint, checkpoint.mtp_experts, recipe, mtp=True))
        tensors += checkpoint.mtp.values()
    if recipe.keep_vision:
        works += [
            _vision(checkpoint, name) for name in checkpoint.skipped if name.startswith(VISION_PREFIXES)
        ]
    return Arrangement(
        tuple(works),
        tuple(_shards(works)),
        _section(works, recipe),
        tuple(
            tensor.name for tensor in tensors if tensor.role == "matrix" and _is_left_plain(tensor, recipe)
        ),
    )


def _check_plain(checkpoint: Checkpoint) -> None:
    """Refuse a source that was quantised before: its losses would be hidden in the new figures."""
    stored: list[tuple[str, object]] = [
        (tensor.name, tensor.spec) for tensor in (*checkpoint.tensors.values(), *checkpoint.mtp.values())
    ]
    for number, layout in checkpoint.expert_layouts(mtp=True).items():
        stored += (
            (f"{projection}_proj of the experts of layer {number}", s)
            for projection, s in layout.specs.items()
        )
    stored.append(("the n-gram table", checkpoint.ngram.spec))
    for name, spec in stored:
        if isinstance(spec, QuantSpec):
            raise UnsupportedCheckpoint(
                f"The source is quantised already: {name} is {spell(spec)}",
                hint="convert the official BF16 or FP8 weights",
                tensor=name,
            )


def _stem(name: str) -> str:
    if name.startswith("mtp."):
        return name
    return f"language_model.{'' if name == 'lm_head' else 'model.'}{name}"


def _tensor(tensor: StoredTensor, recipe: Recipe) -> Work:
    name, info = tensor.name, tensor.weight
    stem, leaf = _stem(name), name.rpartition(".")[2]
    if tensor.role == "matrix":
        rows, columns = tensor.shape
        spec = recipe.matrix(name, columns)
        if spec is not None or isinstance(tensor.spec, Fp8Blocks):
            decoder: Decoder = Plain(info.name, info.dtype)
            if isinstance(tensor.spec, Fp8Blocks):
                assert tensor.scales is not None
                decoder = Blocks(info.name, tensor.spec, tensor.scales.dtype)
            return MatrixWork(
                stem, info, tensor.scales, (rows, columns), decoder, spec, _group(name), _layer(name)
            )
    shape = info.shape
    if tensor.role == "conv":
        channels, taps = tensor.shape
        shape = (channels, taps, 1)
    stored = stem if leaf in BARE else f"{stem}.weight"
    return CopyWork(info, Output(stored, info.dtype, shape))


def _group(name: str) -> str:
    if name.startswith("mtp."):
        return "mtp"
    return {"embed_tokens": "embedding", "lm_head": "head"}.get(name, "trunk")


def _layer(name: str) -> int | None:
    return None if name.startswith("mtp.") else layer_of(name)


def _is_left_plain(tensor: StoredTensor, recipe: Recipe) -> bool:
    """Return whether a matrix would be quantised if its width were another."""
    return recipe.matrix(tensor.name, 0) is not None and recipe.matrix(tensor.name, tensor.shape[1]) is None


def _experts(checkpoint: Checkpoint, layout: ExpertLayout, recipe: Recipe, *, mtp: bool) -> ExpertsWork:
    spec, hidden, number = recipe.routed(mtp=mtp), checkpoint.config.hidden_size, layout.record.layer
    if spec is not None:
        for what, width in (("hidden_size", hidden), ("the expert width", layout.width)):
            _check_group("experts", spec, what, width)
    stem = "mtp.layers.0" if mtp else f"language_model.model.layers.{number}"
    return ExpertsWork(f"{stem}.mlp.switch_mlp", layout, spec, hidden, "mtp experts" if mtp else "experts")


def _table(checkpoint: Checkpoint, spec: QuantSpec | None, scale: float | None) -> Iterator[Work]:
    ngram, layer = checkpoint.ngram, checkpoint.config.ple_layer
    if spec is not None:
        _check_group("table", spec, "a row of the table", ngram.width)
    stem = f"language_model.model.layers.{layer}.ple.ple_embedding.{NGRAM_TABLE}"
    parts = ngram.record.parts
    for number, part in enumerate(parts):
        info = part.spans[0]
        assert isinstance(info, TensorInfo)
        own = f"{stem}.shards.{number}" if len(parts) > 1 else stem
        decoder = Plain(info.name, info.dtype) if scale is None else Scaled(info.name, scale)
        yield MatrixWork(own, info, None, (part.num_rows, ngram.width), decoder, spec, "table", layer)


def _check_group(what: str, spec: QuantSpec, name: str, width: int) -> None:
    if width % spec.group_size:
        fitting = [f"groups of {group}" for group in AFFINE_GROUPS if width % group == 0]
        fitting += [mode for mode, (_, group) in MICRO_SCALED.items() if width % group == 0]
        raise UnsupportedCheckpoint(
            f"Group size {spec.group_size} does not divide {name}: {width}",
            hint=f"choose another for {what}: {', '.join(fitting) or 'nothing fits'}, or none",
            group_size=spec.group_size,
            width=width,
        )


def _vision(checkpoint: Checkpoint, name: str) -> Work:
    """Copy a vision tensor under its MLX name; the patch convolution moves its channels to the end."""
    info = checkpoint.table.tensors[name]
    prefix = next(prefix for prefix in VISION_PREFIXES if name.startswith(prefix))
    stored = "vision_tower." + name.removeprefix(prefix)
    is_official = prefix != "vision_tower."
    if is_official and name.endswith(".patch_embed.proj.weight") and len(info.shape) == 5:
        out, channels, *kernel = info.shape
        return CopyWork(info, Output(stored, info.dtype, (out, *kernel, channels)), transpose=True)
    return CopyWork(info, Output(stored, info.dtype, info.shape))


def _shards(works: list[Work]) -> Iterator[tuple[Work, ...]]:
    group: list[Work] = []
    used = 0
    for work in works:
        length = sum(output.length for output in work.outputs)
        is_whole = isinstance(work, ExpertsWork)
        if group and (is_whole or used + length > SHARD_BYTES):
            yield tuple(group)
            group, used = [], 0
        group.append(work)
        used += length
        if is_whole:
            yield tuple(group)
            group, used = [], 0
    if group:
        yield tuple(group)


def _section(works: list[Work], recipe: Recipe) -> Section | None:
    """Return what config.json says of quantisation: a default, and every module that differs from it."""
    modules: dict[str, QuantSpec | None] = {}
    for work in works:
        if isinstance(work, MatrixWork):
            modules[work.stem] = work.spec
        elif isinstance(work, ExpertsWork):
            modules |= {output.name.rpartition(".")[0]: work.spec for output in work.outputs}
        elif isinstance(work, CopyWork) and _is_matrix(work):
            modules[work.output.name.removesuffix(".weight")] = None
    specs = [recipe.experts, recipe.trunk, recipe.table, *modules.values()]
    default = next((spec for spec in specs if spec is not None and spec in modules.values()), None)
    if default is None:
        return None
    section = _words(default)
    section |= {
        module: False if spec is None else _words(spec) for module, spec in modules.items() if spec != default
    }
    return section


def _is_matrix(work: CopyWork) -> bool:
    return len(work.output.shape) == 2 and not work.output.name.startswith("vision_tower.")


def _words(spec: QuantSpec) -> Section:
    return {"group_size": spec.group_size, "bits": spec.bits, "mode": spec.mode}
