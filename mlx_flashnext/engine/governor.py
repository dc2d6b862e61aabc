"""How many tokens to propose: what pays, and nothing more. Entry point: `Governor`.

Whether a block of k + 1 rows is cheaper than the plain steps it replaces depends on drafter, text,
drive and device (verification costs grow with rows on the CPU backend and with every new expert on a slow
drive). So both sides are measured while the answer runs, and trying is paid for from a purse that gains a
small share of plain time and whatever speculation saves. An empty purse means plain decode.

Invariants:
V1  A width depends on earlier cycles alone, never on a token proposed in this one: no cut by a sampled
    token's own probability (dflash2.md 3.4, rule 8).
V2  What speculation may lose is bounded: what its first cycle makes once, the opening allowance, `TRY_SHARE`
    of plain time, and the cycle that empties the purse. An empty one is overdrawn only while a width that was
    measured `WELL_MEASURED` times gains on plain steps by what both really cost here.

How near it comes to the best fixed width is tested on three tables of costs (`test_governor.py`) and
measured by `python -m bench.studies.speculation_speed guard`. Source: dflash2.md 2.8, 2.9 and G22.
"""

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import Final

TRY_SHARE: Final = 0.01
"""Share of plain decode time that may be spent on finding out whether speculation pays."""
OPENING_STEPS: Final = 1.0
"""Plain steps that an answer may lose before it has gained anything."""
FIRST_STEPS: Final = 2.0
"""Most plain steps that a drafter's first cycle is charged: what it makes once is not its price."""
LARGEST_STEPS: Final = 32.0
"""Most plain steps a purse holds: a drafter that stops paying is switched off within as many lost steps."""
PLAIN_EVERY: Final = 96
"""One cycle of so many is plain, so that the cost of a plain step stays known."""
HARDLY_MEASURED: Final = 3
WELL_MEASURED: Final = 8
EXPLORE_EVERY: Final = 3
"""One drafting cycle of so many has a width that is not well measured and may be the best."""
REPROBE_EVERY: Final = 12
"""One of so many has one that is well measured and may be the best: costs change with text and residency."""
DOUBT: Final = 0.1
"""Relative error of one measured cycle; that of a median of n is taken as `DOUBT / sqrt(n)`."""
WORTH: Final = 1.02
"""Gain in tokens a second below which another width is worth neither a change nor a try."""
WATCHED_CYCLES: Final = 64
LEAST_ACCEPTED: Final = 0.05
"""Mean accepted tokens over `WATCHED_CYCLES` below which a drafter is a defect, not a hard text (G22)."""
_REMEMBERED: Final = 31
_MEMORY: Final = 0.98
"""What a cycle's acceptance is worth one cycle later: a change of text is noticed in some fifty."""
_SHRINK: Final = 4.0
"""Cycles that the drafter's acceptance everywhere is worth as an opinion of one slot."""


