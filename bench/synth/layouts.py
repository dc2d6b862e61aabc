"""How each logical tensor is stored in the Hugging Face, FP8 and MLX layouts.

Entry points: `stored_tensors`, `quantization_config`.
Source: qwen4exp.md 3.1 (BF16), 3.2 (FP8), 3.3 (MLX packs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.synth.presets import Preset
from bench.synth.tensors import TRUNK, Tensor
from bench.synth.values import Grid, Head, NearIdentity, e4m3_values, float_bytes, vector_values

ITEM_BYTES = {"BF16": 2, "F32": 4, "I64": 8, "U32": 4, "U8": 1, "F8_E4M3": 1}
ROUTER_SKEW = 0.6
HEAD_LIMIT = 1 << 27

Blocks = Callable[[], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file; `blocks` yields its bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Blocks
    is_kept_when_sparse: bool = False

    @property
    def length(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def stored_tensors(tensors: Iterable[Tensor], preset: Preset, seed: int) -> Iterator[Stored]:
    """Yield what the preset's layout stores, in the order of `tensors`."""
    held: dict[str, Grid] = {}
    for tensor in tensors:
        if tensor.kind in ("integer", "norm", "conv", "decay", "vision"):
            yield _plain(tensor, preset, seed)
            continue
        grid = _grid(tensor, preset, seed, held)
        if preset.layout == "mlx":
            yield from _packed(tensor, grid, preset)
        elif preset.layout == "hf-fp8" and tensor.kind in ("experts", "table"):
            yield from _fp8(tensor, grid)
        elif tensor.kind != "experts":
            yield Stored(_official(tensor), preset.float_dtype, tensor.shape, partial(_dense, grid, preset))
        else:
            yield from _fused(tensor, grid, preset, held)


def quantization_config(tensors: Iterable[Tensor], preset: Preset) -> dict[str, Any]:
    """Return the `quantization` section of an MLX pack, overrides in pack spelling."""
    default = {"group_size": preset.group_size, "bits": preset.bits, "mode": preset.mode}
    section: dict[str, Any] = dict(default)
    for tensor in tensors:
        if tensor.kind not in ("matrix", "experts", "table"):
            continue
        bits, group_size, mode = _spec(tensor, preset)
        module = _pack_name(tensor.name)
        if tensor.shape[-1] % group_size:
            section[module] = False
        elif (bits, group_size, mode) != (preset.bits, preset.group_size, preset.mode):
            section[module] = {"group_size": group_size, "bits": bits, "mode": mode}
    return section


def _spec(tensor: Tensor, preset: Preset) -> tuple[int, int, str]:
    if tensor.name.endswith((".mlp.gate", ".mlp.shared_expert_gate")):
        return 8, 64, "affine"
    if tensor.kind == "table" and preset.group_size == 64:
        return preset.bits, 32, preset.mode
    return preset.bits, preset.group_size, preset.mode


def _grid(tensor: Tensor, preset: Preset, seed: int, held: dict[str, Grid]) -> Grid:
    bits, group_size, mode = _spec(tensor, preset)
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    grid = Grid(
        seed, tensor.name, rows, columns, tensor.std, bits, math.gcd(group_size, columns), mode,
        row_skew=ROUTER_SKEW if tensor.name.endswith(".mlp.gate") else 0.0,
    )  # fmt: skip
    if tensor.name.endswith("embed_tokens"):
        held["embedding"] = grid
    is_exact = mode == "affine" and bits in (4, 8)
    if tensor.name == "lm_head" and is_exact and rows * columns <= HEAD_LIMIT:
        return Head(
            seed, tensor.name, rows, columns, tensor.std, bits, grid.group_size, embedding=held["embedding"]
        )
    if tensor.diagonal:
        return NearIdentity(
            seed, tensor.name, rows, columns, tensor.std, bits, grid.group_size, diagonal=tensor.diagonal
        )
    return grid


def _official(tensor: Tensor) -> str:
    is_bare = tensor.kind in ("integer", "vision", "decay") or tensor.name.endswith(".dt_bias")
    return tensor.name if is_bare else tensor.name + ".weight"


def _pack_name(name: str) -> str:
    if name.startswith("model.visual."):
        return name.replace("model.visual.", "vision_tower.", 1)
    if name.startswith(TRUNK):
        name = "language_model.model." + name.removeprefix(TRUNK)
    else:
        name = "language_model." + name
    return name.replace(".mlp.experts.", ".mlp.switch_mlp.").replace(
        ".ngram_embedding.shard_", ".ngram_embedding.shards."
    )


def _plain(tensor: Tensor, preset: Preset, seed: int) -> Stored:
    name, is_pack = _official(tensor), preset.layout == "mlx"
    if is_pack:
        name = _pack_name(name)
    if tensor.kind == "integer":
        data = np.array(tensor.integers, "<i8").tobytes()
        return Stored(name, "I64", tensor.shape, partial(_once, data), is_kept_when_sparse=True)
    shape = tensor.shape
    if tensor.kind == "conv":
        shape = (shape[0], shape[1], 1) if is_pack else (shape[0], 1, shape[1])
    elif is_pack and name.endswith("patch_embed.proj.weight"):
        shape = (shape[0], *shape[2:], shape[1])
    return Stored(name, preset.float_dtype, shape, partial(_vector, tensor, preset, seed))


