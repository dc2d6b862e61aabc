"""A drafter at work on one timeline: who proposes, who was dropped, and why. Entry point: `Drafting`.

The answer never depends on anything here: a drafter that raises is dropped for the answer, counted, and
named once; one that does not pay rests.

Invariants:
N1  A drafter in use has observed every row the timeline keeps, once and in order. One that was dropped, or
    rested for long, has seen a gap: it comes back only by `reset`, with the tokens and without the values it
    missed. One that rested a while is told what it missed before it is asked anything (`rested.py`); one that
    reads features comes back with the next answer, whose prompt it looks at.
N2  A proposal is checked before it is used: tokens of this vocabulary, no more than were asked for.

Source: dflash2.md 4.2, 4.4.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from drafter.api import Drafter, FeatureDrafter, FeatureRequest, Proposal
from drafter.errors import DrafterError
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.rested import RestedRows
from mlx_flashnext.engine.sampler import Sampler
from mlx_flashnext.engine.stats import DraftStatistics
from mlx_flashnext.engine.verify import Asked, Rule, check_proposal, draft_sampling, resolve_rule
from mlx_flashnext.model.flashnext import Contraction, ForwardOutput

_log = logging.getLogger(__name__)

NOTHING = Proposal(())


@dataclass(frozen=True, slots=True)
class DraftSnapshot:
    """The drafter's own snapshot, None if it has seen a gap; and the token it was told comes next."""

    inner: object | None
    next_token: int


