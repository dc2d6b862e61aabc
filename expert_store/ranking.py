"""Who leaves a layer's slots first: the policy ranks what was demanded, this file the rest. Entry: `Ranking`.

A policy sees demands of committed tokens and nothing else (policy/base.py). A record may hold a slot without
one: it was predicted, or only rows that are not verified yet have demanded it. Such a record is *unproven*:

    live    it may be demanded, or its demand confirmed, before its generation ends: leaves last
    cold    it was guessed wrongly, or its rows were rejected: leaves first

Invariants:
    K1  an expert with a slot is known to the policy, or live, or cold: exactly one of them;
    K2  the policy changes only by demands that are committed: guesses and rejected rows leave no trace in
        its order (recency is frozen while unverified rows run), nor in the demand counts;
    K3  victims: cold ones, then the policy's choice, then live ones, the oldest first. A guess never evicts
        a live record, and takes from the policy only while fewer than `max_expected` guesses are expected;
    K4  a guess never evicts a record that the layer's next demand is as likely to want, as far as anybody has
        said (`foresee`, `want`); among those it may evict, the first in order that is hardly wanted, or else
        the one that is wanted least.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from expert_store.policy.base import EvictionPolicy

LIVE_DEMANDS_MAX: Final = 64
"""Demands of its layer that a live record may sit out before it turns cold, should nobody ever end its
generation: a warm start's, or those of a request that was abandoned."""
HARDLY_WANTED: Final = 0.02
"""Chance below which records are as good as each other to lose, so that order decides and the search ends."""


class Guess(Protocol):
    """A predicted record that no native route has used yet; told once what becomes of it.

    Attributes:
        confidence: How likely it was to be demanded, as its hint said.
    """

    confidence: float

    @property
    def is_due(self) -> bool:
        """Whether the next demand of its layer was meant to use it."""
        ...

    def used(self) -> None:
        """Take note that a native route has demanded it."""
        ...

    def evicted(self) -> None:
        """Take note that it left its slot unused."""
        ...


