"""How well a draft drafts, from captured documents alone: its own greedy paths against what the target said.

Entry points: `judge_document`, `Judged`, `summarise`. Figures follow the emitted path, not the best
logits. A cycle accepts the agreeing prefix and commits one token more, so what greedy service would do on
a document - where cycles begin, how many tokens each commits - follows exactly from the paths at every
position.

Source: dflash2.md 1.10, 2.1; defect 38.
"""

# Shapes: A anchors, B slots, H hidden, K candidates.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.config import DraftConfig
from drafter.layers import Params
from drafter.selector import candidates, project, slot_scores, unary_logits
from drafter.train.batches import Blocks, blocks_at
from drafter.train.captures import CapturedDocument
from drafter.train.losses import FrozenTarget, block_hidden

ToHost = Callable[[mx.array], Any]
BINS = 10


@dataclass(frozen=True, slots=True)
class Judged:
    """Greedy paths at some positions of a document.

    Attributes:
        starts: int32 [A], positions of the anchors.
        is_right: [A, B - 1], whether the path's token is the target's; False beyond the document's end.
        best_is_right: the same for every slot's best logit, which no predecessor changes.
        is_candidate: whether the target's token is among the candidates.
        confidence: float32 [A, B - 1] of the path's tokens.
        num_after: int32 [A], tokens of the document after each anchor.
    """

    starts: NDArray[np.int32]
    is_right: NDArray[np.bool_]
    best_is_right: NDArray[np.bool_]
    is_candidate: NDArray[np.bool_]
    confidence: NDArray[np.float32]
    num_after: NDArray[np.int32]

    @property
    def accepted(self) -> NDArray[np.int64]:
        """Return the length of every agreeing prefix [A]."""
        return np.cumprod(self.is_right, axis=1).sum(axis=1)


def judge_document(
    params: Params,
    config: DraftConfig,
    target: FrozenTarget,
    to_host: ToHost,
    document: CapturedDocument,
    *,
    num_ids: int | None,
    every: int = 1,
    use_selector: bool = True,
    most_at_once: int = 64,
) -> Judged:
    """Draft at the positions of a document's answer.

    Args:
        params: of the draft.
        config: of the draft.
        target: embedding and head.
        to_host: waits for an array and returns its values.
        document: with features at the draft's taps.
        num_ids: ids from here on are no tokens.
        every: look at one position in so many.
        use_selector: False takes every slot's best logit.
        most_at_once: blocks of one pass.
    """
    padded = _padded(document, config.block_size)
    starts = list(range(max(1, document.num_prompt - 1), len(document.tokens) - 1, every))
    pieces: list[list[Any]] = []
    for first in range(0, len(starts), most_at_once):
        blocks = blocks_at(padded, starts[first : first + most_at_once], config.block_size, _reach(config))
        pieces.append(_paths(params, config, target, to_host, blocks, num_ids, use_selector))
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    after = len(document.tokens) - 1 - np.asarray(starts)
    exists = np.arange(config.max_proposals)[None] < after[:, None]
    right, best, among, confidence = columns
    return Judged(
        np.asarray(starts, np.int32),
        right.astype(bool) & exists,
        best.astype(bool) & exists,
        among.astype(bool) & exists,
        confidence.astype(np.float32),
        after.astype(np.int32),
    )


class Cycle(NamedTuple):
    """One cycle of greedy service: the anchor's position, proposals accepted, tokens committed."""

    start: int
    accepted: int
    committed: int


def cycles_of(judged: Judged, num_proposals: int) -> list[Cycle]:
    """Return the cycles of greedy service of a document; the last one commits nothing beyond its end.

    Args:
        judged: at every position of the answer.
        num_proposals: k of every cycle.
    """
    accepted = np.minimum(judged.accepted, num_proposals)
    place, found = 0, list[Cycle]()
    while place < len(accepted):
        committed = min(int(accepted[place]) + 1, int(judged.num_after[place]))
        found.append(Cycle(int(judged.starts[place]), int(accepted[place]), committed))
        place += committed
    return found


