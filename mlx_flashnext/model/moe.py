"""Router, routed experts and the shared expert of a layer.

Invariants:
E1. The router alone decides: softmax over all experts in float32, the K most probable, ties to the smaller
    id.
E2. Outputs are weighted and summed in float32 in ascending expert id, whatever was resident and in whatever
    order records arrived; one rounding; then the shared expert is added.
E3. One read-back of ids per layer, and none where every expert is resident. The shared expert is queued
    before the host waits, in a submission of its own: in one submission the ids would wait for it.
E4. What later layers will probably choose rides on the same read-back, if somebody wants to know: no second
    wait, and no part in any result.

Source: qwen4exp.md 2.7, statements 17 to 20; the two submissions are measured in the project's feasibility
notes.
"""

# Shapes: T positions, D hidden, E experts, K experts per token, M shared expert width.

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import mlx.core as mx

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.model.host import HostSync, to_host
from mlx_flashnext.model.select import select_top
from mlx_flashnext.model.traced import traced
from mlx_flashnext.model.weight_source import WeightSource

if TYPE_CHECKING:
    from mlx_flashnext.model.layer import DecoderLayer


class LookAhead(Protocol):
    """Guesses what a layer yet to come will choose, from the stack that an earlier one has now."""

    layers_ahead: int
    """How many layers before its turn a layer is guessed; at least 1."""

    def guess(self, layer: int, later: DecoderLayer, stack_TGD: mx.array) -> mx.array:
        """Return int32 [T, N], lazy, in whatever code the one who hears it in `expect` reads.

        Args:
            layer: Index of the layer to come.
            later: That layer; its reads of a stack may be borrowed.
            stack_TGD: The stack of the layer that runs, before its experts have answered.
        """
        ...


class Early(NamedTuple):
    """What a layer yet to come will probably choose: its index, and int32 [T, N] from `LookAhead.guess`."""

    layer: int
    guess: mx.array


class ExpertProvider(Protocol):
    """Computes routed experts, wherever their weights are."""

    def is_resident(self, layer: int) -> bool:
        """Return whether every expert of the layer is in memory, so that ids may stay on the device."""
        ...

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        """Return who guesses later layers while this one runs; what they say comes back by `expect`."""
        ...

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> None:
        """Take note of what a layer yet to come will probably choose. Moves bytes at most.

        Args:
            layer: Layer index.
            ids_TN: Of every position, in the code of the `LookAhead` that guessed.
        """
        ...

    def device_busy(self) -> None:
        """Do what need not be done while the device waits for the host: it has work until the next ids."""
        ...

    def run(self, layer: int, x_TD: mx.array, ids_TK: mx.array | Sequence[Sequence[int]]) -> mx.array:
        """Return every pair's expert output.

        Args:
            layer: Layer index; the MTP layer counts as `num_hidden_layers`.
            x_TD: Expert inputs.
            ids_TK: Expert ids, on the device if the layer is resident, else on the host.

        Returns:
            y_TKD in float32, pairs in the order of `ids_TK`.
        """
        ...


class Router:
    """Chooses experts (E1). Its methods are pure functions of arrays.

    Args:
        config: Model geometry.
        weights: Where the weights come from.
        name: Canonical prefix, `layers.N.mlp`.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str) -> None:
        self._config = config
        self._logits = weights.linear(f"{name}.gate", config.num_experts, config.hidden_size)

    def route(self, x_TD: mx.array) -> tuple[mx.array, mx.array]:
        """Choose experts for every position.

        Returns:
            ids_TK: int32, ascending. weights_TK: float32, aligned with the ids.
        """
        probability_TE, ids_TK = self._choose(x_TD, self._config.num_experts_per_tok)
        weights_TK = mx.take_along_axis(probability_TE, ids_TK, axis=-1)
        if self._config.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(axis=-1, keepdims=True)
        return ids_TK, weights_TK

    def early(self, x_TD: mx.array, num_ids: int) -> mx.array:
        """Return the ids that would be chosen of an input that will not come, the likeliest first.

        Args:
            x_TD: The input.
            num_ids: How many to return.
        """
        probability_TE, ids_TN = self._choose(x_TD, num_ids)
        order_TN = mx.argsort(-mx.take_along_axis(probability_TE, ids_TN, axis=-1), axis=-1)
        return mx.take_along_axis(ids_TN, order_TN, axis=-1)

    def _choose(self, x_TD: mx.array, num_ids: int) -> tuple[mx.array, mx.array]:
        # Logits are rounded to the compute type first, as in the reference: that is where ties come from.
        probability_TE = mx.softmax(self._logits(x_TD).astype(mx.float32), axis=-1)
        return probability_TE, select_top(probability_TE, num_ids)


class SharedExpert:
    """The expert that every position visits, behind a gate of its own.

    Args:
        config: Model geometry.
        weights: Where the weights come from.
        name: Canonical prefix, `layers.N.mlp`.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str) -> None:
        hidden, width = config.hidden_size, config.shared_expert_intermediate_size
        self._share = weights.linear(f"{name}.shared_expert_gate", 1, hidden)
        self._gate = weights.linear(f"{name}.shared_expert.gate_proj", width, hidden)
        self._up = weights.linear(f"{name}.shared_expert.up_proj", width, hidden)
        self._down = weights.linear(f"{name}.shared_expert.down_proj", hidden, width)

    def __call__(self, x_TD: mx.array) -> mx.array:
        """Return y_TD."""
        gate_TM = self._gate(x_TD)
        y_TD = self._down(gate_TM * mx.sigmoid(gate_TM) * self._up(x_TD))
        return mx.sigmoid(self._share(x_TD)) * y_TD


