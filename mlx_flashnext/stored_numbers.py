"""Numbers as safetensors stores them: their MLX types, widening and rounding, and the search for NaN.

Entry points: `convert`, `num_not_finite`, `array_memory`. All work on chunks in place; no MLX graph is
built, so nothing here is lazy. Source: IEEE 754 layouts; OCP microscaling (E8M0, E4M3) for coded scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_flashnext.config import MatrixSpec, QuantSpec

# Packed codes and coded scales are kept as they are.
KEPT: Mapping[str, mx.Dtype] = {"U32": mx.uint32, "U8": mx.uint8}
NATIVE: Mapping[str, mx.Dtype] = {**KEPT, "F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}
# What an array that holds the stored bytes is made of: E4M3 codes have no type of their own.
IN_BANKS: Mapping[str, mx.Dtype] = {**NATIVE, "F8_E4M3": mx.uint8}
STORED: Mapping[str, np.dtype[np.unsignedinteger]] = {
    "F32": np.dtype("<u4"),
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
}
# All exponent bits set: infinite or NaN.
_EXPONENT: Mapping[str, int] = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}


def array_memory(array: mx.array) -> memoryview:
    """Return the bytes of an array, writable.

    The view is valid only while the array is neither assigned to nor changed in place (FEASIBILITY.md 1,
    hazard 1).
    """
    return memoryview(array).cast("B")  # pyright: ignore[reportArgumentType]  (the stubs lack __buffer__)


def float32_memory(array: mx.array) -> NDArray[np.float32]:
    """Return the values of a float32 array as one writable run."""
    return np.frombuffer(array_memory(array), np.float32)


def float32_values(raw: memoryview, dtype: str) -> NDArray[np.float32]:
    """Return stored floats, of any type that safetensors has for them, as float32."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def num_not_finite(bits: NDArray[np.unsignedinteger], dtype: str, spec: MatrixSpec | None) -> int:
    """Return how many stored values are NaN or infinite; packed codes never are, coded scales may be NaN.

    Args:
        bits: The values' bits.
        dtype: Their safetensors tag.
        spec: For scales, the quantisation they belong to.
    """
    if dtype == "U8" and isinstance(spec, QuantSpec):
        # E8M0 has one NaN, 255; E4M3 has two, 127 and 255.
        return int(np.count_nonzero((bits & 0x7F) == 0x7F if spec.mode == "nvfp4" else bits == 0xFF))
    if dtype == "F8_E4M3":
        return int(np.count_nonzero((bits & 0x7F) == 0x7F))
    mask = _EXPONENT.get(dtype)
    return 0 if mask is None else int(np.count_nonzero((bits & mask) == mask))


def e4m3_values() -> NDArray[np.float32]:
    """Return the value of each of the 256 codes of E4M3 without infinities: 127 and 255 are NaN."""
    codes = np.arange(256)
    exponents, fractions = (codes >> 3) & 15, codes & 7
    normal = (8 + fractions) * np.exp2(exponents - 10.0)
    values = np.where(exponents == 0, fractions * np.exp2(-9.0), normal)
    values[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


def convert(bits: NDArray[np.unsignedinteger], stored: str, out: memoryview, dtype: mx.Dtype) -> None:
    """Write float values of one type into memory of another; bfloat16 is rounded to nearest, ties to even.

    Args:
        bits: The values' bits.
        stored: Their safetensors tag: F32 (to bfloat16 alone), BF16 or F16.
        out: Memory for as many values of `dtype`.
        dtype: float32 or bfloat16.
    """
    if dtype == mx.float32:
        if stored == "BF16":
            np.left_shift(bits, 16, out=np.frombuffer(out, np.uint32), dtype=np.uint32)
        else:
            np.copyto(np.frombuffer(out, np.float32), bits.view(np.float16))
        return
    wide = bits if stored == "F32" else bits.view(np.float16).astype(np.float32).view(np.uint32)
    rounded = (wide + (0x7FFF + ((wide >> 16) & 1))) >> 16
    np.copyto(np.frombuffer(out, np.uint16), rounded, casting="unsafe")
