"""What hints may do, and what they may not: order, limits, garbage, slots, generations, books."""

import random
import threading
from array import array

import pytest

from expert_store.errors import StoreError
from expert_store.keys import Prefetch, ReadClass, WaitCause
from expert_store.policy.lru import LeastRecentlyUsed
from expert_store.prefetch import PrefetchLimits
from expert_store.ranking import LIVE_DEMANDS_MAX
from expert_store.reader import ThreadReader
from expert_store.slots import SlotTable
from expert_store.stats import Fate, HintOutcome
from expert_store.testing import HeldSource
from expert_store.unverified import UnverifiedDemands
from tests.unit.expert_store.rig import make_rig

EXACT, NEAR, SPECULATIVE = ReadClass
ONE = {0: (24,)}


def hints(layer, *experts, read_class=NEAR, confidence=0.5, deadline=0):
    return [Prefetch(layer, expert, read_class, confidence, deadline) for expert in experts]


def outcomes(rig):
    return {outcome: num for outcome, num in rig.store.statistics().hints.items() if num}


def fates(rig, read_class):
    return {
        fate: count.num
        for fate, count in rig.store.statistics().classes[read_class].fates.items()
        if count.num
    }


def read_order(rig):
    order = []
    while (job := rig.reader.begin()) is not None:
        order.append(job.key.expert)
        rig.reader.finish()
    return order


# Order.


def test_exact_goes_first_then_near_then_speculative_by_deadline_then_by_confidence():
    rig = make_rig(num_experts=32, slots=20, lengths=ONE)
    rig.store.prefetch(
        [
            Prefetch(0, 1, SPECULATIVE, 1.0, 0),
            Prefetch(0, 2, NEAR, 0.1, 5),
            Prefetch(0, 3, NEAR, 0.9, 5),
            Prefetch(0, 4, NEAR, 0.0, 4),
        ],
        owner=1,
        generation=0,
    )
    rig.store.request(0, [9, 1])
    assert read_order(rig) == [9, 1, 4, 3, 2]


def test_a_demand_makes_a_queued_guess_exact_and_gives_it_its_slot():
    rig = make_rig(slots=4, lengths=ONE)
    rig.store.prefetch(hints(0, 1, 2), owner=1, generation=0)
    request = rig.store.request(0, [2])
    ticket = rig.reader.begin()
    assert (ticket.key.expert, ticket.read_class, ticket.issued_class) == (2, EXACT, NEAR)
    rig.reader.run()
    assert rig.holds(0, 2, request.wait().slots[0])
    got = rig.store.statistics()
    assert (got.num_joined, got.num_misses, got.num_exact, len(rig.counting.reads)) == (1, 0, 0, 2)


def test_a_guess_gives_way_to_others_on_the_drive_and_a_demand_does_not():
    rig = make_rig(slots=4, lengths=ONE)
    busy = [True]
    rig.store.give_way_to(lambda: busy[0])
    rig.store.prefetch(hints(0, 1), owner=1, generation=0)
    assert rig.reader.num_wakes == 0
    rig.store.request(0, [2])
    assert read_order(rig) == [2]
    busy[0] = False
    woken = rig.reader.num_wakes
    rig.store.resume_guesses()
    assert rig.reader.num_wakes == woken + 1
    assert read_order(rig) == [1]
    rig.store.resume_guesses()
    assert rig.reader.num_wakes == woken + 1  # nobody is woken for nothing


def test_a_demand_joins_a_guess_on_the_wire_without_a_second_read():
    rig = make_rig(slots=4, lengths=ONE)
    rig.store.prefetch(hints(0, 1), owner=1, generation=0)
    rig.reader.begin()
    request = rig.store.request(0, [1])
    rig.store.advance(1, 1)  # too late to make it stale: it is exact now
    rig.reader.run()
    assert rig.holds(0, 1, request.wait().slots[0])
    assert fates(rig, NEAR) == {Fate.JOINED: 1}
    assert len(rig.counting.reads) == 1


