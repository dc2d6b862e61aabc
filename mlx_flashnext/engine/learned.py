"""What a governor works from: costs by width and survival by slot, measured here or earlier.

Entry points: `Learned`, a value that goes from session to session and from run to run (`kept_tables.py`);
`CostTable` and `SurvivalTable`, which begin with it and measure on. What was measured earlier counts as a
few observations, so that it decides at first and is outvoted by as many of this session's own.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Final

HARDLY_MEASURED: Final = 3
WELL_MEASURED: Final = 8
DOUBT: Final = 0.1
"""Relative error of one measured cycle; that of a median of n is taken as `DOUBT / sqrt(n)`."""
MOST_TRUST: Final = float(WELL_MEASURED)
"""Most observations that anything measured earlier counts as."""
_REMEMBERED: Final = 31
_MEMORY: Final = 0.98
"""What a cycle's acceptance is worth one cycle later: a change of text is noticed in some fifty."""
_SHRINK: Final = 4.0
"""Cycles that the drafter's acceptance everywhere is worth as an opinion of one slot."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What was measured of one drafter.

    Attributes:
        costs: of a cycle with 0, 1, ... proposals, in plain steps; the first is 1.
        times: observations that each cost counts as; none where it was not measured.
        reached: of each slot, cycles in which all proposals before it were accepted.
        passed: of those, cycles in which it was accepted too.
        purse: plain steps left for trying.
        num_drafting: cycles with proposals that were measured, in all runs together.
    """

    costs: tuple[float, ...] = ()
    times: tuple[float, ...] = ()
    reached: tuple[float, ...] = ()
    passed: tuple[float, ...] = ()
    purse: float = 0.0
    num_drafting: int = 0

    def trusted(self, costs: float, survival: float) -> "Learned":
        """Return the same with less weight.

        Args:
            costs: most observations that a cost counts as.
            survival: most cycles that the first slot's acceptance counts as.
        """
        share = min(1.0, survival / self.reached[0]) if self.reached and self.reached[0] > 0 else 1.0
        return Learned(
            self.costs,
            tuple(min(each, costs) for each in self.times),
            tuple(share * each for each in self.reached),
            tuple(share * each for each in self.passed),
            self.purse,
            self.num_drafting,
        )


NOTHING_LEARNED: Final = Learned()


