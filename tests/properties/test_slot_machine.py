"""The store against a model: requests, hints, reads, failures, generations in any order. T1-T6, S1-S6, K1-K3.

The reader is stepped, so every interleaving is a list of rules and nothing sleeps. The model (store_model.py)
knows which records are in memory, who pinned them, who leaves next, and what became of every ticket; memory
is compared byte by byte. Planted faults at the end show that the machine sees what it is there to see.
"""

import errno

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from expert_store import (
    books,
    completion,
    dispatch,
    lease,
    prefetch,
    ranking,
    read_queue,
    slots,
    store,
    unverified,
)
from expert_store.errors import (
    RecordCorrupt,
    SlotsExhausted,
    SourceFailed,
    StoreClosed,
    StoreError,
    WouldBlock,
)
from expert_store.keys import Prefetch, ReadClass
from expert_store.layout import RecordLayout
from expert_store.policy.lru import LeastRecentlyUsed
from expert_store.prefetch import PrefetchLimits
from expert_store.stats import Fate, HintOutcome
from expert_store.testing import FaultySource
from tests.properties.store_model import StoreModel
from tests.unit.expert_store.rig import make_rig

NUM_EXPERTS = 7
SLOTS = {0: 5, 1: 7}  # layer 1 has a slot for every expert, so slot == expert there
LENGTHS = {0: (12, 5), 1: (40,)}
MIN_EXACT = 3
LIMITS = PrefetchLimits(max_queued=3, budget_bytes=200, min_exact_slots=MIN_EXACT)
NUM_READERS = 4
EXPECTED = {"short": RecordCorrupt, "eio": SourceFailed}
EXACT, NEAR, SPECULATIVE = ReadClass


