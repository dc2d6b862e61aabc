"""A minimal safetensors writer and reader for tests: any dtype tag, bfloat16 included, numpy only.

Entry points: `write_safetensors`, `read_safetensors`. Independent of `expert_store` on purpose: it checks it.
Source: the safetensors format description (u64 header length, JSON header, data).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Stored(NamedTuple):
    """One tensor as stored: safetensors dtype tag, shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def bfloat16_bits(value: np.ndarray) -> np.ndarray:
    """Return the uint16 bits of `value` rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors in name order, the header padded with spaces to a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(tensors):
        stored = tensors[name]
        header[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [at, at + len(stored.data)],
        }
        at += len(stored.data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.writelines(tensors[name].data for name in sorted(tensors))


def read_safetensors(directory: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a directory; bfloat16 comes widened to float32, packed weights as uint32."""
    out: dict[str, np.ndarray] = {}
    kinds = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U32": "<u4", "U8": "u1"}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":
                value = (np.frombuffer(raw[start:end], "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                value = np.frombuffer(raw[start:end], kinds[entry["dtype"]])
            out[name] = value.reshape(entry["shape"])
    return out
