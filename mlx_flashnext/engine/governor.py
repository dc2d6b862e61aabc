"""How many tokens to propose: what pays, and nothing more. Entry point: `Governor`.

Whether a block of k + 1 rows is cheaper than the plain steps it replaces depends on drafter, text,
drive and device (verification costs grow with rows on the CPU backend and with every new expert on a slow
drive). So both sides are measured while the answer runs, and trying is paid for from a purse that gains a
small share of plain time and whatever speculation saves. An empty purse means plain decode.

Invariants:
V1  A width depends on earlier cycles alone, never on a token proposed in this one: no cut by a sampled
    token's own probability (dflash2.md 3.4, rule 8).
V2  What speculation may lose is bounded: the opening allowance, `TRY_SHARE` of plain time, and the one cycle
    that empties the purse.

Source: dflash2.md 2.8, 2.9 and G22.
"""

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import Final

TRY_SHARE: Final = 0.01
"""Share of plain decode time that may be spent on finding out whether speculation pays."""
OPENING_STEPS: Final = 0.5
"""Plain steps that an answer may lose before it has gained anything."""
LARGEST_STEPS: Final = 32.0
"""Most plain steps a purse holds: a drafter that stops paying is switched off within as many lost steps."""
PLAIN_EVERY: Final = 96
"""One cycle of so many is plain, so that the cost of a plain step stays known."""
EXPLORE_EVERY: Final = 8
"""One drafting cycle of so many has a width that was hardly measured yet: costs may have cliffs."""
HARDLY_MEASURED: Final = 3
REPROBE_EVERY: Final = 160
"""One of so many has the width that was measured least, long after all are known: costs may change."""
WATCHED_CYCLES: Final = 64
LEAST_ACCEPTED: Final = 0.05
"""Mean accepted tokens over `WATCHED_CYCLES` below which a drafter is a defect, not a hard text (G22)."""
_REMEMBERED: Final = 15
_SURVIVAL_MEMORY: Final = 0.95


