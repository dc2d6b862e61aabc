"""What goes wrong below the store reaches whoever waits, by name, and nothing is put in its place."""

import errno
import os
import threading

import pytest

from bench.studies.stress_store import stress
from expert_store.errors import (
    RecordCorrupt,
    SlotsExhausted,
    SourceChanged,
    SourceFailed,
    StoreClosed,
    StoreError,
    WorkerDied,
    WouldBlock,
)
from expert_store.keys import Prefetch, ReadClass
from expert_store.layout import RecordLayout
from expert_store.reader import ThreadReader
from expert_store.safetensors_index import read_tensor_table
from expert_store.slots import SlotState, SlotTable
from expert_store.source import FileSource
from expert_store.stats import Fate
from expert_store.store import ExpertStore
from expert_store.testing import DictMemory, FailingGuesses, FaultySource, HeldSource, pattern
from tests.unit.expert_store.rig import make_rig
from tests.unit.expert_store.test_safetensors_index import write

ONE = {0: (24,)}  # one component, so that one read is one record


def faulty(faults):
    """Wrap a source whose reads go wrong by number."""
    return lambda source: FaultySource(source, lambda number, *_: faults.get(number))


FAULTS = [
    ("short", RecordCorrupt, "layer 0 expert 2 in memory-0 at 64: wanted 24 bytes, got 12"),
    (
        OSError(errno.EIO, "Input/output error"),
        SourceFailed,
        "Cannot read memory-0 at 64: Input/output error",
    ),
    (SourceFailed("Cannot read x", errno=5), SourceFailed, "Cannot read x"),
    (ZeroDivisionError("planted"), SourceFailed, "ZeroDivisionError: planted"),
    (MemoryError("no memory"), SourceFailed, "MemoryError"),
]


@pytest.mark.parametrize(("fault", "kind", "says"), FAULTS)
def test_a_failed_read_stops_the_request_by_name_and_leaves_an_empty_slot(fault, kind, says):
    rig = make_rig(lengths=ONE, wrap=faulty({1: fault}))
    request = rig.store.request(0, [1, 2, 3])
    rig.reader.run()
    for _ in range(2):
        with pytest.raises(kind) as caught:
            request.wait()
        assert says in caught.value.message
    assert [rig.store.is_resident(0, expert) for expert in (1, 2, 3)] == [True, False, True]
    got = rig.store.statistics()
    assert (got.fates[Fate.FAILED].num, got.fates[Fate.FAILED].num_bytes) == (1, 24)
    assert got.physical_bytes == 48 + (12 if fault == "short" else 0)


@pytest.mark.parametrize(("fault", "kind", "says"), FAULTS)
def test_a_later_request_may_try_again_and_gets_the_true_record(fault, kind, says):
    rig = make_rig(lengths=ONE, slots=3, wrap=faulty({0: fault}))
    first = rig.store.request(0, [1, 2, 3])
    rig.reader.run()
    with pytest.raises(kind):
        first.wait()
    lease = rig.store.request(0, [1, 2, 3])
    rig.reader.run()
    for expert, slot in zip((1, 2, 3), lease.wait().slots, strict=True):
        assert rig.holds(0, expert, slot)


def test_everybody_who_joined_a_failed_read_gets_an_error_of_their_own_and_drops_all_pins():
    rig = make_rig(lengths=ONE, slots=3, wrap=faulty({0: OSError(errno.EIO, "no")}))
    requests = [rig.store.request(0, [1]), rig.store.request(0, [1, 2]), rig.store.request(0, [2])]
    rig.reader.run()
    raised = []
    for request in requests[:2]:
        with pytest.raises(SourceFailed) as caught:
            request.wait()
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    with pytest.raises(SlotsExhausted):
        rig.store.request(0, [3, 4, 5])  # the third request, whose read was good, still holds its slot
    requests[2].wait().release()
    rig.load(0, [3, 4, 5])


def test_a_request_reports_its_failure_only_when_its_other_reads_have_ended():
    rig = make_rig(lengths=ONE, slots=3, wrap=faulty({0: OSError(errno.EIO, "no")}))
    request = rig.store.request(0, [1, 2])
    rig.reader.step()
    assert not request.is_ready
    with pytest.raises(WouldBlock):
        request.wait_nowait()
    rig.reader.step()
    with pytest.raises(SourceFailed):
        request.wait_nowait()


