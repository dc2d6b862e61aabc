"""Rotary position embedding from explicit frequencies.

Invariants:
1. Frequencies are passed as `freqs`: derived from the base inside the kernel, angles are off by 1e-2 at
   position 262,000 (measured on the CPU backend), which is a different model at long context.
2. Main heads and indexer share one table: its width comes from head_dim, not from the indexer's.

Source: qwen4exp.md 2.6.
"""

# Shapes: h heads, T positions, d head width.

from __future__ import annotations

import mlx.core as mx

from mlx_flashnext.config import ModelConfig


class Rope:
    """Rotates the first `rotary_dim` values of each head, half-split pairs."""

    def __init__(self, config: ModelConfig) -> None:
        self._dims = config.rotary_dim
        exponent = mx.arange(0, config.rotary_dim, 2, dtype=mx.float32) / config.rotary_dim
        self._freqs = mx.power(mx.array(config.rope_theta, mx.float32), exponent)

    def __call__(self, x_hTd: mx.array, first: int, *, stride: int = 1) -> mx.array:
        """Rotate heads lying at positions `first * stride`, `(first + 1) * stride`, ...

        Args:
            x_hTd: Heads; positions on the axis before the last.
            first: Index of the first position, in units of `stride`.
            stride: Tokens from one position to the next: 1, or the block length for pooled keys.
        """
        # Heads on the second axis of four: on the first they are a batch, for which Metal has no one-token
        # kernel and, before MLX 0.32, turned the first of them only (ml-explore/mlx#3494).
        turned_1hTd = mx.fast.rope(
            x_hTd[None],
            self._dims,
            traditional=False,
            base=None,
            scale=float(stride),
            offset=first,
            freqs=self._freqs,
        )
        return turned_1hTd.squeeze(0)
