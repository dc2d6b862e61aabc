"""The contract between a slot table and its eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the experts of one layer that hold a slot.

    The table guarantees: an expert is admitted before it is touched, evicted or removed, and not again until
    it has left; `touch` names each expert of a demand once, in the order of the demand. Every demand of a
    resident or loading expert is touched, whichever path it came by (FIELD P13).
    """

    def admit(self, expert: int) -> None:
        """Take in an expert that was demanded, missed and given a slot."""
        ...

    def touch(self, experts: Sequence[int]) -> None:
        """Note a demand of admitted experts. Runs on every hit: no allocation worth mentioning."""
        ...

    def evict(self, can_leave: Callable[[int], bool]) -> int | None:
        """Choose the expert of least worth among those that can leave, forget it and return it.

        MUST return None, and forget nothing, if none can leave.
        """
        ...

    def remove(self, expert: int) -> None:
        """Forget an expert whose slot was lost for another reason (its read failed)."""
        ...
