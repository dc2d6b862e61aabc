"""How sure a guess must be to be read ahead, and so how many bytes of hints a cycle has: by measured time.

Entry point: `HintLevel`. `worth.py` knows which guesses are how often right; what a wrong one costs depends
on the drive, on what is resident and on who else wants the processor, and shows only in what cycles take. So
levels are compared in spans of cycles, each cycle by what one of its width usually takes: nothing is guessed,
guesses that are right every other time, guesses that are right every fourth time.

Invariants:
    I1  a level moves bytes, never decisions;
    V1  it depends on earlier cycles alone.
"""

from collections import deque
from collections.abc import Sequence
from math import hypot
from statistics import median, quantiles
from typing import Final

NOTHING: Final = 2.0
"""No share of guesses is as large: nobody is asked."""
USUAL: Final = 0.5
"""Share that must be right: where the drive is busy, a wrong guess costs what a right one gains."""
LEVELS: Final = (NOTHING, USUAL, 0.25)
"""Where the drive would idle a wrong guess costs nothing but slots: then more may be let in."""
OPENING_CYCLES: Final = 36
"""Cycles at the usual level before another is tried: a short answer is no time for it."""
SPAN: Final = 12
_SETTLING: Final = 2
"""Cycles at the begin of a span that live on what the one before has read."""
NEXT: Final = 2
"""Spans until a level that is hardly measured is tried again."""
PROBE_EVERY: Final = 16
"""Spans until one that was about as good is: costs change with text and residency."""
SELDOM: Final = 40
"""Spans until one that was clearly worse is."""
CLEARLY: Final = 1.1
WORTH: Final = 0.03
"""Gain in time below which another level is no reason to change, however sure it is."""
_SIGMAS: Final = 2.0
LEAST_CYCLES: Final = 16
_REMEMBERED: Final = 48


class HintLevel:
    """Chooses the level of each cycle of one session.

    Attributes:
        least_right: the share of guesses that must be right now.
    """

    def __init__(self) -> None:
        self.least_right = USUAL
        self._best = USUAL
        self._took: dict[float, deque[float]] = {level: deque(maxlen=_REMEMBERED) for level in LEVELS}
        self._due = dict.fromkeys(LEVELS, 0)  # spans until a level is tried
        self._num_cycles = self._in_span = 0

    def count(self, relative: float) -> None:
        """Take note of a cycle.

        Args:
            relative: what it took over what a cycle of its width usually takes.
        """
        self._num_cycles += 1
        self._in_span += 1
        if self._in_span > _SETTLING:
            self._took[self.least_right].append(relative)
        if self._in_span >= SPAN and self._num_cycles >= OPENING_CYCLES:
            self._in_span = 0
            self._choose()

    def _choose(self) -> None:
        """Begin a span: mostly at the best level, now and then at another."""
        costs = {level: median(took) for level, took in self._took.items() if len(took) >= LEAST_CYCLES}
        if self._best in costs:
            least = min(costs, key=lambda level: costs[level])
            doubt = _SIGMAS * hypot(_error(self._took[least]), _error(self._took[self._best]))
            if costs[least] + max(doubt, WORTH * costs[least]) < costs[self._best]:
                self._best = least
        was_trying, self.least_right = self.least_right != self._best, self._best
        for level in LEVELS:
            self._due[level] -= 1
        others = [level for level in LEVELS if level != self._best and self._due[level] <= 0]
        # One level is measured well enough to be judged before the next is tried.
        if others and not was_trying:
            tried = max(
                others, key=lambda level: (0 < len(self._took[level]) < LEAST_CYCLES, -self._due[level])
            )
            self.least_right = tried
            self._due[tried] = NEXT
            if tried in costs and self._best in costs:
                self._due[tried] = SELDOM if costs[tried] > CLEARLY * costs[self._best] else PROBE_EVERY


def _error(took: Sequence[float]) -> float:
    """Return the standard error of the median, from the quartiles: a few stalls say nothing of the rest."""
    low, _, high = quantiles(took, n=4)
    return 1.25 * (high - low) / 1.35 / len(took) ** 0.5
