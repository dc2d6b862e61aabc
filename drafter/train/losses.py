"""What a draft is trained to do, as one number: say the target's tokens, and choose among its own candidates.

Entry point: `losses`. A slot later in the block counts less, since it is looked at only if all before it
were right. The selector is asked about the draft's own candidates, given the true token before; a slot
whose truth is not among them teaches it nothing.

Source: dflash2.md 5.3.
"""

# Shapes: A anchors, B slots, H hidden, V vocabulary, K candidates, N = A * (B - 1) judged slots.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from drafter.block import LayerContext, hidden_states
from drafter.config import DraftConfig
from drafter.fuse import context_keys_values, fuse
from drafter.layers import Params, rotary_frequencies
from drafter.selector import candidates, project, slot_scores, unary_logits
from drafter.train.batches import Blocks
from drafter.train.schedule import slot_weights


class FrozenTarget(Protocol):
    """What a trainer borrows of the target; gradients pass through and stop at its weights."""

    def embed(self, ids_T: mx.array) -> mx.array:
        """Return the raw embedding rows [T, H]."""
        ...

    def head(self, hidden_TD: mx.array) -> mx.array:
        """Return logits [T, V] by the output head alone."""
        ...


class Losses(NamedTuple):
    """Lazy float32 scalars.

    Attributes:
        base: weighted mean of the cross entropy of all slots.
        selector: of the choice among candidates, over slots whose truth is one of them; 0 without selector.
        accuracy: share of first slots whose best logit is right.
        recall: share of slots whose truth is among the candidates: the selector's ceiling.
    """

    base: mx.array
    selector: mx.array
    accuracy: mx.array
    recall: mx.array


def block_hidden(params: Params, config: DraftConfig, target: FrozenTarget, blocks: Blocks) -> mx.array:
    """Return final-normed hidden states [A, B - 1, H] of the slots after the anchors."""
    return block_states(params, config, target, blocks)[0][:, 1:]


def block_states(
    params: Params, config: DraftConfig, target: FrozenTarget, blocks: Blocks
) -> tuple[mx.array, mx.array]:
    """Return final-normed hidden states [A, B, H] of all slots, and the fused context rows [R, H]."""
    freqs = rotary_frequencies(config.rope_theta, config.head_dim)
    fused = fuse(params, config, mx.array(blocks.features).astype(params["fc.weight"].dtype))
    positions = blocks.first + np.arange(len(blocks.features), dtype=np.int32)
    contexts = [
        LayerContext(*context_keys_values(params, config, layer, fused, blocks.first, freqs), positions)
        for layer in range(config.num_layers)
    ]
    ids = np.full((len(blocks.starts), config.block_size), config.mask_token_id, np.int32)
    ids[:, 0] = blocks.anchors
    embeddings = mx.stop_gradient(target.embed(mx.array(ids.reshape(-1)))).astype(fused.dtype)
    embeddings = embeddings.reshape(*ids.shape, -1)
    return hidden_states(params, config, embeddings, blocks.starts, contexts, freqs), fused


def losses(
    params: Params,
    config: DraftConfig,
    target: FrozenTarget,
    batch: Sequence[Blocks],
    *,
    gamma: float,
    num_ids: int | None,
) -> Losses:
    """Return the losses of a step.

    Args:
        params: of the draft; gradients are with respect to them.
        config: of the draft.
        target: embedding and head.
        batch: blocks of several documents, none of which sees another.
        gamma: of `schedule.slot_weights`.
        num_ids: ids from here on are no tokens.
    """
    hidden = [block_hidden(params, config, target, blocks) for blocks in batch]
    rows_NH = mx.concatenate(hidden).reshape(-1, config.hidden_size)
    targets = mx.array(np.concatenate([blocks.targets for blocks in batch]).reshape(-1, 1))
    weights = mx.tile(
        mx.array(slot_weights(config.max_proposals, gamma)), len(rows_NH) // config.max_proposals
    )
    logits_NV = unary_logits(config, target.head, rows_NH, num_ids)
    said = mx.logsumexp(logits_NV, axis=-1) - mx.take_along_axis(logits_NV, targets, axis=-1).squeeze(-1)
    base = (weights * said).sum() / weights.sum()
    first = (mx.argmax(logits_NV, axis=-1) == targets.squeeze(-1)).reshape(-1, config.max_proposals)[:, 0]
    if not config.has_selector:
        nothing = mx.array(0.0)
        return Losses(base, nothing, first.mean(), nothing)
    # Which candidates they are is no smooth function of anything; their logits are.
    ids_NK = candidates(mx.stop_gradient(logits_NV), config.top_k).ids
    true = mx.array(np.concatenate([blocks.predecessors for blocks in batch]).reshape(-1))
    scores_NK = slot_scores(
        params, true, project(params, rows_NH), ids_NK, mx.take_along_axis(logits_NV, ids_NK, axis=-1)
    )
    is_truth_NK = ids_NK == targets
    is_there = is_truth_NK.any(axis=-1)
    chosen = mx.logsumexp(scores_NK, axis=-1) - mx.where(is_truth_NK, scores_NK, 0).sum(axis=-1)
    counted = weights * is_there
    selector = (counted * chosen).sum() / mx.maximum(counted.sum(), 1e-6)
    return Losses(base, selector, first.mean(), is_there.mean())
