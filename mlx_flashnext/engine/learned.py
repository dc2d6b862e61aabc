"""What a governor works from: costs by width and survival by slot, measured here or earlier.

Entry points: `Learned`, a value that goes from session to session and from run to run (`kept_tables.py`);
`CostTable` and `SurvivalTable`, which begin with it and measure on. What was measured earlier counts as a
few observations, so that it decides at first and is outvoted by as many of this session's own.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import median
from typing import Final

HARDLY_MEASURED: Final = 3
WELL_MEASURED: Final = 8
DOUBT: Final = 0.1
"""Relative error of one measured cycle; that of a median of n is taken as `DOUBT / sqrt(n)`."""
MOST_TRUST: Final = float(WELL_MEASURED)
"""Most observations that a cost measured earlier counts as."""
SURVIVAL_TRUST: Final = 24.0
"""Most cycles that acceptance measured earlier counts as: a few rejections in a row are no other text."""
_REMEMBERED: Final = 31
_MEMORY: Final = 0.98
"""What a cycle's acceptance is worth one cycle later: a change of text is noticed in some fifty."""
_SHRINK: Final = 4.0
"""Cycles that the drafter's acceptance everywhere is worth as an opinion of one slot."""
_UNSEEN: Final = 0.99
"""What a moment's acceptance is worth one cycle of another moment later: who rests in it learns nothing of
it, and comes to try again."""
_MOMENT_SHRINK: Final = 4.0
"""Cycles that a slot's acceptance at all times is worth as an opinion of one moment."""
LULL: Final = 4
"""Plain steps after which what a drafter stumbled over lies behind it. Tuned, like the weight above, on the
recorded acceptance of 54 held-out answers (`bench.studies.governor_replay`)."""
NUM_MOMENTS: Final = 7
"""Moments of a cycle: after a block that was kept whole; none, a few or `LULL` plain steps after one that was
not; and likewise after the beginning of an answer."""

