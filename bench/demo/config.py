"""Geometry of the demo model: the official `qwen4_exp` nesting with small numbers.

Owns nothing on disk.  `text_config` and `full_config` are the single source for training, export and
evaluation; `ngram_constants` derives the integer side of the PLE table exactly as the architecture defines
it.
"""

from __future__ import annotations

import math
from typing import Any

VOCAB_SIZE = 4096
NUM_LAYERS = 8

#: Added tokens in id order, after the byte-pair entries.  True marks control tokens that decoding hides.
ADDED_TOKENS: list[tuple[str, bool]] = [
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<think>", False),
    ("</think>", False),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<|mask|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
]


def text_config(token_ids: dict[str, int]) -> dict[str, Any]:
    """Return the `text_config` section for a tokenizer whose added tokens have these ids."""
    separator = token_ids["<|endoftext|>"]
    # theta 1e4, not 1e7: only 8 frequencies exist and contexts are short, so slow ones would be wasted.
    theta = 10000
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": separator,
        "dtype": "float32",
        "eos_token_id": separator,
        "full_attention_interval": 4,
        "hc_count": 4,
        "hc_lowrank": 32,
        "head_dim": 64,
        "heads_per_ngram": 3,
        "hidden_act": "silu",
        "hidden_size": 192,
        "indexer_budget": 128,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 32,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "initializer_range": 0.02,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(NUM_LAYERS)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 32,
        "make_ngram_vocab_size_divisible_by": 16,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 8192,
        "model_type": "qwen4_exp_text",
        "moe_intermediate_size": 64,
        "mtp": {
            "hybrid": True,
            "layer_types": ["full_attention"],
            "mtp_use_hidden_state_from_layer": None,
            "num_hidden_layers": 1,
            "rope_theta": theta,
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "ngram_size": 3,
        "ngram_vocab_size_base": 7000,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": 2,
        "output_gate_type": "sigmoid",
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": 192,
        "ple_layer_ids": [2],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": theta,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.01,
        "seed": 1234,
        "shared_expert_intermediate_size": 64,
        "split_ngram_parts": 4,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def full_config(token_ids: dict[str, int]) -> dict[str, Any]:
    """Return the whole `config.json`; it has a vision section because the format does, without weights."""
    text = text_config(token_ids)
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "image_token_id": token_ids["<|image_pad|>"],
        "language_model_only": True,
        "model_type": "qwen4_exp",
        "text_config": text,
        "tie_word_embeddings": False,
        "transformers_version": "5.8.0.dev0",
        "video_token_id": token_ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 64,
            "model_type": "qwen4_exp",
            "num_heads": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": token_ids["<|vision_end|>"],
        "vision_start_token_id": token_ids["<|vision_start|>"],
    }


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _splitmix(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def ngram_constants(text: dict[str, Any]) -> dict[str, Any]:
    """Return multipliers, prime sizes, offsets, padded rows and row width of the one PLE table."""
    num_heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    sizes: list[int] = []
    candidate = text["ngram_vocab_size_base"]
    while len(sizes) < num_heads:
        if _is_prime(candidate):
            sizes.append(candidate)
        candidate += 1
    half = max(1, (((1 << 63) - 1) // text["vocab_size"]) // 2)
    multipliers = [
        2 * (_splitmix((text["seed"] + 0x9E3779B97F4A7C15 * (i + 1)) & ((1 << 64) - 1)) % half) + 1
        for i in range(text["ngram_size"])
    ]
    divisor = text["make_ngram_vocab_size_divisible_by"]
    return {
        "multipliers": multipliers,
        "sizes": sizes,
        "offsets": [sum(sizes[:h]) for h in range(num_heads)],
        "rows": -(-sum(sizes) // divisor) * divisor,
        "width": text["ple_embed_dim"] // num_heads,
    }
