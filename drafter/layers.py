"""The small parts of the draft: norm, linear, rotation, masks, and the convolution inside a block.

All are pure functions of arrays and of `Params`: parameters by checkpoint name, so that a trainer
differentiates, saves and loads the same dictionary that a session runs.

Invariants:
1. A norm multiplies by `w`, the target's by `1 + w`: neither loader may touch the other's.
2. Rotation is half-split over the whole head, whatever the target does; angles come from positions.
3. A convolution never leaves its block, and both of its halves take their coefficients from the sublayer's
   input.

Source: dflash2.md 1.4 to 1.7.
"""

# Shapes: N blocks, B slots, H hidden, C kernel taps, G groups, d head width, Q queries, S keys.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx

from drafter.config import FULL, LayerType

Params = Mapping[str, mx.array]
PREPARE, FINISH = 0, 1


def rms(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Normalise by the root mean square over the last axis, in float32, and multiply by the weight."""
    return mx.fast.rms_norm(x, weight, eps)


def linear(params: Params, name: str, x: mx.array) -> mx.array:
    """Return `x @ W.T` for the weight [out, in] called `name.weight`."""
    return x @ params[f"{name}.weight"].T


def rotary_frequencies(theta: float, head_dim: int) -> mx.array:
    """Return `theta ** (2 i / head_dim)`: what positions are divided by, float32 [head_dim / 2]."""
    exponent = mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim
    return mx.power(mx.array(theta, mx.float32), exponent)


def rotate(x_NhTd: mx.array, start: int | mx.array, freqs: mx.array) -> mx.array:
    """Turn heads lying at consecutive positions.

    Args:
        x_NhTd: heads; positions on the axis before the last.
        start: position of the first, one for all or int32 [N].
        freqs: from `rotary_frequencies`. From the base inside the kernel angles drift at long range.
    """
    return mx.fast.rope(
        x_NhTd, x_NhTd.shape[-1], traditional=False, base=None, scale=1.0, offset=start, freqs=freqs
    )


def is_seen(
    query_pos: Any,
    query_start: Any,
    key_pos: Any,
    is_block_key: Any,
    *,
    kind: LayerType,
    is_causal: bool,
    window: int | None,
) -> Any:
    """Return whether a query sees a key: the whole table of masks, in positions.

    Works on numpy and on MLX integer arrays that broadcast against each other.

    Args:
        query_pos: absolute positions of block rows.
        query_start: position of slot 0 of the query's block: the context ends before it.
        key_pos: absolute positions of keys; below 0 for places that hold none.
        is_block_key: whether the key is a row of the query's own block; else it is of the context.
        kind: of the layer.
        is_causal: of the layer.
        window: of the layer, if it slides.
    """
    back = query_pos - key_pos
    in_block = is_block_key & (back >= 0) if is_causal else is_block_key
    seen = in_block | (~is_block_key & (key_pos >= 0) & (key_pos < query_start))
    if kind == FULL or window is None:
        return seen
    return seen & (back < window) & (back > -window)


class Coefficients(NamedTuple):
    """Coefficients of one convolution for every slot: [N, B, C, H] each."""

    prepare: mx.array
    finish: mx.array


def coefficients(params: Params, name: str, u_NBH: mx.array, kernel: int, group: int) -> Coefficients:
    """Return what a sublayer's input says about both halves of its convolution.

    The projection's rows are ordered half, tap, group. No softmax, no activation.

    Args:
        params: of the draft.
        name: of the convolution, for example `layers.0.mlp_conv`.
        u_NBH: the sublayer's input after its norm.
        kernel: taps.
        group: channels that share a dynamic coefficient.
    """
    num_blocks, slots, hidden = u_NBH.shape
    dynamic = linear(params, f"{name}.kernel_projection", u_NBH)
    dynamic = dynamic.reshape(num_blocks, slots, 2, kernel, hidden // group, 1)
    base = params[f"{name}.base_kernel"].reshape(2, kernel, hidden // group, group)
    both = (base + dynamic).reshape(num_blocks, slots, 2, kernel, hidden)
    return Coefficients(both[:, :, PREPARE], both[:, :, FINISH])


def convolve(x_NBH: mx.array, weights_NBCH: mx.array) -> mx.array:
    """Return the sum over taps o of `weights[t, o] * x[t - o]`, with zeros before slot 0.

    Coefficients belong to the slot that is written; only the values are shifted.
    """
    out = weights_NBCH[:, :, 0] * x_NBH
    for tap in range(1, weights_NBCH.shape[2]):
        shifted = mx.pad(x_NBH, [(0, 0), (tap, 0), (0, 0)])[:, : x_NBH.shape[1]]
        out = out + weights_NBCH[:, :, tap] * shifted
    return out