def test_a_hint_for_what_is_resident_or_in_flight_costs_nothing():
    rig = make_rig(slots=4, lengths=ONE)
    rig.load(0, [1])
    rig.store.request(0, [2])
    assert rig.store.prefetch(hints(0, 1, 2, 3, 3), owner=1, generation=0) == 1
    assert outcomes(rig) == {HintOutcome.RESIDENT: 1, HintOutcome.IN_FLIGHT: 2, HintOutcome.ACCEPTED: 1}


def test_whoever_hands_hints_over_is_told_which_of_them_led_to_reads():
    rig = make_rig(slots=4, lengths=ONE)
    rig.load(0, [1])
    issued: list[Prefetch] = []
    rig.store.prefetch(hints(0, 1, 3, 3), owner=1, generation=0, issued=issued)
    assert issued == hints(0, 3)


def test_guesses_wake_no_more_readers_than_may_read_them():
    rig = make_rig(slots=8, lengths=ONE)
    woken: list[int] = []
    wake = rig.reader.wake
    rig.reader.wake = lambda num_jobs: (woken.append(num_jobs), wake(num_jobs))[1]
    rig.store._dispatcher._max_guesses_reading = 2
    rig.store.prefetch(hints(0, 1, 2, 3), owner=1, generation=0)
    rig.reader.begin()
    rig.store.prefetch(hints(0, 4, 5), owner=1, generation=0)
    rig.reader.begin()
    rig.store.prefetch(hints(0, 6), owner=1, generation=0)
    assert woken == [2, 1], "two are on the wire: the third must not wake anybody"
    rig.reader.run()
    assert rig.store.statistics().num_queued == 0, "whoever ends a guess takes the next"


def test_a_newer_hint_takes_over_a_queued_guess_if_it_is_more_urgent():
    rig = make_rig(slots=6, lengths=ONE)
    rig.store.prefetch(hints(0, 1, read_class=SPECULATIVE, deadline=9), owner=7, generation=0)
    rig.store.prefetch(hints(0, 1, 2, deadline=3), owner=1, generation=0)
    rig.store.advance(7, 1)
    assert rig.store.statistics().num_queued == 2
    rig.store.advance(1, 1)
    assert fates(rig, SPECULATIVE) == {Fate.CANCELLED: 1}
    assert fates(rig, NEAR) == {Fate.CANCELLED: 1}


# Limits.


class CountingLock:
    """A lock that counts how often it is taken."""

    def __init__(self):
        self._lock, self.num = threading.RLock(), 0

    def __enter__(self):
        self.num += 1
        return self._lock.__enter__()

    def __exit__(self, *exc):
        return self._lock.__exit__(*exc)


def test_a_million_hints_are_one_acquisition_and_bounded_work(monkeypatch):
    monkeypatch.setattr("expert_store.store.threading.Lock", CountingLock)
    limits = PrefetchLimits(max_hints=50, max_queued=8)
    rig = make_rig(num_experts=500, slots=200, lengths=ONE, limits=limits)
    monkeypatch.undo()
    looked_at = []
    flood = [Prefetch(0, number % 500, NEAR, 0.5, number) for number in range(1_000_000)]
    let_in = type(rig.store._prefetcher)._let_in
    monkeypatch.setattr(
        type(rig.store._prefetcher),
        "_let_in",
        lambda self, hint, *rest: looked_at.append(hint) or let_in(self, hint, *rest),
    )
    before = rig.store._lock.num
    assert rig.store.prefetch(flood, owner=1, generation=0) == 8
    assert (rig.store._lock.num - before, len(looked_at)) == (1, 50)
    assert outcomes(rig) == {
        HintOutcome.ACCEPTED: 8,
        HintOutcome.QUEUE_FULL: 42,
        HintOutcome.TOO_MANY: 999_950,
    }


