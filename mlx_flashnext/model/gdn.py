"""Gated delta net: linear attention with one matrix of state per value head.

Differences from Qwen3-Next that a reader would not expect: the output gate is a sigmoid, not silu; each key
head serves consecutive value heads (j div 3, not j mod 16); queries and keys are normalised in float32.

Invariant: the recurrence runs in `mx.fast.gated_delta_update`. On the CPU backend that is step by step
whatever the block length, so chunking never changes a bit (the reference's chunked form differs from its own
step form by 6e-6). On Metal it is so for calls of up to 8 rows; longer ones use a chunked kernel there, and
head counts or widths other than the real model's use the steps written in MLX operations (its
`gated_delta_update.cpp`; to be shown on a Mac). A block that may be cut runs in calls of fewer rows, and a
cut runs the rows since the last call again: so it gives the bits of plain steps on either.

Source: qwen4exp.md 2.4.
"""

# Shapes: T positions, D hidden, C conv channels (2 * h * k + j * v), h key heads, k key width, j value heads,
# v value width.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.geometry import GDN_ROWS, GDN_STEP_ROWS
from mlx_flashnext.layer_state import GdnState, Staged
from mlx_flashnext.model.conv import CausalConv, rows_before
from mlx_flashnext.model.order import joined, row_blocks
from mlx_flashnext.model.weight_source import WeightSource

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GdnJournal:
    """What the recurrence read in a block, and the states it passed: running some rows again needs no more.

    Attributes:
        starts: The state before each call, that is every `GDN_STEP_ROWS` rows; the first is the block's own.
        window: [H + T, C] rows that entered the convolution, history first.
        inputs: k_Thk, v_Tjv, gamma_Tj and beta_Tj of the recurrence; queries leave no trace in the state.
    """

    starts: tuple[mx.array, ...]
    window: mx.array
    inputs: tuple[mx.array, ...]

    def state_after(self, rows: int) -> GdnState:
        """Return the state after the first rows, by the steps that the block took."""
        call, rest = divmod(rows, GDN_STEP_ROWS)
        recurrent = self.starts[call]
        if rest:
            again = [each[rows - rest : rows] for each in self.inputs]
            recurrent = recur([again[0], *again], recurrent, GDN_STEP_ROWS)[1][-1]
        history = self.window.shape[0] - self.inputs[0].shape[0]
        return GdnState(recurrent, rows_before(self.window, history + rows, history))

    def arrays(self) -> list[mx.array]:
        """Return what the block computed of it."""
        return [*self.starts[1:], self.window, *self.inputs]