def _packed(tensor: Tensor, grid: Grid, preset: Preset) -> Iterator[Stored]:
    module, lead = _pack_name(tensor.name), tensor.shape[:-1]
    if tensor.shape[-1] % _spec(tensor, preset)[1]:
        yield Stored(module + ".weight", preset.float_dtype, tensor.shape, partial(_dense, grid, preset))
        return
    columns, groups = grid.columns * grid.bits // 32, grid.columns // grid.group_size
    yield Stored(module + ".weight", "U32", (*lead, columns), grid.packed)
    if grid.mode != "affine":
        yield Stored(module + ".scales", "U8", (*lead, groups), grid.coded_scales)
        return
    dtype = preset.float_dtype
    yield Stored(module + ".scales", dtype, (*lead, groups), partial(_scales, grid, 1.0, dtype))
    yield Stored(module + ".biases", dtype, (*lead, groups), partial(_scales, grid, -grid.middle, dtype))


def _fused(tensor: Tensor, grid: Grid, preset: Preset, held: dict[str, Grid]) -> Iterator[Stored]:
    stem, _, projection = tensor.name.rpartition(".")
    if projection == "down_proj":
        yield Stored(tensor.name, preset.float_dtype, tensor.shape, partial(_dense, grid, preset))
    elif projection == "gate_proj":
        held["gate"] = grid
    else:
        experts, width, hidden = tensor.shape
        blocks = partial(_gate_and_up, held["gate"], grid, width, preset)
        yield Stored(stem + ".gate_up_proj", preset.float_dtype, (experts, 2 * width, hidden), blocks)


def _fp8(tensor: Tensor, grid: Grid) -> Iterator[Stored]:
    # One draw of bytes per tensor of an expert; a NaN code is never drawn.
    coded = float(np.sqrt(np.mean(e4m3_values().astype(np.float64) ** 2)))
    scale = tensor.std / coded
    if tensor.kind == "table":
        number = int(tensor.name.rpartition("_")[2])
        yield Stored(
            tensor.name + ".weight", "F8_E4M3", tensor.shape, _fp8_blocks(grid, tensor.name, *tensor.shape)
        )
        if number == 0:
            name = tensor.name.rpartition(".")[0] + ".weight_scale"
            yield Stored(name, "BF16", (1,), partial(_constant, scale, 1))
        return
    stem, _, projection = tensor.name.rpartition(".")
    experts, rows, columns = tensor.shape
    blocks = (-(-rows // 128), -(-columns // 128))
    for expert in range(experts):
        name = f"{stem}.{expert}.{projection}"
        yield Stored(name + ".weight", "F8_E4M3", (rows, columns), _fp8_blocks(grid, name, rows, columns))
        yield Stored(name + ".weight_scale_inv", "BF16", blocks, partial(_constant, scale, math.prod(blocks)))


def _fp8_blocks(grid: Grid, name: str, rows: int, columns: int) -> Blocks:
    return Grid(grid.seed, name, rows, columns, grid.std, 8, 1, "mxfp8").packed


def _once(data: bytes) -> Sequence[bytes]:
    return (data,)


def _vector(tensor: Tensor, preset: Preset, seed: int) -> Sequence[bytes]:
    value = vector_values(
        seed, tensor.name, tensor.shape, std=tensor.std, centre=tensor.centre, is_decay=tensor.kind == "decay"
    )
    return (float_bytes(value, preset.float_dtype).tobytes(),)


def _dense(grid: Grid, preset: Preset) -> Iterator[bytes]:
    for block in grid.dense():
        yield float_bytes(block, preset.float_dtype).tobytes()


def _scales(grid: Grid, factor: float, dtype: str) -> Iterator[bytes]:
    for block in grid.scales():
        yield float_bytes(block * np.float32(factor), dtype).tobytes()


def _constant(value: float, count: int) -> Sequence[bytes]:
    return (float_bytes(np.full(count, value, np.float32), "BF16").tobytes(),)


def _gate_and_up(gate: Grid, up: Grid, width: int, preset: Preset) -> Iterator[bytes]:
    held: list[list[np.ndarray]] = [[], []]
    for pair in zip(gate.dense(), up.dense(), strict=True):
        for half, block in zip(held, pair, strict=True):
            half.append(block)
        rows = sum(len(block) for block in held[0])
        whole = rows // width
        if not whole:
            continue
        halves = [np.concatenate(half) for half in held]
        held = [[half[whole * width :]] for half in halves]
        stacked = np.concatenate([half[: whole * width].reshape(whole, width, -1) for half in halves], axis=1)
        yield float_bytes(stacked, preset.float_dtype).tobytes()