GARBAGE = [
    None,
    (),
    "hint",
    (0, 1),
    (0, 1, NEAR, 0.5, 0),  # not a Prefetch
    Prefetch(99, 1),
    Prefetch(0, 99),
    Prefetch(0, -1),
    Prefetch(0, 1.0),
    Prefetch("0", 1),
    Prefetch(0, None),
    Prefetch([], 1),
    Prefetch(0, 1, EXACT),
    Prefetch(0, 1, 7),
    Prefetch(0, 1, NEAR, float("nan")),
    Prefetch(0, 1, NEAR, float("inf")),
    Prefetch(0, 1, NEAR, -0.1),
    Prefetch(0, 1, NEAR, "sure"),
    Prefetch(0, 1, NEAR, 0.5, 1.5),
    Prefetch(0, 1, NEAR, 0.5, None),
]


def test_what_waits_for_a_demand_that_did_not_want_it_is_not_read_any_more():
    rig = make_rig(num_experts=16, slots=8, lengths=ONE)
    rig.store.prefetch(hints(0, 1, 2), owner=1, generation=0)
    rig.store.prefetch(hints(0, 3, read_class=SPECULATIVE), owner=1, generation=0)
    rig.store.prefetch(hints(0, 4), owner=2, generation=0)
    rig.store.request(0, [2, 9], owner=1)
    assert fates(rig, NEAR) == {Fate.CANCELLED: 1}
    assert read_order(rig) == [2, 9, 4, 3], "of a later block, or of somebody else's demand: read"
    assert rig.store.prefetch(hints(0, 1), owner=1, generation=0) == 1, "it may be named again"


NO_CHANCES = [
    None,
    [0.5] * 8,
    memoryview(b"12345678"),
    memoryview(array("f", [0.5] * 7)),
    memoryview(array("d", [0.5] * 8)),
    memoryview(array("f", [0.5] * 8)).cast("B").cast("f", (4, 2)),
]


@pytest.mark.parametrize("chances", NO_CHANCES, ids=["none", "list", "bytes", "short", "doubles", "rows"])
def test_an_outlook_that_is_none_is_ignored(chances):
    rig = make_rig(num_experts=8, slots=4, lengths=ONE)
    outlook = {0: chances, 99: memoryview(array("f", [1.0] * 8))}
    assert rig.store.prefetch(hints(0, 3), owner=1, generation=0, outlook=outlook) == 1
    assert read_order(rig) == [3]


def test_a_guess_takes_the_slot_of_what_the_outlook_calls_least_likely():
    rig = make_rig(num_experts=8, slots=4, lengths=ONE)
    rig.store.request(0, [0, 1, 2, 3]).cancel()
    rig.reader.run()
    chances = memoryview(array("f", [0.4, 0.6, 0.1, 0.6, 0.0, 0.5, 0.5, 0.3]))
    rig.store.prefetch(hints(0, 5, 6, 7), owner=1, generation=0, outlook={0: chances})
    assert read_order(rig) == [5, 6]
    assert [expert for expert in range(8) if rig.store.is_resident(0, expert)] == [1, 3, 5, 6]
    assert fates(rig, NEAR) == {Fate.DROPPED: 1}, "what is left is likelier than the third"


@pytest.mark.parametrize("hint", GARBAGE, ids=repr)
def test_a_hint_that_makes_no_sense_is_counted_and_nothing_else(hint):
    rig = make_rig(slots=4, lengths=ONE)
    assert rig.store.prefetch([hint, *hints(0, 3), hint], owner=1, generation=0) == 1
    assert outcomes(rig) == {HintOutcome.INVALID: 2, HintOutcome.ACCEPTED: 1}
    assert read_order(rig) == [3]


def test_the_byte_budget_is_for_one_owner_and_one_generation():
    rig = make_rig(slots=8, num_experts=16, lengths=ONE, limits=PrefetchLimits(budget_bytes=60))
    rig.store.prefetch(hints(0, 1, 2, 3), owner=1, generation=0)
    rig.store.prefetch(hints(0, 4), owner=2, generation=0)
    assert outcomes(rig) == {HintOutcome.ACCEPTED: 3, HintOutcome.OVER_BUDGET: 1}
    rig.store.advance(1, 1)
    assert rig.store.prefetch(hints(0, 5, 6, 7), owner=1, generation=1) == 2
    rig.store.set_prefetch_budget(24)
    rig.store.advance(1, 2)
    assert rig.store.prefetch(hints(0, 5, 6, 7), owner=1, generation=2) == 1
    rig.store.set_prefetch_budget(0)
    assert rig.store.prefetch(hints(0, 8), owner=3, generation=0) == 0


