"""Proposals from the module that the checkpoint ships for this: one layer that predicts the token after next.

Entry point: `MtpDrafter`. A cell for row i takes the target's stack there and the token at i + 1; a deeper
cell takes the stack of the cell before and the token that one proposed.

Invariants:
D1. The cache holds one cell for every row the target keeps but the last, each made from the target's own
    stack and the committed token after it: exactly what a fresh run over the committed tokens would hold.
D2. The last row is held back with its stack, because the token after it, the anchor, is not a row yet.
D3. Cells of a proposal, that of the last row first, are appended to be looked at and dropped before `propose`
    returns: rows of rejected steps are never kept (phantom keys made acceptance decay elsewhere).

Cost. `observe` computes keys and values only, never attention, experts or logits, and waits for nothing.
`propose(k)` runs k cells of one row: k waits for expert ids where the layer is streamed, none where it is
resident, and one for the tokens.

Source: qwen4exp.md 2.9; dflash2.md 4.1.
"""

# Shapes: T rows, G streams, D hidden, k proposals, K candidates, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from drafter.api import MAX_PROPOSALS, DraftSampling, Draw, Law, Proposal, TargetView
from drafter.errors import DrafterError

# Candidates of a drawn proposal: the target's own default keeps 20.
NUM_CANDIDATES = 20


@dataclass(frozen=True, slots=True)
class _LastRow:
    """The latest row: its stack [1, G, D] and the committed token after it."""

    stack: mx.array
    anchor: int


@dataclass(frozen=True, slots=True)
class MtpSnapshot:
    """A mark in the cache, and the row held back then (None before the first)."""

    mark: object
    last: _LastRow | None


class MtpDrafter:
    """Proposes with the checkpoint's MTP module.

    Args:
        target: runs the module's cells.
        draw: draws a candidate for a target that samples; None to propose the likeliest token always.

    Attributes:
        law: of its proposals to a target that samples; to a greedy one they are always point masses.
        num_cells: cells run for proposals so far.
    """

    kind = "mtp"
    needs_stack = True

    def __init__(self, target: TargetView, draw: Draw | None = None) -> None:
        self._target = target
        self._draw = draw
        self.law: Law = "point" if draw is None else "rows"
        self._cache = target.new_cache()
        self._last: _LastRow | None = None
        self.num_cells = 0

    def max_proposals(self) -> int:
        """Return the most tokens that one proposal may have."""
        return MAX_PROPOSALS

    def reset(self) -> None:
        """Forget the sequence."""
        self._cache = self._target.new_cache()
        self._last = None

    def observe(self, tokens: Sequence[int], next_token: int, stack_TGD: mx.array | None) -> None:
        """Cache the row held back and all of these but the last; see `Drafter`.

        Raises:
            DrafterError: no stack, or not one for every row.
        """
        num_stacks = 0 if stack_TGD is None else stack_TGD.shape[0]
        if stack_TGD is None or num_stacks != len(tokens) or not tokens:
            raise DrafterError(
                f"{num_stacks} stacks for {len(tokens)} rows", hint="hand over the stack of every kept row"
            )
        # The first token says what really came after the row held back, whatever the anchor was then.
        stacks = [] if self._last is None else [self._last.stack]
        followers = list(tokens) if self._last is not None else list(tokens[1:])
        if num_stacks > 1:
            stacks.append(stack_TGD[:-1])
        if followers:
            self._target.extend(mx.concatenate(stacks), followers, self._cache)
        # Not a slice: that would hold the stacks of the whole chunk, and so would every snapshot.
        last_1GD = mx.take(stack_TGD, mx.array([num_stacks - 1]), axis=0) if num_stacks > 1 else stack_TGD
        mx.async_eval(last_1GD)
        self._last = _LastRow(last_1GD, next_token)

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Return `k` tokens, each from a cell of its own; none before the first row. See `Drafter`."""
        k = min(k, MAX_PROPOSALS)
        if self._last is None or k <= 0:
            return Proposal(())
        mark = self._target.mark(self._cache)
        try:
            return self._run(self._last, k, sampling)
        finally:
            self._target.rewind(self._cache, mark)

    def snapshot(self) -> MtpSnapshot:
        """Return references to the cache and the row held back; nothing is copied."""
        return MtpSnapshot(self._target.mark(self._cache), self._last)

    def restore(self, snapshot: object) -> None:
        """Go back to a snapshot of this sequence.

        Raises:
            DrafterError: it is none of this sequence's, or later rows have replaced its own.
        """
        if not isinstance(snapshot, MtpSnapshot):
            raise DrafterError("This is no snapshot of an mtp drafter", hint="observe from the start")
        self._target.rewind(self._cache, snapshot.mark)
        self._last = snapshot.last

    def num_bytes(self) -> int:
        """Return the bytes of the cache and the row held back."""
        held = [] if self._last is None else [self._last.stack]
        return sum(array.nbytes for array in (*self._cache.arrays(), *held))

    def describe(self) -> dict[str, object]:
        """Return kind, law and counters."""
        return {"kind": self.kind, "law": self.law, "cells": self.num_cells}

    def _run(self, last: _LastRow, k: int, sampling: DraftSampling) -> Proposal:
        """Append k cells and read what they propose."""
        stack_1GD, token = last.stack, [last.anchor]
        is_drawn = self._draw is not None and sampling.temperature > 0
        chosen: list[mx.array] = []
        rows: list[tuple[mx.array, mx.array]] = []
        for step in range(k):
            logits_1V, stack_1GD = self._target.run_cell(stack_1GD, token, self._cache)
            if is_drawn:
                token, candidates_K, probs_K = self._drawn(logits_1V[0], step, sampling)
                rows.append((candidates_K, probs_K))
            else:
                token = mx.argmax(logits_1V, axis=-1).astype(mx.int32)
            chosen.append(token)
        self.num_cells += k
        tokens = tuple(int(one) for one in self._target.to_host(mx.concatenate(chosen)))
        if not is_drawn:
            return Proposal(tokens)
        ids_kK, probs_kK = (mx.stack(list(column)) for column in zip(*rows, strict=True))
        return Proposal(tokens, "rows", ids_kK, probs_kK)

    def _drawn(
        self, logits_V: mx.array, step: int, sampling: DraftSampling
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Draw a token [1] from the likeliest candidates; return it, their ids and their probabilities."""
        assert self._draw is not None
        num = min(NUM_CANDIDATES, logits_V.shape[0])
        ids_K = mx.argsort(-logits_V)[:num].astype(mx.int32)
        scores_K = logits_V[ids_K].astype(mx.float32) / sampling.temperature
        index = self._draw(scores_K, sampling.seed, sampling.position + step)
        return ids_K[index].reshape(1), ids_K, mx.softmax(scores_K)
