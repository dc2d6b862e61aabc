"""What is in memory: expert <-> slot, slot states and pins of one layer. Entry: `SlotTable.take`.

Pure data: no I/O, no threads, no lock of its own; the store's lock protects it. Only this file changes
residency and pins.

    EMPTY --take (miss)--> LOADING --loaded--> FULL --take (another miss evicts it)--> LOADING
                           LOADING --failed--> EMPTY

Invariants:
    S1  slot_of and expert_of are inverse over the slots that are not EMPTY;
    S2  a pinned slot (pins > 0) keeps its expert: only FULL slots with no pin are evicted (T3, T5);
    S3  pins count the requests and leases that name the slot and have not ended; they never go below zero;
    S4  num_idle counts FULL slots without pins; free lists the EMPTY ones;
    S5  with a slot for every expert, slot == expert, always: no id ever needs translating.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from expert_store.errors import SlotsExhausted
from expert_store.policy.base import EvictionPolicy

_NONE: Final[tuple[int, ...]] = ()
_ABSENT: Final = -1


class SlotState(IntEnum):
    """What the bytes of a slot are."""

    EMPTY = 0
    """Nothing."""
    LOADING = 1
    """Being written; nobody may read."""
    FULL = 2
    """One whole record."""


# Looked up once: an enum member costs more than the comparison it is used in, ten times a request.
_EMPTY: Final = SlotState.EMPTY
_LOADING: Final = SlotState.LOADING
_FULL: Final = SlotState.FULL


class SlotTable:
    """The slots of one layer.

    Attributes:
        layer: Layer index.
        num_experts: Experts that compete for the slots.
        num_slots: Slots.
        is_identity: Whether slot == expert (S5).
        num_evictions: Records that left for another one.
        num_resident: FULL slots.
    """

    __slots__ = (
        "_expert_of",
        "_free",
        "_num_idle",
        "_num_loading",
        "_pins",
        "_policy",
        "_slot_of",
        "_states",
        "is_identity",
        "layer",
        "num_evictions",
        "num_experts",
        "num_resident",
        "num_slots",
    )

    def __init__(self, layer: int, num_experts: int, num_slots: int, policy: EvictionPolicy) -> None:
        """Start with every slot EMPTY."""
        self.layer = layer
        self.num_experts = num_experts
        self.num_slots = num_slots
        self.is_identity = num_slots >= num_experts
        self.num_evictions = 0
        self.num_resident = 0
        self._policy = policy
        self._slot_of = [_ABSENT] * num_experts
        self._expert_of = [_ABSENT] * num_slots
        self._states = [_EMPTY] * num_slots
        self._pins = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_idle = 0
        self._num_loading = 0

    def take(self, experts: Sequence[int]) -> tuple[list[int], Sequence[int], Sequence[int]]:
        """Pin a slot for every expert; give slots to those that have none. All or nothing.

        Args:
            experts: Distinct, in range.

        Returns:
            slots: One per expert, in the order given.
            missing: Positions given a slot just now: it is LOADING, the caller must have it read.
            joining: Positions whose slot was LOADING already: somebody else has it read.

        Raises:
            SlotsExhausted: More are missing than slots can be freed. Nothing was changed.
        """
        slot_of, pins, states = self._slot_of, self._pins, self._states
        slots = [slot_of[expert] for expert in experts]
        num_missing = slots.count(_ABSENT)
        if num_missing:
            self._check_room(num_missing, slots)
        for slot in slots:
            if slot >= 0:
                if not pins[slot] and states[slot] is _FULL:
                    self._num_idle -= 1
                pins[slot] += 1
        joining: Sequence[int] = _NONE
        if self._num_loading:
            joining = [i for i, slot in enumerate(slots) if slot >= 0 and states[slot] is _LOADING]
        if not num_missing:
            self._policy.touch(experts)
            return slots, _NONE, joining
        missing = [i for i, slot in enumerate(slots) if slot < 0]
        # Touched before anything is evicted, so that the demand itself is part of the history.
        self._policy.touch([expert for expert, slot in zip(experts, slots, strict=True) if slot >= 0])
        for position in missing:
            slots[position] = self._claim(experts[position])
        return slots, missing, joining

    def release(self, slots: Sequence[int]) -> None:
        """Drop one pin of each slot (S3). The record stays until its slot is needed."""
        pins, states = self._pins, self._states
        for slot in slots:
            left = pins[slot] - 1
            assert left >= 0, f"slot {slot} of layer {self.layer} released more often than pinned"
            pins[slot] = left
            if not left and states[slot] is _FULL:
                self._num_idle += 1

    def loaded(self, slot: int) -> None:
        """Declare the record of a LOADING slot whole."""
        assert self._states[slot] is _LOADING, f"slot {slot} of layer {self.layer} is not loading"
        self._states[slot] = _FULL
        self._num_loading -= 1
        self.num_resident += 1
        if not self._pins[slot]:
            self._num_idle += 1

    def failed(self, slot: int) -> None:
        """Give up a LOADING slot: it holds nothing that anybody may read. Its pins must be gone."""
        assert not self._pins[slot], f"slot {slot} of layer {self.layer} failed while pinned"
        assert self._states[slot] is _LOADING, f"slot {slot} of layer {self.layer} is not loading"
        self._states[slot] = _EMPTY
        self._num_loading -= 1
        expert = self._expert_of[slot]
        self._policy.remove(expert)
        self._slot_of[expert] = self._expert_of[slot] = _ABSENT
        self._free.append(slot)

    def state_of(self, expert: int) -> SlotState:
        """Return the state of the slot that an expert has; EMPTY if it has none."""
        slot = self._slot_of[expert]
        return _EMPTY if slot < 0 else self._states[slot]

    def check(self) -> None:
        """Assert S1 to S5; for tests and for a debugger, not for the hot path."""
        full = idle = 0
        for slot, state in enumerate(self._states):
            expert = self._expert_of[slot]
            assert (state is _EMPTY) == (expert == _ABSENT), f"S1 slot {slot}"
            assert expert == _ABSENT or self._slot_of[expert] == slot, f"S1 slot {slot}"
            assert self._pins[slot] >= 0, f"S3 slot {slot}"
            assert not self.is_identity or expert in (_ABSENT, slot), f"S5 slot {slot}"
            full += state is _FULL
            idle += state is _FULL and not self._pins[slot]
        assert sum(slot >= 0 for slot in self._slot_of) == self.num_slots - len(self._free), "S1"
        assert (self.num_resident, self._num_idle) == (full, idle), "S4"
        assert all(self._states[slot] is _EMPTY for slot in self._free), "S4"
        assert len(self._free) + self._num_loading + full == self.num_slots, "S4"

    def _check_room(self, num_missing: int, slots: list[int]) -> None:
        """Refuse before anything changes, if too few slots can be freed once the hits are pinned."""
        pins, states = self._pins, self._states
        hits_idle = sum(1 for s in slots if s >= 0 and not pins[s] and states[s] is _FULL)
        room = len(self._free) + self._num_idle - hits_idle
        if num_missing > room:
            raise SlotsExhausted(
                f"Layer {self.layer} needs {num_missing} more slots and can free {room} of {self.num_slots}",
                hint="release leases, ask for fewer experts at once, or give the layer more slots",
                layer=self.layer,
                wanted=num_missing,
                room=room,
                num_loading=self._num_loading,
            )

    def _claim(self, expert: int) -> int:
        """Give a slot to an expert that has none: EMPTY or evicted, now LOADING with one pin."""
        if self.is_identity:
            slot = expert
            self._free.remove(slot)
        elif self._free:
            slot = self._free.pop()
        else:
            victim = self._policy.evict(self._can_leave)
            assert victim is not None, f"layer {self.layer}: room was counted but none can leave"
            assert self._can_leave(victim), f"layer {self.layer}: policy evicted {victim}, which is in use"
            slot = self._slot_of[victim]
            self._slot_of[victim] = _ABSENT
            self._num_idle -= 1
            self.num_resident -= 1
            self.num_evictions += 1
        self._slot_of[expert] = slot
        self._expert_of[slot] = expert
        self._states[slot] = _LOADING
        self._num_loading += 1
        self._pins[slot] = 1
        self._policy.admit(expert)
        return slot

    def _can_leave(self, expert: int) -> bool:
        slot = self._slot_of[expert]
        return not self._pins[slot] and self._states[slot] is _FULL