@pytest.mark.parametrize(
    "setting", ["max_queued", "max_hints", "max_reads", "budget_bytes", "min_exact_slots"]
)
def test_negative_limits_are_refused(setting):
    with pytest.raises(StoreError, match=f"{setting} is negative"):
        PrefetchLimits(**{setting: -1})


def test_zero_guesses_may_wait_or_be_read_if_the_limits_say_so():
    for limits in (PrefetchLimits(max_queued=0), PrefetchLimits(max_reads=0)):
        rig = make_rig(slots=4, lengths=ONE, limits=limits)
        rig.store.prefetch(hints(0, 1), owner=1, generation=0)
        assert read_order(rig) == []
        rig.load(0, [1])


# Slots.


def test_a_queued_guess_holds_no_slot():
    rig = make_rig(slots=4, lengths=ONE)
    rig.store.prefetch(hints(0, 1, 2), owner=1, generation=0)
    request = rig.store.request(0, [3, 4, 5, 6])
    rig.reader.run()
    lease = request.wait()
    assert sorted(lease.slots) == [0, 1, 2, 3], "every slot was to be had"
    lease.release()


@pytest.mark.parametrize("min_exact", [0, 1, 3, 4, 9, None])
def test_guesses_leave_the_slots_that_exact_demand_may_need(min_exact):
    num_slots = 4
    rig = make_rig(
        num_experts=16, slots=num_slots, lengths=ONE, limits=PrefetchLimits(min_exact_slots=min_exact)
    )
    rig.store.prefetch(hints(0, *range(8)), owner=1, generation=0)
    while rig.reader.begin() is not None:
        pass
    left = num_slots - len(rig.reader.held)
    wanted = 2 if min_exact is None else min(min_exact, num_slots)
    assert left == wanted
    rig.store.request(0, range(8, 8 + left))
    rig.store._shelves[0].table.check()


def test_a_guess_takes_only_what_nobody_wants_and_only_so_much_of_it():
    rig = make_rig(num_experts=16, slots=6, lengths=ONE, limits=PrefetchLimits(min_exact_slots=4))
    rig.load(0, [0, 1, 2, 3])
    lease = rig.store.acquire_nowait(0, [0, 1])  # pinned; 2 is the coldest of the others
    rig.store.prefetch(hints(0, 10, 11), owner=1, generation=0)
    rig.reader.run()  # the two EMPTY slots
    assert rig.store.prefetch(hints(0, 12), owner=1, generation=0) == 0
    assert outcomes(rig)[HintOutcome.NO_ROOM] == 1
    assert all(rig.store.is_resident(0, expert) for expert in (0, 1, 2, 3, 10, 11))
    rig.store.advance(1, 1)  # both were wrong: their slots are free for guesses now
    rig.store.prefetch(hints(0, 12, 13, confidence=0.9), owner=1, generation=1)
    rig.reader.run()
    assert [e for e in range(16) if rig.store.is_resident(0, e)] == [0, 1, 2, 3, 12, 13]
    lease.release()


def test_a_hint_for_what_is_resident_keeps_it_from_other_guesses():
    rig = make_rig(num_experts=16, slots=4, lengths=ONE, limits=PrefetchLimits(min_exact_slots=2))
    rig.load(0, [0, 1, 2, 3])
    rig.store.prefetch(hints(0, 0, 10, 11), owner=1, generation=0)
    rig.reader.run()
    assert [e for e in range(16) if rig.store.is_resident(0, e)] == [0, 3, 10, 11]


