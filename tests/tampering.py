"""Open a checkpoint directory as plain tensors, change them, write it back.

Entry points: `load`, `save`. For tests that need a wrong checkpoint, or one spelled otherwise.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny.safetensors_io import Stored, bfloat16_bits, write_safetensors

TAGS = {np.dtype("<f4"): "F32", np.dtype("<u4"): "U32", np.dtype("<i8"): "I64", np.dtype("u1"): "U8"}


def load(directory: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return every stored tensor and the config."""
    tensors: dict[str, Stored] = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), raw[start:end])
    return tensors, json.loads((directory / "config.json").read_bytes())


def save(directory: Path, tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> Path:
    """Write a checkpoint of one file without index; other files of the directory are dropped."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        path.unlink()
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def store(value: np.ndarray) -> Stored:
    """Return an array as stored."""
    value = np.ascontiguousarray(value)
    return Stored(TAGS[value.dtype], value.shape, value.tobytes())


def store_bfloat16(value: np.ndarray) -> Stored:
    """Return a float32 array as stored in bfloat16."""
    return Stored("BF16", value.shape, bfloat16_bits(value).tobytes())


def floats(stored: Stored) -> np.ndarray:
    """Return the values of a F32 or BF16 tensor as float32."""
    if stored.dtype == "BF16":
        return (
            (np.frombuffer(stored.data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(stored.shape)
        )
    assert stored.dtype == "F32"
    return np.frombuffer(stored.data, "<f4").reshape(stored.shape)


def rename(tensors: Mapping[str, Stored], *pairs: tuple[str, str]) -> dict[str, Stored]:
    """Return the tensors with parts of their names replaced, first to last."""
    out: dict[str, Stored] = {}
    for name, stored in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        assert name not in out
        out[name] = stored
    return out