class GatedDeltaNet:
    """One GDN mixer.

    Args:
        config: Model geometry.
        weights: Where the weights come from.
        name: Canonical prefix, `layers.N.linear_attn`.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str) -> None:
        self._config = config
        hidden, conv_dim = config.hidden_size, config.linear_conv_dim
        value_heads, value_dim = config.linear_num_value_heads, config.linear_value_dim
        self._qkv = weights.linear(f"{name}.in_proj_qkv", conv_dim, hidden)
        self._z = weights.linear(f"{name}.in_proj_z", value_dim, hidden)
        self._b = weights.linear(f"{name}.in_proj_b", value_heads, hidden)
        self._a = weights.linear(f"{name}.in_proj_a", value_heads, hidden)
        self._out = weights.linear(f"{name}.out_proj", hidden, value_dim)
        self._conv = CausalConv(weights.array(f"{name}.conv1d", (conv_dim, config.linear_conv_kernel_dim)))
        self._decay_j = -mx.exp(weights.array(f"{name}.A_log", (value_heads,)))
        self._dt_bias_j = weights.array(f"{name}.dt_bias", (value_heads,))
        self._norm_v = weights.array(f"{name}.norm", (config.linear_value_head_dim,))
        # x * rsqrt(sum(x^2) + eps) = rms_norm(x, eps / k) / sqrt(k); queries carry another 1 / sqrt(k).
        key_width = config.linear_key_head_dim
        self._unit_eps = L2_EPS / key_width
        self._query_scale_k = mx.full((key_width,), 1.0 / key_width)
        self._key_scale_k = mx.full((key_width,), key_width**-0.5)

    def __call__(
        self, x_TD: mx.array, state: GdnState, position: int, *, is_revocable: bool = False
    ) -> tuple[mx.array, Staged[GdnState]]:
        """Mix a block of positions.

        Args:
            x_TD: Sublayer input.
            state: What the earlier positions left.
            position: Unused: the recurrence knows no positions.
            is_revocable: Keep what it takes to return to any row.

        Returns:
            y_TD, and the state after the block.
        """
        del position
        y_TD, *left = self.mix(x_TD, state.recurrent, state.conv_window, is_revocable)
        return y_TD, self.staged(state, left)

    def mix(
        self, x_TD: mx.array, recurrent: mx.array, history: mx.array, is_revocable: bool
    ) -> tuple[mx.array, ...]:
        """Mix a block of positions: a pure function of arrays (see `traced.py`).

        Args:
            x_TD: Sublayer input.
            recurrent: The recurrence before the block.
            history: Rows that entered the convolution before it.
            is_revocable: Keep what it takes to return to any row.

        Returns:
            y_TD, then what `staged` takes.
        """
        config, dtype, T = self._config, x_TD.dtype, x_TD.shape[0]
        heads, width = config.linear_num_key_heads, config.linear_key_head_dim
        mixed_TC, window = self._conv(self._qkv(x_TD), history)
        mixed_TC = mixed_TC.astype(dtype)
        mixed_TC = (mixed_TC * mx.sigmoid(mixed_TC)).astype(mx.float32)
        q, k, v = mx.split(mixed_TC, [config.linear_key_dim, 2 * config.linear_key_dim], axis=-1)
        q_Thk = mx.fast.rms_norm(q.reshape(T, heads, width), self._query_scale_k, self._unit_eps)
        k_Thk = mx.fast.rms_norm(k.reshape(T, heads, width), self._key_scale_k, self._unit_eps)
        v_Tjv = v.reshape(T, config.linear_num_value_heads, config.linear_value_head_dim)

        beta_Tj = mx.sigmoid(self._b(x_TD)).astype(mx.float32)
        step_Tj = mx.logaddexp(self._a(x_TD).astype(mx.float32) + self._dt_bias_j, 0.0)
        gamma_Tj = mx.exp(self._decay_j * step_Tj)
        inputs = [q_Thk, k_Thk, v_Tjv, gamma_Tj, beta_Tj]
        o_Tjv, states = recur(inputs, recurrent, GDN_STEP_ROWS if is_revocable else GDN_ROWS)
        y_Tjv = mx.fast.rms_norm(o_Tjv, self._norm_v, config.rms_norm_eps)
        y_Tjv = y_Tjv * mx.sigmoid(self._z(x_TD).astype(mx.float32)).reshape(y_Tjv.shape)
        y_TD = self._out(y_Tjv.reshape(T, -1).astype(dtype))
        final = (states[-1], rows_before(window, window.shape[0], history.shape[0]))
        if not is_revocable:
            return (y_TD, *final)
        return (y_TD, *final, window, k_Thk, v_Tjv, gamma_Tj, beta_Tj, *states[:-1])

    @staticmethod
    def staged(state: GdnState, left: Sequence[mx.array]) -> Staged[GdnState]:
        """Return what a block left: `left` is what `mix` returned beside y_TD, from `state` on."""
        recurrent, history, *journal = left
        final = GdnState(recurrent, history)
        if not journal:
            return Staged(final)
        window, k_Thk, v_Tjv, gamma_Tj, beta_Tj, *starts = journal
        return Staged(
            final, GdnJournal((state.recurrent, *starts), window, (k_Thk, v_Tjv, gamma_Tj, beta_Tj))
        )


def recur(inputs: list[mx.array], recurrent: mx.array, step: int) -> tuple[mx.array, list[mx.array]]:
    """Run the recurrence.

    Args:
        inputs: q_Thk, k_Thk, v_Tjv, gamma_Tj and beta_Tj, float32.
        recurrent: The state before the first row.
        step: Rows of one call.

    Returns:
        o_Tjv, and the state after each call.
    """
    outputs: list[mx.array] = []
    states: list[mx.array] = []
    for first, end in row_blocks(0, inputs[0].shape[0], step):
        block = [each[None, first:end] for each in inputs]
        o_1Rjv, recurrent = mx.fast.gated_delta_update(*block, initial_state=recurrent)
        outputs.append(o_1Rjv.squeeze(0))
        states.append(recurrent)
    return joined(outputs), states
