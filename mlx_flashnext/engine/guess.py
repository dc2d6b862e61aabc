"""One guess of a route, as predictors say it and hints take it."""

from collections.abc import Sequence
from typing import NamedTuple

Rows = Sequence[Sequence[int]]


class Guess(NamedTuple):
    """One record that will probably be wanted.

    Attributes:
        layer: layer index.
        expert: expert of that layer.
        confidence: from 0 to 1; orders the guesses of a layer.
        passes_ahead: 0 for the block that runs, 1 for the one after it.
    """

    layer: int
    expert: int
    confidence: float = 1.0
    passes_ahead: int = 0
