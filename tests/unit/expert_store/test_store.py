"""What the store promises its callers, step by step."""

import subprocess
import sys
import threading

import pytest

from expert_store.errors import SlotsExhausted, StoreClosed, StoreError, WouldBlock
from expert_store.keys import WaitCause
from expert_store.reader import ThreadReader
from expert_store.stats import Fate
from expert_store.testing import HeldSource
from tests.unit.expert_store.rig import make_rig


def test_a_lease_holds_exactly_the_records_asked_for_in_the_order_asked():
    rig = make_rig()
    request = rig.store.request(0, [5, 2, 7])
    rig.reader.run()
    lease = request.wait()
    assert lease.experts == (5, 2, 7)
    assert all(rig.holds(0, expert, slot) for expert, slot in zip(lease.experts, lease.slots, strict=True))
    assert len(set(lease.slots)) == 3


def test_every_miss_of_a_layer_is_queued_before_the_first_completes_and_readers_are_told_once():
    rig = make_rig(num_experts=16, slots=10)
    rig.store.request(0, range(10))
    statistics = rig.store.statistics()
    assert (statistics.num_queued, rig.counting.reads, rig.reader.num_wakes) == (10, [], 1)


def test_all_misses_are_on_the_wire_at_once_when_there_are_readers_for_them():
    held: list[HeldSource] = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = make_rig(num_experts=16, slots=10, lengths={0: (24,)}, wrap=hold, reader=ThreadReader(10))
    request = rig.store.request(0, range(10))
    held[0].wait_held(10)
    assert not request.is_ready
    assert rig.store.statistics().num_reading == 10
    held[0].release_all()
    request.wait(30).release()
    assert rig.counting.num_reads_max == 10
    rig.store.close()


def test_a_hit_reads_nothing_and_needs_no_reader():
    rig = make_rig()
    slots = rig.load(0, [1, 2])
    num_wakes = rig.reader.num_wakes
    lease = rig.store.acquire_nowait(0, [2, 1])
    assert lease.slots == (slots[1], slots[0])
    assert rig.reader.num_wakes == num_wakes
    assert len(rig.counting.reads) == 4  # two components each, from the misses


def test_acquire_nowait_of_a_miss_raises_and_pins_nothing_but_the_read_goes_on():
    rig = make_rig(slots=2)
    with pytest.raises(WouldBlock) as caught:
        rig.store.acquire_nowait(0, [1, 2])
    assert caught.value.context["pending"] == 2
    rig.reader.run()
    rig.store.acquire_nowait(0, [1, 2]).release()
    rig.load(0, [3, 4])


def test_two_requests_for_one_record_in_flight_share_one_read():
    rig = make_rig()
    first, second = rig.store.request(0, [1, 2]), rig.store.request(0, [2, 3])
    rig.reader.begin()
    third = rig.store.request(0, [1])
    rig.reader.run()
    assert [request.wait().experts for request in (first, second, third)] == [(1, 2), (2, 3), (1,)]
    statistics = rig.store.statistics()
    assert (statistics.num_misses, statistics.num_joined, statistics.num_exact) == (3, 2, 3)
    assert len(rig.counting.reads) == 6


def test_a_request_is_ready_only_when_its_last_record_is():
    rig = make_rig()
    request = rig.store.request(0, [1, 2, 3])
    for _ in range(3):
        rig.reader.begin()
    for index in (1, 1):
        rig.reader.finish(index)
        assert not request.is_ready
        with pytest.raises(WouldBlock):
            request.wait_nowait()
    rig.reader.finish()
    assert request.wait() is request.wait_nowait()


def test_a_wait_wakes_once_for_all_its_reads():
    held: list[HeldSource] = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = make_rig(num_experts=16, slots=10, lengths={0: (24,)}, wrap=hold, reader=ThreadReader(4))
    request = rig.store.request(0, range(10))
    waits: list[bool] = []
    waiter = threading.Thread(target=lambda: waits.append(request.wait(30).is_released))
    waiter.start()
    held[0].wait_held(4)
    held[0].release(9)
    held[0].wait_held(1)
    assert not waits
    held[0].release(1)
    waiter.join(30)
    assert waits == [False]
    rig.store.close()


