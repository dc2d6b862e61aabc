"""The two small words that every file of the store shares: which record, and why it is read."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class ReadClass(IntEnum):
    """Why a read was issued; a smaller value goes first."""

    EXACT = 0
    """The native router chose the expert, or a known token needs a row."""
    NEAR = 1
    """A predictor names it for a layer that the current block is about to reach."""
    SPECULATIVE = 2
    """A route hint names it for a block that is not verified yet."""


class ExpertKey(NamedTuple):
    """One routed expert of one layer."""

    layer: int
    expert: int