Counts = tuple[tuple[float, ...], tuple[float, ...]]
"""Of each slot, cycles in which it was reached, and in which it passed."""


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
        moments: the counts of each moment alone; none where they were not kept.
    """

    costs: tuple[float, ...] = ()
    times: tuple[float, ...] = ()
    reached: tuple[float, ...] = ()
    passed: tuple[float, ...] = ()
    purse: float = 0.0
    num_drafting: int = 0
    moments: tuple[Counts, ...] = ()

    def trusted(self, costs: float, survival: float) -> "Learned":
        """Return the same with less weight.

        Args:
            costs: most observations that a cost counts as.
            survival: most cycles that a slot's acceptance counts as, at all times and at each moment.
        """
        reached, passed = _at_most(survival, (self.reached, self.passed))
        return Learned(
            self.costs,
            tuple(min(each, costs) for each in self.times),
            reached,
            passed,
            self.purse,
            self.num_drafting,
            tuple(_at_most(survival, counts) for counts in self.moments),
        )


NOTHING_LEARNED: Final = Learned()


class CostTable:
    """What a cycle of each width costs: medians in nanoseconds, earlier ones scaled by this plain step.

    Args:
        num_slots: most proposals of a cycle.
        earlier: what was measured before this session.

    Attributes:
        known: widths from 1 on that have a cost, ascending.
        estimates: for every width from 0 on what it costs in plain steps, as measured or in a line with
            others, a plain step among the narrower ones; None if neither. A proposal of a whole block costs
            much once and little for every token, one that was looked up nothing and then every row: two
            widths tell them apart.
    """

    def __init__(self, num_slots: int, earlier: Learned) -> None:
        self._num_slots = num_slots
        self._costs = earlier.costs
        self._times = tuple(min(each, MOST_TRUST) for each in earlier.times)
        self._own: dict[int, deque[int]] = {}
        self._typical_ns: dict[int, float] = {}
        self._refresh()

    def measure(self, width: int, cycle_ns: int) -> None:
        """Take note of what a cycle cost."""
        self._own.setdefault(width, deque(maxlen=_REMEMBERED)).append(cycle_ns)
        self._typical_ns[width] = self._median_ns(width)
        if width == 0:
            for other in range(1, len(self._costs)):
                if self._earlier(other) > 0:
                    self._typical_ns[other] = self._median_ns(other)
        self._refresh()

    @property
    def plain_ns(self) -> float | None:
        """What a plain step costs; None before the first."""
        return self._typical_ns.get(0)

    def typical_ns(self, width: int) -> float:
        """Return what a cycle of a width that was measured takes."""
        return self._typical_ns[width]

    def num_own(self, width: int) -> int:
        """Return the cycles of a width that this session remembers."""
        return len(self._own.get(width, ()))

    def weight(self, width: int) -> float:
        """Return the observations that the cost of a width rests on, earlier ones included."""
        return self.num_own(width) + self._earlier(width)

    def least_steps(self, width: int) -> float:
        """Return the least a width may cost: what is known, less its error, or what a narrower one costs."""
        weight, steps = self.weight(width), self.estimates[width]
        if steps is None:
            return max(self.estimates[each] or 0.0 for each in (0, *self.known) if each < width)
        doubt = DOUBT if weight >= HARDLY_MEASURED else HARDLY_MEASURED * DOUBT
        return steps * (1 - doubt / max(1.0, weight) ** 0.5)

    def in_steps(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return costs in plain steps up to the widest known, and what they rest on: a gap on nothing."""
        costs, times = [1.0], [min(MOST_TRUST, self.weight(0))]
        for width in range(1, max(self.known, default=0) + 1):
            costs.append(self.estimates[width] or costs[-1])
            times.append(min(MOST_TRUST, self.weight(width)) if width in self.known else 0.0)
        return tuple(costs), tuple(times)

    def _refresh(self) -> None:
        """Bring `known` and `estimates` up to date; once a measurement: a cycle asks for all widths."""
        found = [1.0, *(self._steps(width) for width in range(1, self._num_slots + 1))]
        self.known = [width for width in range(1, len(found)) if found[width] is not None]
        points = [(width, steps) for width in self.known if (steps := found[width]) is not None]
        for width in range(1, len(found)):
            if found[width] is None and points:
                if width < points[0][0]:
                    found[width] = _in_line(width, [(0, 1.0), points[0]])
                elif len(points) > 1:
                    found[width] = _in_line(width, points)
        self.estimates = found

    def _steps(self, width: int) -> float | None:
        plain_ns, cost_ns = self._typical_ns.get(0), self._typical_ns.get(width)
        if plain_ns is not None and cost_ns is not None:
            return cost_ns / plain_ns
        return self._costs[width] if plain_ns is None and self._earlier(width) > 0 else None

    def _earlier(self, width: int) -> float:
        return self._times[width] if 0 < width < len(self._costs) else 0.0

    def _median_ns(self, width: int) -> float:
        times = list[float](self._own.get(width, ()))
        earlier = self._earlier(width)
        if earlier > 0 and 0 in self._typical_ns:
            times += [self._costs[width] * self._typical_ns[0]] * max(1, round(earlier))
        return median(times)


def _in_line(width: int, points: Sequence[tuple[int, float]]) -> float:
    """Return the cost of a width between two known ones, or beyond them by the line through the outer ones.

    Args:
        width: the first known one or a wider one.
        points: widths, ascending, with their costs; two at least.
    """
    for (left, low), (right, high) in pairwise(points):
        if left <= width <= right:
            return low + (high - low) * (width - left) / (right - left)
    (first, low), (last, high) = points[0], points[-1]
    slope = max(0.0, (high - low) / (last - first))
    return high + slope * (width - last)


class _Survival:
    """Counts of slots that fade."""

    def __init__(self, num_slots: int, counts: Counts) -> None:
        self.reached, self.passed = (_padded(each, num_slots) for each in counts)

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        """Take note of a cycle: slots behind the first rejection say nothing."""
        for slot in range(min(num_proposed, len(self.reached), num_accepted + 1)):
            self.reached[slot] = _MEMORY * self.reached[slot] + 1
            self.passed[slot] = _MEMORY * self.passed[slot] + (slot < num_accepted)

    def fade(self, share: float) -> None:
        """Let all that is known weigh less."""
        self.reached = [share * each for each in self.reached]
        self.passed = [share * each for each in self.passed]

    def counts(self) -> Counts:
        """Return what was reached and what passed."""
        return tuple(self.reached), tuple(self.passed)