@dataclass(frozen=True, slots=True)
class Wants:
    """What a drafter will look at of the rows of one forward pass: their stacks, features, or nothing."""

    stack: bool = False
    request: FeatureRequest | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the layers to tap."""
        return () if self.request is None else self.request.taps

    @property
    def contraction(self) -> Contraction | None:
        """Return what becomes of the tapped stacks."""
        return None if self.request is None else cast("Contraction", self.request.contraction)

    def seen(self, output: ForwardOutput, num_rows: int) -> tuple[mx.array | None, mx.array | None]:
        """Return the stacks and the features of the first rows of a pass, None for what is not wanted."""
        features_RF = None
        if self.request is not None:
            features_RF = mx.concatenate([output.taps[tap][:num_rows] for tap in self.taps], axis=-1)
        return output.stack[:num_rows] if self.stack else None, features_RF


class Drafting:
    """One timeline's drafter with its governor and its counts.

    Not thread-safe; every call on the inference thread.

    Args:
        drafter: who proposes; None for plain decode.
        governor: how many.
        vocab_size: of the target.
        tokens: all that the timeline has consumed, now and later: its own list.
    """

    def __init__(
        self, drafter: Drafter | None, governor: Governor, vocab_size: int, tokens: Sequence[int]
    ) -> None:
        self._drafter = drafter
        self._request: FeatureRequest | None = getattr(drafter, "feature_request", None)
        self._tokens = tokens
        self._governor = governor
        self._vocab_size = vocab_size
        self._is_stale = False
        self._rested = RestedRows()
        self._next_token = -1
        self._failure: str | None = None
        self._refusal: str | None = None
        self._num_failures = 0
        self._by_slot: list[list[int]] = []
        self._num_cycles = self._num_proposed = self._num_accepted = 0
        self.rule: Rule = "coupled"

    def wants(self, rows_after: int = 0) -> Wants:
        """Return what will be looked at of the next rows.

        Args:
            rows_after: rows of the prompt that come after them; a drafter with a window forgets the early
                ones.
        """
        if self._drafter is None or not (self._is_watching or self._is_keeping):
            return Wants()
        request = self._request
        if request is not None and request.last_rows is not None and rows_after >= request.last_rows:
            request = None
        return Wants(self._drafter.needs_stack, request)

    def begin_answer(self, prompt: Sequence[int], rule: Asked, sampler: Sampler) -> None:
        """Start the counts of an answer, and bring back a drafter that was dropped in an earlier one.

        Args:
            prompt: of the answer; the timeline has consumed a part of it, not all.
            rule: how proposals shall be verified.
            sampler: of the answer; it may refuse blocks.

        Raises:
            InvalidRequest: there is no such rule.
        """
        law = self._drafter.law if self._drafter is not None else "point"
        self.rule = resolve_rule(rule, sampler.params, law)
        self._refusal = sampler.refusal if sampler.max_proposals < 1 else None
        self._num_cycles = self._num_proposed = self._num_accepted = self._num_failures = 0
        self._by_slot = []
        self._failure = None
        self._governor.begin_answer()
        # What the drafter was told of the last row's successor must be what the prompt goes on with.
        following = prompt[len(self._tokens)]
        if self._is_stale or (self._tokens and self._next_token != following):
            self._wake(following)

    def propose(self, room: int, sampler: Sampler) -> Proposal:
        """Return what to verify behind the anchor; nothing if nothing pays or the drafter failed.

        Args:
            room: most proposals that budget and context allow.
            sampler: how the target will choose.
        """
        drafter = self._drafter
        if drafter is None or self._refusal is not None or self._failure is not None:
            return NOTHING
        try:
            width = self._governor.width(min(room, drafter.max_proposals()))
            if width < 1:
                return NOTHING
            if self._is_stale:
                if self._request is not None:
                    return NOTHING  # what it would say without those rows says nothing of its worth (N1)
                self._wake(self._next_token)
                if self._failure is not None:
                    return NOTHING
            self._catch_up(drafter)
            proposal = drafter.propose(width, draft_sampling(sampler, self.rule))
            check_proposal(proposal, width, self._vocab_size)
        except Exception as error:  # noqa: BLE001  whatever a drafter does wrong, the answer goes on
            self._drop(error)
            return NOTHING
        return proposal

    def observe(
        self, tokens: Sequence[int], next_token: int, seen: tuple[mx.array | None, mx.array | None]
    ) -> None:
        """Hand over rows that the timeline keeps.

        Args:
            tokens: of the rows.
            next_token: the committed token after them.
            seen: from `Wants.seen`.
        """
        stack_TGD, features_RF = seen
        told_next, self._next_token = self._next_token, next_token
        if self._drafter is None:
            return
        if not self._is_watching:
            is_kept = self._is_keeping and stack_TGD is not None and self._rested.keep(tokens, stack_TGD)
            if not is_kept:
                self._is_stale = True
                self._rested.clear()
            return
        try:
            self._catch_up(self._drafter, told_next)
            if self._request is None:
                self._drafter.observe(tokens, next_token, stack_TGD)
            else:
                feature_drafter = cast("FeatureDrafter", self._drafter)
                feature_drafter.observe(tokens, next_token, None, features_RF=features_RF)
        except Exception as error:  # noqa: BLE001  as in `propose`
            self._drop(error)

    def count(self, num_proposed: int, num_accepted: int, num_tokens: int, cycle_ns: int) -> None:
        """Take note of a cycle that ended well."""
        self._governor.count(num_proposed, num_accepted, num_tokens, cycle_ns)
        if not num_proposed:
            return
        self._num_cycles += 1
        self._num_proposed += num_proposed
        self._num_accepted += num_accepted
        while len(self._by_slot) < num_proposed:
            self._by_slot.append([0, 0])
        for slot in range(num_proposed):
            self._by_slot[slot][0] += 1
            self._by_slot[slot][1] += slot < num_accepted

    def snapshot(self) -> DraftSnapshot:
        """Return what `restore` needs to come back to this point."""
        inner: object | None = None
        if self._drafter is not None and not self._is_stale:
            try:
                self._catch_up(self._drafter)
                inner = self._drafter.snapshot()
            except Exception as error:  # noqa: BLE001  as in `propose`
                self._drop(error)
        return DraftSnapshot(inner, self._next_token)

    def restore(self, snapshot: DraftSnapshot) -> None:
        """Go back with the timeline to where `snapshot` was taken."""
        self._next_token = snapshot.next_token
        self._is_stale = snapshot.inner is None
        self._rested.clear()
        if self._drafter is None or snapshot.inner is None:
            return
        try:
            self._drafter.restore(snapshot.inner)
        except DrafterError:
            self._is_stale = True  # no fault: it was reset since, and begins anew behind a gap
        except Exception as error:  # noqa: BLE001  as in `propose`
            self._drop(error)

    @property
    def draft_digest(self) -> str:
        """Return the digest of the draft's files, as its drafter says; empty for one without."""
        return "" if self._drafter is None else str(self._drafter.describe().get("digest", ""))

    def statistics(self) -> DraftStatistics:
        """Return the counts of the answer so far."""
        drafter = "none" if self._drafter is None else self._drafter.kind
        return DraftStatistics(
            drafter=drafter,
            used=drafter if self._num_cycles else "none",
            reason=self._reason(),
            rule=self.rule,
            num_cycles=self._num_cycles,
            num_proposed=self._num_proposed,
            num_accepted=self._num_accepted,
            proposed_by_slot=tuple(tried for tried, _ in self._by_slot),
            accepted_by_slot=tuple(accepted for _, accepted in self._by_slot),
            num_failures=self._num_failures,
        )

    @property
    def _is_watching(self) -> bool:
        """Whether rows are handed to the drafter: looking costs time, so one that may not propose rests."""
        is_free = self._drafter is not None and not self._drafter.needs_stack and self._request is None
        is_resting = self._governor.is_resting or self._governor.off_reason is not None
        return not self._is_stale and self._refusal is None and (is_free or not is_resting)

    @property
    def _is_keeping(self) -> bool:
        """Whether rows are kept for a drafter that rests: stacks are there, features have to be made."""
        is_for_long = self._refusal is not None or self._governor.off_reason is not None
        reads_stacks = self._drafter is not None and self._drafter.needs_stack and self._request is None
        return reads_stacks and self._governor.is_resting and not self._is_stale and not is_for_long

    def _catch_up(self, drafter: Drafter, next_token: int | None = None) -> None:
        """Tell a drafter that rested what it has missed."""
        if len(self._rested):
            tokens, stack_TGD = self._rested.take()
            drafter.observe(tokens, self._next_token if next_token is None else next_token, stack_TGD)

    def _reason(self) -> str | None:
        if self._drafter is None:
            return None
        return self._failure or self._refusal or self._governor.verdict()

    def _drop(self, error: Exception) -> None:
        """Do without the drafter for the rest of the answer."""
        assert self._drafter is not None
        self._num_failures += 1
        self._is_stale = True
        self._rested.clear()
        self._failure = f"failed: {type(error).__name__}: {error}"
        _log.warning("drafter %s %s", self._drafter.kind, self._failure)

    def _wake(self, next_token: int) -> None:
        """Start the drafter anew behind a gap: with every token, and none of the values it reads."""
        if self._drafter is None:
            return
        try:
            self._drafter.reset()
            self._rested.clear()
            if not self._drafter.needs_stack and self._tokens:
                self._drafter.observe(self._tokens, next_token, None)
            self._is_stale, self._next_token = False, next_token
        except Exception as error:  # noqa: BLE001  as in `propose`
            self._drop(error)
