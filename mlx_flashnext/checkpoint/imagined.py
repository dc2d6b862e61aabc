"""A checkpoint that is not here: the tensors a build of a model would hold, for plans before a download.

Entry point: `imagine`. Names and shapes come from the table that real checkpoints are checked against
(`expected.py`); what differs between builds is how a matrix is stored. A test compares each build with one
that is written and opened.

Nothing can be read from it: its files do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from expert_store.layout import RecordLayout, RowLayout, RowPart, Span
from expert_store.safetensors_index import FileInfo, TensorInfo, TensorTable
from mlx_flashnext.checkpoint.expected import Expected, Size, mtp_tensors, trunk_tensors
from mlx_flashnext.checkpoint.quantization import block_sizes
from mlx_flashnext.checkpoint.stored import (
    BLOCK_SCALES,
    PROJECTIONS,
    Checkpoint,
    Component,
    ExpertLayout,
    Layout,
    NgramLayout,
    Projection,
    StoredTensor,
)
from mlx_flashnext.config import Fp8Blocks, MatrixSpec, ModelConfig, QuantSpec, parse_config

REAL_CONFIG_PATH: Final = Path(__file__).with_name("qwen3.8-flash-next.config.json")
"""The official config.json of Qwen3.8-Flash-Next."""

_ITEM_BYTES: Final = {"U32": 4, "BF16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8}
_FILE_BYTES: Final = 1 << 50


@dataclass(frozen=True, slots=True)
class Build:
    """How a model is stored.

    Attributes:
        name: what tables call it.
        about: what it is, in words.
        layout: of the experts.
        experts: how routed experts are stored; None for BF16.
        matrices: how the other matrices are; None for BF16.
        routers: how routers are, where matrices are quantised.
        table: how a row of the n-gram table is; None for BF16 or FP8.
        table_dtype: of its values.
    """

    name: str
    about: str
    layout: Layout
    experts: MatrixSpec | None
    matrices: QuantSpec | None = None
    routers: QuantSpec | None = None
    table: QuantSpec | None = None
    table_dtype: str = "BF16"


def _affine(bits: int, group_size: int = 64) -> QuantSpec:
    return QuantSpec("affine", bits, group_size)


def _pack(bits: int) -> Build:
    return Build(
        f"{bits}-bit",
        f"MLX pack: experts affine {bits}-bit group 64, the rest 4-bit, routers 8-bit",
        "mlx",
        _affine(bits),
        _affine(4),
        _affine(8),
        _affine(4, 32),
        "U32",
    )


BUILDS: Final = (
    _pack(4),
    _pack(3),
    _pack(2),
    Build("FP8", "official FP8: experts and table in E4M3, the rest BF16", "hf-fp8", Fp8Blocks(128, 128),
          table_dtype="F8_E4M3"),
    Build("BF16", "official BF16", "hf", None),
)  # fmt: skip


def real_config() -> ModelConfig:
    """Return the configuration of Qwen3.8-Flash-Next."""
    return ModelConfig.from_dict(parse_config(REAL_CONFIG_PATH.read_bytes(), REAL_CONFIG_PATH.parent))


def imagine(config: ModelConfig, build: Build) -> Checkpoint:
    """Return what would be opened if this build of the model were here, its MTP module included."""
    places = _Places()
    trunk = {tensor.name: _tensor(tensor, build, places) for tensor in trunk_tensors(config)}
    layers = range(config.num_hidden_layers)
    experts = {layer: _experts(layer, config, build, places) for layer in layers}
    has_mtp = bool(config.num_mtp_layers)
    mtp = {tensor.name: _tensor(tensor, build, places) for tensor in mtp_tensors(config)} if has_mtp else {}
    mtp_experts = _experts(config.num_hidden_layers, config, build, places) if has_mtp else None
    ngram = _ngram(config, build, places)
    nowhere = Path("nowhere")
    table = TensorTable(
        nowhere, (FileInfo(nowhere, _FILE_BYTES, 0, 0),), {info.name: info for info in places.made}, "0" * 64
    )
    return Checkpoint(
        directory=nowhere,
        config=config,
        table=table,
        layout=build.layout,
        digest=f"imagined {build.name}",
        tensors=trunk,
        experts=experts,
        ngram=ngram,
        mtp=mtp,
        mtp_experts=mtp_experts,
        skipped=(),
        accounts=(),
    )


class _Places:
    """One file without end, in which tensors follow each other."""

    def __init__(self) -> None:
        self.made: list[TensorInfo] = []
        self._end = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        length = math.prod(shape) * _ITEM_BYTES[dtype]
        info = TensorInfo(name, dtype, shape, 0, self._end, length)
        self._end += length
        self.made.append(info)
        return info


def _tensor(expected: Expected, build: Build, places: _Places) -> StoredTensor:
    name, shape = expected.name, expected.shape
    spec = None
    if expected.role == "matrix" and build.matrices is not None:
        is_router = name.endswith((".mlp.gate", ".mlp.shared_expert_gate"))
        spec = build.routers if is_router else build.matrices
        if spec is not None and shape[-1] % spec.group_size:
            spec = None
    if spec is None:
        dtype = "I64" if expected.role == "integer" else "BF16"
        return StoredTensor(name, shape, None, places.add(f"{name}.weight", dtype, shape), role=expected.role)
    parts = [places.add(f"{name}.{part}", dtype, form) for part, dtype, form in _parts(shape, spec)]
    return StoredTensor(name, shape, spec, *parts, role=expected.role)


def _parts(shape: tuple[int, ...], spec: MatrixSpec | None) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the parts that a matrix is stored in: name, dtype, shape."""
    *lead, columns = shape
    if spec is None:
        yield "weight", "BF16", shape
    elif isinstance(spec, Fp8Blocks):
        rows = shape[-2]
        blocks = block_sizes(Size(rows, ()), Size(columns, ()), spec)
        yield "weight", "F8_E4M3", shape
        yield BLOCK_SCALES, "BF16", tuple(size.value for size in blocks)
    else:
        yield "weight", "U32", (*lead, columns * spec.bits // 32)
        for part in ("scales", "biases"):
            yield part, "BF16", (*lead, columns // spec.group_size)


def _experts(layer: int, config: ModelConfig, build: Build, places: _Places) -> ExpertLayout:
    wide, hidden, count = config.moe_intermediate_size, config.hidden_size, config.num_experts
    shapes: Mapping[Projection, tuple[int, int]] = {
        "gate": (wide, hidden),
        "up": (wide, hidden),
        "down": (hidden, wide),
    }
    components: list[Component] = []
    stacks: list[tuple[str, TensorInfo]] = []
    for projection in PROJECTIONS:
        for part, dtype, shape in _parts(shapes[projection], build.experts):
            name = f"{projection}_proj.{part}"
            components.append(Component(name, dtype, shape))
            stacks.append((name, _stack(f"layers.{layer}.{name}", dtype, (count, *shape), build, places)))
    record = RecordLayout.stacked(layer, count, stacks, file_sizes=(_FILE_BYTES,))
    return ExpertLayout(record, tuple(components), dict.fromkeys(PROJECTIONS, build.experts), wide)


def _stack(name: str, dtype: str, shape: tuple[int, ...], build: Build, places: _Places) -> TensorInfo:
    """Place the parts of all experts; official FP8 has a tensor for each, which the index counts."""
    if build.layout != "hf-fp8":
        return places.add(name, dtype, shape)
    first, *_ = [places.add(f"{name}.{expert}", dtype, shape[1:]) for expert in range(shape[0])]
    return TensorInfo(name, dtype, shape, 0, first.offset, first.length * shape[0])


def _ngram(config: ModelConfig, build: Build, places: _Places) -> NgramLayout:
    rows, width = config.ngram.num_rows, config.ngram.width
    spec = build.table
    if spec is None:
        parts = [("weight", build.table_dtype, (rows, width))]
    else:
        parts = list(_parts((rows, width), spec))
    spans = [places.add(f"ngram.{name}", dtype, shape) for name, dtype, shape in parts]
    placed = tuple(Span(info.file, info.offset, info.length) for info in spans)
    layout = RowLayout([name for name, _, _ in parts], [RowPart(rows, placed)], file_sizes=(_FILE_BYTES,))
    components = tuple(Component(name, dtype, shape[1:]) for name, dtype, shape in parts)
    return NgramLayout(layout, components, spec, rows, width, config.ngram.num_heads)