class Governor:
    """Chooses the width of each cycle of one session.

    Not thread-safe; everything on the inference thread.

    Attributes:
        off_reason: why nothing is proposed for the rest of this answer, None while something may be.
    """

    def __init__(self, max_width: int, *, is_guarded: bool = True) -> None:
        """Start knowing nothing.

        Args:
            max_width: most proposals of a cycle.
            is_guarded: False always proposes `max_width`: for tests and for measuring what a width costs.
        """
        self.off_reason: str | None = None
        self._max_width = max_width
        self._is_guarded = is_guarded
        self._cycle_ns: dict[int, deque[int]] = {}
        self._purse_ns: float | None = None
        self._since_plain = 0
        self._num_drafting = self._drafting_ns = self._drafted_tokens = 0
        self._num_measured: Counter[int] = Counter()
        self._accepted: deque[int] = deque(maxlen=WATCHED_CYCLES)
        # Per slot: decayed counts of cycles that proposed it, and of those in which it was accepted.
        self._tried = [0.0] * max_width
        self._survived = [0.0] * max_width

    def begin_answer(self) -> None:
        """Give a drafter that was switched off another chance; what was measured stays known."""
        self.off_reason = None
        self._accepted.clear()
        plain_ns = self._cost_ns(0)
        if plain_ns is not None and self._purse_ns is not None:
            self._purse_ns = max(self._purse_ns, OPENING_STEPS * plain_ns)

    @property
    def is_resting(self) -> bool:
        """Return whether the purse is empty: trying would cost more than it may."""
        return self._is_guarded and self._purse_ns is not None and self._purse_ns <= 0

    def width(self, room: int) -> int:
        """Return how many tokens to propose.

        Args:
            room: most that the answer's budget and context allow.
        """
        most = min(room, self._max_width)
        if self.off_reason is not None or most < 1:
            return 0
        if not self._is_guarded:
            return most
        if self._purse_ns is None or self._purse_ns <= 0 or self._since_plain >= PLAIN_EVERY:
            return 0
        return self._best_width(most)

    def count(self, num_proposed: int, num_accepted: int, num_tokens: int, cycle_ns: int) -> None:
        """Take note of a cycle.

        Args:
            num_proposed: its proposals.
            num_accepted: those the target agreed with.
            num_tokens: tokens committed.
            cycle_ns: wall time from proposing to committing; of a clock that stood still or went back, the
                least it can tell.
        """
        cycle_ns = max(1, cycle_ns)
        self._num_measured[num_proposed] += 1
        self._cycle_ns.setdefault(num_proposed, deque(maxlen=_REMEMBERED)).append(cycle_ns)
        plain_ns = self._cost_ns(0)
        if num_proposed == 0:
            self._since_plain = 0
            assert plain_ns is not None
            if self._purse_ns is None:
                self._purse_ns = OPENING_STEPS * plain_ns
            gained = TRY_SHARE * min(cycle_ns, 2 * plain_ns)
        else:
            self._since_plain += 1
            self._num_drafting += 1
            self._drafting_ns += cycle_ns
            self._drafted_tokens += num_tokens
            self._learn(num_proposed, num_accepted)
            gained = num_tokens * plain_ns - cycle_ns if plain_ns is not None else 0.0
        if self._purse_ns is not None and plain_ns is not None:
            self._purse_ns = min(self._purse_ns + gained, LARGEST_STEPS * plain_ns)

    def verdict(self) -> str | None:
        """Return why nothing is proposed now, in words for the statistics line."""
        if self.off_reason is not None:
            return self.off_reason
        if not self.is_resting:
            return None
        plain_ns = self._cost_ns(0)
        if plain_ns is None or not self._num_drafting:
            return None
        cycles = "1 cycle" if self._num_drafting == 1 else f"{self._num_drafting} cycles"
        return (
            f"does not pay here: {cycles} with proposals took {self._drafting_ns / plain_ns:.2f} plain steps "
            f"for {self._drafted_tokens} tokens"
        )

    def _learn(self, num_proposed: int, num_accepted: int) -> None:
        for slot in range(min(num_proposed, self._max_width)):
            self._tried[slot] = _SURVIVAL_MEMORY * self._tried[slot] + 1
            self._survived[slot] = _SURVIVAL_MEMORY * self._survived[slot] + (slot < num_accepted)
        self._accepted.append(num_accepted)
        if len(self._accepted) == WATCHED_CYCLES:
            mean = sum(self._accepted) / WATCHED_CYCLES
            if mean < LEAST_ACCEPTED and self._is_guarded:
                self.off_reason = f"mean accepted {mean:.2f} over {WATCHED_CYCLES} cycles"

    def _best_width(self, most: int) -> int:
        """Return the width from 1 on with the most tokens a nanosecond; hopeful of what is not known yet."""
        # A width is tried after half of it was: what does not pay is found out where it costs least.
        most = min(most, max(1, 2 * max(self._cycle_ns)))
        least = min(range(1, most + 1), key=lambda width: self._num_measured[width])
        every = EXPLORE_EVERY if self._num_measured[least] < HARDLY_MEASURED else REPROBE_EVERY
        if self._num_drafting % every == every - 1:
            return least
        survival = self._survival(most)
        tokens, rates = 1.0, dict[int, float]()
        for width in range(1, most + 1):
            tokens += survival[width - 1]
            cost_ns = self._cost_ns(width)
            rates[width] = tokens / (cost_ns or 1)
        return max(rates, key=lambda width: rates[width])

    def _survival(self, most: int) -> Sequence[float]:
        """Return for each slot the probability that it and all before it are accepted; hopeful at first."""
        return [(self._survived[slot] + 1) / (self._tried[slot] + 1) for slot in range(most)]

    def _cost_ns(self, width: int) -> float | None:
        """Return what a cycle of a width costs, a line through the nearest measured width if unmeasured."""
        if width in self._cycle_ns:
            return median(self._cycle_ns[width])
        if 0 not in self._cycle_ns:
            return None
        plain_ns = median(self._cycle_ns[0])
        others = [each for each in self._cycle_ns if each]
        if not others:
            return plain_ns
        nearest = min(others, key=lambda each: abs(each - width))
        return plain_ns + (median(self._cycle_ns[nearest]) - plain_ns) * width / nearest