def summarise(judged: Sequence[Judged], num_proposals: int) -> dict[str, Any]:
    """Return the figures of some documents as plain values; see docs/FORMATS.md, draft evaluation."""
    right = np.concatenate([one.is_right for one in judged])
    after = np.concatenate([one.num_after for one in judged])
    slots = np.arange(right.shape[1])
    exists = slots[None] < after[:, None]
    kept = np.cumprod(right, axis=1).astype(bool)
    reached = np.concatenate([np.ones((len(right), 1), bool), kept[:, :-1]], axis=1) & exists
    cycles = [cycle for one in judged for cycle in cycles_of(one, num_proposals)]
    committed = sum(cycle.committed for cycle in cycles)
    confidence = np.concatenate([one.confidence for one in judged])

    def share(hits: NDArray[Any], asked: NDArray[Any]) -> list[float]:
        return (hits.sum(axis=0) / np.maximum(asked.sum(axis=0), 1)).round(6).tolist()

    return {
        "num_positions": len(right),
        "num_cycles": len(cycles),
        "num_committed": committed,
        "tokens_per_cycle": committed / max(1, len(cycles)),
        "accuracy_by_slot": share(right, exists),
        "acceptance_by_slot": share(kept, exists),
        "conditional_by_slot": share(kept, reached),
        "best_logit_by_slot": share(np.concatenate([one.best_is_right for one in judged]), exists),
        "recall_by_slot": share(np.concatenate([one.is_candidate for one in judged]), exists),
        "mean_prefix": float(kept.sum(axis=1).mean()) if len(kept) else 0.0,
        "calibration": calibration(confidence[reached], kept[reached]),
    }


def calibration(confidence: NDArray[np.float32], is_right: NDArray[np.bool_]) -> dict[str, Any]:
    """Return how often tokens of each confidence are accepted, given that all before them were.

    `expected_error` is the mean distance of the two over tokens; the table is what a reader of `confidence`
    may use in its place.
    """
    bins = np.clip((confidence * BINS).astype(int), 0, BINS - 1)
    table: list[dict[str, float]] = []
    error = 0.0
    for each in range(BINS):
        inside = bins == each
        if not inside.any():
            continue
        said, found = float(confidence[inside].mean()), float(is_right[inside].mean())
        table.append({"confidence": said, "accepted": found, "num_tokens": int(inside.sum())})
        error += inside.sum() * abs(said - found)
    return {"table": table, "expected_error": float(error / max(1, len(confidence)))}


def _paths(
    params: Params,
    config: DraftConfig,
    target: FrozenTarget,
    to_host: ToHost,
    blocks: Blocks,
    num_ids: int | None,
    use_selector: bool,
) -> list[Any]:
    """Return right, best right, among candidates and confidence, [A, B - 1] each."""
    hidden = block_hidden(params, config, target, blocks)
    num_blocks, num_slots, _ = hidden.shape
    rows = hidden.reshape(num_blocks * num_slots, -1)
    logits = unary_logits(config, target.head, rows, num_ids)
    targets = mx.array(blocks.targets)
    best = mx.argmax(logits, axis=-1).reshape(num_blocks, num_slots)
    if not config.has_selector:
        top = mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1)).reshape(num_blocks, num_slots)
        right = best == targets
        return [to_host(x) for x in (right, right, right, top)]
    slots = candidates(logits, config.top_k)
    ids = slots.ids.reshape(num_blocks, num_slots, -1)
    unary = slots.logits.reshape(num_blocks, num_slots, -1)
    projected = project(params, rows).reshape(num_blocks, num_slots, -1)
    before, right, confidence = mx.array(blocks.anchors), list[mx.array](), list[mx.array]()
    for slot in range(num_slots):
        scores = unary[:, slot]
        if use_selector:
            scores = slot_scores(params, before, projected[:, slot], ids[:, slot], scores)
        index = mx.argmax(scores, axis=-1)[:, None]
        before = mx.take_along_axis(ids[:, slot], index, axis=-1).squeeze(-1)
        right.append(before == targets[:, slot])
        confidence.append(mx.take_along_axis(mx.softmax(scores, axis=-1), index, axis=-1).squeeze(-1))
    among = (ids == targets[..., None]).any(axis=-1)
    return [
        to_host(x) for x in (mx.stack(right, axis=1), best == targets, among, mx.stack(confidence, axis=1))
    ]


def _padded(document: CapturedDocument, block_size: int) -> CapturedDocument:
    """Return the document with room for a block at its end; what is added is never counted."""
    more = np.zeros(block_size, np.int32)
    return CapturedDocument(
        np.concatenate([document.tokens, more]), document.num_prompt, document.features, document.routes
    )


def _reach(config: DraftConfig) -> int | None:
    """Return the rows before an anchor that the draft can see, None for all."""
    return config.window if config.all_slide else None
