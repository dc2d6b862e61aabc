"""Segmented LRU: one demand is probation, a second one protects; a sweep cannot flush what is used again.

Admitted experts enter probation; a further demand moves them to the protected segment, whose overflow goes
back to the recent end of probation. Victims come from probation first. For prompts that sweep most experts of
a layer once while a few are used by every token. Worse than LRU where the working set turns over faster than
demands repeat. Source: Karedla, Love, Wherry, "Caching strategies to improve disk system performance", 1994.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

PROTECTED_FRACTION: Final = 0.8
"""Share of the slots that may be protected; the paper's range is flat from 0.6 to 0.8."""


class SegmentedLru:
    """Two lists, each from least to most recent."""

    __slots__ = ("_num_protected_max", "_probation", "_protected")

    def __init__(self, num_slots: int) -> None:
        """Start empty.

        Args:
            num_slots: Slots of the layer; bounds the protected segment.
        """
        self._num_protected_max = int(num_slots * PROTECTED_FRACTION)
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def admit(self, expert: int) -> None:
        """Enter probation as the most recent."""
        self._probation[expert] = None

    def touch(self, experts: Sequence[int]) -> None:
        """Protect each, or renew its protection."""
        protected, probation = self._protected, self._probation
        for expert in experts:
            if expert in protected:
                protected.move_to_end(expert)
                continue
            del probation[expert]
            protected[expert] = None
            if len(protected) > self._num_protected_max:
                demoted, _ = protected.popitem(last=False)
                probation[demoted] = None

    def evict(self, can_leave: Callable[[int], bool]) -> int | None:
        """Return the least recent that can leave, from probation if any there can."""
        for segment in (self._probation, self._protected):
            for expert in segment:
                if can_leave(expert):
                    del segment[expert]
                    return expert
        return None

    def remove(self, expert: int) -> None:
        """Forget one."""
        segment = self._protected if expert in self._protected else self._probation
        del segment[expert]
