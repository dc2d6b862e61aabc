"""The whole text model: embedding, layers, terminal mixer, head.

Entry point: `FlashNext.forward`. The one decode and prefill path: a block of any number of tokens.

Invariants:
F1. N-gram rows are requested before the first layer and waited for just at the layer that adds them.
F2. A pass stages what it leaves in the block it was given and commits nothing. The returned logits (or the
    stack, without logits) carry what is staged as a dependency, so one wait for them completes both.
F3. Each layer is submitted, without a wait, once its graph is built: the device runs it while the next one is
    described. Otherwise a token of the demo took 1.15 of this time resident, 1.09 streamed (medians of
    `bench.studies.token_time`), and its n-gram rows were waited for with an idle device.

Source: qwen4exp.md 2.1 and 2.8. There is no final norm: the last operation before the head is the terminal
mixer.
"""

# Shapes: T positions, G streams, D hidden, V vocabulary.

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.errors import StateError
from mlx_flashnext.layer_state import PleState, Staged
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.model.hyper import HyperRead
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.model.moe import ExpertProvider, LookAhead
from mlx_flashnext.model.mtp import MtpCell
from mlx_flashnext.model.ple import NgramMemory, RowSource, ngram_rows
from mlx_flashnext.model.rope import Rope
from mlx_flashnext.model.weight_source import WeightSource
from mlx_flashnext.state import Block, SequenceState