def test_a_pinned_slot_keeps_its_record_whatever_else_is_asked_for():
    rig = make_rig(slots=4)
    request = rig.store.request(0, [0, 1])
    rig.reader.run()
    lease = request.wait()
    for expert in range(2, 8):
        rig.load(0, [expert])
        assert all(rig.holds(0, e, s) for e, s in zip(lease.experts, lease.slots, strict=True))
    with pytest.raises(SlotsExhausted) as caught:
        rig.store.request(0, [2, 3, 4])
    assert caught.value.context["wanted"] > caught.value.context["room"]
    lease.release()
    rig.load(0, [2, 3, 4, 5])


def test_a_refused_request_changes_nothing():
    rig = make_rig(slots=3)
    rig.load(0, [0, 1])
    before = rig.store.statistics()
    with pytest.raises(SlotsExhausted):
        rig.store.request(0, [0, 1, 2, 3])
    assert rig.store.statistics() == before
    assert set(rig.load(0, [0, 1, 2])) == {0, 1, 2}


def test_release_is_idempotent_and_gives_back_one_pin_only():
    rig = make_rig(slots=1)
    rig.load(0, [3])
    first, second = rig.store.acquire_nowait(0, [3]), rig.store.acquire_nowait(0, [3])
    first.release()
    first.release()
    with pytest.raises(SlotsExhausted):
        rig.store.request(0, [4])
    second.release()
    rig.load(0, [4])


def test_a_cancelled_request_drops_its_pins_and_its_records_become_ordinary_entries():
    rig = make_rig(slots=2)
    request = rig.store.request(0, [1, 2])
    request.cancel()
    request.cancel()
    rig.reader.run()
    assert rig.store.is_resident(0, 1)
    with pytest.raises(StoreError, match="cancelled"):
        request.wait()
    assert rig.store.statistics().fates[Fate.STALE].num == 2
    rig.load(0, [3, 4])


def test_acquire_waits_for_reads_of_an_abandoned_request_rather_than_refuse():
    rig = make_rig(slots=2, reader=ThreadReader(1))
    for expert in range(0, 8, 2):
        rig.store.request(0, [expert, expert + 1]).cancel()
        rig.store.acquire(0, [(expert + 2) % 8, (expert + 3) % 8], timeout_s=30).release()
    assert (rig.store.is_resident(0, 0), rig.store.is_resident(0, 1)) == (True, True)
    rig.store.close()


def test_layers_of_different_record_size_keep_their_own_slots_and_hit_rate():
    lengths = {0: (24, 8), 1: (400, 40), 2: (7,)}
    rig = make_rig(slots={0: 4, 1: 3, 2: 2}, lengths=lengths)
    for _ in range(5):
        for layer, experts in ((0, [1, 2, 3]), (1, [4, 5]), (2, [6])):
            for expert, slot in zip(experts, rig.load(layer, experts), strict=True):
                assert rig.holds(layer, expert, slot)
    layers = rig.store.statistics().layers
    assert [layer.num_misses for layer in layers] == [3, 2, 1]
    assert [layer.num_hits for layer in layers] == [12, 8, 4]
    assert [layer.num_evictions for layer in layers] == [0, 0, 0]


@pytest.mark.parametrize("policy", ["lru", "slru"])
@pytest.mark.parametrize("path", ["request", "acquire_nowait", "join", "cancelled"])
def test_recency_advances_on_every_path(policy, path):
    rig = make_rig(slots=3, policy=policy)
    if path == "join":
        rig.store.request(0, [0]).cancel()
        rig.store.request(0, [1]).cancel()
        rig.store.request(0, [0]).cancel()  # demanded again while in flight
        rig.reader.run()
    else:
        rig.load(0, [0])
        rig.load(0, [1])
    rig.load(0, [2])
    if path == "request":
        rig.load(0, [0])
    elif path == "acquire_nowait":
        rig.store.acquire_nowait(0, [0]).release()
    elif path == "cancelled":
        rig.store.request(0, [0]).cancel()
    rig.load(0, [3])
    assert rig.store.is_resident(0, 0)
    assert not rig.store.is_resident(0, 1)


