"""The store against a dictionary model: requests, reads, failures, releases in any order. T1-T6, S1-S5.

The reader is stepped, so every interleaving is a list of rules and nothing sleeps. The model knows which
records are in memory, who pinned them and which one least recent use sends away; memory is compared byte by
byte. Planted faults at the end show that the machine sees what it is there to see.
"""

import errno
from collections import Counter, OrderedDict

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from expert_store import completion, dispatch, lease, slots
from expert_store.errors import (
    RecordCorrupt,
    SlotsExhausted,
    SourceFailed,
    StoreClosed,
    StoreError,
    WouldBlock,
)
from expert_store.layout import RecordLayout
from expert_store.policy.lru import LeastRecentlyUsed
from expert_store.stats import Fate
from expert_store.testing import FaultySource
from tests.unit.expert_store.rig import make_rig

NUM_EXPERTS = 7
SLOTS = {0: 4, 1: 7}  # layer 1 has a slot for every expert, so slot == expert there
LENGTHS = {0: (12, 5), 1: (40,)}
EXPECTED = {"short": RecordCorrupt, "eio": SourceFailed}


LAYERS = st.sampled_from([0, 0, 1])
EXPERTS = st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, max_size=3)


class Asked:
    """A request as the model sees it."""

    def __init__(self, request, layer, experts, missing):
        self.request, self.layer, self.experts = request, layer, experts
        self.pending = set(missing)
        self.error = None
        self.is_pinning = True
        self.lease = None


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.fault = None
        self.rig = make_rig(
            num_experts=NUM_EXPERTS,
            slots=SLOTS,
            lengths=LENGTHS,
            wrap=lambda source: FaultySource(source, lambda *_: self._fault()),
        )
        self.store = self.rig.store
        self.full = {
            layer: OrderedDict() for layer in SLOTS
        }  # expert -> None, least recent first, loading too
        self.loading = set()  # (layer, expert)
        self.queued = []  # keys, in order
        self.reading = []  # keys, as held by the reader
        self.asked = []
        self.counts = Counter()
        self.generation = 0

    def _fault(self):
        if self.fault == "eio":
            return OSError(errno.EIO, "Input/output error")
        return self.fault

    def pins(self, layer):
        return Counter(e for a in self.asked if a.layer == layer and a.is_pinning for e in a.experts)

    @rule(layer=LAYERS, experts=EXPERTS)
    def request(self, layer, experts):
        self.ask(layer, experts)

    def ask(self, layer, experts):
        order, pins = self.full[layer], self.pins(layer)
        missing = [e for e in experts if e not in order]
        stuck = {e for e in order if pins[e] or (layer, e) in self.loading or e in experts}
        if len(missing) > SLOTS[layer] - len(stuck):
            with pytest.raises(SlotsExhausted):
                self.store.request(layer, experts)
            return None
        request = self.store.request(layer, experts, owner=1)
        joined = [e for e in experts if (layer, e) in self.loading]
        for expert in experts:
            if expert in order:
                order.move_to_end(expert)
        for expert in missing:
            if len(order) == SLOTS[layer]:
                del order[next(e for e in order if e not in stuck)]
            order[expert] = None
            stuck.add(expert)
            self.loading.add((layer, expert))
            self.queued.append((layer, expert))
        asked = Asked(request, layer, experts, {(layer, e) for e in [*missing, *joined]})
        self.asked.append(asked)
        self.counts.update(demands=len(experts), misses=len(missing), joined=len(joined))
        return asked

    @rule(layer=LAYERS, experts=EXPERTS, is_kept=st.booleans())
    def acquire(self, layer, experts, is_kept):
        """Do in one step what a caller does: without this, evictions would be rare."""
        asked = self.ask(layer, experts)
        while self.queued:
            self.begin_read()
        while self.reading:
            self.finish_read(0, None)
        if asked is not None:
            asked.lease = asked.request.wait()
            if not is_kept:
                asked.lease.release()
                self.asked.remove(asked)

    @precondition(lambda self: self.queued)
    @rule()
    def begin_read(self):
        job = self.rig.reader.begin()
        assert job is not None
        assert job.key == self.queued.pop(0)  # first come, first served
        self.reading.append(job.key)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), fault=st.sampled_from([None, None, None, "short", "eio"]))
    def end_read(self, data, fault):
        self.finish_read(data.draw(st.integers(0, len(self.reading) - 1)), fault)

    def finish_read(self, index, fault):
        key = self.reading.pop(index)
        self.fault = fault
        self.rig.reader.finish(index)
        self.fault = None
        self.loading.remove(key)
        waiting = [a for a in self.asked if key in a.pending]
        self.counts[
            "failed" if fault else "stale" if not any(a.is_pinning for a in waiting) else "in_time"
        ] += 1
        if fault:
            del self.full[key[0]][key[1]]
        for asked in waiting:
            asked.pending.remove(key)
            if fault:
                asked.error = asked.error or EXPECTED[fault]
                asked.is_pinning = False

    @precondition(lambda self: any(a.lease is None for a in self.asked))
    @rule(data=st.data())
    def look(self, data):
        asked = data.draw(st.sampled_from([a for a in self.asked if a.lease is None]))
        if asked.pending:
            with pytest.raises(WouldBlock):
                asked.request.wait_nowait()
        elif asked.error is not None:
            with pytest.raises(asked.error):
                asked.request.wait_nowait()
            self.asked.remove(asked)
        elif not asked.is_pinning:
            with pytest.raises(StoreError, match="cancelled"):
                asked.request.wait_nowait()
            self.asked.remove(asked)
        else:
            asked.lease = asked.request.wait()
            assert asked.lease is asked.request.wait_nowait()

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

    @rule()
    def advance(self):
        self.generation += 1
        self.store.advance(1, self.generation)

    @invariant()
    def slots_hold_what_the_model_says(self):
        for layer, order in self.full.items():
            self.store._shelves[layer].table.check()
            for expert in range(NUM_EXPERTS):
                is_full = expert in order and (layer, expert) not in self.loading
                assert self.store.is_resident(layer, expert) == is_full, (layer, expert)

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
        got = self.store.statistics()
        counts = self.counts
        assert (got.num_demands, got.num_misses, got.num_joined) == (
            counts["demands"],
            counts["misses"],
            counts["joined"],
        )
        assert got.num_demands == got.num_hits + got.num_misses + got.num_joined
        assert (got.num_queued, got.num_reading) == (len(self.queued), len(self.reading))
        fates = {fate: count.num for fate, count in got.fates.items()}
        ended = (fates.pop(Fate.IN_TIME), fates.pop(Fate.STALE), fates.pop(Fate.FAILED))
        assert ended == (counts["in_time"], counts["stale"], counts["failed"])
        assert not any(fates.values())
        assert got.num_exact == sum(ended) + got.num_queued + got.num_reading

    def teardown(self):
        self.store.close()
        for asked in self.asked:
            if asked.lease is None and asked.is_pinning and any(key in self.queued for key in asked.pending):
                with pytest.raises(StoreClosed):
                    asked.request.wait_nowait()


STEPS = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


def test_the_store_agrees_with_the_model_over_ten_thousand_steps():
    assert STEPS.max_examples * STEPS.stateful_step_count >= 10_000
    run_state_machine_as_test(StoreMachine, settings=STEPS)


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


@pytest.mark.parametrize(
    "plant",
    [
        read_the_neighbour,
        refill_a_slot_early,
        evict_a_pinned_slot,
        release_twice,
        lose_a_wake_up,
        forget_who_joined,
        substitute_what_could_not_be_read,
        forget_recency_on_hits,
        write_beyond_the_slot,
    ],
)
def test_a_planted_fault_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    quick = settings(STEPS, phases=[Phase.generate], verbosity=Verbosity.quiet, database=None)
    with pytest.raises((AssertionError, StoreError, KeyError, pytest.fail.Exception)):
        run_state_machine_as_test(StoreMachine, settings=quick)