def test_a_slow_read_is_a_time_out_that_leaves_the_request_valid():
    held = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = make_rig(lengths=ONE, wrap=hold, reader=ThreadReader(1))
    request = rig.store.request(0, [1])
    with pytest.raises(WouldBlock, match="1 of 1 records of layer 0 are not there after 0 s"):
        request.wait(timeout_s=0)
    with pytest.raises(WouldBlock):
        rig.store.acquire(0, [1], timeout_s=0)
    held[0].release_all()
    request.wait(30).release()
    rig.store.close()


def test_a_dead_worker_is_noticed_by_the_waiter_and_breaks_the_store():
    rig = make_rig(lengths=ONE, wrap=faulty({1: "die"}), reader=ThreadReader(1))
    rig.store.acquire(0, [5]).release()
    request = rig.store.request(0, [1, 2, 3])
    with pytest.raises(WorkerDied, match="ReaderKilled"):
        request.wait(30)
    for experts in ([5], [6]):
        with pytest.raises(WorkerDied):
            rig.store.request(0, experts)
    assert rig.store.statistics().fates[Fate.FAILED].num == 3
    rig.store.close()


def test_a_worker_that_vanishes_without_a_word_is_noticed_too():
    class Vanishing(ThreadReader):
        def _exchange(self, done, error):
            super()._exchange(done, error)  # takes a job and never hands it in

    rig = make_rig(lengths=ONE, reader=Vanishing(1))
    request = rig.store.request(0, [1, 2])
    with pytest.raises(WorkerDied, match="gone"):
        request.wait(30)
    with pytest.raises(WorkerDied):
        rig.store.request(0, [3])
    with pytest.raises(WorkerDied):
        rig.store.wait_idle(30)
    rig.store.close()


def test_closing_wakes_whoever_waits_for_what_is_queued():
    held = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = make_rig(lengths=ONE, wrap=hold, reader=ThreadReader(1))
    on_the_wire, queued = rig.store.request(0, [1]), rig.store.request(0, [2])
    held[0].wait_held(1)
    seen = []

    def wait(request):
        try:
            seen.append(request.wait(30))
        except StoreError as error:
            seen.append(type(error))

    waiter = threading.Thread(target=wait, args=[queued])
    waiter.start()
    closer = threading.Thread(target=rig.store.close)
    closer.start()
    waiter.join(30)
    assert seen == [StoreClosed]
    held[0].release_all()
    closer.join(30)
    wait(on_the_wire)
    assert rig.holds(0, 1, seen[1].slots[0])


