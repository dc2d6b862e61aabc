"""What is in memory: expert <-> slot, slot states and pins of one layer. Entry: `SlotTable.take`.

Pure data: no I/O, no threads, no lock of its own; the store's lock protects it. Only this file changes
residency and pins.

    EMPTY --take (miss), guess--> LOADING --loaded--> FULL --take, guess (another evicts it)--> LOADING
                                  LOADING --failed--> EMPTY

Invariants:
    S1  slot_of and expert_of are inverse over the slots that are not EMPTY;
    S2  a pinned slot (pins > 0) keeps its expert: only FULL slots with no pin are evicted (T3, T5);
    S3  pins count the requests and leases that name the slot and have not ended; they never go below zero;
    S4  num_idle counts FULL slots without pins; free lists the EMPTY ones;
    S5  with a slot for every expert, slot == expert, always: no id ever needs translating;
    S6  (T3) guesses that nobody has joined hold LOADING slots only as long as `min_exact` others are left:
        whatever is guessed, that many slots can be freed as soon as exact demand drops its pins.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from expert_store.errors import SlotsExhausted
from expert_store.policy.base import EvictionPolicy
from expert_store.ranking import Guess, Ranking

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
        max_guesses: Slots that guesses may hold while LOADING (S6), and expected guesses may take from
            demanded records.
        num_evictions: Records that left for another one.
        num_resident: FULL slots.
        ranking: Who leaves first.
    """

    __slots__ = (
        "_expert_of",
        "_free",
        "_guessed",
        "_has_been",
        "_num_idle",
        "_num_loading",
        "_pins",
        "_slot_of",
        "_states",
        "is_identity",
        "layer",
        "max_guesses",
        "num_evictions",
        "num_experts",
        "num_resident",
        "num_slots",
        "ranking",
    )

    def __init__(
        self, layer: int, num_experts: int, num_slots: int, policy: EvictionPolicy, *, min_exact: int = 0
    ) -> None:
        """Start with every slot EMPTY.

        Args:
            layer: Layer index.
            num_experts: Experts that compete for the slots.
            num_slots: Slots.
            policy: Ranks what was demanded.
            min_exact: Slots that guesses may not take (S6). With a slot for every expert nobody competes,
                and this does not matter.
        """
        self.layer = layer
        self.num_experts = num_experts
        self.num_slots = num_slots
        self.is_identity = num_slots >= num_experts
        self.num_evictions = 0
        self.num_resident = 0
        self.max_guesses = num_slots if self.is_identity else max(0, num_slots - min_exact)
        self.ranking = Ranking(policy, num_experts, self.max_guesses)
        self._guessed: set[int] = set()  # slots that are LOADING for a guess that nobody has joined
        self._has_been = bytearray(num_experts)
        self._slot_of = [_ABSENT] * num_experts
        self._expert_of = [_ABSENT] * num_slots
        self._states = [_EMPTY] * num_slots
        self._pins = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_idle = 0
        self._num_loading = 0

    def take(
        self, experts: Sequence[int], *, is_committed: bool = True
    ) -> tuple[list[int], Sequence[int], Sequence[int]]:
        """Pin a slot for every expert; give slots to those that have none. All or nothing.

        Args:
            experts: Distinct, in range.
            is_committed: Whether the demand counts for the ranking now; if not, see `Ranking.confirm`.

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
            if self._guessed:
                self._guessed.difference_update([slots[position] for position in joining])
        if not num_missing:
            self.ranking.hit(experts, is_committed=is_committed)
            return slots, _NONE, joining
        missing = [i for i, slot in enumerate(slots) if slot < 0]
        # Noted before anything is evicted, so that the demand itself is part of the history.
        hits = [expert for expert, slot in zip(experts, slots, strict=True) if slot >= 0]
        self.ranking.hit(hits, is_committed=is_committed)
        for position in missing:
            slot = self._find_room(experts[position], None)
            assert slot is not None, f"layer {self.layer}: room was counted but none can leave"
            slots[position] = slot
            pins[slot] = 1
            self.ranking.miss(experts[position], is_committed=is_committed)
        return slots, missing, joining

    def has_room_for_guesses(self, num_waiting: int) -> bool:
        """Return whether one more guess than those waiting could get a slot, as things stand."""
        return bool(self.max_guesses) and num_waiting < len(self._free) + (
            0 if self.is_identity else self.ranking.room_for_guesses
        )

    def guess(self, expert: int, guess: Guess) -> int | None:
        """Give a slot, LOADING and unpinned, to a predicted expert that has none; None if none may be taken.

        Taken are EMPTY slots, slots of cold records, and, as long as few guesses are expected, slots that the
        policy would free; never one that is pinned, LOADING, holds another expected guess, or a record as
        likely to be wanted (ranking.py K4).
        """
        if len(self._guessed) >= self.max_guesses:
            return None
        slot = self._find_room(expert, guess)
        if slot is not None:
            self._guessed.add(slot)
            self.ranking.expect(expert, guess)
        return slot

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
        self._has_been[self._expert_of[slot]] = 1
        if self._guessed:
            self._guessed.discard(slot)
        if not self._pins[slot]:
            self._num_idle += 1

    def failed(self, slot: int) -> None:
        """Give up a LOADING slot: it holds nothing that anybody may read. Its pins must be gone."""
        assert not self._pins[slot], f"slot {slot} of layer {self.layer} failed while pinned"
        assert self._states[slot] is _LOADING, f"slot {slot} of layer {self.layer} is not loading"
        self._states[slot] = _EMPTY
        self._num_loading -= 1
        self._guessed.discard(slot)
        expert = self._expert_of[slot]
        self.ranking.remove(expert)
        self._slot_of[expert] = self._expert_of[slot] = _ABSENT
        self._free.append(slot)

    def state_of(self, expert: int) -> SlotState:
        """Return the state of the slot that an expert has; EMPTY if it has none."""
        slot = self._slot_of[expert]
        return _EMPTY if slot < 0 else self._states[slot]

    def is_full(self, expert: int) -> bool:
        """Return whether an expert, be there such a one or not, is in a slot, whole."""
        if not 0 <= expert < self.num_experts:
            return False
        slot = self._slot_of[expert]
        return slot >= 0 and self._states[slot] is _FULL

    def has_been(self, expert: int) -> bool:
        """Return whether the record of an expert has ever been in a slot, whole."""
        return bool(self._has_been[expert])

    def confirm(self, experts: Sequence[int], num_rows: Sequence[int]) -> None:
        """Make an uncommitted demand count: experts by their last use, committed rows of each."""
        counts, slot_of = self.ranking.counts, self._slot_of
        for expert, rows in zip(experts, num_rows, strict=True):
            counts[expert] += rows
        self.ranking.confirm([expert for expert in experts if slot_of[expert] >= 0])

    def check(self) -> None:
        """Assert S1 to S6; for tests and for a debugger, not for the hot path."""
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
        assert len(self._guessed) <= self.max_guesses, "S6"
        for slot in self._guessed:
            assert self._states[slot] is _LOADING, "S6"
            assert not self._pins[slot], "S6"
        self.ranking.check({expert for expert in self._expert_of if expert != _ABSENT})

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
                num_guessed=len(self._guessed.difference(slots)),
            )

    def _find_room(self, expert: int, guess: Guess | None) -> int | None:
        """Give a slot to an expert that has none: EMPTY or evicted, now LOADING without a pin."""
        if self.is_identity:
            slot = expert
            self._free.remove(slot)
        elif self._free:
            slot = self._free.pop()
        else:
            victim = (
                self.ranking.evict(self._can_leave)
                if guess is None
                else self.ranking.evict_for(expert, guess, self._can_leave)
            )
            if victim is None:
                return None
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
        return slot

    def _can_leave(self, expert: int) -> bool:
        slot = self._slot_of[expert]
        return not self._pins[slot] and self._states[slot] is _FULL
