"""Rows of a big table (the n-gram embedding): small, many, known early. Entry: `RowTable.gather`.

A gather issues all its reads before it returns, on threads of its own, so that rows never queue behind
records of megabytes: 16 rows a token are 16 latencies, which should overlap. Each row is read once per batch,
exactly: no rounding to pages, so nothing beyond a row is written (FIELD P18) and nothing beyond it is asked
for (FIELD P19). Rows that follow each other in a file become one read.

Guesses about experts give way to rows (`is_busy`, `when_idle`): on a drive as slow as computing, rows stood
in line behind two guesses, and their layer waited for them (4 % of a token; with real-size records one
record's time, 23 of 970 ms).

Buffers take turns: a batch is valid until its buffer's next turn, `num_buffers` gathers later. A buffer whose
reads have not ended is waited for before it is filled again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from expert_store.completion import Completion
from expert_store.errors import RecordCorrupt, SlotsExhausted, StoreClosed, StoreError, WouldBlock
from expert_store.layout import RowLayout
from expert_store.reader import Job, Reader, RowMemory, ThreadReader, check_views
from expert_store.source import ByteSource, read_failed
from expert_store.stats import RowStatistics
from expert_store.watch import RowWatch

_JOBS_PER_READER: Final = 4
"""A large batch is cut into this many jobs per reader: even work, little overhead."""


class RowBatch:
    """Rows that are in memory or on their way.

    Attributes:
        buffer: Which buffer of the memory holds them.
        index: Where in the buffer each row asked for lies, in the order asked.
        num_unique: Distinct rows among them: indices run from 0 to num_unique - 1.
    """

    __slots__ = ("_completion", "_table", "buffer", "index", "num_unique")

    def __init__(
        self, table: RowTable, buffer: int, index: list[int], num_unique: int, num_jobs: int
    ) -> None:
        """Made by `RowTable.gather`."""
        self._table = table
        self.buffer = buffer
        self.index = index
        self.num_unique = num_unique
        self._completion = Completion(num_jobs)

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return not self._completion.pending

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every row is in the buffer.

        Args:
            timeout_s: Give up after this many seconds; the batch stays valid. None waits for ever.

        Raises:
            WouldBlock: The time ran out.
            StoreError: A row could not be read; the batch must not be used.
        """
        if self._completion.pending:
            self._table.stand_still(self._completion, timeout_s)
        if self._completion.error is not None:
            raise self._completion.error.again()

    def settle(self) -> None:
        """Block until no read writes to the buffer any more, well or not."""
        if self._completion.pending:
            self._table.stand_still(self._completion, None)

    def part_ended(self, error: StoreError | None) -> None:
        """Take note of the end of one job; the caller holds the table's lock."""
        self._completion.count_down(error)


class _Run(NamedTuple):
    """One read: a run of a file, and where its rows go."""

    file: int
    offset: int
    length: int
    views: list[memoryview]


