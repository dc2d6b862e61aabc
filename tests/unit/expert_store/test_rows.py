"""Rows: exact, early, each read once, never a byte beyond."""

import errno
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_store.errors import (
    RecordCorrupt,
    SlotsExhausted,
    SourceFailed,
    StoreClosed,
    StoreError,
    WorkerDied,
    WouldBlock,
)
from expert_store.layout import RowLayout, RowPart, Span
from expert_store.reader import ThreadReader
from expert_store.rows import RowTable
from expert_store.testing import (
    CountingSource,
    DictMemory,
    FaultySource,
    HeldSource,
    MemorySource,
    StepReader,
    pattern,
)

LENGTHS = (20, 4)
SIZES = (5, 1, 7)  # rows of each part
NUM_ROWS = sum(SIZES)


def row_bytes(row: int) -> bytes:
    return b"".join(pattern(9, row, part, length) for part, length in enumerate(LENGTHS))


def make_files() -> tuple[MemorySource, RowLayout]:
    """Parts in one file, scattered, the last row ending with the file."""
    blob, parts, row = bytearray(b"\xee" * 8), [], 0
    for size in SIZES:
        spans = []
        for part, length in enumerate(LENGTHS):
            spans.append(Span(0, len(blob), size * length))
            for local in range(size):
                blob += pattern(9, row + local, part, length)
        parts.append(RowPart(size, tuple(spans)))
        row += size
    source = MemorySource([bytes(blob)])
    return source, RowLayout(["weight", "scale"], parts, file_sizes=source.file_sizes)


class Rig:
    def __init__(
        self, *, wrap=lambda source: source, reader=None, num_buffers=2, rows_per_buffer=16, num_readers=4
    ):
        source, layout = make_files()
        self.counting = CountingSource(wrap(source))
        self.memory = DictMemory(
            row_lengths=LENGTHS, num_buffers=num_buffers, rows_per_buffer=rows_per_buffer, guard_bytes=8192
        )
        self.reader = StepReader() if reader is None else reader
        self.num_idle = 0
        self.table = RowTable(
            layout,
            self.counting,
            self.memory,
            reader=self.reader,
            num_readers=num_readers,
            when_idle=self.idle,
        )

    def idle(self):
        self.num_idle += 1

    def check(self, batch, rows):
        assert len(batch.index) == len(rows)
        for row, place in zip(rows, batch.index, strict=True):
            assert self.memory.row(batch.buffer, place) == row_bytes(row)
        self.memory.check_guards()


def test_it_is_busy_until_the_last_read_has_ended_well_or_not_and_says_so_once():
    broken = OSError(errno.EIO, "broken")
    rig = Rig(wrap=lambda source: FaultySource(source, lambda number, *_: broken if number == 1 else None))
    assert not rig.table.is_busy
    batches = [rig.table.gather([0, 7]), rig.table.gather([12])]
    num_idle = []
    for _ in range(3):
        assert rig.table.is_busy
        num_idle.append(rig.num_idle)
        rig.reader.step()
    assert (num_idle, rig.num_idle, rig.table.is_busy) == ([0, 0, 0], 1, False)
    with pytest.raises(SourceFailed):
        batches[0].wait()
    rig.table.gather([1])
    rig.table.close()  # what is queued fails: nothing gives way to it for ever
    assert (rig.num_idle, rig.table.is_busy) == (2, False)


@given(rows=st.lists(st.integers(0, NUM_ROWS - 1), max_size=16), num_readers=st.integers(1, 3))
def test_every_row_is_where_the_index_says_and_no_guard_byte_is_touched(rows, num_readers):
    rig = Rig(num_readers=num_readers)
    batch = rig.table.gather(rows)
    assert not rig.counting.reads
    assert batch.is_ready == (not rows)
    rig.reader.run()
    batch.wait()
    rig.check(batch, rows)
    assert batch.num_unique == len(set(rows)) == len(set(batch.index))


def test_a_batch_is_queued_whole_before_gather_returns_and_duplicates_are_read_once():
    rig = Rig()
    batch = rig.table.gather([3, 8, 3, 12, 8])
    assert batch.index == [0, 1, 0, 2, 1]
    assert rig.reader.num_wakes == 1
    assert rig.reader.run() == 3
    assert len(rig.counting.reads) == 6
    got = rig.table.statistics()
    assert (got.num_batches, got.num_rows, got.num_unique, got.num_reads) == (1, 5, 3, 6)
    assert (got.logical_bytes, got.physical_bytes) == (72, 72)


def test_physical_bytes_are_the_bytes_of_the_rows_alone():
    rig = Rig(num_readers=1)
    rows = [0, 1, 2, 5, 12]
    rig.table.gather(rows)
    rig.reader.run()
    assert rig.counting.num_bytes == len(rows) * sum(LENGTHS) <= 16 * 4096
    assert max(one.offset + one.length for one in rig.counting.reads) <= rig.counting._inner.file_sizes[0]