class Governor:
    """Chooses the width of each cycle of one session.

    Not thread-safe; everything on the inference thread.

    Attributes:
        off_reason: why nothing is proposed for the rest of this answer, None while something may be.
    """

    def __init__(self, max_width: int, *, is_guarded: bool = True, costs: Sequence[float] = ()) -> None:
        """Start knowing nothing but what was measured before.

        Args:
            max_width: most proposals of a cycle.
            is_guarded: False always proposes `max_width`: for tests and for measuring what a width costs.
            costs: of a cycle with 0, 1, ... proposals, in plain steps, measured earlier with this
                model, drafter and budget; fades as this session measures the width itself.
        """
        self._costs = costs
        self.off_reason: str | None = None
        self._max_width = max_width
        self._is_guarded = is_guarded
        self._cycle_ns: dict[int, deque[int]] = {}
        self._typical_ns: dict[int, float] = {}
        """Their medians, with what is known of `costs`; kept, because every cycle asks for all of them."""
        self._purse_ns: float | None = None
        self._since_plain = 0
        self._has_drafted = False
        self._num_drafting = self._drafting_ns = self._drafted_tokens = 0
        self._num_measured: Counter[int] = Counter()
        self._accepted: deque[int] = deque(maxlen=WATCHED_CYCLES)
        self._width = 1
        # Per slot: decayed counts of cycles in which all before it were accepted, and it too.
        self._reached = [0.0] * max_width
        self._passed = [0.0] * max_width

    def begin_answer(self) -> None:
        """Give a drafter that was switched off another chance; what was measured stays known."""
        self.off_reason = None
        self._accepted.clear()
        plain_ns = self._cost_ns(0)
        if plain_ns is not None and self._purse_ns is not None:
            self._purse_ns = max(self._purse_ns, OPENING_STEPS * plain_ns)

    @property
    def is_resting(self) -> bool:
        """Return whether the purse is empty, and not by bad luck: trying would cost more than it may."""
        is_empty = self._purse_ns is not None and self._purse_ns <= 0
        return self._is_guarded and is_empty and not self._is_known_to_pay()

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
        if self._purse_ns is None or self.is_resting or self._since_plain >= PLAIN_EVERY:
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
        if num_proposed:
            self._since_plain += 1
            self._learn(num_proposed, num_accepted)
            if not self._has_drafted:
                # It made the drafter's kernels and caches: what it took says nothing of the next one.
                self._has_drafted = True
                plain_ns = self._cost_ns(0)
                if self._purse_ns is not None and plain_ns is not None:
                    self._purse_ns += num_tokens * plain_ns - min(cycle_ns, FIRST_STEPS * plain_ns)
                return
        self._measure(num_proposed, cycle_ns)
        plain_ns = self._cost_ns(0)
        if num_proposed == 0:
            self._since_plain = 0
            assert plain_ns is not None
            if self._purse_ns is None:
                self._purse_ns = OPENING_STEPS * plain_ns
            gained = TRY_SHARE * min(cycle_ns, 2 * plain_ns)
        else:
            self._num_drafting += 1
            self._drafting_ns += cycle_ns
            self._drafted_tokens += num_tokens
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

    def costs(self) -> tuple[float, ...]:
        """Return what cycles with 0, 1, ... proposals cost in plain steps, as far as known without a gap."""
        known = list[float]()
        plain_ns = self._cost_ns(0)
        for width in range(self._max_width + 1):
            cost_ns = self._cost_ns(width)
            if plain_ns is None or cost_ns is None:
                break
            known.append(cost_ns / plain_ns)
        return tuple(known)

    def _measure(self, width: int, cycle_ns: int) -> None:
        self._num_measured[width] += 1
        self._cycle_ns.setdefault(width, deque(maxlen=_REMEMBERED)).append(cycle_ns)
        self._typical_ns[width] = self._median_ns(width)
        if width == 0:
            for other in range(1, len(self._costs)):
                self._typical_ns[other] = self._median_ns(other)

    def _learn(self, num_proposed: int, num_accepted: int) -> None:
        for slot in range(min(num_proposed, self._max_width, num_accepted + 1)):
            self._reached[slot] = _MEMORY * self._reached[slot] + 1
            self._passed[slot] = _MEMORY * self._passed[slot] + (slot < num_accepted)
        self._accepted.append(num_accepted)
        if len(self._accepted) == WATCHED_CYCLES:
            mean = sum(self._accepted) / WATCHED_CYCLES
            if mean < LEAST_ACCEPTED and self._is_guarded:
                self.off_reason = f"mean accepted {mean:.2f} over {WATCHED_CYCLES} cycles"

    def _best_width(self, most: int) -> int:
        """Return the width from 1 on with the most tokens a nanosecond, or one that may turn out to be it."""
        known = {
            width: cost_ns for width in range(1, most + 1) if (cost_ns := self._cost_ns(width)) is not None
        }
        if not known:
            return 1
        tokens = self._tokens(most)
        rates = {width: tokens[width] / cost_ns for width, cost_ns in known.items()}
        best = max(rates, key=lambda width: rates[width])
        if self._width not in rates or rates[best] > WORTH * rates[self._width]:
            self._width = best
        # A width is tried after half of it was, and only if it would be the best at the least it can cost:
        # what does not pay is found out where that is cheap, or not at all.
        hopeful = [
            width
            for width in range(1, min(most, 2 * max(known)) + 1)
            if width != self._width and tokens[width] / self._least_ns(width) > WORTH * rates[self._width]
        ]
        if hopeful:
            least = min(hopeful, key=lambda width: self._num_measured[width])
            every = EXPLORE_EVERY if self._num_measured[least] < WELL_MEASURED else REPROBE_EVERY
            if self._num_drafting % every == every - 1:
                return least
        return self._width

    def _is_known_to_pay(self) -> bool:
        """Return whether the width in use is well measured and gains on plain steps."""
        width, plain_ns = self._width, self._cost_ns(0)
        if plain_ns is None or self._num_times(width) < WELL_MEASURED:
            return False
        return self._tokens(width)[width] * plain_ns > WORTH * self._typical_ns[width]

    def _tokens(self, most: int) -> Sequence[float]:
        """Return for each width the tokens that a cycle of it commits; hopeful at first.

        A slot that was hardly reached is taken to pass as the others do.
        """
        everywhere = (sum(self._passed) + 1) / (sum(self._reached) + 1)
        tokens, survival = [1.0], 1.0
        for reached, passed in zip(self._reached[:most], self._passed[:most], strict=True):
            survival *= (passed + _SHRINK * everywhere) / (reached + _SHRINK)
            tokens.append(tokens[-1] + survival)
        return tokens

    def _cost_ns(self, width: int) -> float | None:
        """Return what a cycle of a width costs, as measured here or before; None if it was not."""
        return self._typical_ns.get(width)

    def _median_ns(self, width: int) -> float:
        times = list[float](self._cycle_ns.get(width, ()))
        if 0 < width < len(self._costs) and 0 in self._typical_ns:
            times += [self._costs[width] * self._typical_ns[0]] * HARDLY_MEASURED
        return median(times)

    def _least_ns(self, width: int) -> float:
        """Return the least a width may cost: as measured, less the error, or what a narrower one costs."""
        num_measured = self._num_times(width) + HARDLY_MEASURED * (width < len(self._costs))
        if num_measured >= HARDLY_MEASURED:
            return self._typical_ns[width] * (1 - DOUBT / num_measured**0.5)
        narrower = [each for each in self._cycle_ns if 0 < each < width]
        sure = [each for each in narrower if self._num_times(each) >= HARDLY_MEASURED]
        return max(self._typical_ns[each] for each in (0, *sure))

    def _num_times(self, width: int) -> int:
        return len(self._cycle_ns.get(width, ()))
