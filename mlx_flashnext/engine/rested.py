"""Rows that a drafter is told of later, because it rests. Entry point: `RestedRows`.

A drafter that reads the target's stacks has a cache of its own to keep whole. While it may not propose,
telling it of every row would cost time for nothing; but the stacks are there anyway, so they are kept, and
the drafter takes them in one go when it is asked again. A rest that outlasts `MOST_ROWS` leaves a gap.
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

MOST_ROWS: Final = 256
"""A rest after a failed try of two rows takes about a hundred cycles (governor.py). The plan counts these."""


class RestedRows:
    """Rows in order, none missing."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._stacks: list[mx.array] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def keep(self, tokens: Sequence[int], stack_TGD: mx.array) -> bool:
        """Take rows; False if there are too many now, and none is kept any more."""
        if len(self._tokens) + len(tokens) > MOST_ROWS:
            self.clear()
            return False
        mx.async_eval([stack_TGD])  # pyright: ignore[reportUnknownMemberType]  else the pass that made it would be held
        self._tokens.extend(tokens)
        self._stacks.append(stack_TGD)
        return True

    def take(self) -> tuple[list[int], mx.array]:
        """Return all tokens and their stacks [T, G, D], and keep none."""
        tokens, stack_TGD = self._tokens, mx.concatenate(self._stacks)
        self.clear()
        return tokens, stack_TGD

    def clear(self) -> None:
        """Keep none."""
        self._tokens, self._stacks = [], []
