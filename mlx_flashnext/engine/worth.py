"""Whether guesses are worth their reads, learned from what became of earlier ones. Entry: `Worth`.

A wrong guess costs at most what a right one gains: the drive's time for one record. So a guess is let in only
if those as sure as it were right at least every other time, or whatever the governor has found to pay
(`hint_level.py`). Judged are guesses that led to a read, by whether
the layer chose the expert in the pass they were made for; what was resident anyway cost nothing and proves
nothing.

What is withheld goes on being tried, one guess a pass; each that is right doubles the next pass's tries, so
that a predictor which has become good is let in again within a few passes.
"""

from collections.abc import Sequence
from typing import Final

from expert_store.keys import Prefetch
from mlx_flashnext.engine.guess import Rows
from mlx_flashnext.engine.hint_level import USUAL

MAX_TRIES: Final = 64
"""Most withheld guesses that are tried in one pass."""
_OPENING: Final = (6.0, 8.0)
"""Right ones and all, before anything is known: five wrong ones in a row end the credit."""
_PRIOR: Final = 8.0
"""Guesses for which the share of all guesses stands in while a level of confidence is little known."""
_REMEMBERED: Final = 128
"""Counts are halved at so many: what a predictor was worth a subject ago says little."""
_LEVELS: Final = 16


class Worth:
    """Counts guesses and right ones, by how sure they were.

    Attributes:
        least_right: share of guesses of one sureness that must have been right for another to be let in.
        num_withheld: guesses that were not let in.
    """

    def __init__(self) -> None:
        self.num_withheld = 0
        self.least_right = USUAL
        self._right = [0.0] * (_LEVELS + 1)
        self._all = [0.0] * (_LEVELS + 1)
        self._total_right, self._total = _OPENING
        self._is_good = [True] * (_LEVELS + 1)  # whether guesses of a level are let in
        # By deadline, which names pass and layer: expert, level, whether it was a try.
        self._open: dict[int, list[tuple[int, int, bool]]] = {}
        self._tried: set[tuple[int, int]] = set()
        self._num_tries, self._tries_left = 1, 0

    def begin(self, deadline: int, *, may_try: bool, least_right: float = USUAL) -> None:
        """Begin a pass: forget guesses for passes before it, which nobody judged.

        Args:
            deadline: of the pass's first layer.
            may_try: whether withheld guesses may be tried in it.
            least_right: from now on.
        """
        for late in [one for one in self._open if one < deadline]:
            del self._open[late]
        self._tried = {one for one in self._tried if one[0] >= deadline}
        self._tries_left = self._num_tries if may_try else 0
        if least_right != self.least_right:
            self.least_right = least_right
            self._judge()

    @property
    def is_recovering(self) -> bool:
        """Whether the last tries were right, so that more are due soon."""
        return self._num_tries > 1

    def lets_in(self, deadline: int, expert: int, confidence: float) -> bool:
        """Return whether a guess may be handed over."""
        level = int(confidence * _LEVELS) if 0.0 <= confidence <= 1.0 else 0  # `_level`, a call less
        if self._is_good[level]:
            return True
        if self._tries_left > 0:
            self._tries_left -= 1
            self._tried.add((deadline, expert))
            return True
        self.num_withheld += 1
        return False

    def issued(self, hints: Sequence[Prefetch]) -> int:
        """Take note of hints that led to reads; return how many of them were no tries."""
        num_tries = 0
        for _, expert, _, confidence, deadline in hints:
            is_try = (deadline, expert) in self._tried
            num_tries += is_try
            self._open.setdefault(deadline, []).append((expert, _level(confidence), is_try))
        return len(hints) - num_tries

    def routed(self, deadline: int, ids_TK: Rows) -> None:
        """Judge the guesses that were made for a layer of a pass."""
        guesses = self._open.pop(deadline, None)
        if guesses is None:
            return
        chosen = {expert for row in ids_TK for expert in row}
        for expert, level, is_try in guesses:
            self._count(level, is_right=expert in chosen, is_try=is_try)
        self._judge()

    def _judge(self) -> None:
        overall = _PRIOR * self._total_right / self._total
        self._is_good = [
            right + overall >= self.least_right * (number + _PRIOR)
            for right, number in zip(self._right, self._all, strict=True)
        ]

    def _count(self, level: int, *, is_right: bool, is_try: bool) -> None:
        if is_try:
            self._num_tries = min(2 * self._num_tries, MAX_TRIES) if is_right else 1
        self._right[level] += is_right
        self._all[level] += 1
        self._total_right += is_right
        self._total += 1
        if self._all[level] >= _REMEMBERED:
            self._right[level] /= 2
            self._all[level] /= 2
        if self._total >= _REMEMBERED:
            self._total_right /= 2
            self._total /= 2


def _level(confidence: float) -> int:
    """Return the level of a confidence; of what is none, the lowest: the store refuses it."""
    return int(confidence * _LEVELS) if 0.0 <= confidence <= 1.0 else 0