LAYERS = st.sampled_from([0, 0, 1])
EXPERTS = st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, max_size=3)
OWNERS = st.integers(1, 2)
HINTS = st.lists(
    st.builds(
        Prefetch,
        st.sampled_from([0] * 6 + [1] * 3 + [9]),
        st.sampled_from([*range(NUM_EXPERTS)] * 3 + [-1, NUM_EXPERTS]),
        st.sampled_from([NEAR, SPECULATIVE]),
        st.sampled_from([0.2, 0.5, 0.9]),
        st.integers(0, 2),
    ),
    max_size=4,
)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.fault = None
        self.rig = make_rig(
            num_experts=NUM_EXPERTS,
            slots=SLOTS,
            lengths=LENGTHS,
            wrap=lambda source: FaultySource(source, lambda *_: self._fault()),
            limits=LIMITS,
            num_readers=NUM_READERS,
        )
        self.store = self.rig.store
        self.store.give_way_to(lambda: self.model.gives_way)
        self.model = StoreModel(
            SLOTS,
            NUM_EXPERTS,
            {layer: sum(lengths) for layer, lengths in LENGTHS.items()},
            min_exact=MIN_EXACT,
            max_queued=LIMITS.max_queued,
            max_reads=NUM_READERS // 2,
            budget=LIMITS.budget_bytes,
        )

    @property
    def asked(self):
        return self.model.asked

    def _fault(self):
        if self.fault == "eio":
            return OSError(errno.EIO, "Input/output error")
        return self.fault

    # Requests.

    @rule(
        layer=LAYERS, experts=EXPERTS, owner=OWNERS, masks=st.none() | st.lists(st.integers(1, 7), min_size=3)
    )
    def request(self, layer, experts, owner, masks):
        self.ask(layer, experts, owner, masks)

    def ask(self, layer, experts, owner, masks):
        masks = None if masks is None else masks[: len(experts)]
        if self.model.would_exhaust(layer, experts) and not self.model.would_exhaust(layer, experts, True):
            self.finish_guesses(layer)  # else the store would wait for them
        if self.model.would_exhaust(layer, experts):
            with pytest.raises(SlotsExhausted):
                self.store.request(layer, experts, owner=owner, row_masks=masks)
            return None
        num_wakes = self.rig.reader.num_wakes
        request = self.store.request(layer, experts, owner=owner, row_masks=masks)
        num_exact = len(self.model.exact)
        asked = self.model.ask(request, layer, experts, owner, masks)
        assert (self.rig.reader.num_wakes > num_wakes) == (len(self.model.exact) > num_exact), (
            "a lost wake-up"
        )
        return asked

    @rule(layer=LAYERS, experts=EXPERTS, owner=OWNERS, is_kept=st.booleans(), is_block=st.booleans())
    def acquire(self, layer, experts, owner, is_kept, is_block):
        """Do in one step what a caller does: without this, evictions would be rare."""
        asked = self.ask(layer, experts, owner, [1, 2, 5] if is_block else None)
        while asked is not None and asked.pending and (self.begin() or self.model.reading):
            if self.model.reading:
                self.finish(0, None)
        if asked is not None:
            if asked.error is not None:
                return
            asked.lease = asked.request.wait()
            if not is_kept:
                asked.lease.release()
                self.asked.remove(asked)

    def finish_guesses(self, layer):
        for read in [r for r in self.model.reading if r.read_class is not EXACT and r.key[0] == layer]:
            self.finish(self.model.reading.index(read), None)

    # Hints.

    @rule(hints=HINTS, owner=OWNERS, ahead=st.sampled_from([0, 0, 0, 0, 1, -1]))
    def prefetch(self, hints, owner, ahead):
        generation = self.model.generations[owner] + ahead
        num_wakes = self.rig.reader.num_wakes
        got = self.store.prefetch(hints, owner=owner, generation=generation)
        assert got == self.model.prefetch(hints, owner, generation)
        assert (self.rig.reader.num_wakes > num_wakes) == (bool(got) and self.may_guess())

    def may_guess(self):
        num_reading = sum(read.is_guess_read for read in self.model.reading)
        return num_reading < self.model.max_reads and not self.model.gives_way

    @rule(gives_way=st.sampled_from([True, False, False, False]))
    def share_the_drive(self, gives_way):
        """Let another table's demand come to the drive, or end."""
        self.model.gives_way = gives_way
        if not gives_way:
            num_wakes = self.rig.reader.num_wakes
            self.store.resume_guesses()
            may_wake = bool(self.model.guesses) and self.may_guess()
            assert (self.rig.reader.num_wakes > num_wakes) == may_wake, "a lost wake-up"

    @rule(
        layer=LAYERS,
        owner=OWNERS,
        experts=EXPERTS,
        guess_class=st.sampled_from([NEAR, SPECULATIVE]),
        is_seen_through=st.booleans(),
        is_demanded=st.booleans(),
    )
    def prefetch_well(self, layer, owner, experts, guess_class, is_seen_through, is_demanded):
        """Read ahead, and mostly demand it: without this, few guesses would be joined or used."""
        generation = self.model.generations[owner]
        hints = [Prefetch(layer, expert, guess_class, 0.9, 0) for expert in experts]
        got = self.store.prefetch(hints, owner=owner, generation=generation)
        assert got == self.model.prefetch(hints, owner, generation)
        self.begin()
        self.begin()
        while is_seen_through and self.model.reading:
            self.finish(0, None)
        if is_demanded:
            self.ask(layer, experts, owner, None)

    @rule(owner=OWNERS, num_rows=st.none() | st.integers(0, 3))
    def advance(self, owner, num_rows):
        self.model.advance(owner, num_rows)
        self.store.advance(owner, self.model.generations[owner], num_rows=num_rows)

    @rule(dice=st.integers(1, 30))
    def stop_prefetching(self, dice):
        if dice == 30:
            self.store.stop_prefetching()
            self.model.stop()

    # Reads.

    @rule()
    def begin_read(self):
        self.begin()

    def begin(self):
        job, expected = self.rig.reader.begin(), self.model.begin_read()
        assert (None if job is None else tuple(job.key)) == (None if expected is None else expected.key)
        self.rig.clock.advance(1)
        return job is not None

    @precondition(lambda self: self.model.reading)
    @rule(index=st.integers(0, 3), fault=st.sampled_from([None, None, None, "short", "eio"]))
    def end_read(self, index, fault):
        self.finish(index % len(self.model.reading), fault)

    @precondition(lambda self: self.model.exact)
    @rule(index=st.integers(0, 3), fault=st.sampled_from([None, "short", "eio"]))
    def read_one(self, index, fault):
        self.begin()
        self.finish(index % len(self.model.reading), fault)

    def finish(self, index, fault):
        self.rig.clock.advance(1)
        self.fault = fault
        self.rig.reader.finish(index)
        self.fault = None
        self.model.finish_read(index, fault)

    # Waiting and leasing.

    @precondition(lambda self: any(a.lease is None for a in self.asked))
    @rule(data=st.data())
    def look(self, data):
        asked = data.draw(st.sampled_from([a for a in self.asked if a.lease is None]))
        if asked.pending:
            with pytest.raises(WouldBlock):
                asked.request.wait_nowait()
        elif asked.error is not None:
            with pytest.raises(EXPECTED[asked.error]):
                asked.request.wait_nowait()
            self.asked.remove(asked)
        elif not asked.is_pinning:
            with pytest.raises(StoreError, match="cancelled"):
                asked.request.wait_nowait()
            self.asked.remove(asked)
        else:
            asked.lease = asked.request.wait()
            assert asked.lease is asked.request.wait_nowait()

    @precondition(lambda self: any(a.pending for a in self.asked))
    @rule(data=st.data())
    def stand_still(self, data):
        """Begin to wait, as `wait` does before it blocks."""
        asked = data.draw(st.sampled_from([a for a in self.asked if a.pending]))
        with pytest.raises(WouldBlock):
            asked.request.wait(timeout_s=0)
        asked.is_waited_for = True

    @precondition(lambda self: any(a.lease is None for a in self.asked))
    @rule(data=st.data())
    def cancel(self, data):
        asked = data.draw(st.sampled_from([a for a in self.asked if a.lease is None]))
        asked.request.cancel()
        asked.is_pinning = False

    @precondition(lambda self: any(a.lease is not None for a in self.asked))
    @rule(data=st.data(), times=st.integers(1, 2))
    def release(self, data, times):
        asked = data.draw(st.sampled_from([a for a in self.asked if a.lease is not None]))
        for _ in range(times):
            asked.lease.release()
        self.asked.remove(asked)

    # What must hold.

    @invariant()
    def slots_hold_what_the_model_says(self):
        for layer, shelf in self.model.layers.items():
            table = self.store._shelves[layer].table
            table.check()
            for expert in range(NUM_EXPERTS):
                assert self.store.is_resident(layer, expert) == self.model.is_full(layer, expert)
            assert list(table.ranking._policy._order) == shelf.order, "K2"
            assert list(table.ranking._live) == list(shelf.live), "K3"
            assert list(table.ranking._cold) == list(shelf.cold), "K3"
            assert table.ranking.counts == [shelf.counts[expert] for expert in range(NUM_EXPERTS)], "K2"

    @invariant()
    def exact_demand_finds_the_slots_that_guesses_may_not_take(self):
        for layer, num_slots in SLOTS.items():
            guessed = [r for r in self.model.reading if r.read_class is not EXACT and r.key[0] == layer]
            assert num_slots - len(guessed) >= min(num_slots, MIN_EXACT) or num_slots >= NUM_EXPERTS

    @invariant()
    def the_queue_is_in_the_order_of_the_model(self):
        queue = self.store._dispatcher.queue
        assert [tuple(t.key) for t in queue._exact] == [r.key for r in self.model.exact]
        assert [tuple(t.key) for t in reversed(queue.guesses())] == [r.key for r in self.model.guesses]
        mine = [(r.owner, r.generation) for r in self.model.guesses]
        assert [(t.owner, t.generation) for t in reversed(queue.guesses())] == mine

    @invariant()
    def leases_name_untouched_records(self):
        for asked in self.asked:
            if asked.lease is not None:
                for expert, slot in zip(asked.experts, asked.lease.slots, strict=True):
                    assert self.rig.holds(asked.layer, expert, slot), (asked.layer, expert, slot)
                    assert asked.layer != 1 or slot == expert

    @invariant()
    def requests_are_ready_exactly_when_their_reads_have_ended(self):
        for asked in self.asked:
            assert asked.request.is_ready == (not asked.pending)

    @invariant()
    def everything_is_counted_once(self):
        got, model = self.store.statistics(), self.model
        counts = model.counts
        assert (got.num_demands, got.num_misses, got.num_joined, got.num_prefetched) == (
            counts["demands"],
            counts["misses"],
            counts["joined"],
            counts["prefetched"],
        )
        assert got.num_demands == got.num_hits + got.num_misses + got.num_joined
        assert (got.num_stale_used, bool(got.stale_evicted_bytes)) == (
            counts["stale_used"],
            counts["stale_evicted"] > 0,
        )
        assert got.num_reading == len(model.reading)
        assert got.num_queued == len(model.exact) + len(model.guesses)
        assert {k: v for k, v in got.hints.items() if v} == {k: v for k, v in model.hints.items() if v}
        for read_class, books_of in got.classes.items():
            assert books_of.num == model.issued[read_class]
            fates = {fate: count.num for fate, count in books_of.fates.items() if count.num}
            assert fates == dict(model.fates[read_class]), read_class
        check_sums(got)

    def teardown(self):
        self.store.close()
        for asked in self.asked:
            if asked.lease is None and asked.is_pinning and self.is_queued(asked):
                with pytest.raises(StoreClosed):
                    asked.request.wait_nowait()
        got = self.store.statistics()
        assert (got.num_queued, got.num_reading, got.num_unused) == (0, 0, 0)
        check_sums(got)

    def is_queued(self, asked):
        return any(read.key in asked.pending for read in self.model.exact)


