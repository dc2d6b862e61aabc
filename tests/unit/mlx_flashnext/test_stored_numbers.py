"""Widening and rounding are those of MLX, and every pattern that is not a number is counted."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.config import QuantSpec
from mlx_flashnext.stored_numbers import convert, num_not_finite

ALL_16 = np.arange(1 << 16, dtype=np.uint16)


def converted(bits, stored, dtype, count):
    out = bytearray(count * dtype.size)
    convert(bits, stored, memoryview(out), dtype)
    return out


def test_every_bfloat16_widens_exactly():
    out = np.frombuffer(converted(ALL_16, "BF16", mx.float32, 1 << 16), np.uint32)
    assert np.array_equal(out >> 16, ALL_16)
    assert not np.any(out & 0xFFFF)


def test_every_finite_float16_widens_exactly():
    finite = ALL_16[np.isfinite(ALL_16.view(np.float16))]
    out = np.frombuffer(converted(finite, "F16", mx.float32, len(finite)), np.float32)
    assert np.array_equal(out, finite.view(np.float16).astype(np.float32))


def test_rounding_to_bfloat16_is_that_of_mlx():
    rng = np.random.default_rng(0)
    ties = (ALL_16[:0x7F00].astype(np.uint32) << 16) + 0x8000
    bits = np.concatenate(
        [ties, ties + 1, ties - 1, rng.normal(size=10000).astype(np.float32).view(np.uint32)]
    )
    out = np.frombuffer(converted(bits, "F32", mx.bfloat16, len(bits)), np.uint16)
    expected = mx.array(bits.view(np.float32)).astype(mx.bfloat16).view(mx.uint16)
    assert np.array_equal(out, np.array(expected))


@pytest.mark.parametrize(("dtype", "kind"), [("F16", np.float16), ("F32", np.float32)])
def test_nan_and_infinity_are_counted(dtype, kind):
    values = np.array([0, 1, -1, np.inf, -np.inf, np.nan, np.finfo(kind).max, np.finfo(kind).tiny], kind)
    bits = values.view(np.uint16 if kind is np.float16 else np.uint32)
    assert num_not_finite(bits, dtype, None) == 3


def test_every_bfloat16_that_is_not_finite_is_counted():
    wide = (ALL_16.astype(np.uint32) << 16).view(np.float32)
    assert num_not_finite(ALL_16, "BF16", None) == np.count_nonzero(~np.isfinite(wide))


@pytest.mark.parametrize(
    ("mode", "bits", "group", "bad"), [("mxfp4", 4, 32, 1), ("mxfp8", 8, 32, 1), ("nvfp4", 4, 16, 2)]
)
def test_coded_scales_that_are_nan_are_counted(mode, bits, group, bad):
    codes = np.arange(256, dtype=np.uint8)
    assert num_not_finite(codes, "U8", QuantSpec(mode, bits, group)) == bad


def test_packed_codes_are_never_nan():
    assert num_not_finite(np.full(4, 0xFFFFFFFF, np.uint32), "U32", None) == 0