def test_a_live_guess_outlasts_cold_demands_and_a_wrong_near_one_does_not():
    for read_class, is_kept in ((SPECULATIVE, True), (NEAR, False)):
        rig = make_rig(num_experts=16, slots=4, lengths=ONE)
        rig.load(0, [0, 1, 2])
        rig.store.prefetch(hints(0, 9, read_class=read_class), owner=1, generation=0)
        rig.reader.run()
        rig.load(0, [5])
        assert rig.store.is_resident(0, 9) == is_kept
        assert rig.store.is_resident(0, 0) != is_kept


def test_a_guess_that_nobody_ends_turns_cold_in_the_end():
    rig = make_rig(num_experts=16, slots=4, lengths=ONE)
    rig.store.prefetch(hints(0, 9, read_class=SPECULATIVE), owner=1, generation=0)
    rig.reader.run()
    for _ in range(LIVE_DEMANDS_MAX - 1):
        rig.load(0, [0, 1, 2])
    rig.load(0, [0, 1, 3])
    assert rig.store.is_resident(0, 9)
    rig.load(0, [0, 1, 4])
    assert not rig.store.is_resident(0, 9)
    assert fates(rig, SPECULATIVE) == {Fate.EVICTED_UNUSED: 1}


@pytest.mark.parametrize(("num_readers", "at_once"), [(1, 1), (2, 1), (4, 2), (9, 4)])
def test_guesses_leave_half_the_readers_to_exact_demand(num_readers, at_once):
    rig = make_rig(num_experts=32, slots=24, lengths=ONE, num_readers=num_readers)
    rig.store.prefetch(hints(0, *range(12)), owner=1, generation=0)
    while rig.reader.begin() is not None:
        pass
    assert len(rig.reader.held) == at_once
    rig.store.request(0, [20])
    assert rig.reader.begin().key.expert == 20
    rig.reader.run()


def test_exact_demand_waits_for_a_guess_on_the_wire_only_if_no_slot_is_to_be_had_otherwise():
    held = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    limits = PrefetchLimits(min_exact_slots=2)
    rig = make_rig(num_experts=16, slots=3, lengths=ONE, wrap=hold, reader=ThreadReader(3), limits=limits)
    rig.store.prefetch(hints(0, 1), owner=1, generation=0)
    held[0].wait_held(1)
    got = []
    asker = threading.Thread(target=lambda: got.append(rig.store.acquire(0, [4, 5], timeout_s=30)))
    asker.start()
    held[0].wait_held(3)  # both are on the wire beside the guess
    held[0].release_all()
    asker.join(30)
    assert not asker.is_alive()
    assert len(set(got[0].slots)) == 2
    got[0].release()
    rig.store.close()


def test_exact_demand_for_every_slot_waits_for_the_guess_that_holds_one():
    held = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = make_rig(num_experts=16, slots=2, lengths=ONE, wrap=hold, reader=ThreadReader(2))
    rig.store.prefetch(hints(0, 1, 2, 3), owner=1, generation=0)
    held[0].wait_held(1)
    got = []
    asker = threading.Thread(target=lambda: got.append(rig.store.acquire(0, [4, 5], timeout_s=30)))
    asker.start()
    held[0].release_all()
    asker.join(30)
    assert all(rig.holds(0, expert, slot) for expert, slot in zip((4, 5), got[0].slots, strict=True))
    rig.store.close()


def test_no_guess_makes_a_request_fail_that_would_not_have_failed_without():
    """A block that is run in groups asks for every slot, with one half leased and the other requested."""
    held = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = make_rig(num_experts=16, slots=4, lengths=ONE, wrap=hold, reader=ThreadReader(4))
    rig.store.prefetch(hints(0, 1, 2), owner=1, generation=0)
    held[0].wait_held(2)
    first = rig.store.request(0, [4, 5])
    got = []
    asker = threading.Thread(target=lambda: got.append(rig.store.request(0, [6, 7])))
    asker.start()
    held[0].release_all()
    asker.join(30)
    for request in (first, got[0]):
        request.wait(30).release()
    assert rig.store.statistics().waits[WaitCause.NO_SLOT].read_ns == 0
    rig.store.close()