Contraction = Literal["mean", "next_attn_mix", "final_mix", "stream0"]
"""How the streams of a stack become one row: their mean, the next layer's own read for its attention (for the
last layer, what the head reads), what the head reads, or the first stream."""


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a block produced, not yet computed.

    Attributes:
        logits: [T, V] for all, [1, V] for the last, None for none.
        stack: [T, G, D] after the last layer, before the terminal mixer: what the MTP module reads.
        taps: What was tapped of each layer: its output stack [T, G, D], or the contraction [T, D] of it.
    """

    logits: mx.array | None
    stack: mx.array
    taps: Mapping[int, mx.array]


class FlashNext:
    """The target model.

    Args:
        config: Model geometry.
        weights: Where the resident weights come from.
        experts: Computes the routed experts; kept as the attribute `experts`.
        rows: Reads n-gram table rows.
        sync: Counter of waits for the device.
        compute_dtype: Type of activations: float32 on the CPU backend, bfloat16 on Metal.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        experts: ExpertProvider,
        rows: RowSource,
        sync: HostSync,
        *,
        compute_dtype: mx.Dtype,
    ) -> None:
        self.config = config
        self.compute_dtype = compute_dtype
        self.experts = experts
        self._rows = rows
        rope = Rope(config)
        self._embed = weights.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self._layers = [
            DecoderLayer(
                config, weights, f"layers.{i}", kind=kind, layer=i, experts=experts, rope=rope, sync=sync
            )
            for i, kind in enumerate(config.layer_kinds)
        ]
        self._ple = NgramMemory(config, weights, f"layers.{config.ple_layer}.ple")
        self._mixer = HyperRead(config, weights, "hyper_connection_mixer")
        self._head = weights.linear("lm_head", config.vocab_size, config.hidden_size)

    def new_state(self, capacity_tokens: int | None = None) -> SequenceState:
        """Return the state of an empty sequence.

        Args:
            capacity_tokens: Allocate for this many tokens now and refuse more; None grows as needed.
        """
        return SequenceState(self.config, compute_dtype=self.compute_dtype, capacity_tokens=capacity_tokens)

    def forward(
        self,
        tokens: Sequence[int],
        block: Block,
        *,
        logits: Literal["all", "last", "none"] = "last",
        taps: Collection[int] = (),
        contraction: Contraction | None = None,
    ) -> ForwardOutput:
        """Run a block of tokens and stage what it leaves; the sequence is unchanged until the commit.

        Args:
            tokens: One token id per row of the block.
            block: Opened on a state of this model, and not yet run.
            logits: Of which positions.
            taps: Layers whose output is returned.
            contraction: How the streams of a tapped stack become one; None returns the stacks.

        Returns:
            Lazy arrays; waiting for `logits` (or, without logits, for `stack`) completes the state too.

        Raises:
            StateError: A token outside the vocabulary, or a block of other rows, closed, or run before.
        """
        block.check_rows(len(tokens))
        self._check_tokens(tokens)
        before, is_revocable = block.before, block.is_revocable
        assert before.ple is not None
        pending = self._rows.issue(ngram_rows(tokens, before.ple.history, self.config))
        hidden_TD = self._embed(mx.array(list(tokens), mx.int32))
        stack_TGD = mx.repeat(hidden_TD[:, None], self.config.hc_count, axis=1)
        staged: list[Staged] = []
        staged_ple: Staged[PleState] | None = None
        tapped: dict[int, mx.array] = {}
        for index, layer in enumerate(self._layers):
            if index == self.config.ple_layer:
                delta_TGD, staged_ple = self._ple(
                    stack_TGD, tokens, pending.wait(), before.ple, is_revocable=is_revocable
                )
                (stack_TGD,) = mx.depends([stack_TGD + delta_TGD], staged_ple.arrays())
            stack_TGD, staged_layer = layer(
                stack_TGD,
                before.layers[index],
                before.num_tokens,
                is_revocable=is_revocable,
                ahead=self._ahead(index),
            )
            staged.append(staged_layer)
            if index in taps:
                tapped[index] = self.contract(index, stack_TGD, contraction)
                if contraction is not None:
                    # Computed here and now, so that no tapped stack outlives its layer.
                    (stack_TGD,) = mx.depends([stack_TGD], [tapped[index]])
            mx.async_eval(stack_TGD)

        block.stage(staged, staged_ple)
        if logits == "none":
            return ForwardOutput(None, stack_TGD, tapped)
        return ForwardOutput(self.head(stack_TGD if logits == "all" else stack_TGD[-1:]), stack_TGD, tapped)

    def contract(self, index: int, stack_TGD: mx.array, contraction: Contraction | None) -> mx.array:
        """Return a layer's output stack, or what a contraction makes of it. Source: dflash2.md 1.14."""
        if contraction is None:
            return stack_TGD
        if contraction == "stream0":
            return stack_TGD[:, :1].squeeze(1)
        if contraction == "mean":
            return stack_TGD.astype(mx.float32).mean(axis=1).astype(stack_TGD.dtype)
        if contraction == "next_attn_mix" and index + 1 < len(self._layers):
            return self._layers[index + 1].attention_mix(stack_TGD)
        return self._mixer(stack_TGD)

    def _ahead(self, index: int) -> list[tuple[LookAhead, int, DecoderLayer]]:
        """Return which later layers are to be guessed while layer `index` runs, and by whom."""
        asked = [(who, index + who.layers_ahead) for who in self.experts.looks_ahead(index)]
        return [(who, later, self._layers[later]) for who, later in asked if later < len(self._layers)]

    def with_experts(self, experts: ExpertProvider) -> FlashNext:
        """Return the same model, sharing every weight, over another provider of experts."""
        other = copy.copy(self)
        other.experts = experts
        other._layers = [layer.with_experts(experts) for layer in self._layers]
        return other

    def head(self, stack_TGD: mx.array) -> mx.array:
        """Return logits [T, V] of stacks after the last layer."""
        return self._head(self._mixer(stack_TGD))

    def embed(self, ids_T: mx.array) -> mx.array:
        """Return the raw embedding rows [T, D] of ids on the device, padding rows included, lazy."""
        return self._embed(ids_T)

    def unembed(self, hidden_TD: mx.array) -> mx.array:
        """Return logits [T, V] of contracted hidden states: the head alone, without the terminal mixer."""
        return self._head(hidden_TD)

    def mtp_cell(self, weights: WeightSource, experts: ExpertProvider, sync: HostSync) -> MtpCell:
        """Return the checkpoint's MTP module, which shares this model's embedding and head."""
        return MtpCell(self.config, weights, experts, sync, embed=self._embed, head=self._head)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.config.vocab_size:
            raise StateError(
                f"Token id {low if low < 0 else high} is outside the vocabulary of {self.config.vocab_size}",
                hint="the tokenizer does not belong to this checkpoint",
            )
