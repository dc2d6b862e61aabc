"""The main loop of flashnext: one cycle proposes, verifies and commits. READ THIS FIRST.

A cycle verifies a block of B = k + 1 rows: the anchor, which is the last committed token and has not been
through the target yet, and k proposals of a drafter. The target runs the whole block in one forward pass;
verification keeps the a proposals that the target would have chosen itself and adds one token of the target's
own, the correction or the bonus. Plain decode is k = 0: there is no second loop.

    1  propose    the drafter guesses what follows the anchor; the governor says how many tokens pay. What a
                  route sidecar knows of the anchor's row is read ahead while the draft runs
    2  hint       guesses of the block's routes become reads ahead; n-gram rows are issued: they are known
    3  forward    every layer: mix, route (ids to the host: the one wait of a streamed layer), slots, compute;
                  what the layer says of later ones is handed over while its own records are on their
                  way, or while the device computes it if all of them are there
    4  verify     accepted prefix and one token more; reading them is the last wait
    5  admit      the answer may end inside the block: stop ids, stop strings
    6  commit     everything the sequence carries moves to the last kept row, all or nothing
    7  observe    the drafter sees the kept rows, and no others
    8  advance    the generation moves on: leases end, tickets of the past lose their owner

Waits for the device per cycle: one per streamed layer, plus one, plus those of the drafter: one for a block
draft's proposal, and one for an early route hint, whose value is there before the draft has run.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx

from drafter.api import Drafter, Proposal, RouteDrafter, RouteHints
from expert_store.store import ExpertStore
from mlx_flashnext.engine.drafting import Drafting, DraftSnapshot
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.hints import LONGEST_HINT, Hints
from mlx_flashnext.engine.laps import NO_LAPS, Laps
from mlx_flashnext.engine.sampler import Sampler
from mlx_flashnext.engine.verify import Verdict, verify
from mlx_flashnext.experts import StreamedExperts
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.model.host import HostSync, fence
from mlx_flashnext.rows import StreamedRows
from mlx_flashnext.state import Block, SequenceState, Snapshot


@dataclass(slots=True)
class Target:
    """The verified model with everything one forward pass touches.

    Attributes:
        model: the network.
        experts: where routed experts come from.
        store: the expert store behind them.
        rows: where rows of the n-gram table come from.
        sync: counter of waits for the device.
    """

    model: FlashNext
    experts: StreamedExperts
    store: ExpertStore
    rows: StreamedRows
    sync: HostSync


@dataclass(frozen=True, slots=True)
class TimelineSnapshot:
    """A timeline as it was; see `Timeline.restore`."""

    num_tokens: int
    state: Snapshot
    drafting: DraftSnapshot


@dataclass(frozen=True, slots=True)
class CycleFacts:
    """What one cycle did, for who writes it down.

    Attributes:
        position: tokens that the target had consumed before it.
        generation: of the owner while it ran.
        anchor: the last committed token before it.
        proposal: what was verified behind the anchor.
        verdict: what verification said.
        num_kept: tokens that the answer took, at least one; as many rows stay.
        logits: [T, V] of every row of the block, on the device.
        seen: stack and features of the rows that stay, as the drafter got them.
    """

    position: int
    generation: int
    anchor: int
    proposal: Proposal
    verdict: Verdict
    num_kept: int
    logits: mx.array
    seen: tuple[mx.array | None, mx.array | None]


class CycleObserver(Protocol):
    """Watches a timeline; nothing it does reaches the answer."""

    def cycle_ended(self, facts: CycleFacts, sampler: Sampler) -> None:
        """Take note of a cycle. The sampler has not seen the kept tokens yet. Must not raise."""
        ...


class Timeline:
    """One sequence in the making: what the state has consumed, the anchor, and the generation.

    Invariants:
        I1  `hints` hears of passes and hands over reads; nothing it says reaches model, state or verdict.
        I2  `tokens` are exactly the tokens that `state` has consumed; the anchor is not among them.

    Attributes:
        turns: where turns began, as far as that is kept; snapshots of this timeline and of no other.
        observer: watches cycles.
        laps: told where the phases of a cycle end.
    """

    def __init__(
        self,
        target: Target,
        state: SequenceState,
        drafter: Drafter | None,
        governor: Governor,
        owner: int,
        hints: Hints | None = None,
    ) -> None:
        self.target = target
        self.state = state
        self.owner = owner
        self.hints = hints
        self.tokens: list[int] = []
        self.turns: list[TimelineSnapshot] = []
        self._governor = governor
        self._route_drafter = cast("RouteDrafter", drafter) if hasattr(drafter, "tells_routes") else None
        self.drafting = Drafting(drafter, governor, target.model.config.vocab_size, self.tokens)
        self.generation = 0
        self.observer: CycleObserver | None = None
        self.laps: Laps = NO_LAPS

    def consume(self, chunk: Sequence[int], next_token: int, rows_after: int = 0) -> None:
        """Run one prefill chunk: the same forward pass without proposing and verifying.

        Args:
            chunk: token ids; their logits are not computed.
            next_token: the prompt's token after them.
            rows_after: rows of the prompt behind this chunk.
        """
        wants = self.drafting.wants(rows_after)
        with self._pass(chunk, is_revocable=False) as block:
            output = self.target.model.forward(
                chunk, block, logits="none", taps=wants.taps, contraction=wants.contraction
            )
            self.target.experts.device_busy()
            fence(self.target.sync, output.stack)
            block.commit()
        self._advance(chunk)
        self.drafting.observe(chunk, next_token, wants.seen(output, len(chunk)))

    def cycle(
        self, anchor: int, sampler: Sampler, room: int, admit: Callable[[Sequence[int]], int]
    ) -> tuple[int, ...]:
        """Run one cycle and return the tokens it commits; the last of them is the next anchor.

        Args:
            anchor: the last committed token.
            sampler: chooses from the logits; it has seen every committed token, the anchor included.
            room: most proposals that the answer's budget and context allow.
            admit: told what verification kept, says how many of those the answer takes, at least one.
        """
        began_ns = time.perf_counter_ns()
        target, drafting, laps = self.target, self.drafting, self.laps
        target.experts.owner = self.owner
        if self.hints is not None:
            self.hints.set_level(self._governor.least_right)
        if self._route_drafter is not None:
            self._route_drafter.tells_routes = self.hints is not None and self.hints.wants_routes
            self._route_drafter.hears_early = self._read_early
        laps.begin()
        proposal = drafting.propose(room, sampler)
        laps.end("draft")
        tokens = [anchor, *proposal.tokens]
        wants = drafting.wants()
        with self._pass(tokens, is_revocable=True, routes=proposal.routes) as block:
            output = target.model.forward(
                tokens, block, logits="all", taps=wants.taps, contraction=wants.contraction
            )
            assert output.logits is not None
            target.experts.device_busy()
            verdict = verify(output.logits, proposal, sampler, drafting.rule, target.sync)
            laps.end("verify")
            kept = verdict.tokens[: admit(verdict.tokens)]
            laps.begin()
            block.commit(len(kept))
            laps.end("commit", self.state.carried.arrays)
        self._advance(tokens[: len(kept)])
        laps.begin()
        seen = wants.seen(output, len(kept))
        drafting.observe(tokens[: len(kept)], kept[-1], seen)
        laps.end("observe")
        laps.cycle(len(tokens), len(kept))
        took_ns = time.perf_counter_ns() - began_ns
        drafting.count(len(proposal.tokens), min(verdict.accepted, len(kept)), len(kept), took_ns)
        if self.observer is not None:
            position, generation = len(self.tokens) - len(kept), self.generation - 1
            facts = CycleFacts(
                position, generation, anchor, proposal, verdict, len(kept), output.logits, seen
            )
            self.observer.cycle_ended(facts, sampler)
        return kept

    def snapshot(self) -> TimelineSnapshot:
        """Return references to everything as it is now."""
        return TimelineSnapshot(len(self.tokens), self.state.snapshot(), self.drafting.snapshot())

    def restore(self, snapshot: TimelineSnapshot) -> None:
        """Go back to a snapshot of this timeline; later snapshots are void from then on."""
        self.state.restore(snapshot.state)
        self.drafting.restore(snapshot.drafting)
        del self.tokens[snapshot.num_tokens :]
        self._advance(())

    def rest(self) -> None:
        """End an answer, well or not: what was read ahead for it is nobody's any more.

        Another answer may be running on the same target, in the middle of any step.
        """
        self.generation += LONGEST_HINT + 1
        self.target.store.leave(self.owner, self.generation)

    @contextmanager
    def _pass(
        self, tokens: Sequence[int], *, is_revocable: bool, routes: RouteHints | None = None
    ) -> Generator[Block]:
        """Open a block; within, the experts know whose it is and who listens, and what is guessed is read."""
        experts = self.target.experts
        experts.owner, experts.generation = self.owner, self.generation
        experts.num_unverified = len(tokens) if is_revocable and len(tokens) > 1 else 0
        experts.listener = self.hints
        try:
            if self.hints is not None:
                position = len(self.tokens)
                ahead = self.hints.begin(tokens, position, is_prefill=not is_revocable, routes=routes)
                experts.hand_over(ahead)
            with self.state.begin(len(tokens), revocable=is_revocable) as block:
                yield block
        finally:
            experts.end_pass()

    def _read_early(self, routes: RouteHints) -> None:
        """Read ahead for the block to come what the drafter says before it has proposed."""
        if self.hints is None:
            return
        experts = self.target.experts
        experts.generation, experts.listener = self.generation, self.hints
        try:
            experts.hand_over(self.hints.early(routes))
        finally:
            experts.listener = None

    def _advance(self, consumed: Sequence[int]) -> None:
        self.target.experts.device_idle()
        self.tokens.extend(consumed)
        self.generation += 1
        self.target.store.advance(self.owner, self.generation, num_rows=len(consumed))
        if self.hints is not None:
            self.hints.commit(len(consumed))
