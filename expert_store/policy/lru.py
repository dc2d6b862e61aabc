"""Least recently used: the demand that lies furthest back leaves.

The default: per-layer tables see one demand per token, so the cyclic order of layers, which ruins LRU over a
shared pool, does not occur. Not for prompts that sweep many experts once: see slru.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class LeastRecentlyUsed:
    """One list from least to most recent."""

    __slots__ = ("_order",)

    def __init__(self, num_slots: int) -> None:
        """Start empty; `num_slots` does not matter to this policy."""
        del num_slots
        self._order: OrderedDict[int, None] = OrderedDict()

    def admit(self, expert: int) -> None:
        """Enter as the most recent."""
        self._order[expert] = None

    def touch(self, experts: Sequence[int]) -> None:
        """Make each the most recent, in turn."""
        move = self._order.move_to_end
        for expert in experts:
            move(expert)

    def evict(self, can_leave: Callable[[int], bool]) -> int | None:
        """Return the least recent that can leave."""
        for expert in self._order:
            if can_leave(expert):
                del self._order[expert]
                return expert
        return None

    def remove(self, expert: int) -> None:
        """Forget one."""
        del self._order[expert]