def test_preload_puts_every_expert_in_the_slot_of_its_number():
    rig = make_rig(num_experts=70, slots=70, lengths={0: (8,)}, reader=ThreadReader(2))
    rig.store.acquire(0, [9, 3]).release()
    done: list[int] = []
    rig.store.preload(0, done.append)
    assert done == [32, 64, 70]
    assert rig.store.is_layer_resident(0)
    assert rig.store.acquire_nowait(0, range(70)).slots == tuple(range(70))
    assert all(rig.holds(0, expert, expert) for expert in range(70))
    rig.store.close()


def test_preload_refuses_a_layer_with_fewer_slots_than_experts():
    rig = make_rig(slots=7)
    with pytest.raises(StoreError, match="7 slots for 8 experts"):
        rig.store.preload(0)
    assert not rig.store.is_layer_resident(0)


def test_advance_closes_the_cycle_and_leaves_exact_tickets_alone():
    rig = make_rig()
    rig.store.request(0, [1, 2], owner=5)
    rig.store.advance(5, 1)
    assert rig.store.statistics().num_queued == 2
    rig.reader.run()
    rig.store.request(0, [1, 3], owner=5)
    rig.store.advance(5, 2)
    cycle = rig.store.statistics().last_cycle
    assert (cycle.num_demands, cycle.num_hits, cycle.num_misses, cycle.exact_bytes) == (2, 1, 1, 32)
    with pytest.raises(StoreError, match="backwards: 2 to 1"):
        rig.store.advance(5, 1)
    rig.store.advance(5, 2)
    assert rig.store.statistics().num_cycles == 2


def test_tickets_carry_owner_generation_and_class():
    rig = make_rig()
    rig.store.advance(7, 3)
    rig.store.request(0, [1], owner=7)
    ticket = rig.reader.begin()
    assert (ticket.key, ticket.owner, ticket.generation, ticket.read_class) == ((0, 1), 7, 3, 0)


def test_statistics_count_demands_bytes_and_fates():
    rig = make_rig()
    request = rig.store.request(0, [1, 2])
    rig.clock.advance(100)
    rig.reader.begin()
    rig.clock.advance(50)
    rig.reader.begin()
    rig.clock.advance(25)
    rig.reader.finish()
    rig.reader.finish()
    request.wait()
    rig.store.request(0, [1, 2, 3])
    got = rig.store.statistics()
    assert (got.num_demands, got.num_hits, got.num_misses, got.num_joined) == (5, 2, 3, 0)
    assert (got.num_exact, got.exact_bytes, got.logical_bytes, got.physical_bytes) == (3, 96, 96, 64)
    assert (got.exact_io_ns, got.exposed_wait_ns, got.hidden_fraction, got.hit_rate) == (75, 0, 1.0, 0.4)
    assert (got.issue_to_ready.total_ns, got.read_time.total_ns, got.read_time.max_ns) == (350, 100, 75)
    assert got.read_time.quantile_ns(0.5) == 26  # bins of an eighth of an octave
    assert {fate: count.num for fate, count in got.fates.items() if count.num} == {Fate.IN_TIME: 2}
    assert got.fates[Fate.IN_TIME].num_bytes == 64


def wait_a_thousand_ns(rig, request):
    """Wait for the read that is on the wire; it ends 1000 ns after somebody waits."""

    def finish_later():
        while not request.is_waited_for:
            pass
        rig.clock.advance(1000)
        rig.reader.finish()

    other = threading.Thread(target=finish_later)
    other.start()
    request.wait(30)
    other.join()


def test_exposed_wait_is_the_time_a_caller_stood_still_and_makes_the_ticket_late():
    rig = make_rig()
    request = rig.store.request(0, [1])
    rig.reader.begin()

    wait_a_thousand_ns(rig, request)
    got = rig.store.statistics()
    assert got.exposed_wait_ns == 1000
    assert got.fates[Fate.LATE].num == 1


