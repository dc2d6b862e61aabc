"""The slot table alone: what `take` promises, and what it refuses to do for its own bugs."""

import pytest

from expert_store.errors import SlotsExhausted
from expert_store.policy.lru import LeastRecentlyUsed
from expert_store.slots import SlotState, SlotTable


def table(num_slots=3, num_experts=8):
    return SlotTable(0, num_experts, num_slots, LeastRecentlyUsed(num_slots))


def load(slots, *experts):
    taken, missing, _ = slots.take(experts)
    for position in missing:
        slots.loaded(taken[position])
    slots.release(taken)
    slots.check()
    return taken


def test_take_tells_hits_joins_and_misses_apart():
    slots = table()
    load(slots, 5)
    slots.take([6])
    taken, missing, joining = slots.take([6, 7, 5])
    assert (list(missing), list(joining)) == ([1], [0])
    assert len(set(taken)) == 3
    assert [slots.state_of(e) for e in (4, 5, 6)] == [SlotState.EMPTY, SlotState.FULL, SlotState.LOADING]
    slots.check()


def test_slots_are_used_up_before_anything_is_evicted():
    slots = table()
    assert load(slots, 4, 5) + load(slots, 6) == [0, 1, 2]
    assert slots.num_evictions == 0
    assert load(slots, 7) == [0]
    assert (slots.num_evictions, slots.state_of(4)) == (1, SlotState.EMPTY)


def test_a_demand_never_evicts_its_own_hits():
    slots = table()
    load(slots, 0, 1, 2)
    taken, missing, _ = slots.take([0, 3, 4])  # 0 is the least recent
    assert (taken[0], list(missing)) == (0, [1, 2])
    assert slots.state_of(0) is SlotState.FULL


def test_a_loading_slot_is_not_evicted_even_when_nobody_wants_it_any_more():
    slots = table(num_slots=1)
    taken, _, _ = slots.take([0])
    slots.release(taken)
    with pytest.raises(SlotsExhausted) as caught:
        slots.take([1])
    assert caught.value.context["num_loading"] == 1
    slots.loaded(taken[0])
    slots.take([1])
    slots.check()


def test_a_failed_load_leaves_an_empty_slot_behind():
    slots = table(num_slots=2)
    taken, _, _ = slots.take([0, 1])
    slots.release(taken)
    slots.failed(taken[0])
    slots.loaded(taken[1])
    slots.check()
    assert slots.state_of(0) is SlotState.EMPTY
    assert load(slots, 2) == [taken[0]]
    assert slots.num_evictions == 0


@pytest.mark.parametrize("num_slots", [8, 9])
def test_with_a_slot_for_every_expert_the_slot_is_the_expert(num_slots):
    slots = table(num_slots=num_slots)
    assert slots.is_identity
    assert load(slots, 6, 2, 7) == [6, 2, 7]
    taken, _, _ = slots.take([3])
    slots.release(taken)
    slots.failed(taken[0])
    assert load(slots, 3, 0) == [3, 0]
    assert load(slots, *range(8)) == list(range(8))
    assert slots.num_evictions == 0


@pytest.mark.parametrize(
    "misuse",
    [
        lambda slots: slots.release([0, 0]),
        lambda slots: slots.loaded(1),
        lambda slots: slots.loaded(0),
        lambda slots: slots.failed(2),
        lambda slots: slots.failed(0),
    ],
)
def test_our_own_bugs_are_stopped_where_they_happen(misuse):
    slots = table()
    slots.take([0])  # pinned once, LOADING
    slots.loaded(0)
    slots.take([1])
    slots.release([1])
    slots.loaded(1)
    slots.take([2])  # pinned, LOADING: may not fail yet
    with pytest.raises(AssertionError):
        misuse(slots)
