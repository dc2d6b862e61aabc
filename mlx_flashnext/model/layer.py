"""One decoder layer: a mixer and a mixture of experts, each between a read of and a write to the stack.

Source: qwen4exp.md 2.1.
"""

# Shapes: T positions, G streams, D hidden.

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx

from mlx_flashnext.config import LayerKind, ModelConfig
from mlx_flashnext.layer_state import GdnState, LayerState, QsaState, Staged
from mlx_flashnext.model.gdn import GatedDeltaNet
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.model.hyper import HyperConnection
from mlx_flashnext.model.moe import Early, ExpertProvider, LookAhead, MixtureOfExperts
from mlx_flashnext.model.qsa import Projected, SparseAttention
from mlx_flashnext.model.rope import Rope
from mlx_flashnext.model.traced import traced
from mlx_flashnext.model.weight_source import WeightSource


@traced
def written(stack_TGD: mx.array, y_TD: mx.array, inject_TG: mx.array) -> mx.array:
    """Return the stack with a sublayer's output added."""
    return HyperConnection.write(stack_TGD, y_TD, inject_TG)


class DecoderLayer:
    """A layer of either kind.

    Args:
        config: Model geometry.
        weights: Where the weights come from.
        name: Canonical prefix, `layers.N` or `mtp.layers.0`.
        kind: Which mixer.
        layer: Layer index given to the expert provider.
        experts: Computes the routed experts.
        rope: The model's rotary table.
        sync: Counter of waits for the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        name: str,
        *,
        kind: LayerKind,
        layer: int,
        experts: ExpertProvider,
        rope: Rope,
        sync: HostSync,
    ) -> None:
        self._attn_hyper = HyperConnection(config, weights, f"{name}.attn_hyper_connection")
        self._mlp_hyper = HyperConnection(config, weights, f"{name}.mlp_hyper_connection")
        self._read, self._between = traced(self._attn_hyper.read), traced(self._mlp_hyper.write_and_read)
        self._look = traced(self._mlp_hyper.__call__)
        self._gdn = self._qsa = None
        if kind == "gdn":
            self._gdn = GatedDeltaNet(config, weights, f"{name}.linear_attn")
            self._recur = traced(self._gdn.mix)
        else:
            self._qsa = SparseAttention(config, weights, f"{name}.self_attn", rope)
            self._project, self._close = traced(self._qsa.project), traced(self._qsa.close)
        self._moe = MixtureOfExperts(config, weights, f"{name}.mlp", layer, experts, sync)

    def __call__(
        self,
        stack_TGD: mx.array,
        state: LayerState,
        position: int,
        *,
        is_revocable: bool,
        ahead: Sequence[tuple[LookAhead, int, DecoderLayer]] = (),
    ) -> tuple[mx.array, Staged]:
        """Run the layer on a block of positions.

        Args:
            stack_TGD: The residual stack.
            state: What the layer carries from the tokens before.
            position: Tokens before the block.
            is_revocable: Keep what it takes to return to any row.
            ahead: Who guesses the experts of which later layer, with its index, while this one runs.

        Returns:
            The stack and the state after the layer.
        """
        mixed_TD, inject_TG = self._read(stack_TGD)
        y_TD, staged = self._mix(mixed_TD, state, position, is_revocable)
        # Untied, the new states would be computed last of all and keep every layer's block alive till then.
        (y_TD,) = mx.depends([y_TD], staged.arrays())
        stack_TGD, mixed_TD, inject_TG = self._between(stack_TGD, y_TD, inject_TG)
        early = [Early(index, who.guess(index, later, stack_TGD)) for who, index, later in ahead]
        return written(stack_TGD, self._moe(mixed_TD, early), inject_TG), staged

    def early_read(self, stack_TGD: mx.array) -> mx.array:
        """Return x_TD as this layer would read an earlier stack for its experts, without its attention."""
        return self._look(stack_TGD)

    def early_route(self, stack_TGD: mx.array, num_ids: int | None = None) -> mx.array:
        """Guess this layer's experts from an earlier stack: its own read and its own router, ids_TK."""
        return self._moe.early_route(self._look(stack_TGD), num_ids)

    def attention_mix(self, stack_TGD: mx.array) -> mx.array:
        """Return x_TD as this layer's attention would read the stack."""
        return self._attn_hyper(stack_TGD)

    def extend(self, stack_TGD: mx.array, state: QsaState, position: int) -> Staged[QsaState]:
        """Cache a block of positions in a QSA layer whose own output nobody wants; see `__call__`.

        Neither attention nor experts are computed: what a QSA layer carries follows from its input alone.
        """
        assert self._qsa is not None
        return self._qsa.extend(self._attn_hyper.read(stack_TGD)[0], state, position)

    def with_experts(self, experts: ExpertProvider) -> DecoderLayer:
        """Return the same layer over another provider of experts."""
        other = copy.copy(self)
        other._moe = self._moe.with_experts(experts)
        return other

    def _mix(
        self, x_TD: mx.array, state: LayerState, position: int, is_revocable: bool
    ) -> tuple[mx.array, Staged]:
        if self._gdn is not None:
            assert isinstance(state, GdnState)
            y_TD, *left = self._recur(x_TD, state.recurrent, state.conv_window, is_revocable)
            return y_TD, self._gdn.staged(state, left)
        assert self._qsa is not None
        assert isinstance(state, QsaState)
        projected = Projected(*self._project(x_TD))
        o_Thd, staged = self._qsa.attend(projected, state, position, is_revocable=is_revocable)
        return self._close(o_Thd, projected.gate), staged