@pytest.mark.parametrize(("layer", "experts"), [(9, [0]), (0, [8]), (0, [-1]), (0, [1, 1])])
def test_a_request_that_makes_no_sense_is_refused(layer, experts):
    rig = make_rig()
    with pytest.raises(StoreError):
        rig.store.request(layer, experts)
    assert rig.store.statistics().num_demands == 0


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(StoreError, match="belady"):
        make_rig(policy="belady")
    with pytest.raises(StoreError, match="Layer 1 has 0 slots"):
        make_rig(slots={0: 1})


def test_a_request_for_nothing_is_ready_at_once():
    assert make_rig().store.acquire(0, []).slots == ()


def test_a_closed_store_refuses_and_fails_what_was_queued():
    rig = make_rig()
    rig.load(0, [3])
    lease = rig.store.acquire_nowait(0, [3])
    request = rig.store.request(0, [1, 2])
    rig.reader.begin()
    rig.store.close()
    rig.store.close()
    assert rig.reader.is_closed
    with pytest.raises(StoreClosed):
        request.wait()
    with pytest.raises(StoreClosed):
        rig.store.request(0, [3])
    lease.release()


def test_the_callers_thread_makes_no_call_to_the_operating_system_for_storage(tmp_path):
    script = _PATHS + _TRACE.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[]\n"


_TRACE = """
import pathlib
from expert_store.layout import RecordLayout, Span
from expert_store.source import FileSource
from expert_store.safetensors_index import FileInfo
from expert_store.store import ExpertStore
from expert_store.testing import DictMemory
path = pathlib.Path({folder!r}) / "file"
path.write_bytes(bytes(range(256)) * 64)
status = path.stat()
source = FileSource([FileInfo(path, status.st_size, status.st_mtime_ns, status.st_ino)])
layout = RecordLayout.stacked(0, 16, [("part", Span(0, 0, 16384))], file_sizes=[16384])
memory = DictMemory(slot_lengths=dict([(0, (1024,))]))
store = ExpertStore(dict([(0, layout)]), source, memory, slots=dict([(0, 8)]))
calls = []
def profile(frame, event, function):
    if event == "c_call" and getattr(function, "__module__", None) in ("posix", "_io", "io"):
        calls.append(function.__name__)
sys.setprofile(profile)  # this thread alone
for _ in range(3):
    for first in range(0, 16, 4):
        store.acquire(0, range(first, first + 4)).release()
sys.setprofile(None)
assert store.statistics().num_misses == 48
store.close()
source.close()
print(calls)
"""


def test_the_store_imports_where_mlx_and_numpy_cannot_be():
    script = (
        "import sys\n"
        "for name in ('mlx', 'mlx.core', 'numpy', 'torch', 'safetensors', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import expert_store.store, expert_store.rows, expert_store.testing, expert_store.safetensors_index\n"
        "outside = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "outside -= {'typing_extensions'}  # msgspec looks for it\n"
        "outside -= {'typing_extensions'}  # msgspec looks for it\n"
        "print(sorted(name for name in outside if sys.modules.get(name) and name[0] != '_'))\n"
    )
    command = [sys.executable, "-S", "-c", _PATHS + script]
    command = [sys.executable, "-S", "-c", _PATHS + script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['expert_store', 'msgspec']\n"


_PATHS = f"import sys; sys.path[:] = {sys.path!r}\n"


def test_a_watch_hears_of_every_wait_and_read_with_its_times_until_it_is_taken_away():
    class Watch:
        def __init__(self):
            self.waits, self.reads = [], []

        def stood_still(self, *what):
            self.waits.append(what)

        def read_ready(self, ticket):
            self.reads.append((ticket.key, ticket.issued_ns, ticket.started_ns, ticket.ready_ns, ticket.fate))

    rig, watch = make_rig(), Watch()
    rig.store.watch(watch)
    rig.clock.advance(50)
    request = rig.store.request(0, [1])
    rig.clock.advance(5)
    rig.reader.begin()

    wait_a_thousand_ns(rig, request)
    assert watch.waits == [(0, WaitCause.COLD, 55, 0, 1000)]
    assert watch.reads == [((0, 1), 50, 55, 1055, Fate.LATE)]
    rig.store.watch(None)
    rig.store.request(0, [2])
    assert rig.reader.step()
    assert len(watch.reads) == 1