# Generations.


def test_advance_cancels_what_is_queued_and_lets_the_wire_finish_without_credit():
    rig = make_rig(num_experts=16, slots=4, lengths=ONE)
    rig.store.prefetch(hints(0, 1, 2), owner=1, generation=0)
    rig.reader.begin()
    rig.store.advance(1, 1)
    rig.reader.run()
    assert fates(rig, NEAR) == {Fate.CANCELLED: 1, Fate.STALE: 1}
    assert rig.store.is_resident(0, 1)
    rig.load(0, [1])
    got = rig.store.statistics()
    assert (got.num_prefetched, got.num_stale_used, got.num_hits) == (0, 1, 1)


def test_a_stale_guess_is_the_first_to_leave():
    rig = make_rig(num_experts=16, slots=4, lengths=ONE)
    rig.load(0, [0, 1, 2])
    rig.store.prefetch(hints(0, 9), owner=1, generation=0)
    rig.reader.begin()
    rig.store.advance(1, 1)
    rig.reader.run()
    rig.load(0, [3])
    assert [e for e in range(16) if rig.store.is_resident(0, e)] == [0, 1, 2, 3]
    got = rig.store.statistics()
    assert (got.stale_evicted_bytes, got.rejected_bytes) == (24, 24)


def test_hints_of_a_past_generation_are_refused_and_of_a_later_one_kept():
    rig = make_rig(num_experts=16, slots=8, lengths=ONE)
    rig.store.advance(1, 5)
    assert rig.store.prefetch(hints(0, 1), owner=1, generation=4) == 0
    assert rig.store.prefetch(hints(0, 2), owner=1, generation=6) == 1
    rig.store.advance(1, 6)
    assert rig.store.statistics().num_queued == 1
    rig.store.advance(1, 7)
    assert outcomes(rig) == {HintOutcome.STALE: 1, HintOutcome.ACCEPTED: 1}
    assert fates(rig, NEAR) == {Fate.CANCELLED: 1}


def test_a_new_generation_leaves_other_owners_alone():
    rig = make_rig(num_experts=16, slots=8, lengths=ONE)
    rig.store.prefetch(hints(0, 1), owner=1, generation=0)
    rig.store.prefetch(hints(0, 2), owner=2, generation=0)
    rig.store.advance(1, 1)
    assert read_order(rig) == [2]


def test_after_stop_hints_are_refused_and_exact_demand_goes_on():
    rig = make_rig(num_experts=16, slots=8, lengths=ONE)
    rig.store.prefetch(hints(0, 1, 2, 3), owner=1, generation=0)
    rig.reader.step()
    rig.reader.begin()
    rig.store.stop_prefetching()
    rig.store.stop_prefetching()
    assert rig.store.prefetch(hints(0, 5), owner=1, generation=0) == 0
    rig.reader.run()
    rig.load(0, [1, 2, 3, 4])
    assert fates(rig, NEAR) == {Fate.STALE: 2, Fate.CANCELLED: 1}
    assert rig.store.statistics().num_unused == 0


def test_a_closed_store_refuses_hints_without_a_word():
    rig = make_rig()
    rig.store.prefetch(hints(0, 1), owner=1, generation=0)
    rig.store.close()
    assert rig.store.prefetch(hints(0, 2), owner=1, generation=0) == 0
    assert outcomes(rig) == {HintOutcome.ACCEPTED: 1, HintOutcome.STOPPED: 1}
    assert fates(rig, NEAR) == {Fate.CANCELLED: 1}


def test_waiting_for_idleness_survives_a_cancelled_guess():
    rig = make_rig(slots=4, lengths=ONE)
    rig.store.prefetch(hints(0, 1), owner=1, generation=0)
    waiter = threading.Thread(target=lambda: rig.store.wait_idle(30))
    waiter.start()
    ticket = rig.store._dispatcher.queue.guesses()[0]
    while not ticket.waiters:
        pass
    rig.store.advance(1, 1)
    waiter.join(30)
    assert not waiter.is_alive()


