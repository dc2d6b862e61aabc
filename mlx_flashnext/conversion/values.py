"""Pieces of stored matrices as MLX values, and values as the tensors of an MLX checkpoint.

Entry points: `Plain`, `Blocks`, `Scaled` (how stored bytes are read as values), `encode`, `outputs_of`.

Everything here is a piece of some rows: nothing ever holds a whole stack of experts, a whole embedding or a
part of the n-gram table.

Source: MLX `quantize`; qwen4exp.md 3.2 (FP8: value times its block's scale, in float32).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_flashnext.config import Fp8Blocks, QuantSpec
from mlx_flashnext.errors import WeightMismatch
from mlx_flashnext.model.quant import decode_blocks
from mlx_flashnext.stored_numbers import NATIVE, STORED, array_memory, num_not_finite

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U32": 4, "U8": 1, "I64": 8, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of the converted checkpoint: its stored name, safetensors dtype tag and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Return its bytes."""
        return math.prod(self.shape) * BYTES[self.dtype]


class Decoder(Protocol):
    """Reads stored bytes as values; `plain` is the dtype tag that unquantised numbers keep in the output."""

    @property
    def plain(self) -> str:
        """Return F32, BF16 or F16."""
        ...

    def __call__(self, raw: Sequence[memoryview], shape: tuple[int, int]) -> mx.array:
        """Return values [rows, columns], not yet computed.

        Args:
            raw: The weight's bytes, then those of its scales if it has any.
            shape: Rows and columns of the piece.
        """
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Floats, taken as they are."""

    name: str
    dtype: str

    @property
    def plain(self) -> str:
        """Return the stored type."""
        return self.dtype

    def __call__(self, raw: Sequence[memoryview], shape: tuple[int, int]) -> mx.array:
        """Return the values in the stored type."""
        return _array(self.name, self.dtype, raw[0], shape)


@dataclass(frozen=True, slots=True)
class Blocks:
    """E4M3 codes with a factor for each block; pieces begin on a block's first row."""

    name: str
    blocks: Fp8Blocks
    scales_dtype: str

    @property
    def plain(self) -> str:
        """Return BF16: the type of everything else in the official FP8 checkpoint."""
        return "BF16"

    def __call__(self, raw: Sequence[memoryview], shape: tuple[int, int]) -> mx.array:
        """Return the values in float32."""
        rows, columns = shape
        wide = -(-columns // self.blocks.columns)
        codes = _array(self.name, "F8_E4M3", raw[0], shape)
        tall = -(-rows // self.blocks.rows)
        scales = _array(f"scales of {self.name}", self.scales_dtype, raw[1], (tall, wide))
        return decode_blocks(codes, scales, self.blocks, mx.float32)


@dataclass(frozen=True, slots=True)
class Scaled:
    """E4M3 codes with one factor for all of them: the official FP8 table."""

    name: str
    scale: float

    @property
    def plain(self) -> str:
        """Return BF16."""
        return "BF16"

    def __call__(self, raw: Sequence[memoryview], shape: tuple[int, int]) -> mx.array:
        """Return the values in float32."""
        return mx.from_fp8(_array(self.name, "F8_E4M3", raw[0], shape), mx.float32) * self.scale


def _array(name: str, dtype: str, raw: memoryview, shape: tuple[int, int]) -> mx.array:
    """Return stored bytes as an array of their own type; E4M3 codes as uint8.

    Raises:
        WeightMismatch: A value is NaN or infinite: it would make noise of its whole group.
    """
    bits = np.frombuffer(raw, STORED[dtype])
    if bad := num_not_finite(bits, dtype, None):
        raise WeightMismatch(
            f"{name}: {bad} of {bits.size} values of a piece are not finite (NaN or infinite)",
            hint="the file is damaged: fetch it again",
            tensor=name,
            num_not_finite=bad,
        )
    array = mx.array(bits.reshape(shape))
    return array if dtype == "F8_E4M3" else array.view(NATIVE[dtype])


def outputs_of(
    stem: str, lead: tuple[int, ...], columns: int, spec: QuantSpec | None, plain: str
) -> tuple[Output, ...]:
    """Return the tensors that a matrix, or a stack of them, becomes.

    Args:
        stem: Name without `.weight`.
        lead: All dimensions but the last.
        columns: The last dimension.
        spec: Its quantisation.
        plain: Dtype tag of plain numbers and of affine scales.
    """
    if spec is None:
        return (Output(f"{stem}.weight", plain, (*lead, columns)),)
    weight = Output(f"{stem}.weight", "U32", (*lead, columns * spec.bits // 32))
    factors = (*lead, columns // spec.group_size)
    if spec.mode != "affine":
        return weight, Output(f"{stem}.scales", "U8", factors)
    return weight, Output(f"{stem}.scales", plain, factors), Output(f"{stem}.biases", plain, factors)


def encode(values: mx.array, spec: QuantSpec | None, plain: str) -> list[mx.array]:
    """Return the parts that values are stored as, computed; in the order of `outputs_of`.

    Affine scales and biases are stored in the plain type, as MLX's own converter leaves them; the codes are
    chosen with exact ones in either case.
    """
    dtype = NATIVE[plain]
    if spec is None:
        parts = [values.astype(dtype)]
    else:
        found = mx.quantize(values, group_size=spec.group_size, bits=spec.bits, mode=spec.mode)
        parts = [found[0], *(part if spec.mode != "affine" else part.astype(dtype) for part in found[1:])]
    mx.eval(parts)
    return parts


def decode(parts: Sequence[mx.array], spec: QuantSpec | None) -> mx.array:
    """Return what a reader makes of stored parts, in float32."""
    if spec is None:
        return parts[0].astype(mx.float32)
    biases = parts[2].astype(mx.float32) if len(parts) > 2 else None
    scales = parts[1] if spec.mode != "affine" else parts[1].astype(mx.float32)
    return mx.dequantize(
        parts[0], scales, biases, group_size=spec.group_size, bits=spec.bits, mode=spec.mode
    ).astype(mx.float32)


def memory_of(parts: Sequence[mx.array]) -> list[memoryview]:
    """Return the bytes of computed parts."""
    return [array_memory(part) for part in parts]