class Ranking:
    """The experts of one layer that hold a slot, by when they should leave it.

    Attributes:
        num_expected: Live records that were predicted and not used yet.
        counts: Committed demands by expert, since the store was opened.
    """

    __slots__ = (
        "_born",
        "_chances",
        "_cold",
        "_is_foreseen",
        "_is_named",
        "_live",
        "_max_expected",
        "_num_demands",
        "_policy",
        "counts",
        "num_expected",
    )

    def __init__(self, policy: EvictionPolicy, num_experts: int, max_expected: int) -> None:
        """Start empty."""
        self._policy = policy
        self._max_expected = max_expected
        self._live: dict[int, Guess | None] = {}
        self._cold: dict[int, Guess | None] = {}
        self._born: dict[int, int] = {}  # of live ones: demands of the layer before it
        self._chances = array("f", bytes(4 * num_experts))  # of the next demand's wanting each expert
        self._is_named = self._is_foreseen = False  # whether any is told; whether all are
        self._num_demands = 0
        self.num_expected = 0
        self.counts = [0] * num_experts

    # Demands.

    def hit(self, experts: Sequence[int], *, is_committed: bool) -> None:
        """Note a demand of experts that have a slot; the guesses among them are used.

        The other guesses that were due at this demand were wrong and turn cold.
        """
        if self._is_named:
            self._chances = array("f", bytes(4 * len(self.counts)))
            self._is_named = self._is_foreseen = False
        if self._live or self._cold:
            experts = self._hit_unproven(experts, is_committed)
        if is_committed:
            self._policy.touch(experts)
            counts = self.counts
            for expert in experts:
                counts[expert] += 1

    def miss(self, expert: int, *, is_committed: bool) -> None:
        """Take in an expert that was demanded and given a slot."""
        if is_committed:
            self._policy.admit(expert)
            self.counts[expert] += 1
        else:
            self._make_live(expert, None)

    def confirm(self, experts: Sequence[int]) -> None:
        """Commit a demand that was not committed when it was made (not its counts), last use last."""
        live, cold, policy = self._live, self._cold, self._policy
        if not (live or cold):
            policy.touch(experts)
            return
        known: list[int] = []  # since the last one that was not; one call for all of them
        for expert in experts:
            if expert not in live and expert not in cold:
                known.append(expert)
                continue
            if known:
                policy.touch(known)
                known = []
            self._settle(expert)
            policy.admit(expert)
        if known:
            policy.touch(known)

    def reject(self, experts: Sequence[int]) -> None:
        """Let experts go first that only rejected rows have demanded."""
        for expert in experts:
            if expert in self._live and self._live[expert] is None:
                self.doubt(expert)

    def doubt(self, expert: int) -> None:
        """Let an unproven expert go first."""
        if expert in self._live:
            self._cold[expert] = self._settle(expert)

    # Guesses.

    @property
    def room_for_guesses(self) -> int:
        """Records that guesses may send away now, at most."""
        return max(0, self._most_expected - self.num_expected) + len(self._cold)

    @property
    def _most_expected(self) -> int:
        return len(self.counts) if self._is_foreseen else self._max_expected

    def want(self, expert: int, confidence: float) -> None:
        """Hear how likely the layer's next demand will name an expert with a slot (K4)."""
        self._chances[expert] = confidence
        self._is_named = True

    def foresee(self, chances: memoryview) -> None:
        """Hear how likely the layer's next demand will name each expert (K4).

        Args:
            chances: Float32, one of every expert.
        """
        memoryview(self._chances)[:] = chances
        self._is_named = self._is_foreseen = True

    def expect(self, expert: int, guess: Guess) -> None:
        """Take in an expert that was predicted and given a slot."""
        self._make_live(expert, guess)

    # Leaving.

    def evict(self, can_leave: Callable[[int], bool]) -> int | None:
        """Choose who leaves for exact demand, forget and return it; None if none can (K3)."""
        victim = _first(self._cold, can_leave)
        if victim is not None:
            return self._let_go(victim)
        victim = self._policy.evict(can_leave)
        if victim is not None:
            return victim
        victim = _first(self._live, can_leave)
        return None if victim is None else self._let_go(victim)

    def evict_for(self, expert: int, guess: Guess, can_leave: Callable[[int], bool]) -> int | None:
        """Choose who leaves for a guess of an expert, forget and return it; None if none may (K3, K4)."""
        if not self._is_foreseen:  # else that is what was said last of the guess itself
            self.want(expert, guess.confidence)
        chances = self._chances
        least = chances[expert]
        best: int | None = None

        def is_hardly_wanted(one: int) -> bool:
            nonlocal best, least
            if chances[one] < least and can_leave(one):
                best, least = one, chances[one]
                return least < HARDLY_WANTED
            return False

        victim = _first(self._cold, is_hardly_wanted)
        if victim is None and self.num_expected < self._most_expected:
            victim = self._policy.evict(is_hardly_wanted)
            if victim is not None:
                return victim
        victim = best if victim is None else victim
        if victim is None or victim in self._cold:
            return None if victim is None else self._let_go(victim)
        self._policy.remove(victim)
        return victim

    def _let_go(self, expert: int) -> int:
        """Forget an unproven expert that leaves, and tell its guess."""
        guess = self._settle(expert)
        if guess is not None:
            guess.evicted()
        return expert

    def remove(self, expert: int) -> None:
        """Forget an expert whose read failed."""
        if expert in self._live or expert in self._cold:
            self._settle(expert)
        else:
            self._policy.remove(expert)

    def _hit_unproven(self, experts: Sequence[int], is_committed: bool) -> Sequence[int]:
        """Note what a demand proves; return the experts that the policy knew before."""
        live, cold = self._live, self._cold
        self._num_demands += 1
        known: list[int] = []
        for expert in experts:
            if expert not in live and expert not in cold:
                known.append(expert)
                continue
            guess = self._settle(expert)
            if guess is not None:
                guess.used()
            if is_committed:
                self._policy.admit(expert)
                self.counts[expert] += 1
            else:
                self._make_live(expert, None)
        if self.num_expected:
            for expert in [e for e, guess in live.items() if guess is not None and guess.is_due]:
                self.doubt(expert)
        while live and self._num_demands - self._born[oldest := next(iter(live))] > LIVE_DEMANDS_MAX:
            self.doubt(oldest)
        return known

    def _make_live(self, expert: int, guess: Guess | None) -> None:
        self._live[expert] = guess
        self._born[expert] = self._num_demands
        self.num_expected += guess is not None

    def _settle(self, expert: int) -> Guess | None:
        """Forget an unproven expert."""
        if expert in self._cold:
            return self._cold.pop(expert)
        guess = self._live.pop(expert)
        del self._born[expert]
        self.num_expected -= guess is not None
        return guess

    def check(self, holders: set[int]) -> None:
        """Assert K1 as far as it can be seen; for tests."""
        assert not self._live.keys() & self._cold.keys(), "K1"
        assert self._live.keys() | self._cold.keys() <= holders, "K1"
        assert self._born.keys() == self._live.keys()
        assert self.num_expected == sum(guess is not None for guess in self._live.values()), "K3"


def _first(experts: dict[int, Guess | None], can_leave: Callable[[int], bool]) -> int | None:
    for expert in experts:
        if can_leave(expert):
            return expert
    return None
