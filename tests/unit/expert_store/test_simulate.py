"""The store on a virtual clock and drive: time, bytes and hits are those of the store and of arithmetic."""

import random

import psutil
import pytest

from expert_store.errors import CheckpointCorrupt, StoreError, WorkerDied
from expert_store.keys import Prefetch, ReadClass, WaitCause
from expert_store.prefetch import PrefetchLimits
from expert_store.simulate import Drive, Simulated, VirtualReader, plain_layouts
from expert_store.stats import Fate
from expert_store.store import ExpertStore
from expert_store.testing import DictMemory, MemorySource, StepReader

RECORD, LAYERS, EXPERTS = 1000, 3, 12
MS = 1_000_000
SLOW = Drive(1e6, latency_ns=50_000, overhead_ns=30_000, wake_ns=20_000, num_readers=2)
BESIDE = 50_000 + 30_000  # of every record, beside its bytes' time


def opened(drive=SLOW, slots=6, **named):
    layouts = plain_layouts(dict.fromkeys(range(LAYERS), EXPERTS), RECORD, **named)
    limits = PrefetchLimits(min_exact_slots=2)
    return Simulated.open(layouts, drive, slots=dict.fromkeys(layouts, slots), limits=limits)


def demands(seed, length=60, widest=4):
    chance = random.Random(seed)
    return [
        (layer, sorted(chance.sample(range(EXPERTS), chance.randint(1, widest))))
        for _ in range(length)
        for layer in range(LAYERS)
    ]


def hints(chance):
    """Any hints, good for whatever."""
    return [
        Prefetch(
            chance.randrange(LAYERS),
            chance.randrange(EXPERTS),
            chance.choice([ReadClass.NEAR, ReadClass.SPECULATIVE]),
            chance.random(),
            chance.randrange(9),
        )
        for _ in range(chance.randrange(4))
    ]


def play(simulated, wanted, *, seed=None, computing_ns=200_000):
    """Demand each set, with guesses of anything if there is a seed; return the time after each."""
    chance = random.Random(seed)
    store, times = simulated.store, []
    for number, (layer, experts) in enumerate(wanted):
        simulated.compute(chance.randrange(computing_ns) if seed is not None else computing_ns)
        told = hints(chance) if seed is not None else []
        store.acquire(
            layer, experts, meanwhile=lambda told=told: store.prefetch(told, owner=0, generation=0)
        ).release()
        times.append(simulated.clock())
        if seed is not None and number % 7 == 6:
            store.advance(0, number)
    return times


def test_a_request_takes_what_the_arithmetic_says():
    with opened() as simulated:
        simulated.store.acquire(0, [1, 2, 3])
        # Two readers wake, 20 us; the drive gives a record a millisecond, so the third is over after three;
        # its latency is 50 us, its reader adds 30, and whoever waits wakes 20 us later.
        assert simulated.store.statistics().exposed_wait_ns == 20_000 + 3 * MS + BESIDE + 20_000
    with opened(Drive(1e9, latency_ns=MS, num_readers=2), reads_per_record=4) as simulated:
        simulated.store.acquire(0, [1, 2, 3])
        # Latencies are what matters: four of one record after the other, two records at a time.
        assert simulated.store.statistics().exposed_wait_ns == 8 * MS + 2_000  # and two records' bytes


def test_rates_by_depth_are_those_that_the_two_figures_were_taken_from():
    """A published drive: 17.3 GB/s with eight reads on the wire, 9.46 with one, of records of 2.76 MB."""
    record, experts = 2_764_800, 200
    latency_ns = round((record / 9.46e9 - record / 17.3e9) * 1e9)
    for readers, published in ((1, 9.46e9), (8, 17.3e9)):
        layouts = plain_layouts({0: experts}, record)
        drive = Drive(17.3e9, latency_ns=latency_ns, num_readers=readers)
        with Simulated.open(layouts, drive, slots={0: experts}) as simulated:
            simulated.store.acquire(0, list(range(experts))).release()
            rate = record * experts / (simulated.store.statistics().exposed_wait_ns / 1e9)
        assert rate == pytest.approx(published, rel=0.005)