# Recency.


def order_of(rig, layer=0):
    return list(rig.store._shelves[layer].table.ranking._policy._order)


def test_rejected_rows_leave_recency_as_it_was():
    rig = make_rig(num_experts=16, slots=8, lengths=ONE)
    for experts in ([0, 1], [2, 3], [4]):
        rig.load(0, experts)
    before, counts = order_of(rig), rig.store.demand_counts()
    request = rig.store.request(0, [0, 1, 9], owner=1, row_masks=[0b10, 0b110, 0b100])
    rig.reader.run()
    request.wait().release()
    assert order_of(rig) == before
    rig.store.advance(1, 1, num_rows=1)
    assert (order_of(rig), rig.store.demand_counts()) == (before, counts)
    for expert in (10, 11, 12):  # two EMPTY slots, then that of 9, which only a rejected row had wanted
        rig.load(0, [expert])
    assert not rig.store.is_resident(0, 9)
    assert all(rig.store.is_resident(0, expert) for expert in range(5))


@pytest.mark.parametrize("seed", range(20))
def test_a_settled_block_ranks_as_if_its_rows_had_been_decoded_one_by_one(seed):
    rng = random.Random(seed)
    num_rows, kept = 4, rng.randint(0, 4)
    rows = [rng.sample(range(12), 3) for _ in range(num_rows)]
    tables = [SlotTable(0, 12, 12, LeastRecentlyUsed(12)) for _ in range(2)]
    for table in tables:
        taken, _, _ = table.take(range(12))
        for slot in taken:
            table.loaded(slot)
        table.release(taken)
    plain, block = tables
    for row in rows[:kept]:
        plain.take(sorted(row))
    union = sorted({expert for row in rows for expert in row})
    masks = [sum(1 << number for number, row in enumerate(rows) if expert in row) for expert in union]
    block.take(union, is_committed=False)
    unverified = UnverifiedDemands()
    unverified.add(1, block, tuple(union), tuple(masks))
    unverified.settle(1, kept)
    assert list(plain.ranking._policy._order) == list(block.ranking._policy._order)
    assert plain.ranking.counts == block.ranking.counts


def test_a_guess_touches_nothing_until_it_is_demanded():
    rig = make_rig(num_experts=16, slots=4, lengths=ONE)
    rig.load(0, [0, 1])
    before = order_of(rig)
    rig.store.prefetch(hints(0, 0, 5), owner=1, generation=0)
    rig.reader.run()
    assert order_of(rig) == before
    rig.load(0, [5])
    assert order_of(rig) == [*before, 5]


# Books.


def test_slack_and_issue_to_ready_are_counted_by_class():
    rig = make_rig(num_experts=16, slots=8, lengths=ONE)
    rig.store.prefetch(hints(0, 1, 2), owner=1, generation=0)
    rig.clock.advance(1000)
    rig.reader.step()
    rig.clock.advance(500)
    rig.load(0, [1])  # 500 early
    rig.store.prefetch(hints(0, 3), owner=1, generation=0)
    rig.reader.begin()
    rig.store.request(0, [3])
    rig.clock.advance(40)
    rig.reader.run()  # 40 late
    got = rig.store.statistics()
    near = got.classes[NEAR]
    assert (got.slack.early.num, got.slack.early.total_ns) == (1, 500)
    assert (got.slack.late.num, got.slack.late.total_ns) == (1, 40)
    assert (near.issue_to_ready.num, near.issue_to_ready.max_ns) == (3, 1500)
    assert got.classes[EXACT].issue_to_ready.num == 0
    assert (got.queue.num_reads, got.queue.num_predicted_reads, got.queue.depth_max) == (3, 3, 1)


