"""From the target's features to what every draft layer reads: one fused vector a row, then keys and values.

Entry points: `fuse`, `context_keys_values`. A context row passes through no layer: layer i sees the same
vector as layer 0, without layer norm and without convolution, so its keys and values can be stored the moment
its features exist.

Source: dflash2.md 1.4, statements 2 and 5.
"""

# Shapes: T rows, F concatenated features (n taps * H), H hidden, K key heads, d head width.

from __future__ import annotations

import mlx.core as mx

from drafter.config import DraftConfig
from drafter.layers import Params, linear, rms, rotate


def fuse(params: Params, config: DraftConfig, features_TF: mx.array) -> mx.array:
    """Return one vector [T, H] for every row.

    Args:
        params: of the draft.
        config: of the draft.
        features_TF: contracted outputs of the tapped layers, concatenated in the order of `config.taps`.
    """
    return rms(linear(params, "fc", features_TF), params["hidden_norm.weight"], config.rms_norm_eps)


def context_keys_values(
    params: Params, config: DraftConfig, layer: int, fused_TH: mx.array, start: int, freqs: mx.array
) -> tuple[mx.array, mx.array]:
    """Return what a layer keeps of context rows: keys and values [K, T, d].

    Args:
        params: of the draft.
        config: of the draft.
        layer: of the draft.
        fused_TH: from `fuse`.
        start: position of the first row; the others follow it.
        freqs: from `rotary_frequencies`.
    """
    keys, values = keys_values(params, config, layer, fused_TH[None], start, freqs)
    return keys[0], values[0]


def keys_values(
    params: Params, config: DraftConfig, layer: int, x_NTH: mx.array, start: int | mx.array, freqs: mx.array
) -> tuple[mx.array, mx.array]:
    """Return turned keys and values [N, K, T, d] of rows, context or block."""
    name = f"layers.{layer}.self_attn"
    keys = split_heads(linear(params, f"{name}.k_proj", x_NTH), config.num_kv_heads)
    values = split_heads(linear(params, f"{name}.v_proj", x_NTH), config.num_kv_heads)
    keys = rms(keys, params[f"{name}.k_norm.weight"], config.rms_norm_eps)
    return rotate(keys, start, freqs), values


def split_heads(x_NTD: mx.array, num_heads: int) -> mx.array:
    """Return [N, heads, T, d] of rows whose heads lie side by side."""
    num_blocks, rows, width = x_NTD.shape
    return x_NTD.reshape(num_blocks, rows, num_heads, width // num_heads).transpose(0, 2, 1, 3)
