"""From hidden states to proposed tokens: logits, K candidates a slot, and one walk from left to right.

Entry points: `unary_logits`, `candidates`, `walk`; `slot_scores` is the one formula, for a walk's row, for a
whole lattice, and for a trainer's true predecessors.

Invariants:
S1. A walked token and the row it was drawn from share predecessor, temperature and candidates: the row is
    the law of the token. Nothing edits either afterwards.
S2. Everything here is float32 and stays on the device: the walk is one graph, no slot waits.
S3. Candidates of a slot stand in ascending id, so that among equal scores the lowest id is chosen.

Source: dflash2.md 1.8 and 1.10, statements 11 and 12. The selector applies no top-p, top-k or min-p.
"""

# Shapes: T slots, H hidden, V vocabulary, K candidates, R rank.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from drafter.config import DraftConfig
from drafter.layers import Params, linear

# Ids looked at together when the largest are sought.
_GROUP = 256

# (scores [K], position of the proposed token) -> index of the drawn candidate, a lazy scalar.
DrawSlot = Callable[[mx.array, int], mx.array]


class Candidates(NamedTuple):
    """Of every slot: ids int32 [T, K] in ascending order, their logits float32 [T, K]."""

    ids: mx.array
    logits: mx.array


class Path(NamedTuple):
    """A walk, on the device.

    Attributes:
        tokens: int32 [T].
        ids: int32 [T, K]: the slot's candidates.
        probs: float32 [T, K] over the slot's candidates: softmax of the scores at the draft's temperature.
        confidence: float32 [T]: the chosen candidate's share at temperature 1.
        scores: float32 [T, K], given the walked predecessors.
    """

    tokens: mx.array
    ids: mx.array
    probs: mx.array
    confidence: mx.array
    scores: mx.array


def unary_logits(
    config: DraftConfig, head: Callable[[mx.array], mx.array], hidden_TH: mx.array, num_ids: int | None = None
) -> mx.array:
    """Return float32 logits [T, V] of slots, as the selector adds them.

    Args:
        config: of the draft.
        head: the target's own output head; neither its final norm nor its terminal mixer.
        hidden_TH: final-normed.
        num_ids: ids at and above it are no tokens, nor is the mask id: they get minus infinity. None leaves
            them in, as the reference does.
    """
    logits = head(hidden_TH).astype(mx.float32)
    logits = capped(config, logits)
    ids = mx.arange(logits.shape[-1])
    if config.selector_vocab_size is not None:
        logits = mx.where(ids < config.selector_vocab_size, logits, -mx.inf)
    if num_ids is not None:
        logits = mx.where((ids < num_ids) & (ids != config.mask_token_id), logits, -mx.inf)
    return logits


def capped(config: DraftConfig, logits: mx.array) -> mx.array:
    """Return logits times the multiplier, then through the cap."""
    if config.multiplier != 1:
        logits = logits * config.multiplier
    if config.softcap is not None:
        logits = config.softcap * mx.tanh(logits / config.softcap)
    return logits


def candidates(logits_TV: mx.array, top_k: int) -> Candidates:
    """Return the `top_k` largest logits of every slot.

    The largest k lie in the k groups of ids with the largest maxima: a vocabulary of a quarter million is
    looked through once, and only those groups are sorted.
    """
    slots, vocabulary = logits_TV.shape
    chosen = logits_TV
    ids = mx.broadcast_to(mx.arange(vocabulary, dtype=mx.int32), logits_TV.shape)
    if vocabulary > 2 * top_k * _GROUP:
        whole = mx.pad(logits_TV, [(0, 0), (0, -vocabulary % _GROUP)], constant_values=mx.array(-mx.inf))
        grouped = whole.reshape(slots, -1, _GROUP)
        groups = _largest(grouped.max(axis=-1), top_k)
        chosen = mx.take_along_axis(grouped, groups[..., None], axis=1).reshape(slots, -1)
        ids = (groups[..., None] * _GROUP + mx.arange(_GROUP, dtype=mx.int32)).reshape(slots, -1)
    ids = mx.sort(mx.take_along_axis(ids, _largest(chosen, top_k), axis=-1), axis=-1)
    return Candidates(ids, mx.take_along_axis(logits_TV, ids, axis=-1))


def _largest(values_TN: mx.array, k: int) -> mx.array:
    """Return where the k largest values of every row are, in no order: int32 [T, k]."""
    if k >= values_TN.shape[-1]:
        return mx.broadcast_to(mx.arange(values_TN.shape[-1], dtype=mx.int32), values_TN.shape)
    return mx.argpartition(-values_TN, k - 1, axis=-1)[:, :k].astype(mx.int32)


def project(params: Params, hidden_TH: mx.array) -> mx.array:
    """Return what the selector reads of every slot's own hidden state: float32 [T, R]."""
    return linear(params, "candidate_selector.hidden_projection", hidden_TH).astype(mx.float32)


def slot_scores(
    params: Params, predecessors: mx.array, projected: mx.array, ids: mx.array, logits: mx.array
) -> mx.array:
    """Return the score of every candidate given what stands before it: logits' shape, float32.

    Args:
        params: of the draft.
        predecessors: ids, any shape [...].
        projected: from `project`, [..., R].
        ids: of the candidates, [..., K].
        logits: of the candidates, [..., K].
    """
    before = params["candidate_selector.predecessor_codebook"][predecessors].astype(mx.float32)
    after = params["candidate_selector.successor_codebook"][ids].astype(mx.float32)
    return logits + (after * (before * projected)[..., None, :]).sum(axis=-1)


def walk(
    params: Params,
    anchor: int,
    projected_TR: mx.array,
    slots: Candidates,
    *,
    temperature: float,
    position: int,
    draw: DrawSlot,
) -> Path:
    """Choose a token slot by slot, each given the one chosen before.

    Args:
        params: of the draft.
        anchor: id before the first slot.
        projected_TR: from `project`.
        slots: candidates.
        temperature: of the draft; 0 takes the best score.
        position: of the first slot's token.
        draw: draws from scores over the temperature; not called at temperature 0.
    """
    before = mx.array(anchor, mx.int32)
    tokens, probs, confidence, all_scores = [], [], [], []
    for slot in range(slots.ids.shape[0]):
        scores = slot_scores(params, before, projected_TR[slot], slots.ids[slot], slots.logits[slot])
        law = scores if temperature == 0 else scores * (1.0 / temperature)
        index = mx.argmax(scores) if temperature == 0 else draw(law, position + slot)
        before = slots.ids[slot][index]
        tokens.append(before)
        probs.append(mx.softmax(law))
        confidence.append(mx.softmax(scores)[index])
        all_scores.append(scores)
    return Path(mx.stack(tokens), slots.ids, mx.stack(probs), mx.stack(confidence), mx.stack(all_scores))


def best_tokens(logits_TV: mx.array) -> Path:
    """Return the best logit of every slot: all that a draft without selector can say."""
    tokens = mx.argmax(logits_TV, axis=-1).astype(mx.int32)
    scores = mx.max(logits_TV, axis=-1, keepdims=True)
    confidence = mx.exp(scores - mx.logsumexp(logits_TV, axis=-1, keepdims=True)).squeeze(-1)
    return Path(tokens, tokens[:, None], mx.ones_like(scores), confidence, scores)