def check_sums(got):
    """Every ticket has one fate, or is queued, being read, or unused in its slot: in records and in bytes."""
    ended = got.fates
    num_open = got.num_queued + got.num_reading + got.num_unused
    assert sum(books.num for books in got.classes.values()) == sum(c.num for c in ended.values()) + num_open
    open_bytes = got.logical_bytes - sum(count.num_bytes for count in ended.values())
    assert open_bytes >= got.unused_bytes
    assert num_open or not open_bytes
    accepted = got.classes[NEAR].num + got.classes[SPECULATIVE].num
    assert got.hints[HintOutcome.ACCEPTED] == accepted


STEPS = settings(
    max_examples=400,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_store_agrees_with_the_model_over_four_times_five_thousand_steps(number):
    num_steps = 0
    quarter = settings(STEPS, max_examples=180, derandomize=False, database=None)  # 36 to 44 steps on average

    class Counted(StoreMachine):
        @invariant()
        def count(self):
            nonlocal num_steps
            num_steps += 1

    run_state_machine_as_test(seed(number)(Counted), settings=quarter)
    assert num_steps >= 5_000


# Planted faults. Each breaks one promise inside the store; the machine above must notice.


def read_the_neighbour(patch):
    reads = RecordLayout.reads
    patch.setattr(RecordLayout, "reads", lambda self, expert: reads(self, (expert + 1) % self.num_experts))


def refill_a_slot_early(patch):
    patch.setattr(
        slots.SlotTable, "_can_leave", lambda self, expert: self.state_of(expert) == slots.SlotState.FULL
    )


def evict_a_pinned_slot(patch):
    patch.setattr(LeastRecentlyUsed, "evict", lambda self, can_leave: self._order.popitem(last=False)[0])


def release_twice(patch):
    def drop(self):
        self.is_released = True
        self._shelf.table.release(self.slots)

    patch.setattr(lease.Lease, "drop", drop)


def lose_a_wake_up(patch):
    count_down = completion.Completion.count_down

    def forgetful(self, error):
        if self.pending > 1 or not error:
            count_down(self, error)

    patch.setattr(completion.Completion, "count_down", forgetful)


def forget_who_joined(patch):
    patch.setattr(dispatch.Dispatcher, "join", lambda self, layer, experts, waiter: None)


def substitute_what_could_not_be_read(patch):
    end = dispatch.Dispatcher.end
    patch.setattr(dispatch.Dispatcher, "end", lambda self, ticket, error: end(self, ticket, None))


def forget_recency_on_hits(patch):
    patch.setattr(LeastRecentlyUsed, "touch", lambda self, experts: None)


def write_beyond_the_slot(patch):
    read = dispatch.Dispatcher.read

    def overrun(self, ticket):
        read(self, ticket)
        block = self._memory._blocks["slot", ticket.key.layer, ticket.slot][0]
        block[-self._memory.guard_bytes] ^= 1

    patch.setattr(dispatch.Dispatcher, "read", overrun)


def wake_no_reader_for_a_guess_that_is_joined(patch):
    issue = dispatch.Dispatcher.issue

    def forgetful(self, shelf, missing, waiter, owner, generation):
        before = self._reader.num_wakes
        num_joined = issue(self, shelf, missing, waiter, owner, generation)
        if num_joined == len(missing):
            self._reader.num_wakes = before
        return num_joined

    patch.setattr(dispatch.Dispatcher, "issue", forgetful)


def publish_what_is_stale(patch):
    patch.setattr(prefetch.Prefetcher, "is_stale", lambda self, ticket: False)


def read_guesses_first(patch):
    def first(self):
        return self._guesses[-1][4] if self._guesses else (self._exact or [None])[0]

    def pop(self, now_ns):
        ticket = first(self)
        if self._guesses:
            self._take_out(ticket)
        else:
            self._exact.popleft()
        ticket.start(now_ns)
        return ticket

    patch.setattr(read_queue.ReadQueue, "first", first)
    patch.setattr(read_queue.ReadQueue, "pop", pop)


def let_guesses_take_the_last_slots(patch):
    patch.setattr(prefetch.PrefetchLimits, "exact_slots", lambda self, num_slots: 0)


def count_a_fate_twice(patch):
    close = books.Ledger.close

    def twice(self, read, fate):
        close(self, read, fate)
        self.classes[read.issued_class].fate_nums[fate] += fate is Fate.JOINED

    patch.setattr(books.Ledger, "close", twice)


def credit_a_guess_that_was_given_up(patch):
    def used(self, ticket):
        if ticket.fate is not None:
            ticket.fate = None
            self.ledger.close(ticket, Fate.IN_TIME)

    patch.setattr(dispatch.Dispatcher, "used", used)


def let_a_guess_fail_the_request_that_joined_it(patch):
    patch.setattr(dispatch.Dispatcher, "_end_badly", dispatch.Dispatcher._fail)


def make_a_guess_recent(patch):
    def expect(self, expert, guess):
        del guess
        self._policy.admit(expert)

    patch.setattr(ranking.Ranking, "expect", expect)


def make_rejected_rows_recent(patch):
    settle = unverified.UnverifiedDemands.settle
    patch.setattr(unverified.UnverifiedDemands, "settle", lambda self, owner, rows: settle(self, owner, None))


def touch_before_the_verdict(patch):
    take = slots.SlotTable.take
    patch.setattr(slots.SlotTable, "take", lambda self, experts, is_committed: take(self, experts))


def spend_without_limit(patch):
    let_in = prefetch.Prefetcher._let_in

    def generous(self, hint, owner, generation, now_ns):
        self._spent[owner] = 0
        return let_in(self, hint, owner, generation, now_ns)

    patch.setattr(prefetch.Prefetcher, "_let_in", generous)


def use_every_reader_for_guesses(patch):
    init = dispatch.Dispatcher.__init__

    def greedy(self, *args):
        init(self, *args)
        self._max_guesses_reading += 1

    patch.setattr(dispatch.Dispatcher, "__init__", greedy)


def begin_guesses_beside_another_demand(patch):
    patch.setattr(dispatch.Dispatcher, "give_way_to", lambda self, is_busy: None)


def leave_guesses_asleep(patch):
    patch.setattr(store.ExpertStore, "resume_guesses", lambda self: None)


PLANTS = [
    begin_guesses_beside_another_demand,
    leave_guesses_asleep,
    read_the_neighbour,
    refill_a_slot_early,
    evict_a_pinned_slot,
    release_twice,
    lose_a_wake_up,
    wake_no_reader_for_a_guess_that_is_joined,
    forget_who_joined,
    substitute_what_could_not_be_read,
    forget_recency_on_hits,
    write_beyond_the_slot,
    publish_what_is_stale,
    read_guesses_first,
    let_guesses_take_the_last_slots,
    count_a_fate_twice,
    credit_a_guess_that_was_given_up,
    let_a_guess_fail_the_request_that_joined_it,
    make_a_guess_recent,
    make_rejected_rows_recent,
    touch_before_the_verdict,
    spend_without_limit,
    use_every_reader_for_guesses,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    # What is right may take 400 examples; a fault that hides longer than that gets three times as many.
    quick = settings(
        STEPS, max_examples=1200, phases=[Phase.generate], verbosity=Verbosity.quiet, database=None
    )
    with pytest.raises((AssertionError, StoreError, KeyError, pytest.fail.Exception)):
        run_state_machine_as_test(StoreMachine, settings=quick)
