"""The n-gram table in every layout. Entry point: `ngram_layout`.

Invariants:
1. Parts are joined in the order of their numbers; a name never decides.
2. All parts together have exactly the rows the hash can name, of exactly the width the config gives.

Source: qwen4exp.md 2.3.1, 3.1 to 3.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from expert_store.layout import RowLayout, RowPart
from expert_store.safetensors_index import TensorInfo
from mlx_flashnext.checkpoint.expected import Size, Sizes
from mlx_flashnext.checkpoint.grouping import PackedRows, Parts
from mlx_flashnext.checkpoint.quantization import FLOATS, Place, Quantization, quant_spec
from mlx_flashnext.checkpoint.refusals import (
    REPACK,
    check_packed,
    check_shape,
    mismatch,
    missing_tensor,
    size_mismatch,
)
from mlx_flashnext.checkpoint.stored import Component, NgramLayout
from mlx_flashnext.config import ModelConfig, QuantSpec

_PARTS: Final = ("weight", "scales", "biases")


def ngram_layout(
    module: str,
    table: Mapping[int | None, Parts],
    packed: PackedRows | None,
    config: ModelConfig,
    quantization: Quantization,
    text: Mapping[str, object],
    file_sizes: Sequence[int],
) -> NgramLayout:
    """Describe the table.

    Args:
        module: Its canonical name.
        table: Its stored parts by number; None for a whole matrix, or for the one scale of an FP8 table.
        packed: The parts of a pack, whose rows lie in one piece; then `table` is empty.
        config: The model's config.
        quantization: What config.json says of quantisation.
        text: The text config, for messages.
        file_sizes: Bytes of each file of the table.

    Raises:
        WeightMismatch: A part is missing, or rows, width, dtype or quantisation are wrong.
        CheckpointCorrupt: A part leaves its file.
    """
    if packed is not None:
        if table:
            raise mismatch(f"{module} is stored in two ways: with rows in one piece, and apart", module)
        table = _apart(packed)
    whole = dict(table.get(None, {}))
    scale = whole.pop("weight_scale", None)
    numbered = {number: parts for number, parts in table.items() if number is not None}
    if whole and numbered:
        raise mismatch(f"{module} is stored both whole and in {len(numbered)} parts", module)
    if numbered:
        count = config.split_ngram_parts
        for number in range(max(count, max(numbered) + 1)):
            if number not in numbered:
                why = f"config.json asks for split_ngram_parts = {count}"
                raise missing_tensor(f"part {number} of {module}", why)
        if len(numbered) != count:
            last = numbered[max(numbered)]
            info = next(iter(last.values()))
            size = Size(count, ("split_ngram_parts",))
            raise size_mismatch(info, "number of table parts", len(numbered), size, text)
        ordered = [(number, numbered[number]) for number in range(count)]
    elif whole:
        ordered = [(None, whole)]
    else:
        raise missing_tensor(module, "the n-gram table")

    width = Sizes(config).row_width
    spec: QuantSpec | None = None
    components: tuple[Component, ...] = ()
    rows: list[RowPart] = []
    first: TensorInfo | None = None
    for index, (number, parts) in enumerate(ordered):
        infos, part_spec = _part(module, number, parts, width, quantization, text)
        found = tuple(
            Component(name, info.dtype, info.shape[1:]) for name, info in zip(_PARTS, infos, strict=False)
        )
        if index and (part_spec != spec or found != components):
            raise mismatch(f"{infos[0].name}: stored otherwise than the parts before it", infos[0].name)
        spec, components = part_spec, found
        if packed is None:
            rows.append(RowPart(infos[0].shape[0], infos))
        else:
            lengths = tuple(component.length for component in packed.rows.components)
            rows.append(RowPart(infos[0].shape[0], (packed.tensors[index],), lengths))
        first = first or infos[0]
    assert first is not None
    _check_scale(module, scale, is_fp8=first.dtype == "F8_E4M3")
    num_rows = sum(part.num_rows for part in rows)
    if num_rows != config.ngram.num_rows:
        fields = (
            "ngram_vocab_size_base",
            "make_ngram_vocab_size_divisible_by",
            "ngram_size",
            "heads_per_ngram",
        )
        raise size_mismatch(
            first, "number of rows of all table parts", num_rows, Size(config.ngram.num_rows, fields), text
        )
    numbers = tuple(number for number, _ in ordered)
    record = RowLayout([component.name for component in components], rows, file_sizes=file_sizes)
    return NgramLayout(
        record, components, spec, num_rows, width.value, config.ngram.num_heads, scale, numbers
    )


def _apart(packed: PackedRows) -> dict[int | None, Parts]:
    """Return the parts of a pack's table as a checkpoint would have them, to be proved like a header's.

    Raises:
        WeightMismatch: Components that are no row, or parts that come twice.
    """
    rows = packed.rows
    names = tuple(component.name for component in rows.components)
    if names not in (_PARTS, _PARTS[:2]):
        raise mismatch(f"The pack's rows hold {', '.join(names)}", packed.tensors[0].name, hint=REPACK)
    table: dict[int | None, Parts] = {}
    for part, tensor in zip(rows.parts, packed.tensors, strict=True):
        parts: Parts = {}
        for component in rows.components:
            name = f"{component.name} of {tensor.name}"
            check_packed(name, component)
            shape, length = (part.num_rows, *component.shape), part.num_rows * component.length
            parts[component.name] = TensorInfo(
                name, component.dtype, shape, tensor.file, tensor.offset, length
            )
        if table.setdefault(part.number, parts) is not parts:
            raise mismatch(f"The pack lists part {part.number} of its table twice", tensor.name, hint=REPACK)
    if [part.number for part in rows.parts] not in ([None], list(range(len(rows.parts)))):
        raise mismatch(
            "The pack lists the parts of its table out of order", packed.tensors[0].name, hint=REPACK
        )
    return table


def _check_scale(module: str, scale: TensorInfo | None, *, is_fp8: bool) -> None:
    """Refuse an FP8 table without its one scale, and a scale that nothing asks for."""
    if scale is None:
        if is_fp8:
            raise missing_tensor(f"{module}.weight_scale", "the table is FP8")
        return
    if not is_fp8:
        raise mismatch(f"{scale.name}: the table is not FP8 and has no such scale", scale.name)
    if scale.dtype not in FLOATS or math.prod(scale.shape) != 1:
        raise mismatch(
            f"{scale.name}: {scale.dtype} {list(scale.shape)}, one number for the whole table was expected",
            scale.name,
        )


def _part(
    module: str,
    number: int | None,
    parts: Parts,
    width: Size,
    quantization: Quantization,
    text: Mapping[str, object],
) -> tuple[tuple[TensorInfo, ...], QuantSpec | None]:
    weight = parts.get("weight")
    where = module if number is None else f"{module} part {number}"
    if weight is None:
        raise missing_tensor(f"weight of {where}")
    if len(weight.shape) != 2:
        raise mismatch(
            f"{weight.name}: shape {list(weight.shape)}, two dimensions were expected", weight.name
        )
    packed = weight.dtype == "U32"
    for part, info in parts.items():
        if part not in (_PARTS if packed else _PARTS[:1]):
            raise mismatch(f"Tensor not known: {info.name}", info.name)
    places = Place(module, number), Place(module)
    if weight.dtype in (*FLOATS, "F8_E4M3"):
        quantization.check_plain(weight, *places)
        check_shape(weight, weight.shape[1:], (width,), text)
        return (weight,), None
    if not packed:
        raise mismatch(f"{weight.name}: a table of dtype {weight.dtype} is not known", weight.name)
    scales, biases = parts.get("scales"), parts.get("biases")
    if scales is None:
        raise missing_tensor(f"scales of {where}", "its weight is packed")
    configured = quantization.packed_spec(weight, *places)
    spec = quant_spec(width, weight, scales, biases, configured, text)
    return tuple(info for info in (weight, scales, biases) if info is not None), spec
