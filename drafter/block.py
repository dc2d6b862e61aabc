"""One pass over a block: from the embeddings of anchor and mask slots to hidden states of every slot.

Entry point: `hidden_states`. One block when proposing, many blocks of one sequence at once when training:
they share the context, and none sees another.

Invariants:
B1. Keys and values of block rows leave with the pass; only context rows are ever kept.
B2. Which key a query sees follows from positions alone (`layers.is_seen`), never from where it is stored.

Source: dflash2.md 1.4 and 1.5; 5.2 for many blocks.
"""

# Shapes: N blocks, B slots, Q = N * B queries, S context rows, H hidden, K key heads, d head width.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.config import DraftConfig, LayerType
from drafter.fuse import keys_values, split_heads
from drafter.layers import Coefficients, Params, coefficients, convolve, is_seen, linear, rms, rotate


class LayerContext(NamedTuple):
    """What a layer holds of the context: keys and values [K, S, d], positions int32 [S], -1 for none."""

    keys: mx.array
    values: mx.array
    positions: NDArray[np.int32]


def hidden_states(
    params: Params,
    config: DraftConfig,
    embeddings_NBH: mx.array,
    starts: Sequence[int],
    contexts: Sequence[LayerContext],
    freqs: mx.array,
) -> mx.array:
    """Return final-normed hidden states [N, B, H], slot 0 included.

    Args:
        params: of the draft.
        config: of the draft.
        embeddings_NBH: the target's raw embedding rows of every slot: the anchor's, then the mask id's.
        starts: position of every block's anchor.
        contexts: of every layer; layers of one kind hold the same positions.
        freqs: from `rotary_frequencies`.
    """
    eps = config.rms_norm_eps
    x = embeddings_NBH
    if config.embedding_scale != 1:
        x = x * config.embedding_scale
    masks: dict[tuple[LayerType, bool], mx.array] = {}
    for layer, (kind, is_causal) in enumerate(zip(config.layer_types, config.is_causal, strict=True)):
        if (kind, is_causal) not in masks:
            seen = visible(config, layer, starts, x.shape[1], contexts[layer].positions)
            masks[kind, is_causal] = mx.array(seen)  # type: ignore[arg-type]  # stubs know no numpy
        name = f"layers.{layer}"
        u = rms(x, params[f"{name}.input_layernorm.weight"], eps)
        kernels = _kernels(params, config, f"{name}.attention_conv", u)
        attended = attend(
            params,
            config,
            layer,
            _prepared(u, kernels),
            starts,
            contexts[layer],
            masks[kind, is_causal],
            freqs,
        )
        x = x + _finished(attended, kernels)
        u = rms(x, params[f"{name}.post_attention_layernorm.weight"], eps)
        kernels = _kernels(params, config, f"{name}.mlp_conv", u)
        x = x + _finished(feed_forward(params, f"{name}.mlp", _prepared(u, kernels)), kernels)
    return final_norm(params, config, x)


def visible(
    config: DraftConfig, layer: int, starts: Sequence[int], num_slots: int, positions: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Return which of context and block rows every block row sees: [Q, S + Q].

    Args:
        config: of the draft.
        layer: of the draft.
        starts: position of every block's anchor.
        num_slots: of a block.
        positions: of the context's rows.
    """
    first = np.asarray(starts, np.int32)
    block = np.repeat(np.arange(len(first)), num_slots)
    rows = (first[:, None] + np.arange(num_slots, dtype=np.int32)).reshape(-1)
    is_own = np.concatenate(
        [np.zeros((len(rows), len(positions)), bool), block[:, None] == block[None, :]], axis=1
    )
    is_elsewhere = np.concatenate([np.zeros(len(positions), bool), np.ones(len(rows), bool)])
    seen = is_seen(
        rows[:, None],
        first[block][:, None],
        np.concatenate([positions, rows])[None],
        is_own,
        kind=config.layer_types[layer],
        is_causal=config.is_causal[layer],
        window=config.window,
    )
    return seen & (is_own | ~is_elsewhere)


def attend(
    params: Params,
    config: DraftConfig,
    layer: int,
    x_NBH: mx.array,
    starts: Sequence[int],
    context: LayerContext,
    mask: mx.array,
    freqs: mx.array,
) -> mx.array:
    """Return grouped-query attention of block rows over context and block, projected: [N, B, H]."""
    name = f"layers.{layer}.self_attn"
    num_blocks, slots, _ = x_NBH.shape
    start = int(starts[0]) if num_blocks == 1 else mx.array(np.asarray(starts, np.int32))
    queries = split_heads(linear(params, f"{name}.q_proj", x_NBH), config.num_heads)
    queries = rms(queries, params[f"{name}.q_norm.weight"], config.rms_norm_eps)
    queries = rotate(queries, start, freqs)
    keys, values = keys_values(params, config, layer, x_NBH, start, freqs)
    keys = mx.concatenate([context.keys, _rows_of_heads(keys)], axis=1)
    values = mx.concatenate([context.values, _rows_of_heads(values)], axis=1)
    mixed = mx.fast.scaled_dot_product_attention(
        _rows_of_heads(queries)[None], keys[None], values[None], scale=config.head_dim**-0.5, mask=mask
    )
    mixed = mixed[0].transpose(1, 0, 2).reshape(num_blocks, slots, -1)
    return linear(params, f"{name}.o_proj", mixed)


def feed_forward(params: Params, name: str, x: mx.array) -> mx.array:
    """Return the gated feed-forward layer of every row."""
    gate = linear(params, f"{name}.gate_proj", x)
    return linear(params, f"{name}.down_proj", gate * mx.sigmoid(gate) * linear(params, f"{name}.up_proj", x))


def final_norm(params: Params, config: DraftConfig, x: mx.array) -> mx.array:
    """Return the rows as the target's head takes them."""
    return rms(x, params["norm.weight"], config.rms_norm_eps)


def _rows_of_heads(x_NhBd: mx.array) -> mx.array:
    """Return [heads, N * B, d]: the rows of all blocks one after another."""
    num_blocks, heads, slots, width = x_NhBd.shape
    if num_blocks == 1:
        return x_NhBd[0]
    return x_NhBd.transpose(1, 0, 2, 3).reshape(heads, num_blocks * slots, width)


def _kernels(params: Params, config: DraftConfig, name: str, u_NBH: mx.array) -> Coefficients | None:
    if not config.conv_kernel:
        return None
    return coefficients(params, name, u_NBH, config.conv_kernel, config.conv_group)


def _prepared(u_NBH: mx.array, kernels: Coefficients | None) -> mx.array:
    return u_NBH if kernels is None else convolve(u_NBH, kernels.prepare)


def _finished(y_NBH: mx.array, kernels: Coefficients | None) -> mx.array:
    return y_NBH if kernels is None else convolve(y_NBH, kernels.finish)