def test_what_is_read_while_computing_is_not_waited_for():
    with opened() as simulated:
        store = simulated.store
        store.prefetch([Prefetch(1, 5)], owner=0, generation=0)
        simulated.compute(MS // 2)
        store.prefetch(
            [Prefetch(1, 6)], owner=0, generation=0
        )  # half the readers guess: it waits for its turn
        simulated.compute(MS)
        store.acquire(1, [5]).release()
        assert store.statistics().exposed_wait_ns == 0
        store.acquire(1, [6]).release()
        found = store.statistics()
        assert 0 < found.exposed_wait_ns < MS
        assert found.waits[WaitCause.LATE_HINT].total_ns == found.exposed_wait_ns
        assert (found.num_prefetched, found.num_joined, found.num_misses) == (1, 1, 0)


def test_a_record_that_comes_while_computing_takes_time_from_it():
    with opened() as simulated:
        simulated.store.prefetch([Prefetch(1, 5), Prefetch(1, 6)], owner=0, generation=0)
        began_ns = simulated.clock()
        simulated.compute(3 * MS, 7_000)  # both are there by then: one reader guesses at a time
        assert simulated.clock() - began_ns == 3 * MS + 14_000
        began_ns = simulated.clock()
        simulated.compute(3 * MS, 7_000)
        assert simulated.clock() - began_ns == 3 * MS


def test_what_is_due_while_the_host_holds_the_interpreter_happens_at_its_end():
    with opened() as simulated:
        request = simulated.store.request(0, [1, 2])
        began_ns = simulated.clock()
        simulated.hold(5 * MS)  # the readers could not even wake
        request.wait().release()
        assert simulated.clock() - began_ns == 5 * MS + 2 * MS + BESIDE + 20_000
        with pytest.raises(StoreError, match="takes -1 ns"):
            simulated.hold(-1)
        with pytest.raises(StoreError, match="has -1 bytes"):
            simulated.read_rows(-1)


def test_what_is_due_at_the_end_of_a_hold_comes_after_what_was_held():
    happened: list[str] = []
    with opened(Drive(None, latency_ns=5 * MS)) as simulated:
        reader, began_ns = simulated._reader, simulated.clock()
        reader.read_beside(1, lambda: happened.append("held"))
        simulated.compute(2 * MS)
        reader.read_beside(1, lambda: happened.append("at its end"))
        reader.hold_until(began_ns + 7 * MS)
        assert not happened, "the control: nothing happens in it"
        simulated.compute(0)
    assert happened == ["held", "at its end"]


def test_rows_stand_behind_what_is_on_the_wire_and_guesses_behind_rows():
    """As in a run: two guesses are asked for, one is on the wire, then rows of half a record come."""
    with opened() as simulated:
        store = simulated.store
        store.prefetch([Prefetch(1, 5), Prefetch(1, 6)], owner=0, generation=0)
        simulated.compute(MS // 10)  # the first has begun, 20 us after it was asked for
        began_ns = simulated.clock()
        simulated.read_rows(RECORD // 2)
        simulated.wait_for_rows()
        # The rest of the first guess, half a record, the reader's own time, and the waiter wakes.
        assert simulated.clock() - began_ns == (MS + 20_000 - MS // 10) + MS // 2 + BESIDE + 20_000
        assert store.statistics().exposed_wait_ns == 0  # for experts
        # The second guess began when the rows were there, while their waiter woke.
        store.acquire(1, [6]).release()
        assert store.statistics().exposed_wait_ns == MS + BESIDE + 20_000
        began_ns = simulated.clock()
        simulated.wait_for_rows()
        assert simulated.clock() == began_ns  # none are under way
        simulated.read_rows(RECORD)
        simulated.wait_for_rows()
        assert simulated.clock() - began_ns == 20_000 + MS + BESIDE + 20_000


def test_guesses_that_gave_way_go_on_by_themselves():
    with opened() as simulated:
        store = simulated.store
        simulated.read_rows(RECORD)
        store.prefetch([Prefetch(1, 5)], owner=0, generation=0)
        simulated.compute(4 * MS)  # nobody waits for the rows
        store.acquire(1, [5]).release()
        assert store.statistics().exposed_wait_ns == 0
        assert store.statistics().num_prefetched == 1


@pytest.mark.parametrize("seed", range(6))
def test_the_clock_never_goes_back_and_the_bytes_add_up(seed):
    wanted = demands(seed)
    with opened() as simulated:
        times = play(simulated, wanted, seed=seed)
        simulated.store.wait_idle()
        found = simulated.store.statistics()
    assert times == sorted(times)
    assert found.num_demands == sum(len(experts) for _, experts in wanted)
    assert found.num_demands == found.num_hits + found.num_joined + found.num_misses
    unread = sum(found.fates[fate].num_bytes for fate in (Fate.CANCELLED, Fate.DROPPED))
    assert found.physical_bytes == found.logical_bytes - unread == RECORD * found.queue.num_reads
    issued = sum(books.num for books in found.classes.values())
    assert issued == sum(count.num for count in found.fates.values()) + found.num_unused
    # At no moment was the drive faster than it is.
    assert found.physical_bytes / 1e6 * 1e9 <= times[-1] + RECORD * 1000 * 2


@pytest.mark.parametrize("seed", range(3))
def test_the_same_trace_on_the_same_machine_has_the_same_result(seed):
    found = []
    for _ in range(2):
        with opened() as simulated:
            found.append((play(simulated, demands(seed), seed=seed), simulated.store.statistics()))
    assert found[0] == found[1]
    with opened(Drive(2e6, 50_000, 30_000, 20_000, 2)) as simulated:
        assert play(simulated, demands(seed), seed=seed) != found[0][0]


@pytest.mark.parametrize("seed", range(3))
def test_an_infinitely_fast_drive_is_never_waited_for(seed):
    with opened(Drive()) as simulated:
        play(simulated, demands(seed), seed=seed)
        found = simulated.store.statistics()
    assert found.exposed_wait_ns == 0
    assert found.num_misses > 0


@pytest.mark.parametrize("seed", range(8))
def test_one_slot_less_never_has_fewer_misses(seed):
    """LRU is a stack: what is resident with n slots is so with n + 1. It holds as no demand is split."""
    misses = []
    for slots in range(4, EXPERTS + 1):
        with opened(slots=slots) as simulated:
            play(simulated, demands(seed))
            misses.append(simulated.store.statistics().num_misses)
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > misses[-1]


def stepped(wanted, slots: int):
    """Return what the same store does with real bytes, its reads stepped one by one."""
    layouts = plain_layouts(dict.fromkeys(range(LAYERS), EXPERTS), 8)
    reader = StepReader(num_readers=SLOW.num_readers)
    memory = DictMemory(dict.fromkeys(layouts, (8,)))
    source = MemorySource([bytes(8 * EXPERTS)])
    with ExpertStore(layouts, source, memory, slots=dict.fromkeys(layouts, slots), reader=reader) as store:
        for layer, experts in wanted:
            request = store.request(layer, experts)
            reader.run()
            request.wait().release()
        return store.statistics()


@pytest.mark.parametrize("seed", range(4))
def test_hits_and_misses_are_those_of_the_store(seed):
    wanted = demands(seed)
    with opened() as simulated:
        play(simulated, wanted)
        found = simulated.store.statistics()
    real = stepped(wanted, 6)
    for layer, other in zip(found.layers, real.layers, strict=True):
        ours = (layer.num_demands, layer.num_hits, layer.num_joined, layer.num_misses, layer.num_evictions)
        assert ours == (
            other.num_demands, other.num_hits, other.num_joined, other.num_misses, other.num_evictions
        )  # fmt: skip
    assert 0 < found.num_hits < found.num_demands


@pytest.mark.parametrize("seed", range(3))
def test_more_readers_and_a_faster_drive_never_make_exact_demand_wait_longer(seed):
    waits = []
    for readers, rate in ((1, 5e5), (1, 1e6), (2, 1e6), (4, 1e6), (4, 4e6)):
        with opened(Drive(rate, latency_ns=400_000, num_readers=readers)) as simulated:
            play(simulated, demands(seed))
            waits.append(simulated.store.statistics().exposed_wait_ns)
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > waits[-1]


def test_a_wait_may_be_given_up():
    with opened() as simulated:
        request = simulated.store.request(0, [1])
        began_ns = simulated.clock()
        with pytest.raises(StoreError, match="not there after"):
            request.wait(0.0005)
        assert simulated.clock() - began_ns == 500_000
        request.wait().release()
        assert simulated.clock() - began_ns == 20_000 + MS + BESIDE + 20_000


def test_a_lost_wake_up_is_said_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(VirtualReader, "wake", lambda self, num_jobs: None)
    with opened() as simulated, pytest.raises(WorkerDied, match="nobody reads"):
        simulated.store.acquire(0, [1])


def test_a_clock_that_would_go_back_is_seen(monkeypatch):
    """The planted fault: a drive that is ready before it began."""
    monkeypatch.setattr(VirtualReader, "_ready_ns", lambda self, *_: self._clock.now_ns - 1)
    with opened() as simulated:
        with pytest.raises(AssertionError, match="go back"):
            simulated.store.acquire(0, [1])
        monkeypatch.undo()


def test_a_large_record_takes_no_memory():
    process = psutil.Process()
    before = process.memory_info().rss
    layouts = plain_layouts(dict.fromkeys(range(2), 4), 1 << 30)
    with Simulated.open(layouts, Drive(1e9), slots=dict.fromkeys(layouts, 2)) as simulated:
        simulated.store.acquire(0, [1, 2]).release()
        assert process.memory_info().rss - before < 64 << 20


def test_what_no_drive_is_is_refused():
    for wrong in (0.0, float("nan"), -1.0):
        with pytest.raises(StoreError, match="No drive gives"):
            Drive(wrong)
    for name in ("latency_ns", "overhead_ns", "wake_ns"):
        with pytest.raises(StoreError, match=f"{name} is negative: -1"):
            Drive(**{name: -1})
    with pytest.raises(StoreError, match="num_readers is below one: 0"):
        Drive(num_readers=0)
    with opened() as simulated:
        for times in ((-1, 0), (0, -1)):
            with pytest.raises(StoreError, match="takes -1 ns"):
                simulated.compute(*times)
    with pytest.raises(CheckpointCorrupt):
        plain_layouts({0: 4}, 3, reads_per_record=4)