@traced
def combined(weights_TK: mx.array, y_TKD: mx.array, shared_TD: mx.array) -> mx.array:
    """Return y_TD of a mixture: its pairs by their weights, and the shared expert (E2)."""
    return (weights_TK[..., None] * y_TKD).sum(axis=1).astype(shared_TD.dtype) + shared_TD


class MixtureOfExperts:
    """The second sublayer of every layer.

    Args:
        config: Model geometry.
        weights: Where the weights come from.
        name: Canonical prefix, `layers.N.mlp`.
        layer: Layer index given to the provider.
        experts: Computes the routed experts.
        sync: Counter of waits for the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        name: str,
        layer: int,
        experts: ExpertProvider,
        sync: HostSync,
    ) -> None:
        self._config = config
        self._layer = layer
        self._experts = experts
        self._sync = sync
        self._router = router = Router(config, weights, name)
        self._route, self._early = traced(router.route), traced(router.early)
        self._shared = traced(SharedExpert(config, weights, name).__call__)

    def __call__(self, x_TD: mx.array, early: Sequence[Early] = ()) -> mx.array:
        """Return y_TD of a block of positions.

        Args:
            x_TD: What the layer's hyper-connection read.
            early: What later layers will probably choose, for whoever provides the experts.
        """
        ids_TK, weights_TK = self.route(x_TD)
        if self._experts.is_resident(self._layer):
            shared_TD = self._shared(x_TD)
            y_TKD = self._experts.run(self._layer, x_TD, ids_TK)
        else:
            read_TJ = mx.concatenate([ids_TK, *(one.guess for one in early)], axis=1) if early else ids_TK
            mx.async_eval(read_TJ)
            shared_TD = self._shared(x_TD)
            mx.async_eval(shared_TD)
            self._experts.device_busy()
            y_TKD = self._experts.run(self._layer, x_TD, self._read_back(read_TJ, ids_TK.shape[1], early))
        return combined(weights_TK, y_TKD, shared_TD)

    def route(self, x_TD: mx.array) -> tuple[mx.array, mx.array]:
        """Choose experts for every position; see `Router.route`."""
        return self._route(x_TD)

    def early_route(self, x_TD: mx.array, num_ids: int | None = None) -> mx.array:
        """Return the ids this layer would choose of an input it will not get, the likeliest first.

        Args:
            x_TD: The input.
            num_ids: How many to return; None for as many as it chooses.
        """
        return self._early(x_TD, num_ids or self._config.num_experts_per_tok)

    def with_experts(self, experts: ExpertProvider) -> MixtureOfExperts:
        """Return the same weights over another provider of experts."""
        other = copy.copy(self)
        other._experts = experts
        return other

    def _read_back(self, read_TJ: mx.array, top_k: int, early: Sequence[Early]) -> list[list[int]]:
        """Return the ids of this layer on the host; what rides behind them is handed on (E4)."""
        rows: list[list[int]] = to_host(self._sync, read_TJ)
        if not early:
            return rows
        begin = top_k
        for layer, guess in early:
            end = begin + guess.shape[1]
            self._experts.expect(layer, [row[begin:end] for row in rows])
            begin = end
        return [row[:top_k] for row in rows]
