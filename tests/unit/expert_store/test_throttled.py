"""A simulated drive: a record of many reads takes their latencies and its bytes' time, in one sleep."""

import pytest

from expert_store.layout import ReadOp
from expert_store.testing import MemorySource, ThrottledSource

RUNS = [ReadOp(0, 0, 40, 0, 1), ReadOp(0, 40, 60, 1, 2)]


def drive(**named: float) -> tuple[ThrottledSource, list[float]]:
    slept: list[float] = []
    source = MemorySource([bytes(range(100))])
    return ThrottledSource(source, sleep=slept.append, clock=lambda: sum(slept), **named), slept


def read(source: ThrottledSource) -> bytes:
    views = [memoryview(bytearray(40)), memoryview(bytearray(60))]
    assert source.read_runs(RUNS, views) == 100
    return b"".join(views)


def test_a_record_sleeps_once_for_all_its_reads():
    source, slept = drive(bytes_per_s=1000.0)
    assert read(source) == bytes(range(100))
    assert slept == [pytest.approx(0.1)]


def test_latencies_of_a_records_reads_add_up():
    source, slept = drive(latency_s=0.5, bytes_per_s=1000.0)
    read(source)
    assert slept == [pytest.approx(1.1)]  # two of them, and a tenth for the bytes


def test_records_share_the_bandwidth():
    source, slept = drive(bytes_per_s=1000.0)
    source._free_at_s = 0.25  # another reader's record is on the wire
    read(source)
    assert slept == [pytest.approx(0.35)]


def test_turns_are_in_the_order_of_arrival_however_long_bytes_take_to_fetch():
    order: list[str] = []

    class Slow(MemorySource):
        """While the first record is being fetched, another arrives and is through with it sooner."""

        def read_into(self, file, offset, views):
            if not order:
                order.append("first fetches")
                read(source)
                order.append("second is over")
            return super().read_into(file, offset, views)

    slept: list[float] = []
    source = ThrottledSource(
        Slow([bytes(range(100))]), bytes_per_s=1000.0, sleep=slept.append, clock=lambda: sum(slept)
    )
    read(source)
    assert order == ["first fetches", "second is over"]
    assert slept == [pytest.approx(0.2)]  # the second waited for the first one's turn, which is then over


def test_a_single_read_is_a_record_of_one():
    source, slept = drive(bytes_per_s=1000.0)
    source.read_into(0, 0, [memoryview(bytearray(100))])
    assert slept == [pytest.approx(0.1)]