class CostTable:
    """What a cycle of each width costs: medians in nanoseconds, earlier ones scaled by this plain step.

    Args:
        earlier: what was measured before this session.
    """

    def __init__(self, earlier: Learned) -> None:
        self._costs = earlier.costs
        self._times = tuple(min(each, MOST_TRUST) for each in earlier.times)
        self._own: dict[int, deque[int]] = {}
        self._typical_ns: dict[int, float] = {}  # kept, because every cycle asks for all of them
        self._num_measured: Counter[int] = Counter()

    def measure(self, width: int, cycle_ns: int) -> None:
        """Take note of what a cycle cost."""
        self._num_measured[width] += 1
        self._own.setdefault(width, deque(maxlen=_REMEMBERED)).append(cycle_ns)
        self._typical_ns[width] = self._median_ns(width)
        if width == 0:
            for other in range(1, len(self._costs)):
                if self._earlier(other) > 0:
                    self._typical_ns[other] = self._median_ns(other)

    @property
    def plain_ns(self) -> float | None:
        """What a plain step costs; None before the first."""
        return self._typical_ns.get(0)

    def steps(self, width: int) -> float | None:
        """Return what a cycle of a width costs in plain steps; None if that is not known."""
        plain_ns, cost_ns = self._typical_ns.get(0), self._typical_ns.get(width)
        if plain_ns is not None and cost_ns is not None:
            return cost_ns / plain_ns
        if plain_ns is None and self._earlier(width) > 0:
            return self._costs[width]
        return 1.0 if width == 0 else None

    def num_own(self, width: int) -> int:
        """Return the cycles of a width that this session remembers."""
        return len(self._own.get(width, ()))

    def num_tries(self, width: int) -> int:
        """Return the cycles of a width that this session has measured."""
        return self._num_measured[width]

    def weight(self, width: int) -> float:
        """Return the observations that the cost of a width rests on, earlier ones included."""
        return self.num_own(width) + self._earlier(width)

    def known(self, most: int) -> list[int]:
        """Return the widths from 1 to `most` that have a cost."""
        return [width for width in range(1, most + 1) if self.steps(width) is not None]

    def least_steps(self, width: int) -> float:
        """Return the least a width may cost: as measured, less the error, or what a narrower one costs."""
        weight, steps = self.weight(width), self.steps(width)
        if steps is not None and weight >= HARDLY_MEASURED:
            return steps * (1 - DOUBT / weight**0.5)
        sure = [each for each in self.known(width - 1) if self.weight(each) >= HARDLY_MEASURED]
        return max(self.steps(each) or 0.0 for each in (0, *sure))

    def in_steps(self, most: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return costs in plain steps up to the widest known, and what they rest on: a gap on nothing."""
        widest = max(self.known(most), default=0)
        costs, times = [1.0], [min(MOST_TRUST, self.weight(0))]
        for width in range(1, widest + 1):
            steps = self.steps(width)
            costs.append(costs[-1] if steps is None else steps)
            times.append(0.0 if steps is None else min(MOST_TRUST, self.weight(width)))
        return tuple(costs), tuple(times)

    def _earlier(self, width: int) -> float:
        return self._times[width] if 0 < width < len(self._costs) else 0.0

    def _median_ns(self, width: int) -> float:
        times = list[float](self._own.get(width, ()))
        earlier = self._earlier(width)
        if earlier > 0 and 0 in self._typical_ns:
            times += [self._costs[width] * self._typical_ns[0]] * max(1, round(earlier))
        return median(times)


class SurvivalTable:
    """How far proposals are accepted, slot by slot, in counts that fade.

    Args:
        num_slots: most proposals of a cycle.
        earlier: what was measured before this session.
    """

    def __init__(self, num_slots: int, earlier: Learned) -> None:
        self._reached = _padded(earlier.reached, num_slots)
        self._passed = _padded(earlier.passed, num_slots)

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        """Take note of a cycle: slots behind the first rejection say nothing."""
        for slot in range(min(num_proposed, len(self._reached), num_accepted + 1)):
            self._reached[slot] = _MEMORY * self._reached[slot] + 1
            self._passed[slot] = _MEMORY * self._passed[slot] + (slot < num_accepted)

    def tokens(self, most: int) -> Sequence[float]:
        """Return for each width up to `most` the tokens that a cycle of it commits; hopeful at first.

        A slot that was hardly reached is taken to pass as the others do.
        """
        everywhere = (sum(self._passed) + 1) / (sum(self._reached) + 1)
        tokens, survival = [1.0], 1.0
        for reached, passed in zip(self._reached[:most], self._passed[:most], strict=True):
            survival *= (passed + _SHRINK * everywhere) / (reached + _SHRINK)
            tokens.append(tokens[-1] + survival)
        return tokens

    @property
    def is_known(self) -> bool:
        """Whether it rests on a few cycles, and is more than hope."""
        return bool(self._reached) and self._reached[0] > HARDLY_MEASURED - 1

    def counts(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return what was reached and what passed, by slot."""
        return tuple(self._reached), tuple(self._passed)


def learned(
    costs: CostTable, survival: SurvivalTable, num_slots: int, purse: float, num_drafting: int
) -> Learned:
    """Return what tables came to, for the next session."""
    steps, times = costs.in_steps(num_slots)
    reached, passed = survival.counts()
    whole = Learned(steps, times, reached, passed, purse, num_drafting)
    return whole.trusted(MOST_TRUST, MOST_TRUST)


def _padded(values: Sequence[float], num_slots: int) -> list[float]:
    return [value for value, _ in zip_longest(values[:num_slots], range(num_slots), fillvalue=0.0)]
