"""Geometry and storage of each kind of synthetic checkpoint.

Entry points: `PRESETS`, `text_config`, `whole_config`.
Source: the official config.json, kept byte for byte in `mlx_flashnext/checkpoint`, SHA-256
889658f2508e8c61d409b02e70e0d78d8d4452ec65aaafbe129805d213d2e74b.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_flashnext.checkpoint.imagined import REAL_CONFIG_PATH

REAL_CONFIG = REAL_CONFIG_PATH

Layout = Literal["hf", "hf-fp8", "mlx"]
Split = Literal["official-bf16", "official-fp8", "by-size", "by-layer"]


@dataclass(frozen=True, slots=True)
class Preset:
    """What to write and how.

    `overrides` replace fields of the real text config. `float_dtype` is the safetensors tag of everything
    that is not packed: BF16 or F32; in MLX packs that includes scales and biases.
    """

    layout: Layout
    about: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    bits: int = 4
    group_size: int = 64
    mode: str = "affine"
    float_dtype: Literal["BF16", "F32"] = "BF16"
    mtp: bool = False
    vision: bool = False
    split: Split = "by-layer"
    is_real_size: bool = False


# Special ids must lie inside the small vocabularies; rotary and n-gram sizes scale with the rest.
_SMALL_IDS = {"bos_token_id": 1, "eos_token_id": 1}
_SMALL = {
    **_SMALL_IDS,
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "hc_lowrank": 64,
    "ple_embed_dim": 256,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 4,
    "heads_per_ngram": 4,
    "indexer_head_dim": 64,
    "indexer_budget": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
# Real widths, so real records: 768 experts of 2,764,800 B with bf16 scales (2.12 GB), 3,072,000 B with
# float32.
_MEDIUM = {
    **_SMALL_IDS,
    "vocab_size": 8192,
    "num_hidden_layers": 4,
    "num_experts": 192,
    "ngram_vocab_size_base": 20000,
    "split_ngram_parts": 8,
    "max_position_embeddings": 32768,
}

PRESETS: dict[str, Preset] = {
    "real-bf16": Preset(
        "hf", "official BF16 names, sizes and 131 files", mtp=True, vision=True, split="official-bf16",
        is_real_size=True,
    ),
    "real-fp8": Preset(
        "hf-fp8", "official FP8: 150,528 expert tensors in 131 files", mtp=True, vision=True,
        split="official-fp8", is_real_size=True,
    ),
    "real-mlx4": Preset(
        "mlx", "the known 4-bit pack: affine, group 32 everywhere, router 8-bit, no MTP", group_size=32,
        vision=True, split="by-size", is_real_size=True,
    ),
    "medium": Preset(
        "mlx", "real record size, 4 layers x 192 experts, float32 scales for CPU runs: 2.4 GB of experts",
        overrides=_MEDIUM, float_dtype="F32",
    ),
    "small": Preset("mlx", "a few MB: 4 layers x 16 experts", overrides=_SMALL, float_dtype="F32", mtp=True),
}  # fmt: skip


def text_config(preset: Preset) -> dict[str, Any]:
    """Return the real text config with the preset's overrides, layer types cut or extended to the layers."""
    text: dict[str, Any] = copy.deepcopy(json.loads(REAL_CONFIG.read_bytes())["text_config"])
    text.update(copy.deepcopy(dict(preset.overrides)))
    if "layer_types" not in preset.overrides:
        interval = text["full_attention_interval"]
        text["layer_types"] = [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(text["num_hidden_layers"])
        ]
    return text


def whole_config(
    preset: Preset, text: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return config.json around a text config; real presets without overrides give the official values."""
    config: dict[str, Any] = copy.deepcopy(json.loads(REAL_CONFIG.read_bytes()))
    config["text_config"] = dict(text)
    if not preset.is_real_size:
        config.update(
            image_token_id=2, video_token_id=3, vision_start_token_id=4, vision_end_token_id=5,
            language_model_only=not preset.vision,
        )  # fmt: skip
        config["vision_config"]["out_hidden_size"] = text["hidden_size"]
    if preset.layout == "hf-fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    elif quantization is not None:
        config["quantization"] = dict(quantization)
        config["quantization_config"] = dict(quantization)
    return config