class RowTable:
    """Reads rows; the desk of its own reader. `gather` and `close` are for one thread at a time.

    Attributes:
        watch: Told of every wait and read; None tells nobody. Set between gathers.
    """

    def __init__(
        self,
        layout: RowLayout,
        source: ByteSource,
        memory: RowMemory,
        *,
        num_readers: int = 4,
        reader: Reader | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        when_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the readers.

        Args:
            layout: Where the rows lie.
            source: Where bytes come from. Whoever opened it closes it, after the table.
            memory: Where rows go.
            num_readers: Reader threads, if no `reader` is given.
            reader: Who reads; for tests.
            clock: Nanoseconds, for statistics alone.
            when_idle: Called when the last read under way has ended, on its thread, under the table's lock:
                it may take no lock under which `gather` is called.
        """
        self._layout = layout
        self._source = source
        self._memory = memory
        self._clock = clock
        self._lock = threading.Lock()  # protects what follows, and the jobs
        self._jobs: deque[_RowRead] = deque()
        self._num_open = 0  # jobs that have not ended
        self._when_idle = when_idle
        self._refusal: StoreError | None = None
        self.watch: RowWatch | None = None
        self._turn = 0
        self._batches: list[RowBatch | None] = [None] * memory.num_buffers
        self._num_rows = self._num_unique = self._num_reads = self._physical_bytes = self._exposed_wait_ns = 0
        self._num_jobs_max = max(1, num_readers) * _JOBS_PER_READER
        self._reader = ThreadReader(num_readers, name="row-reader") if reader is None else reader
        self._reader.start(self)

    def gather(self, rows: Sequence[int]) -> RowBatch:
        """Issue the reads of some rows and return without waiting for them.

        Args:
            rows: Row numbers, in any order, repeated or not.

        Returns:
            Where each will be. Valid until `num_buffers` gathers later.

        Raises:
            SlotsExhausted: More distinct rows than a buffer holds.
            StoreError: No such row; a closed or broken table.
        """
        places: dict[int, int] = {}
        index = [places.setdefault(row, len(places)) for row in rows]
        self._check(places)
        buffer = self._turn % len(self._batches)
        previous = self._batches[buffer]
        if previous is not None:
            previous.settle()
        jobs = self._cut(sorted(places.items()))
        batch = RowBatch(self, buffer, index, len(places), len(jobs))
        with self._lock:
            if self._refusal is not None:
                raise self._refusal.again()
            self._turn += 1
            self._batches[buffer] = batch
            self._num_rows += len(index)
            self._num_unique += len(places)
            self._num_open += len(jobs)
            self._jobs.extend(_RowRead(self, batch, job) for job in jobs)
            self._reader.wake(len(jobs))
        return batch

    @property
    def is_busy(self) -> bool:
        """Whether rows are on their way. Any thread, without the lock."""
        return self._num_open > 0

    def statistics(self) -> RowStatistics:
        """Return a snapshot of every count."""
        with self._lock:
            return RowStatistics(
                num_batches=self._turn,
                num_rows=self._num_rows,
                num_unique=self._num_unique,
                logical_bytes=self._num_unique * self._layout.row_bytes,
                physical_bytes=self._physical_bytes,
                num_reads=self._num_reads,
                exposed_wait_ns=self._exposed_wait_ns,
            )

    def close(self) -> None:
        """Fail what is queued, let reads on the wire finish, join every thread. Idempotent."""
        with self._lock:
            self.reader_failed(StoreClosed("Row table is closed", hint="open the model again"))
        self._reader.close()

    # What readers and batches use (`Desk`).

    @property
    def lock(self) -> threading.Lock:
        """Protects queue, jobs and counters."""
        return self._lock

    def next_job(self) -> Job | None:
        """Take the oldest job; the caller holds the lock."""
        return self._jobs.popleft() if self._jobs else None

    def reader_failed(self, error: StoreError) -> None:
        """Fail what is queued and refuse what comes; the caller holds the lock."""
        if self._refusal is None:
            self._refusal = error
        while self._jobs:
            self._jobs.popleft().hand_in(error)

    def stand_still(self, completion: Completion, timeout_s: float | None) -> None:
        """Block until a batch has ended, and count how long (exposed wait)."""
        began_ns = self._clock()
        try:
            is_done = completion.wait(timeout_s, self._check_reader)
        finally:
            with self._lock:
                waited_ns = self._clock() - began_ns
                self._exposed_wait_ns += waited_ns
                if self.watch is not None:
                    self.watch.rows_stood_still(began_ns, waited_ns)
        if not is_done:
            raise WouldBlock(f"Rows are not there after {timeout_s:g} s", hint="wait longer")

    def read(self, buffer: int, rows: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Read (row, place in the buffer) pairs, sorted by row; on a reader thread, without the lock.

        Returns:
            Number of reads, physical bytes.
        """
        watch, num_reads, total = self.watch, 0, 0
        began_ns = 0 if watch is None else self._clock()
        for run in self._runs(buffer, rows):
            try:
                got = self._source.read_into(run.file, run.offset, run.views)
            except OSError as error:
                raise read_failed(error, self._source.name(run.file), run.offset) from error
            num_reads += 1
            total += got
            if got != run.length:
                raise self._cut_short(rows, run, got)
        if watch is not None:
            watch.rows_ready(began_ns, self._clock(), len(rows), total)
        return num_reads, total

    def ended(self, num_reads: int, physical_bytes: int) -> None:
        """Count what a job read, now that it has ended; the caller holds the lock."""
        self._num_reads += num_reads
        self._physical_bytes += physical_bytes
        self._num_open -= 1
        if not self._num_open:
            self._when_idle()

    # Inside.

    def _check(self, places: dict[int, int]) -> None:
        if places and not (min(places) >= 0 and max(places) < self._layout.num_rows):
            wrong = next(row for row in places if not 0 <= row < self._layout.num_rows)
            raise StoreError(
                f"No such row: {wrong} of {self._layout.num_rows}",
                hint="this is a bug of the caller",
                row=wrong,
            )
        if len(places) > self._memory.rows_per_buffer:
            raise SlotsExhausted(
                f"{len(places)} distinct rows do not fit a buffer of {self._memory.rows_per_buffer}",
                hint="gather fewer tokens at once",
                wanted=len(places),
                room=self._memory.rows_per_buffer,
            )

    def _cut(self, rows: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Cut a batch into jobs: one row each while that keeps all readers busy, longer ones beyond."""
        size = max(1, -(-len(rows) // self._num_jobs_max))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _runs(self, buffer: int, rows: Sequence[tuple[int, int]]) -> list[_Run]:
        """Return the reads of some rows; what follows each other in a file becomes one read."""
        lengths = self._layout.component_lengths
        pieces: list[tuple[int, int, int, memoryview]] = []
        for row, place in rows:
            views = self._memory.row_views(buffer, place)
            check_views(views, lengths, "row", place)
            for span, view in zip(self._layout.spans(row), views, strict=True):
                pieces.append((span.file, span.offset, span.length, view))
        runs: list[_Run] = []
        for file, offset, length, view in sorted(pieces, key=itemgetter(0, 1)):
            last = runs[-1] if runs else None
            if last is not None and last.file == file and last.offset + last.length == offset:
                last.views.append(view)
                runs[-1] = last._replace(length=last.length + length)
            else:
                runs.append(_Run(file, offset, length, [view]))
        return runs

    def _check_reader(self) -> None:
        """Break the table if a reader is gone; called by waiters, without the lock."""
        try:
            self._reader.check()
        except StoreError as error:
            with self._lock:
                self.reader_failed(error)
            raise

    def _cut_short(self, rows: Sequence[tuple[int, int]], run: _Run, got: int) -> RecordCorrupt:
        name = self._source.name(run.file)
        return RecordCorrupt(
            f"Row is cut short: among rows {rows[0][0]} to {rows[-1][0]} in {name} at {run.offset}: "
            f"wanted {run.length} bytes, got {got}",
            hint="fetch this file again",
            row=rows[0][0],
            file=name,
            offset=run.offset,
            wanted=run.length,
            got=got,
        )


class _RowRead:
    """The job of reading some rows of a batch."""

    __slots__ = ("_batch", "_counts", "_rows", "_table")

    def __init__(self, table: RowTable, batch: RowBatch, rows: Sequence[tuple[int, int]]) -> None:
        self._table = table
        self._batch = batch
        self._rows = rows
        self._counts = (0, 0)

    def read(self) -> None:
        self._counts = self._table.read(self._batch.buffer, self._rows)

    def hand_in(self, error: StoreError | None) -> None:
        self._batch.part_ended(error)
        self._table.ended(*self._counts)
