"""Values of synthetic tensors: random codes on affine or micro-scaled grids, drawn in row blocks.

Entry points: `Grid` (one matrix), `Head` (an lm_head that prefers one successor per token), `vector_values`.

Invariants:
1. Weight and scale streams have generators of their own, seeded by (seed, crc32(name), which), and blocks of
   a fixed number of rows: packed and dense forms agree, and nothing depends on the order of writing.
2. On 4- and 8-bit affine grids code 0 is never drawn and scales have few significant bits, so the values are
   symmetric about zero and scale * (code - middle) is exact in bfloat16.

Source: MLX packing (qwen4exp.md 3.3: little-endian bit stream, least significant bits first).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 23
_NIBBLES = bytes(b + (8 if b % 16 == 0 else 0) + (128 if b < 16 else 0) for b in range(256))
_BYTES = bytes([128, *range(1, 256)])
_NO_NAN = bytes(0 if b & 0x7F == 0x7F else b for b in range(256))


def e4m3_values() -> NDArray[np.float32]:
    """Return the value of each of the 256 F8_E4M3 codes; the two NaN codes read as 0."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    value = np.where(code & 0x7F == 0x7F, 0.0, value)
    return np.where(code >= 128, -value, value).astype(np.float32)


def bfloat16_bits(value: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, ties to even, and return the bits."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bfloat16_round(value: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to bfloat16 and widen again."""
    return (bfloat16_bits(value).astype(np.uint32) << 16).view(np.float32)


def float_bytes(value: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Return `value`, rounded to bfloat16, as stored under the safetensors tag BF16 or F32."""
    return bfloat16_bits(value) if dtype == "BF16" else bfloat16_round(value)


class _Stream:
    """A long run of random bytes, the same however it is cut into pieces of whole 8-byte words."""

    def __init__(self, seed: int, name: str, which: int) -> None:
        self._bits = np.random.SFC64([seed, zlib.crc32(name.encode()), which])

    def take(self, length: int) -> bytes:
        words = self._bits.random_raw(-(-length // 8)).astype("<u8", copy=False)
        return words.tobytes()[:length] if length % 8 else words.tobytes()


def _snap(scale: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    mantissa, exponent = np.frexp(scale)
    steps = 1 if bits == 8 else 16
    return np.ldexp(np.ceil(mantissa * steps) / steps, exponent).astype(np.float32)


@dataclass(frozen=True)
class Grid:
    """One quantised matrix: codes of `bits` in groups of `group_size`, values of spread `std`."""

    seed: int
    name: str
    rows: int
    columns: int
    std: float
    bits: int = 4
    group_size: int = 64
    mode: str = "affine"
    row_skew: float = 0.0

    @property
    def middle(self) -> float:
        """The code that stands for zero."""
        top = (1 << self.bits) - 1
        return (top + 1) / 2 if self.bits in (4, 8) else top / 2

    @cached_property
    def _table(self) -> bytes | None:
        if self.mode == "mxfp8":
            return _NO_NAN
        if self.mode != "affine":
            return None
        return {4: _NIBBLES, 8: _BYTES}.get(self.bits)

    @cached_property
    def _unit_std(self) -> float:
        if self.mode == "affine":
            return float(np.sqrt(((1 << self.bits) ** 2 - 1) / 12))
        if self.bits == 8:
            return float(np.sqrt(np.mean(e4m3_values().astype(np.float64) ** 2)))
        return float(np.sqrt(np.mean(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) ** 2)))

    def _row_blocks(self) -> Iterator[tuple[int, int]]:
        # A multiple of 8 rows, so that every block starts on a whole word of both streams.
        step = max(8, BLOCK_BYTES * 8 // (self.columns * self.bits) // 8 * 8)
        for start in range(0, self.rows, step):
            yield start, min(self.rows, start + step)

    def packed(self) -> Iterator[bytes]:
        """Yield the packed codes, little-endian, in blocks of whole rows."""
        stream = _Stream(self.seed, self.name, 0)
        for start, end in self._row_blocks():
            raw = stream.take((end - start) * self.columns * self.bits // 8)
            yield raw if self._table is None else raw.translate(self._table)

    def scales(self) -> Iterator[NDArray[np.float32]]:
        """Yield affine scales, float32 [rows of the block, groups]."""
        stream = _Stream(self.seed, self.name, 1)
        groups = self.columns // self.group_size
        spread = (self.std / self._unit_std * (0.9 + 0.2 * np.arange(256) / 255)).astype(np.float32)
        skew = self._skew()
        table = _snap(spread, self.bits)
        for start, end in self._row_blocks():
            code = np.frombuffer(stream.take((end - start) * groups), np.uint8).reshape(-1, groups)
            yield table[code] if skew is None else _snap(spread[code] * skew[start:end, None], self.bits)

    def coded_scales(self) -> Iterator[bytes]:
        """Yield the uint8 scales of the micro-scaled modes: E8M0 for mxfp4 and mxfp8, E4M3 for nvfp4."""
        value = self.std / self._unit_std
        if self.mode == "nvfp4":
            code = int(np.argmin(np.abs(e4m3_values()[:127] - value)))
        else:
            code = round(float(np.log2(value))) + 127
        for start, end in self._row_blocks():
            yield bytes([code]) * ((end - start) * (self.columns // self.group_size))

    def dense(self) -> Iterator[NDArray[np.float32]]:
        """Yield the values, float32 [rows of the block, columns]; affine 4 and 8 bits only."""
        if self.mode != "affine" or self.bits not in (4, 8):
            raise SystemExit(
                f"dense output needs an affine 4- or 8-bit grid, not {self.mode} {self.bits}-bit"
            )
        for raw, scale in zip(self.packed(), self.scales(), strict=True):
            code = np.frombuffer(raw, np.uint8)
            if self.bits == 4:
                code = np.stack([code & 15, code >> 4], axis=-1)
            centred = code.astype(np.float32).reshape(*scale.shape, self.group_size) - np.float32(self.middle)
            yield (centred * scale[..., None]).reshape(scale.shape[0], self.columns)

    def _skew(self) -> NDArray[np.float32] | None:
        if not self.row_skew:
            return None
        normal = np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), 2]).standard_normal(
            self.rows
        )
        return np.exp(self.row_skew * normal).astype(np.float32)


class Rounded(Grid, ABC):
    """A grid whose values are computed whole and rounded to it. Affine, 4 and 8 bits only; held in memory."""

    @abstractmethod
    def _values(self) -> NDArray[np.float32]:
        """Return what is to be rounded, float32 [rows, columns]."""

    @cached_property
    def _quantised(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        groups = self._values().reshape(self.rows, -1, self.group_size)
        scale = np.maximum(np.abs(groups).max(-1) / (self.middle - 0.5), 1e-6).astype(np.float32)
        scale = _snap(scale, self.bits)
        code = np.clip(np.rint(groups / scale[..., None]) + self.middle, 1, 2 * self.middle - 1)
        return code.astype(np.uint8).reshape(self.rows, self.columns), scale

    def packed(self) -> Iterator[bytes]:
        """Yield the packed codes in blocks of whole rows."""
        code = self._quantised[0]
        for start, end in self._row_blocks():
            part = code[start:end]
            yield (part if self.bits == 8 else part[:, 0::2] | (part[:, 1::2] << 4)).tobytes()

    def scales(self) -> Iterator[NDArray[np.float32]]:
        """Yield the scales, float32 [rows of the block, groups]."""
        for start, end in self._row_blocks():
            yield self._quantised[1][start:end]

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), 3])


@dataclass(frozen=True)
class Head(Rounded):
    """An lm_head whose row pi(t) carries `alpha` of token t's embedding, pi one cycle over ordinary tokens.

    Greedy decoding then walks through many tokens with a wide margin, so different numerics agree. Ids below
    8 are special and never preferred.
    """

    embedding: Grid | None = None
    alpha: float = 0.35

    def _values(self) -> NDArray[np.float32]:
        assert self.embedding is not None
        rng = self._rng()
        value = rng.standard_normal((self.rows, self.columns), dtype=np.float32)
        value[:8] = 0
        ordinary = rng.permutation(np.arange(8, self.rows))
        value[np.roll(ordinary, -1)] += self.alpha * np.concatenate(list(self.embedding.dense()))[ordinary]
        return value * np.float32(self.std)


@dataclass(frozen=True)
class NearIdentity(Rounded):
    """A square matrix that hands its input on nearly unchanged: `diagonal` times it, and noise of `std`."""

    diagonal: float = 1.0

    def _values(self) -> NDArray[np.float32]:
        noise = self._rng().standard_normal((self.rows, self.columns), dtype=np.float32)
        value = noise * self.std + self.diagonal * np.eye(self.rows, self.columns, dtype=np.float32)
        return value.astype(np.float32)


def vector_values(
    seed: int, name: str, shape: tuple[int, ...], *, std: float, centre: float, is_decay: bool = False
) -> NDArray[np.float32]:
    """Return a small unquantised tensor: normal values, or for A_log logarithms of uniform decay rates."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), 4])
    if is_decay:
        return np.log(rng.uniform(0.01, 16.0, shape)).astype(np.float32)
    return (centre + std * rng.standard_normal(shape)).astype(np.float32)
