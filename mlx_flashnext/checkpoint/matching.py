"""Plain tensors against what the config asks for. Entry point: `match_tensors`.

Invariant: a tensor is accepted only with the exact shape the config gives and a dtype the loader reads; a
refusal names the tensor, the dimension, both values and the config fields behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from expert_store.safetensors_index import TensorInfo
from mlx_flashnext.checkpoint.expected import Expected
from mlx_flashnext.checkpoint.grouping import Parts
from mlx_flashnext.checkpoint.quantization import FLOATS, Place, Quantization, block_sizes, quant_spec
from mlx_flashnext.checkpoint.refusals import check_shape, mismatch, missing_tensor
from mlx_flashnext.checkpoint.stored import BLOCK_SCALES, StoredTensor
from mlx_flashnext.errors import ModelError


@dataclass(slots=True)
class Match:
    """Outcome: tensors found whole, canonical names missing, and what is wrong with the rest."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    problems: list[ModelError] = field(default_factory=list)
    used: list[TensorInfo] = field(default_factory=list)


def match_tensors(
    expected: Iterable[Expected],
    modules: Mapping[str, Parts],
    quantization: Quantization,
    text: Mapping[str, object],
) -> Match:
    """Find every expected tensor among the stored ones.

    Args:
        expected: What the config asks for.
        modules: What is stored, by canonical module and part.
        quantization: What the config says of quantisation.
        text: The text config, for messages.
    """
    match = Match()
    for want in expected:
        parts = modules.get(want.name)
        if parts is None or "weight" not in parts:
            match.missing.append(want.name)
            continue
        try:
            stored = _stored(want, parts, quantization, text)
        except ModelError as error:
            match.problems.append(error)
            match.used.extend(parts.values())
            continue
        match.tensors[want.name] = stored
        match.used.extend(stored.parts)
    return match


def _stored(
    want: Expected, parts: Parts, quantization: Quantization, text: Mapping[str, object]
) -> StoredTensor:
    weight = parts["weight"]
    if want.role == "matrix" and weight.dtype == "U32":
        return _quantised(want, parts, quantization, text)
    if want.role == "matrix" and weight.dtype == "F8_E4M3":
        return _fp8(want, parts, quantization, text)
    allowed = ("I64",) if want.role == "integer" else FLOATS
    if weight.dtype not in allowed:
        raise mismatch(
            f"{weight.name}: dtype {weight.dtype}, {' or '.join(allowed)} was expected", weight.name
        )
    if want.role == "matrix":
        quantization.check_plain(weight, Place(want.name))
    shape = weight.shape
    if want.role == "conv" and len(shape) == 3 and 1 in shape[1:]:
        shape = (shape[0], shape[2] if shape[1] == 1 else shape[1])
    check_shape(weight, shape, want.sizes, text)
    return StoredTensor(want.name, want.shape, None, weight, role=want.role)


def _quantised(
    want: Expected, parts: Parts, quantization: Quantization, text: Mapping[str, object]
) -> StoredTensor:
    weight, scales = parts["weight"], parts.get("scales")
    if scales is None:
        raise missing_tensor(f"{weight.name.removesuffix('.weight')}.scales", "its weight is packed")
    rows, columns = want.sizes
    check_shape(weight, weight.shape[:-1], (rows,), text)
    biases = parts.get("biases")
    spec = quant_spec(
        columns, weight, scales, biases, quantization.packed_spec(weight, Place(want.name)), text
    )
    return StoredTensor(want.name, want.shape, spec, weight, scales, biases)


def _fp8(
    want: Expected, parts: Parts, quantization: Quantization, text: Mapping[str, object]
) -> StoredTensor:
    weight, scales, block = parts["weight"], parts.get(BLOCK_SCALES), quantization.fp8_block
    if block is None:
        raise mismatch(f"{weight.name}: F8_E4M3, but config.json names no quant_method fp8", weight.name)
    if scales is None:
        raise missing_tensor(f"{want.name}.{BLOCK_SCALES}", "its weight is FP8")
    if scales.dtype not in FLOATS:
        raise mismatch(
            f"{scales.name}: dtype {scales.dtype}, {' or '.join(FLOATS)} was expected", scales.name
        )
    rows, columns = want.sizes
    check_shape(weight, weight.shape, want.sizes, text)
    check_shape(scales, scales.shape, block_sizes(rows, columns, block), text)
    return StoredTensor(want.name, want.shape, block, weight, scales)