class SurvivalTable:
    """How far proposals are accepted, slot by slot and moment by moment.

    A text is easy or hard for a stretch: a block that was kept whole is followed by another one like it, one
    that was not by a worse one, unless some plain steps lie between. So each moment has counts of its own,
    of which those of all moments together are an opinion.

    Args:
        num_slots: most proposals of a cycle.
        earlier: what was measured before this session.

    Attributes:
        num_plain: plain steps since the last cycle with proposals, or since the answer began.
        follows_whole: whether that cycle's block was kept whole.
    """

    def __init__(self, num_slots: int, earlier: Learned) -> None:
        self._all = _Survival(num_slots, (earlier.reached, earlier.passed))
        moments = zip_longest(earlier.moments[:NUM_MOMENTS], range(NUM_MOMENTS))
        self._moments = [_Survival(num_slots, counts or ((), ())) for counts, _ in moments]
        self.begin()

    def begin(self) -> None:
        """Begin an answer."""
        self.follows_whole, self._follows_any, self.num_plain = False, False, 0

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        """Take note of a cycle."""
        if not num_proposed:
            self.num_plain += 1
            return
        own = self._moments[self._moment]
        for moment in self._moments:
            if moment is not own:
                moment.fade(_UNSEEN)
        for survival in (self._all, own):
            survival.learn(num_proposed, num_accepted)
        self.follows_whole, self._follows_any = num_accepted == num_proposed, True
        self.num_plain = 0

    def tokens(self, most: int, *, always: bool = False) -> Sequence[float]:
        """Return for each width up to `most` the tokens that a cycle of it commits; hopeful at first.

        A slot that was hardly reached is taken to pass as the others do, and at this moment as at all times.

        Args:
            most: widest block.
            always: at all times together, not at this moment.
        """
        everywhere = (sum(self._all.passed) + 1) / (sum(self._all.reached) + 1)
        own = self._moments[self._moment]
        tokens, survival = [1.0], 1.0
        for slot in range(most):
            share = (self._all.passed[slot] + _SHRINK * everywhere) / (self._all.reached[slot] + _SHRINK)
            if not always:
                share = (own.passed[slot] + _MOMENT_SHRINK * share) / (own.reached[slot] + _MOMENT_SHRINK)
            survival *= share
            tokens.append(tokens[-1] + survival)
        return tokens

    @property
    def is_known(self) -> bool:
        """Whether it rests on a few cycles, and is more than hope."""
        return bool(self._all.reached) and self._all.reached[0] > HARDLY_MEASURED - 1

    def counts(self) -> tuple[Counts, tuple[Counts, ...]]:
        """Return what was reached and what passed, by slot: at all times, and at each moment."""
        return self._all.counts(), tuple(moment.counts() for moment in self._moments)

    @property
    def _moment(self) -> int:
        if self.follows_whole:
            return 0
        lull = 0 if self.num_plain == 0 else 1 if self.num_plain < LULL else 2
        return 1 + lull + (0 if self._follows_any else 3)


def learned(costs: CostTable, survival: SurvivalTable, purse: float, num_drafting: int) -> Learned:
    """Return what tables came to, for the next session."""
    steps, times = costs.in_steps()
    (reached, passed), moments = survival.counts()
    whole = Learned(steps, times, reached, passed, purse, num_drafting, moments)
    return whole.trusted(MOST_TRUST, SURVIVAL_TRUST)


def _at_most(cycles: float, counts: Counts) -> Counts:
    """Return counts with less weight, if any slot was reached in more cycles."""
    reached, passed = counts
    most = max(reached, default=0.0)
    share = min(1.0, cycles / most) if most > 0 else 1.0
    return tuple(share * each for each in reached), tuple(share * each for each in passed)


def _padded(values: Sequence[float], num_slots: int) -> list[float]:
    return [value for value, _ in zip_longest(values[:num_slots], range(num_slots), fillvalue=0.0)]
