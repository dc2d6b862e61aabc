"""Hyper-connections: how a sublayer reads the four residual streams and writes back to them.

There are no layer norms elsewhere and no final norm: normalisation lives here. The stack itself stays
un-normalised.

Source: qwen4exp.md 2.2, statements 1, 2 and 4.
"""

# Shapes: T positions, G streams, D hidden, W = G * D.

from __future__ import annotations

import mlx.core as mx

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.model.norm import StreamNorm
from mlx_flashnext.model.weight_source import WeightSource


class HyperRead:
    """Contracts the stack to one hidden vector through a per-element gate.

    Args:
        config: Model geometry.
        weights: Where the weights come from.
        name: Canonical prefix, for example `hyper_connection_mixer`.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str) -> None:
        self._streams, self._hidden = config.hc_count, config.hidden_size
        wide = config.stack_size
        self._norm = StreamNorm(
            weights, f"{name}.hc_norm", config.hc_count, config.hidden_size, config.rms_norm_eps
        )
        self._down = weights.linear(f"{name}.input_mix_weight_down", config.hc_lowrank, wide)
        self._up = weights.linear(f"{name}.input_mix_weight_up", wide, config.hc_lowrank)

    def __call__(self, stack_TGD: mx.array) -> mx.array:
        """Return the contraction mixed_TD."""
        unit_TGD = self._norm(stack_TGD)
        return self._mix(unit_TGD, unit_TGD.reshape(-1, self._streams * self._hidden))

    def _mix(self, unit_TGD: mx.array, unit_TW: mx.array) -> mx.array:
        low = self._down(unit_TW) / self._streams
        low = low * mx.sigmoid(low)
        gate_TGD = mx.sigmoid(self._up(low)).reshape(unit_TGD.shape)
        # A mean, not a sum; in float32, rounded once.
        return (gate_TGD * unit_TGD).astype(mx.float32).mean(axis=1).astype(unit_TGD.dtype)


class HyperConnection(HyperRead):
    """A read that also says how strongly each stream takes the sublayer's output back."""

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str) -> None:
        super().__init__(config, weights, name)
        self._inject = weights.linear(f"{name}.block_inject_weight", config.hc_count, config.stack_size)

    def read(self, stack_TGD: mx.array) -> tuple[mx.array, mx.array]:
        """Return the contraction mixed_TD and the write weights inject_TG."""
        unit_TGD = self._norm(stack_TGD)
        unit_TW = unit_TGD.reshape(-1, self._streams * self._hidden)
        inject_TG = 2.0 * mx.sigmoid(self._inject(unit_TW) / self._streams)
        return self._mix(unit_TGD, unit_TW), inject_TG

    def write_and_read(
        self, stack_TGD: mx.array, y_TD: mx.array, inject_TG: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return the stack with another sublayer's output added, and what `read` makes of it."""
        stack_TGD = self.write(stack_TGD, y_TD, inject_TG)
        return stack_TGD, *self.read(stack_TGD)

    @staticmethod
    def write(stack_TGD: mx.array, y_TD: mx.array, inject_TG: mx.array) -> mx.array:
        """Return the stack with the sublayer's output added to each stream by its weight."""
        return stack_TGD + inject_TG[..., None] * y_TD[:, None]
