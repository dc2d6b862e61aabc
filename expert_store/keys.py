"""The small words that every file of the store shares: which record, why it is read, why it is waited for."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class ReadClass(IntEnum):
    """Why a read was issued; a smaller value goes first."""

    EXACT = 0
    """The native router chose the expert, or a known token needs a row."""
    NEAR = 1
    """A predictor names it for a layer's next demand, in the block that runs or begins next."""
    SPECULATIVE = 2
    """It is named for a block after that one, or the cache is warmed."""


class WaitCause(IntEnum):
    """Why a record that compute stood still for was not there."""

    COLD = 0
    """It had never been in a slot."""
    EVICTED = 1
    """It had been in a slot and had left it."""
    LATE_HINT = 2
    """A prediction had issued its read, not early enough."""
    NO_SLOT = 3
    """Its read could not be queued: reads on the wire held the slots it needs."""
    UNFINISHED = 4
    """Not known: the wait was given up before the record came."""


class ExpertKey(NamedTuple):
    """One routed expert of one layer."""

    layer: int
    expert: int


class Prefetch(NamedTuple):
    """One hint: a record that will probably be demanded. A named tuple, because a token may bring a thousand.

    Plain Python numbers: a hint of anything else (an array's scalar, say) is counted as invalid.

    Attributes:
        layer: Layer index.
        expert: Expert of that layer.
        read_class: NEAR or SPECULATIVE.
        confidence: From 0 to 1; orders hints of one deadline.
        deadline: When compute is expected to demand it, on any scale that grows: the smallest goes first
            within a class. The store only compares; hints of one owner should share one scale, such as
            `passes_ahead * num_layers + layer`.
    """

    layer: int
    expert: int
    read_class: ReadClass = ReadClass.NEAR
    confidence: float = 1.0
    deadline: int = 0