def test_a_wait_is_put_down_to_the_record_that_ends_it():
    rig = make_rig(num_experts=16, slots=4, lengths=ONE, num_readers=2)

    def wait_for(experts, *, queued_ns, read_ns):
        request = rig.store.request(0, experts)

        def finish_later():
            while not request.is_waited_for:
                pass
            rig.clock.advance(queued_ns)
            if queued_ns:
                rig.reader.begin()
            rig.clock.advance(read_ns)
            rig.reader.run()

        other = threading.Thread(target=finish_later)
        other.start()
        request.wait(30).release()
        other.join()

    wait_for([1], queued_ns=30, read_ns=7)
    for expert in (2, 3, 4, 5):
        rig.load(0, [expert])
    wait_for([1], queued_ns=100, read_ns=3)
    rig.store.prefetch(hints(0, 9), owner=1, generation=0)
    rig.reader.begin()
    wait_for([9], queued_ns=0, read_ns=11)
    got = rig.store.statistics()
    split = {cause: (part.queue_ns, part.read_ns) for cause, part in got.waits.items() if part.total_ns}
    assert split == {
        WaitCause.COLD: (30, 7),
        WaitCause.EVICTED: (100, 3),
        WaitCause.LATE_HINT: (0, 11),
    }
    assert got.exposed_wait_ns == sum(layer.exposed_wait_ns for layer in got.layers) == 151


def test_a_wait_that_is_given_up_has_no_cause():
    rig = make_rig(lengths=ONE, reader=ThreadReader(1), wrap=HeldSource)
    request = rig.store.request(0, [1])
    assert not request.is_ready
    with pytest.raises(StoreError):
        request.wait(timeout_s=0)
    assert set(rig.store.statistics().waits) == set(WaitCause)
    rig.counting._inner.release_all()
    rig.store.close()


def test_exact_io_time_counts_guesses_only_once_they_are_used():
    rig = make_rig(num_experts=16, slots=8, lengths=ONE)
    rig.store.prefetch(hints(0, 1, 2), owner=1, generation=0)
    rig.reader.begin()
    rig.reader.begin()
    rig.clock.advance(100)
    rig.reader.finish()  # 1: from 0 to 100
    rig.clock.advance(100)
    rig.reader.finish()  # 2: from 0 to 200
    assert rig.store.statistics().exact_io_ns == 0
    rig.load(0, [1])
    assert rig.store.statistics().exact_io_ns == 100
    rig.load(0, [2])
    assert rig.store.statistics().exact_io_ns == 200


def test_a_clock_that_steps_back_breaks_nothing():
    rig = make_rig(num_experts=16, slots=8, lengths=ONE)
    rig.clock.advance(10_000)
    rig.store.prefetch(hints(0, 1), owner=1, generation=0)
    request = rig.store.request(0, [2])
    for _ in range(2):
        rig.reader.begin()
        rig.clock.advance(-4_000)
        rig.reader.finish()
    request.wait().release()
    rig.load(0, [1])
    rig.store.advance(1, 1)
    got = rig.store.statistics()
    assert min(got.exact_io_ns, got.exposed_wait_ns, got.issue_to_ready.total_ns, got.read_time.total_ns) >= 0
    assert got.read_time.num == 2


def test_prefetching_that_achieves_nothing_can_be_seen():
    """FIELD P15: loads that are all dropped look like success if only drops are counted."""
    rig = make_rig(num_experts=16, slots=4, lengths=ONE, limits=PrefetchLimits(min_exact_slots=4))
    rig.store.prefetch(hints(0, 1, 2), owner=1, generation=0)
    rig.reader.run()
    got = rig.store.statistics()
    assert (got.predicted_bytes, got.queue.num_predicted_reads, got.useful_prefetch_ratio) == (0, 0, None)
    assert outcomes(rig) == {HintOutcome.NO_ROOM: 2}

    rig = make_rig(num_experts=16, slots=4, lengths=ONE)
    rig.store.prefetch(hints(0, 1, 2), owner=1, generation=0)
    rig.reader.run()
    rig.load(0, [1])
    assert rig.store.statistics().useful_prefetch_ratio == 0.5
