"""Matrices of any stored form: dense or quantised, single or stacked by expert slot.

Entry points: `Linear`, `Embedding` (protocols) with their dense and quantised forms; `ExpertBank` and
`expert_glu` for gathered experts; `dequantize_rows` for table rows; `decode_blocks` for FP8.

Invariants:
1. The result of a pair (row, slot) depends on that row and that slot's bytes alone: not on the other pairs,
   their order, the number of slots, nor on whether pairs were sorted.
2. Nothing here knows a geometry: shapes come from the arrays, so padded expert widths work as they are.

Source: MLX `quantized_matmul`, `gather_qmm`, `gather_mm`; the sorting threshold is mlx-lm's
(`switch_layers.py`).
"""

# Shapes: T positions, K experts per token, P pairs (T * K), D hidden, M expert width, S slots.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlx_flashnext.config import Fp8Blocks, MatrixSpec, QuantSpec
from mlx_flashnext.model.halves import second_stream
from mlx_flashnext.model.order import after, joined, row_blocks

# From here on pairs are sorted by slot, which lets Metal use its matrix kernel (mlx-lm's threshold).
SORT_PAIRS = 64
# Pairs whose matrices are decoded at a time where no kernel multiplies with the bank's own type: bounds the
# copies. However many groups there are, MLX's CPU backend has up to nine of them under way (measured).
WIDEN_PAIRS, WIDEN_GROUPS = 4, 9


class Linear(Protocol):
    """A product with one matrix [out, in]."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ matrix.T` in the type of `x`."""
        ...


class Embedding(Protocol):
    """A look-up of rows of one matrix [num, dim]."""

    def __call__(self, ids_T: mx.array) -> mx.array:
        """Return the rows [T, dim] in the compute type."""
        ...


