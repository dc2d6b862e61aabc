"""Tiny checkpoints in the official FP8 layout, and their twin: the same values, spelled out in float32.

Entry point: `build_fp8`. The codes are found by looking for the nearest value in a table made from the
definition of E4M3, so the twin owes nothing to the product's decoding.

Source: qwen4exp.md 3.2 (names, block scales, the table's one scale); OCP FP8 (E4M3 has no infinities).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tampering import save, store, store_bfloat16
from tests.tiny.checkpoints import tiny_config, tiny_tensors, tiny_text_config
from tests.tiny.safetensors_io import Stored, bfloat16_bits
from tests.tiny.tokenizer import write_tokenizer

LARGEST = 448.0


def e4m3(code: int) -> float:
    """Return the value of one code by the definition."""
    sign, exponent, fraction = (-1.0) ** (code >> 7), (code >> 3) & 15, code & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


_CODES = np.array(sorted((c for c in range(256) if c & 127 != 127 and c != 128), key=e4m3), np.uint8)
_VALUES = np.array([e4m3(int(code)) for code in _CODES], np.float32)


def encode(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest E4M3 codes and the values they stand for."""
    place = np.clip(np.searchsorted(_VALUES, value), 1, len(_VALUES) - 1)
    place -= value - _VALUES[place - 1] < _VALUES[place] - value
    return _CODES[place], _VALUES[place]


def in_bfloat16(value: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to bfloat16."""
    return (bfloat16_bits(value).astype(np.uint32) << 16).view(np.float32).reshape(np.shape(value))


def encode_blocks(value: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, bfloat16 scales of each block, and the float32 values they stand for."""
    rows, columns = value.shape
    scales = np.zeros((-(-rows // block[0]), -(-columns // block[1])), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = value[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scales[i, j] = np.abs(part).max() / LARGEST
    scales = in_bfloat16(scales)
    wide = np.repeat(np.repeat(scales, block[0], 0)[:rows], block[1], 1)[:, :columns]
    codes, values = encode(np.clip(value / wide, -LARGEST, LARGEST))
    return codes, scales, values * wide


def build_fp8(
    directory: Path,
    twin: Path,
    *,
    block: tuple[int, int] = (32, 16),
    seed: int = 2,
    overrides: Mapping[str, Any] | None = None,
    trunk: bool = False,
) -> Path:
    """Write a checkpoint in the official FP8 layout, and its twin in the official float32 layout.

    Args:
        directory: Where the FP8 checkpoint goes.
        twin: Where the same values go as float32, experts fused.
        block: Rows and columns that share a scale.
        seed: As in `build_hf`.
        overrides: As in `build_hf`.
        trunk: Store attention projections in FP8 too, as other exporters do.

    Returns:
        `directory`.
    """
    text = tiny_text_config(overrides, dtype="bfloat16")
    stored: dict[str, Stored] = {}
    plain: dict[str, Stored] = {}
    parts = {n: v for n, v in tiny_tensors(text, seed).items() if ".ngram_embedding." in n}
    largest = max(np.abs(value).max() for value in parts.values())
    table_scale = in_bfloat16(np.array([largest / LARGEST], np.float32))
    for name, value in tiny_tensors(text, seed).items():
        if value.dtype != np.float32:
            stored[name] = plain[name] = store(value)
        elif name in parts:
            codes, values = encode(np.clip(value / table_scale, -LARGEST, LARGEST))
            stored[name] = Stored("F8_E4M3", value.shape, codes.tobytes())
            plain[name] = store(values * table_scale)
            stored[name.split(".shard_")[0] + ".weight_scale"] = store_bfloat16(table_scale)
        elif ".mlp.experts." in name:
            plain[name] = store(_experts(stored, name, value, block, text["moe_intermediate_size"]))
        elif trunk and name.endswith(("q_proj.weight", "out_proj.weight")):
            codes, scales, values = encode_blocks(value, block)
            stored[name] = Stored("F8_E4M3", value.shape, codes.tobytes())
            stored[name + "_scale_inv"] = store_bfloat16(scales)
            plain[name] = store(values)
        else:
            stored[name], plain[name] = store_bfloat16(value), store(in_bfloat16(value))
    config = tiny_config(overrides, dtype="bfloat16")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    save(directory, stored, {**config, "quantization_config": fp8})
    save(twin, plain, tiny_config(overrides))
    for place in (directory, twin):
        write_tokenizer(place, vocab_size=text["vocab_size"])
    return directory


def _experts(
    stored: dict[str, Stored], name: str, value: np.ndarray, block: tuple[int, int], width: int
) -> np.ndarray:
    """Store a fused stack expert by expert; return the values it now stands for."""
    stem, _, leaf = name.rpartition(".")
    halves = {"down_proj": slice(None)}
    if leaf == "gate_up_proj":
        halves = {"gate_proj": slice(0, width), "up_proj": slice(width, None)}
    out = np.empty_like(value)
    for expert in range(len(value)):
        for projection, rows in halves.items():
            codes, scales, out[expert, rows] = encode_blocks(value[expert, rows], block)
            module = f"{stem}.{expert}.{projection}.weight"
            stored[module] = Stored("F8_E4M3", codes.shape, codes.tobytes())
            stored[module + "_scale_inv"] = store_bfloat16(scales)
    return out