def test_an_interrupted_wait_keeps_no_pins(monkeypatch):
    rig = make_rig(lengths=ONE, slots=2)

    def interrupt(self, timeout_s=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("expert_store.lease.LeaseRequest.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.store.acquire(0, [1, 2])
    rig.reader.run()
    rig.load(0, [3, 4])


def test_memory_longer_than_a_component_is_refused_before_anything_is_read():
    rig = make_rig(lengths=ONE)
    rig.memory.slot_lengths = {0: (32,)}
    request = rig.store.request(0, [1])
    rig.reader.run()
    with pytest.raises(SourceFailed, match="AssertionError: memory of slot 0 has"):
        request.wait()
    assert not rig.counting.reads


# Guesses: what happens to them is no request's business.


def guess(rig, *experts):
    return rig.store.prefetch([Prefetch(0, expert) for expert in experts], owner=1, generation=0)


@pytest.mark.parametrize(("fault", "kind", "says"), FAULTS)
def test_a_guess_that_cannot_be_read_disturbs_nobody_and_is_read_anew_when_demanded(fault, kind, says):
    rig = make_rig(lengths=ONE, slots=3, wrap=faulty({0: fault}))
    guess(rig, 1, 2)
    rig.reader.run()
    assert [rig.store.is_resident(0, expert) for expert in (1, 2)] == [False, True]
    for expert, slot in zip((1, 2, 3), rig.load(0, [1, 2, 3]), strict=True):
        assert rig.holds(0, expert, slot)
    near = rig.store.statistics().classes[ReadClass.NEAR].fates
    assert (near[Fate.FAILED].num, near[Fate.IN_TIME].num) == (1, 1)


@pytest.mark.parametrize(("fault", "kind", "says"), FAULTS)
def test_a_demand_that_joined_a_guess_which_fails_gets_an_exact_read(fault, kind, says):
    rig = make_rig(lengths=ONE, slots=2, wrap=faulty({0: fault}))
    guess(rig, 1)
    rig.reader.begin()
    requests = [rig.store.request(0, [1]), rig.store.request(0, [1, 2])]
    rig.reader.run()
    for request in requests:
        assert rig.holds(0, 1, request.wait().slots[0])
    got = rig.store.statistics()
    assert (got.num_exact, got.classes[ReadClass.NEAR].fates[Fate.FAILED].num) == (2, 1)
    assert sum(count.num for count in got.fates.values()) == 3


def test_the_exact_read_after_a_failed_guess_may_fail_the_request():
    rig = make_rig(lengths=ONE, wrap=faulty({0: "short", 1: "short"}))
    guess(rig, 1)
    rig.reader.begin()
    request = rig.store.request(0, [1])
    rig.reader.run()
    with pytest.raises(RecordCorrupt):
        request.wait()
    assert rig.store.statistics().fates[Fate.FAILED].num == 2
    rig.load(0, [1])


def test_exact_demand_goes_on_when_every_guess_fails():
    rig = make_rig(lengths=ONE, num_experts=16, slots=6, reader=FailingGuesses(2))
    for first in range(12):
        guess(rig, first, first + 1, (first + 7) % 16)
        with rig.store.acquire(0, [first, first + 1, first + 2], timeout_s=30) as lease:
            assert all(rig.holds(0, e, s) for e, s in zip(lease.experts, lease.slots, strict=True))
    rig.store.wait_idle(30)
    got = rig.store.statistics()
    near = got.classes[ReadClass.NEAR].fates
    assert near[Fate.FAILED].num == got.queue.num_predicted_reads
    assert got.classes[ReadClass.EXACT].fates[Fate.FAILED].num == 0
    rig.store.close()


def test_stopping_in_the_middle_leaves_exact_demand_as_it_was():
    held = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = make_rig(lengths=ONE, num_experts=16, slots=8, wrap=hold, reader=ThreadReader(2))
    guess(rig, 1, 2, 3)
    held[0].wait_held(1)
    request = rig.store.request(0, [1, 2, 9])  # on the wire, queued, and not guessed
    rig.store.stop_prefetching()
    held[0].release_all()
    with request.wait(30) as lease:
        assert all(rig.holds(0, e, s) for e, s in zip((1, 2, 9), lease.slots, strict=True))
    fates = rig.store.statistics().classes[ReadClass.NEAR].fates
    assert (fates[Fate.CANCELLED].num, guess(rig, 4)) == (1, 0)
    rig.store.close()


def test_a_reader_that_dies_over_a_guess_breaks_the_store_and_leaves_nobody_waiting():
    rig = make_rig(lengths=ONE, wrap=faulty({0: "die"}), reader=ThreadReader(1))
    guess(rig, 1)
    with pytest.raises(WorkerDied):
        rig.store.request(0, [1, 2]).wait(30)
    with pytest.raises(WorkerDied):
        rig.store.request(0, [3])
    assert guess(rig, 5) == 0
    got = rig.store.statistics()
    assert got.num_queued == got.num_reading == got.num_unused == 0
    assert sum(count.num for count in got.fates.values()) == sum(b.num for b in got.classes.values())
    rig.store.close()


def test_hints_change_no_byte_of_what_is_leased():
    def run(make_hints):
        rig = make_rig(
            lengths=ONE, num_experts=16, slots=6, wrap=faulty({3: "short"}), reader=ThreadReader(2)
        )
        seen = []
        for step in range(60):
            demand = [(step * 5 + i * 3) % 16 for i in range(3)]
            rig.store.prefetch(make_hints(step), owner=1, generation=step)
            try:
                with rig.store.acquire(0, demand, owner=1, timeout_s=30) as lease:
                    seen.append([rig.memory.record(0, slot) for slot in lease.slots])
            except RecordCorrupt:
                with rig.store.acquire(0, demand, owner=1, timeout_s=30) as lease:
                    seen.append([rig.memory.record(0, slot) for slot in lease.slots])
            rig.store.advance(1, step + 1)
        rig.store.close()
        return seen

    def true_route(step):
        return [Prefetch(0, (step * 5 + i * 3) % 16) for i in range(3)]

    kinds = {
        "off": lambda step: [],
        "oracle": true_route,
        "late": lambda step: true_route(step - 1),
        "wrong": lambda step: [Prefetch(0, (step * 5 + i * 3 + 1) % 16) for i in range(3)],
        "flood": lambda step: [Prefetch(0, e, ReadClass.SPECULATIVE) for e in range(16)] * 50,
        "senseless": lambda step: [Prefetch(9, step), Prefetch(0, -1), Prefetch(0, 99), None],
    }
    answers = {kind: run(make_hints) for kind, make_hints in kinds.items()}
    assert all(answer == answers["off"] for answer in answers.values())


# Everything at once: the first 20 seconds of `bench/studies/stress_store.py`.


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_nothing_hangs_tears_or_leaks_when_everything_happens_at_once(policy):
    report = stress(10.0, seed=1, policy=policy)
    counts = report["counts"]
    assert {"leases", "batches", "evaluated", "cancelled", "failed requests"} <= set(counts)
    assert report["evictions"]
    assert report["joined"]
    assert {"IN_TIME", "STALE"} <= set(report["guessed"])


def refill_early(patch):
    patch.setattr(SlotTable, "_can_leave", lambda self, expert: self.state_of(expert) is SlotState.FULL)


def tell_nobody(patch):
    patch.setattr(ThreadReader, "wake", lambda self, num_jobs: None)


@pytest.mark.parametrize("plant", [refill_early, tell_nobody])
def test_the_stress_run_notices_a_planted_fault(plant, monkeypatch):
    plant(monkeypatch)
    monkeypatch.setattr("bench.studies.stress_store.WAIT_S", 2.0)
    with pytest.raises((AssertionError, WouldBlock)):
        stress(20.0, seed=2)


# On real files.

NUM_EXPERTS, LENGTH = 6, 64


@pytest.fixture
def checkpoint(tmp_path):
    size = NUM_EXPERTS * LENGTH
    header = {"w": {"dtype": "U8", "shape": [NUM_EXPERTS, LENGTH], "data_offsets": [0, size]}}
    path = tmp_path / "model.safetensors"
    start = 8 + len(write(path, header, size))
    with path.open("r+b") as stream:
        stream.seek(start)
        stream.write(b"".join(pattern(0, expert, 0, LENGTH) for expert in range(NUM_EXPERTS)))
    return path


def open_store(path, reader=None):
    table = read_tensor_table(path.parent)
    layout = RecordLayout.stacked(0, NUM_EXPERTS, [("w", table.tensors["w"])], file_sizes=table.file_sizes)
    source = FileSource(table.files)
    memory = DictMemory(slot_lengths={0: (LENGTH,)})
    return (
        ExpertStore({0: layout}, source, memory, slots={0: 2}, num_readers=2, reader=reader),
        source,
        memory,
    )


def edit(path):
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"!")
    os.utime(path)


def truncate(path):
    os.truncate(path, path.stat().st_size - LENGTH)


def replace(path):
    other = path.with_name("new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [edit, truncate, replace, os.unlink])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_file_changed_after_it_was_indexed_stops_every_read(checkpoint, change, is_running):
    store, source, memory = open_store(checkpoint)
    if is_running:
        with store.acquire(0, [0, 1], timeout_s=30) as lease:
            assert memory.record(0, lease.slots[1]) == pattern(0, 1, 0, LENGTH)
    change(checkpoint)
    for expert in (4, 5):
        with pytest.raises((SourceChanged, RecordCorrupt), match=r"model\.safetensors"):
            store.acquire(0, [expert], timeout_s=30)
        assert not store.is_resident(0, expert)
    store.close()
    source.close()


def test_two_stores_on_one_checkpoint_do_not_disturb_each_other(checkpoint):
    before = checkpoint.stat()
    pairs = [open_store(checkpoint) for _ in range(2)]
    for expert in range(NUM_EXPERTS):
        for store, _, memory in pairs:
            with store.acquire(0, [expert], timeout_s=30) as lease:
                assert memory.record(0, lease.slots[0]) == pattern(0, expert, 0, LENGTH)
    for store, source, _ in pairs:
        store.close()
        source.close()
    after = checkpoint.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
    assert [entry.name for entry in checkpoint.parent.iterdir() if entry.is_file()] == [checkpoint.name]