class DenseLinear:
    """An unquantised matrix [out, in]."""

    def __init__(self, weight: mx.array) -> None:
        self.weight = weight

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ weight.T`."""
        return x @ self.weight.T


class QuantizedLinear:
    """A quantised matrix [out, in * bits / 32] with scales, and biases if the mode has them."""

    def __init__(self, weight: mx.array, scales: mx.array, biases: mx.array | None, spec: QuantSpec) -> None:
        self.weight = weight
        self.scales = scales
        self.biases = biases
        self.spec = spec

    def __call__(self, x: mx.array) -> mx.array:
        """Return the product in the type of `x`, half of its columns from a second stream if that pays."""
        out = self.weight.shape[0]
        second = second_stream(x.size * out)
        if second is None or out < 2:
            return self._product(x)
        with mx.stream(second):
            y_rest = self._columns(slice(out // 2, out))._product(x)
        return mx.concatenate([self._columns(slice(out // 2))._product(x), y_rest], axis=-1)

    def _columns(self, which: slice) -> QuantizedLinear:
        """Return the matrix of some of the product's columns."""
        biases = None if self.biases is None else self.biases[which]
        return QuantizedLinear(self.weight[which], self.scales[which], biases, self.spec)

    def _product(self, x: mx.array) -> mx.array:
        y = mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.spec.group_size,
            bits=self.spec.bits,
            mode=self.spec.mode,
        )
        return y.astype(x.dtype)


class DenseEmbedding:
    """An unquantised table [num, dim]."""

    def __init__(self, weight: mx.array, dtype: mx.Dtype) -> None:
        self.weight = weight
        self._dtype = dtype

    def __call__(self, ids_T: mx.array) -> mx.array:
        """Return the rows in the compute type."""
        return self.weight[ids_T].astype(self._dtype)


class QuantizedEmbedding:
    """A quantised table, dequantised row by row."""

    def __init__(
        self, weight: mx.array, scales: mx.array, biases: mx.array | None, spec: QuantSpec, dtype: mx.Dtype
    ) -> None:
        self.weight = weight
        self.scales = scales
        self.biases = biases
        self.spec = spec
        self._dtype = dtype

    def __call__(self, ids_T: mx.array) -> mx.array:
        """Return the rows in the compute type."""
        parts = [part[ids_T] for part in (self.weight, self.scales, self.biases) if part is not None]
        return dequantize_rows(parts, self.spec, self._dtype)


def dequantize_rows(
    parts: Sequence[mx.array], spec: QuantSpec | None, dtype: mx.Dtype, scale: float | None = None
) -> mx.array:
    """Return table rows in the compute type.

    Args:
        parts: The rows' weight, then scales and biases if they are quantised; one leading axis each.
        spec: How they are quantised, or None.
        dtype: The compute type.
        scale: The one scale of a table of E4M3 values, None for all other tables.
    """
    if scale is not None:
        return (mx.from_fp8(parts[0], mx.float32) * scale).astype(dtype)
    if spec is None:
        return parts[0].astype(dtype)
    weight, scales = parts[0], parts[1]
    biases = parts[2] if len(parts) > 2 else None
    rows = mx.dequantize(weight, scales, biases, group_size=spec.group_size, bits=spec.bits, mode=spec.mode)
    return rows.astype(dtype)


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One projection of S experts: weight [S, out, in or packed], and how it is quantised."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    spec: MatrixSpec | None = None


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """The three projections of S experts."""

    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix


def expert_glu(x_TD: mx.array, slots_TK: mx.array, bank: ExpertBank) -> mx.array:
    """Return `down(silu(gate(x)) * up(x))` of every (position, slot) pair.

    Args:
        x_TD: Expert inputs.
        slots_TK: Slot numbers, any integer type.
        bank: The experts lying in the slots.

    Returns:
        y_TKD in float32, pairs in the order of `slots_TK`.
    """
    T, K = slots_TK.shape
    if T * K < SORT_PAIRS:
        return _glu(x_TD[:, None, None], bank, slots_TK, is_sorted=False)
    order_P = mx.argsort(slots_TK.reshape(-1))
    slots_P = slots_TK.reshape(-1)[order_P]
    # The axis of one row goes in before the gather: Metal's matrix kernel has misread a left side that got it
    # as a view (ml-explore/mlx#4253).
    y_PD = _glu(x_TD[:, None][order_P // K], bank, slots_P, is_sorted=True)
    return y_PD[mx.argsort(order_P)].reshape(T, K, -1)


def _glu(x: mx.array, bank: ExpertBank, slots: mx.array, *, is_sorted: bool) -> mx.array:
    """Return `down(silu(gate(x)) * up(x))` of pairs in float32, half of them on a second stream if that pays.

    Args:
        x: [T, 1, 1, D] or [P, 1, D].
        bank: The experts lying in the slots.
        slots: [T, K] or [P].
        is_sorted: Whether `slots` is one axis in ascending order.
    """
    second = None
    if isinstance(bank.gate.spec, QuantSpec):  # decoded matrices are copies, whose number is bounded
        second = second_stream(3 * slots.size * bank.gate.weight.shape[-2] * bank.down.weight.shape[-2])
    if second is None or slots.size < 2:
        return _glu_here(x, bank, slots, is_sorted=is_sorted)
    # Once for both halves: MLX does it anew in every product, for all slots.
    bank = ExpertBank(*(_widened(matrix, x.dtype) for matrix in (bank.gate, bank.up, bank.down)))
    axis = 0 if slots.shape[0] > slots.shape[-1] or slots.ndim == 1 else 1
    first, rest = mx.split(slots, [slots.shape[axis] // 2], axis=axis)
    x_first, x_rest = mx.split(x, [first.shape[0]]) if axis == 0 else (x, x)
    with mx.stream(second):
        y_rest = _glu_here(x_rest, bank, rest, is_sorted=is_sorted)
    return mx.concatenate([_glu_here(x_first, bank, first, is_sorted=is_sorted), y_rest], axis=axis)


def _widened(matrix: ExpertMatrix, dtype: mx.Dtype) -> ExpertMatrix:
    """Return a matrix whose scales are of the compute type, if that is float32 and they are narrower."""
    scales, biases = matrix.scales, matrix.biases
    if scales is None or dtype != mx.float32 or scales.dtype not in (mx.bfloat16, mx.float16):
        return matrix
    wide = None if biases is None else biases.astype(dtype)
    return ExpertMatrix(matrix.weight, scales.astype(dtype), wide, matrix.spec)


def _glu_here(x: mx.array, bank: ExpertBank, slots: mx.array, *, is_sorted: bool) -> mx.array:
    gate = gathered_product(x, bank.gate, slots, is_sorted=is_sorted)
    up = gathered_product(x, bank.up, slots, is_sorted=is_sorted)
    y = gathered_product(gate * mx.sigmoid(gate) * up, bank.down, slots, is_sorted=is_sorted)
    return y.squeeze(-2).astype(mx.float32)


def gathered_product(x: mx.array, matrix: ExpertMatrix, slots: mx.array, *, is_sorted: bool) -> mx.array:
    """Multiply rows with the matrices in their slots.

    Args:
        x: [..., 1, in], its leading axes broadcast against `slots`.
        matrix: The stacked matrices.
        slots: Slot numbers.
        is_sorted: Whether `slots` is one axis in ascending order.

    Returns:
        [*slots.shape, 1, out] in the type of `x`.
    """
    if isinstance(matrix.spec, QuantSpec):
        assert matrix.scales is not None
        y = mx.gather_qmm(
            x,
            matrix.weight,
            matrix.scales,
            matrix.biases,
            rhs_indices=slots,
            transpose=True,
            group_size=matrix.spec.group_size,
            bits=matrix.spec.bits,
            mode=matrix.spec.mode,
            sorted_indices=is_sorted,
        )
        return y.astype(x.dtype)
    if matrix.spec is None and matrix.weight.dtype == x.dtype:
        return mx.gather_mm(x, matrix.weight.swapaxes(-1, -2), rhs_indices=slots, sorted_indices=is_sorted)
    return _decoded_product(x, matrix, slots)


def _decoded_product(x: mx.array, matrix: ExpertMatrix, slots: mx.array) -> mx.array:
    """Multiply with a bank of another type, FP8 or floats, a few pairs at a time.

    No backend multiplies with E4M3 and block scales, and the CPU backend gathers float32 only; decoding the
    whole bank would copy every slot on every call. Cost: bench/LEDGER.md, study `layout_cost`.
    """
    slots_P = slots.reshape(-1)
    x_P1D = mx.broadcast_to(x, (*slots.shape, *x.shape[-2:])).reshape(slots_P.shape[0], 1, -1)
    parts: list[mx.array] = []
    for first, end in row_blocks(0, slots_P.shape[0], WIDEN_PAIRS):
        wide = _decoded(matrix, after(parts, slots_P[first:end]), x.dtype)
        own = mx.arange(end - first, dtype=mx.uint32)
        parts.append(mx.gather_mm(x_P1D[first:end], wide.swapaxes(-1, -2), rhs_indices=own))
    return joined(parts).reshape(*slots.shape, 1, -1)


def _decoded(matrix: ExpertMatrix, slots_P: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return the matrices [P, out, in] of some slots in the compute type."""
    weight = matrix.weight[slots_P]
    if not isinstance(matrix.spec, Fp8Blocks):
        return weight.astype(dtype)
    assert matrix.scales is not None
    return decode_blocks(weight, matrix.scales[slots_P], matrix.spec, dtype)


def decode_blocks(codes: mx.array, scales: mx.array, blocks: Fp8Blocks, dtype: mx.Dtype) -> mx.array:
    """Return matrices of E4M3 codes in the compute type: each value times its block's scale, rounded once.

    Args:
        codes: uint8 [..., rows, columns].
        scales: Floats [..., blocks of rows, blocks of columns]; the last ones may reach beyond the matrix.
        blocks: Size of a block.
        dtype: The compute type.
    """
    *lead, rows, columns = codes.shape
    values, factors = mx.from_fp8(codes, mx.float32), scales.astype(mx.float32)
    tall, wide = rows // scales.shape[-2], columns // scales.shape[-1]
    if tall * scales.shape[-2] != rows or (scales.shape[-2] > 1 and tall != blocks.rows):
        factors, tall = mx.repeat(factors, blocks.rows, axis=-2)[..., :rows, :], 1
    if wide * scales.shape[-1] != columns or (scales.shape[-1] > 1 and wide != blocks.columns):
        factors, wide = mx.repeat(factors, blocks.columns, axis=-1)[..., :columns], 1
    blocked = values.reshape(*lead, rows // tall, tall, columns // wide, wide)
    return (blocked * factors[..., :, None, :, None]).reshape(codes.shape).astype(dtype)
