"""The most hits that any eviction could have had over recorded demands. Entry: `best_hits`.

A demand is the set of experts that one block asks of one layer: all of them must be in slots at once. A set
wider than the slots is visited in groups, in ascending order, as the engine does. Without a policy, what is
needed again last leaves first, but no member of the set that is being served: by exchange, nothing that reads
on demand has more hits.

Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from expert_store.policy.base import EvictionPolicy

_NEVER: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Hits:
    """What became of demands.

    Attributes:
        num_demands: Experts asked for.
        num_hits: Of them, those in a slot.
    """

    num_demands: int
    num_hits: int

    @property
    def num_misses(self) -> int:
        """Records that had to be read."""
        return self.num_demands - self.num_hits

    @property
    def hit_rate(self) -> float | None:
        """Share of demands that found their record in a slot; None without demands."""
        return self.num_hits / self.num_demands if self.num_demands else None


def best_hits(
    demands: Sequence[Sequence[int]],
    num_slots: int,
    policy: Callable[[int], EvictionPolicy] | None = None,
    *,
    is_measured: Sequence[bool] | None = None,
) -> Hits:
    """Serve the demands of one layer in order.

    Args:
        demands: Sets of experts, each ascending.
        num_slots: Slots of the layer.
        policy: Made with the number of slots; None is Belady's.
        is_measured: Of each demand, whether it counts; None counts all. The others fill slots alone.
    """
    steps: list[tuple[Sequence[int], bool]] = []
    for number, wanted in enumerate(demands):
        width = num_slots if len(wanted) <= num_slots else max(1, num_slots // 2)
        starts = range(0, len(wanted), width)
        counts = is_measured is None or is_measured[number]
        steps += [(wanted[start : start + width], counts) for start in starts]
    due: dict[int, int] = {}
    chooser = _Belady(due) if policy is None else policy(num_slots)
    resident: set[int] = set()
    num_demands = num_hits = 0
    next_uses = _next_uses([wanted for wanted, _ in steps])
    for (wanted, counts), next_use in zip(steps, next_uses, strict=True):
        hits = [expert for expert in wanted if expert in resident]
        if counts:
            num_demands += len(wanted)
            num_hits += len(hits)
        due.update(zip(wanted, next_use, strict=True))
        chooser.touch(hits)
        pinned = frozenset(wanted)
        for expert in [one for one in wanted if one not in resident]:
            if len(resident) >= num_slots:
                victim = chooser.evict(lambda one, pinned=pinned: one not in pinned)
                assert victim is not None, "more is pinned than there are slots"
                resident.remove(victim)
            resident.add(expert)
            chooser.admit(expert)
    return Hits(num_demands, num_hits)


class _Belady(EvictionPolicy):
    """Evicts what is due last.

    Args:
        due: The step that wants each expert next; kept up by the caller.
    """

    def __init__(self, due: Mapping[int, int]) -> None:
        self._due = due
        self._resident: set[int] = set()

    def admit(self, expert: int) -> None:
        self._resident.add(expert)

    def touch(self, experts: Sequence[int]) -> None:
        del experts

    def evict(self, can_leave: Callable[[int], bool]) -> int | None:
        able = (expert for expert in self._resident if can_leave(expert))
        victim = max(able, key=lambda expert: (self._due[expert], expert), default=None)
        if victim is not None:
            self._resident.remove(victim)
        return victim

    def remove(self, expert: int) -> None:
        self._resident.discard(expert)


def _next_uses(steps: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for every expert of every step, the number of the step that wants it next."""
    coming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(steps) - 1, -1, -1):
        found.append([coming.get(expert, _NEVER) for expert in steps[number]])
        coming.update(dict.fromkeys(steps[number], number))
    found.reverse()
    return found