def test_rows_that_follow_each_other_become_one_read():
    rig = Rig(num_readers=1)  # at most four jobs, so these nine rows are cut by three
    # 0 to 4 are of one part, 5 is alone, 6 to 8 are of another; both components of row 5 follow what row 4
    # ends with.
    rows = [2, 0, 1, 3, 4, 5, 6, 7, 8]
    batch = rig.table.gather(rows)
    assert rig.reader.run() == 3
    assert sorted(one.length for one in rig.counting.reads) == [12, 12, 32, 40, 60, 60]
    batch.wait()
    rig.check(batch, rows)


def test_all_rows_of_a_token_are_on_the_wire_at_once_when_there_are_readers_for_them():
    held = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = Rig(wrap=hold, reader=ThreadReader(12))
    batch = rig.table.gather(range(12))
    held[0].wait_held(12)
    held[0].release_all()
    batch.wait(30)
    rig.check(batch, list(range(12)))
    rig.table.close()


def test_buffers_take_turns_and_a_batch_stays_valid_until_its_turn_comes_again():
    rig = Rig(num_buffers=3)
    batches = []
    for turn in range(7):
        rows = [turn, turn + 1, 11 - turn]
        batch = rig.table.gather(rows)
        rig.reader.run()
        batches.append((batch, rows))
        for earlier, wanted in batches[-3:]:
            rig.check(earlier, wanted)
    assert [batch.buffer for batch, _ in batches] == [0, 1, 2, 0, 1, 2, 0]


def test_a_buffer_is_not_filled_again_while_it_is_being_written():
    held = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = Rig(wrap=hold, reader=ThreadReader(2), num_buffers=1)
    first = rig.table.gather([1])
    held[0].wait_held(1)
    second = []
    other = threading.Thread(target=lambda: second.append(rig.table.gather([2])))
    other.start()
    while other.is_alive() and not first._completion.is_waited_for:
        pass
    assert not second  # it waits for the first batch, although a reader is free
    assert len(rig.counting.reads) == 1
    held[0].release_all()
    other.join(30)
    second[0].wait(30)
    rig.check(second[0], [2])
    rig.table.close()


@pytest.mark.parametrize("rows", [[-1], [0, NUM_ROWS]])
def test_a_row_that_is_not_there_is_refused(rows):
    with pytest.raises(StoreError, match=f"No such row: {rows[-1]} of {NUM_ROWS}"):
        Rig().table.gather(rows)


def test_more_distinct_rows_than_a_buffer_holds_are_refused():
    rig = Rig(rows_per_buffer=3)
    rig.table.gather([1, 2, 3, 1, 2, 3])
    with pytest.raises(SlotsExhausted, match="4 distinct rows do not fit a buffer of 3"):
        rig.table.gather([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("fault", "kind"), [("short", RecordCorrupt), (OSError(errno.EIO, "Input/output error"), SourceFailed)]
)
def test_a_row_that_cannot_be_read_fails_its_batch_and_no_other(fault, kind):
    rig = Rig(wrap=lambda source: FaultySource(source, lambda number, *_: fault if number == 2 else None))
    bad = rig.table.gather([4, 9])
    rig.reader.run()
    for _ in range(2):
        with pytest.raises(kind) as caught:
            bad.wait()
        assert str(caught.value.context["file"]).startswith("memory-")
    good = rig.table.gather([4, 9])
    rig.reader.run()
    good.wait()
    rig.check(good, [4, 9])


def test_waiting_for_rows_has_a_time_limit():
    held = []

    def hold(source):
        held.append(HeldSource(source))
        return held[0]

    rig = Rig(wrap=hold, reader=ThreadReader(1))
    batch = rig.table.gather([1])
    with pytest.raises(WouldBlock):
        batch.wait(timeout_s=0)
    held[0].release_all()
    batch.wait(30)
    rig.table.close()


def test_a_dead_reader_is_noticed_and_breaks_the_table():
    rig = Rig(wrap=lambda source: FaultySource(source, lambda *_: "die"), reader=ThreadReader(1))
    batch = rig.table.gather([1, 2, 3])
    with pytest.raises(WorkerDied):
        batch.wait(30)
    with pytest.raises(WorkerDied):
        rig.table.gather([1])
    rig.table.close()


def test_a_closed_table_refuses_and_fails_what_was_queued():
    rig = Rig()
    batch = rig.table.gather([1, 2])
    rig.table.close()
    rig.table.close()
    with pytest.raises(StoreClosed):
        batch.wait()
    with pytest.raises(StoreClosed):
        rig.table.gather([1])
