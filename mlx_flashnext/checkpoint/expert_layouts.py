"""Routed experts of one layer in every layout. Entry point: `ExpertReader`.

    fused     gate_up_proj [E, 2W, H], rows 0..W-1 gate, then up; down_proj [E, H, W]; plain or quantised
    split     gate_proj, up_proj [E, W, H]; down_proj [E, H, W]; plain or quantised (MLX packs)
    listed    the parts of three matrices for each expert: F8_E4M3 with block scales (official FP8), or MLX's
    packed    one record for each expert (flashnext pack): the parts of any of these, one after the other

Invariants:
1. Components of a fused stack are its two halves: gate and up of one expert stay neighbours in the file and
   are fetched by one read.
2. The stored width W may exceed the config's only by padding to a multiple of `PADDED_MULTIPLE`, and only if
   gate, up and down agree. All of W is computed, so padding of zeros never changes a result.

Source: qwen4exp.md 2.7, 3.1 to 3.5; padding: FIELD.md P66 (K-quant packs pad 640 to 768).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expert_store.layout import RecordLayout, StackedComponent
from expert_store.pack import record_layout
from expert_store.safetensors_index import TensorInfo
from mlx_flashnext.checkpoint.expected import Size, Sizes
from mlx_flashnext.checkpoint.grouping import ExpertGroup, PackedRecords, Parts
from mlx_flashnext.checkpoint.quantization import FLOATS, Place, Quantization, block_sizes, quant_spec
from mlx_flashnext.checkpoint.refusals import (
    REPACK,
    check_packed,
    check_shape,
    mismatch,
    missing_tensor,
    size_mismatch,
)
from mlx_flashnext.checkpoint.stored import BLOCK_SCALES, PROJECTIONS, Component, ExpertLayout, Projection
from mlx_flashnext.config import MatrixSpec, ModelConfig, QuantSpec

PADDED_MULTIPLE = 256
FUSED = "gate_up_proj"


class ExpertReader:
    """Turns stored expert tensors of a layer into an `ExpertLayout`.

    Args:
        config: The model's config.
        quantization: What config.json says of quantisation.
        text: The text config, for messages.
        file_sizes: Bytes of each file of the table.
    """

    def __init__(
        self,
        config: ModelConfig,
        quantization: Quantization,
        text: Mapping[str, object],
        file_sizes: Sequence[int],
    ) -> None:
        self._config = config
        self._quantization = quantization
        self._text = text
        self._file_sizes = tuple(file_sizes)
        self._sizes = Sizes(config)

    def layout(self, layer: int, prefix: str, group: ExpertGroup) -> ExpertLayout:
        """Describe one layer.

        Args:
            layer: Layer index the records are to carry.
            prefix: Canonical prefix, for example `layers.3.mlp.experts`.
            group: The stored tensors.

        Raises:
            WeightMismatch: A projection is missing or stored twice, or a size, dtype or quantisation is
            wrong. CheckpointCorrupt: A stack leaves its file.
        """
        if bool(group.listed) + bool(group.stacked) + bool(group.packed) > 1:
            raise mismatch(f"{prefix} is stored in two ways: in one piece, by experts, or as records", prefix)
        if group.packed:
            return self._packed(prefix, group.packed)
        if group.listed:
            return self._listed(layer, prefix, group)
        stacked = group.stacked
        split = {"gate_proj", "up_proj"}
        wanted = {
            "down_proj",
            *(split if not split.isdisjoint(stacked) and FUSED not in stacked else {FUSED}),
        }
        for name in sorted(wanted ^ stacked.keys()):
            if name in wanted:
                raise missing_tensor(f"{prefix}.{name}")
            raise mismatch(f"Tensor stored twice: {prefix}.{name}, also in {FUSED}", f"{prefix}.{name}")
        for name, parts in stacked.items():
            if "weight" not in parts:
                raise missing_tensor(f"{prefix}.{name}.weight")
        return self._stacked(layer, prefix, stacked)

    def _stacked(self, layer: int, prefix: str, stacked: Mapping[str, Parts]) -> ExpertLayout:
        width = self._width(stacked)
        hidden = self._sizes.hidden
        wide = Size(width, ("moe_intermediate_size",))
        specs: dict[Projection, MatrixSpec | None] = {}
        rows: dict[Projection, Size] = {"gate": wide, "up": wide, "down": hidden}
        columns: dict[Projection, Size] = {"gate": hidden, "up": hidden, "down": wide}
        pieces: list[tuple[Component, StackedComponent]] = []
        for projection in PROJECTIONS:
            leaf = f"{projection}_proj"
            fused = FUSED in stacked and projection != "down"
            parts = stacked[FUSED if fused else leaf]
            half = (("gate", "up").index(projection), 2) if fused else (0, 1)
            spec = self._check_stack(
                f"{prefix}.{leaf}", parts, rows[projection], columns[projection], half[1]
            )
            specs[projection] = spec
            pieces += (
                _piece(f"{leaf}.{part}", parts[part], half, self._config.num_experts)
                for part in (("weight", "scales", "biases") if spec else ("weight",))
                if part in parts
            )
        if FUSED in stacked:  # part by part, so that the halves of one stack follow each other (invariant 1)
            order = {name: i for i, name in enumerate(("weight", "scales", "biases"))}
            pieces.sort(
                key=lambda piece: (piece[0].name[:4] == "down", order[piece[0].name.rpartition(".")[2]])
            )
        _nothing_left(stacked, pieces)
        record = RecordLayout.stacked(
            layer, self._config.num_experts, [place for _, place in pieces], file_sizes=self._file_sizes
        )
        return ExpertLayout(record, tuple(component for component, _ in pieces), specs, width)

    def _width(self, stacked: Mapping[str, Parts]) -> int:
        """Return the stored expert width, refusing one that is neither the config's nor a padding of it."""
        fused = stacked.get(FUSED)
        info = (fused or stacked["gate_proj"])["weight"]
        if len(info.shape) != 3:
            raise mismatch(
                f"{info.name}: shape {list(info.shape)}, three dimensions were expected", info.name
            )
        width, rest = divmod(info.shape[1], 2 if fused else 1)
        if rest:
            raise mismatch(f"{info.name}: {info.shape[1]} rows do not halve into gate and up", info.name)
        return self._checked_width(info, width)

    def _checked_width(self, info: TensorInfo, width: int) -> int:
        asked = self._config.moe_intermediate_size
        padded = -(-asked // PADDED_MULTIPLE) * PADDED_MULTIPLE
        if width not in (asked, padded):
            raise size_mismatch(
                info, "expert width", width, Size(asked, ("moe_intermediate_size",)), self._text
            )
        return width

    def _check_stack(
        self, name: str, parts: Parts, rows: Size, columns: Size, num_halves: int
    ) -> QuantSpec | None:
        weight = parts["weight"]
        lead = (self._sizes.experts, Size(rows.value * num_halves, rows.fields))
        places = Place(name), Place(f"{name.rpartition('.')[0]}.{FUSED}")
        if weight.dtype in FLOATS:
            self._quantization.check_plain(weight, *places)
            check_shape(weight, weight.shape, (*lead, columns), self._text)
            return None
        if weight.dtype != "U32":
            raise mismatch(f"{weight.name}: experts of dtype {weight.dtype} are not known", weight.name)
        if "scales" not in parts:
            raise missing_tensor(f"{name}.scales", "its weight is packed")
        check_shape(weight, weight.shape[:-1], lead, self._text)
        configured = self._quantization.packed_spec(weight, *places)
        return quant_spec(columns, weight, parts["scales"], parts.get("biases"), configured, self._text)

    def _listed(self, layer: int, prefix: str, group: ExpertGroup) -> ExpertLayout:
        """Describe a layer with one tensor per expert and part: every expert is stored like the first."""
        num_experts = self._sizes.experts
        parts: dict[str, Parts] = {}
        places: dict[str, list[TensorInfo]] = {}
        for leaf, part in sorted(group.listed):
            name = f"{leaf}.{part}"
            infos = self._in_order(f"{prefix}.{name}", group.listed[leaf, part], num_experts)
            first = infos[0]
            for info in infos:
                if (info.dtype, info.shape) != (first.dtype, first.shape):
                    raise mismatch(
                        f"{info.name}: {info.dtype} {list(info.shape)}, expected {first.dtype} "
                        f"{list(first.shape)} as in expert 0",
                        info.name,
                    )
            parts.setdefault(leaf, {})[part] = first
            places[name] = infos
        specs, width = self._matrices(prefix, parts)
        # In file order, so that neighbours are fetched by one read.
        order = sorted(places, key=lambda name: (places[name][0].file, places[name][0].offset))
        record = RecordLayout.listed(
            layer, [(name, places[name]) for name in order], file_sizes=self._file_sizes
        )
        components = tuple(Component(name, places[name][0].dtype, places[name][0].shape) for name in order)
        return ExpertLayout(record, components, specs, width)

    def _packed(self, prefix: str, packed: PackedRecords) -> ExpertLayout:
        """Describe a layer of a pack: what its manifest says of the parts is proved like a header's."""
        layer, (first, *_) = packed
        if layer.num_experts != self._config.num_experts:
            count = self._sizes.experts
            raise size_mismatch(first, "number of records", layer.num_experts, count, self._text)
        parts: dict[str, Parts] = {}
        for component in layer.components:
            leaf, _, part = component.name.partition(".")
            name = f"{prefix}.{component.name}"
            check_packed(name, component)
            info = TensorInfo(
                name, component.dtype, component.shape, first.file, first.offset, component.length
            )
            if parts.setdefault(leaf, {}).setdefault(part, info) is not info:
                raise mismatch(f"The pack lists a part twice: {name}", name, hint=REPACK)
        specs, width = self._matrices(prefix, parts)
        components = tuple(Component(part.name, part.dtype, part.shape) for part in layer.components)
        return ExpertLayout(record_layout(layer, first, self._file_sizes), components, specs, width)

    def _matrices(
        self, prefix: str, parts: Mapping[str, Parts]
    ) -> tuple[dict[Projection, MatrixSpec | None], int]:
        """Check the three matrices of one expert; return how each is stored, and the expert width."""
        for leaf, stored in parts.items():
            if leaf.removesuffix("_proj") not in PROJECTIONS:
                info = next(iter(stored.values()))
                raise mismatch(f"Tensor not known: {info.name}", info.name)
            if "weight" not in stored:
                raise missing_tensor(f"{prefix}.{leaf}.weight")
        for projection in PROJECTIONS:
            if f"{projection}_proj" not in parts:
                raise missing_tensor(f"{prefix}.{projection}_proj")
        gate = parts["gate_proj"]["weight"]
        width = self._checked_width(gate, gate.shape[0] if gate.shape else 0)
        wide, hidden = Size(width, ("moe_intermediate_size",)), self._sizes.hidden
        specs: dict[Projection, MatrixSpec | None] = {}
        for projection in PROJECTIONS:
            rows, columns = (hidden, wide) if projection == "down" else (wide, hidden)
            leaf = f"{projection}_proj"
            specs[projection] = self._matrix(prefix, leaf, parts[leaf], rows, columns)
        return specs, width

    def _matrix(self, prefix: str, leaf: str, parts: Parts, rows: Size, columns: Size) -> MatrixSpec | None:
        weight, module = parts["weight"], f"{prefix}.{leaf}"
        places = Place(module), Place(f"{prefix}.{FUSED}")
        known: tuple[str, ...] = ("weight",)
        spec: MatrixSpec | None = None
        if weight.dtype == "F8_E4M3":
            known = ("weight", BLOCK_SCALES)
            spec = self._quantization.fp8_block
            if spec is None:
                raise mismatch(
                    f"{prefix} is stored expert by expert in FP8, but config.json names no quant_method fp8",
                    prefix,
                )
            scales = parts.get(BLOCK_SCALES)
            if scales is None:
                raise missing_tensor(f"{module}.{BLOCK_SCALES} of expert 0", "its weight is FP8")
            if scales.dtype not in FLOATS:
                raise mismatch(f"{scales.name}: scales of dtype {scales.dtype} are not known", scales.name)
            check_shape(weight, weight.shape, (rows, columns), self._text)
            check_shape(scales, scales.shape, block_sizes(rows, columns, spec), self._text)
        elif weight.dtype == "U32":
            known = ("weight", "scales", "biases")
            if "scales" not in parts:
                raise missing_tensor(f"{module}.scales", "its weight is packed")
            check_shape(weight, weight.shape[:-1], (rows,), self._text)
            configured = self._quantization.packed_spec(weight, *places)
            spec = quant_spec(columns, weight, parts["scales"], parts.get("biases"), configured, self._text)
        elif weight.dtype in FLOATS:
            self._quantization.check_plain(weight, *places)
            check_shape(weight, weight.shape, (rows, columns), self._text)
        else:
            raise mismatch(f"{weight.name}: experts of dtype {weight.dtype} are not known", weight.name)
        for part, info in parts.items():
            if part not in known:
                raise mismatch(f"Tensor not known: {info.name}", info.name)
        return spec

    def _in_order(self, name: str, stored: Mapping[int, TensorInfo], num_experts: Size) -> list[TensorInfo]:
        count = num_experts.value
        infos: list[TensorInfo] = []
        for expert in range(count):
            info = stored.get(expert)
            if info is None:
                why = f"config.json asks for num_experts = {count}"
                raise missing_tensor(f"{name} of expert {expert}", why)
            infos.append(info)
        if len(stored) != count:
            info = stored[max(stored)]
            raise size_mismatch(info, "number of experts", len(stored), num_experts, self._text)
        return infos


def _nothing_left(stacked: Mapping[str, Parts], pieces: Sequence[tuple[Component, StackedComponent]]) -> None:
    used = {(place.file, place.base) for _, place in pieces}
    for parts in stacked.values():
        for info in parts.values():
            if (info.file, info.offset) not in used:
                raise mismatch(f"Tensor not known: {info.name}", info.name)


def _piece(
    name: str, info: TensorInfo, half: tuple[int, int], num_experts: int
) -> tuple[Component, StackedComponent]:
    index, num_halves = half
    stride = info.length // num_experts
    length = stride // num_halves
    _, rows, columns = info.shape
    component = Component(name, info.dtype, (rows // num_halves, columns))
    return component, StackedComponent(name, info.file, info.offset, stride, index * length, length)
