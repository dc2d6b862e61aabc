"""Sources, memories, readers and clocks for tests. Shipped, because whoever builds on the store needs them.

Sources wrap a source, so that they combine: `CountingSource(FaultySource(MemorySource(...)))`. Nothing here
sleeps to arrange a race: `HeldSource` keeps reads on the wire until told, `StepReader` reads only when told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from expert_store.errors import SourceFailed, StoreError
from expert_store.layout import ReadOp
from expert_store.reader import Desk, Job, Reader, ThreadReader, attempt
from expert_store.source import ByteSource
from expert_store.ticket import Ticket


class MemorySource(ByteSource):
    """Files that are bytes in memory."""

    def __init__(self, files: Sequence[bytes | bytearray | memoryview]) -> None:
        """Serve these as files 0, 1, ..."""
        self._files = [memoryview(file).cast("B") for file in files]
        self.is_closed = False

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Sizes in bytes, as layouts want them."""
        return tuple(file.nbytes for file in self._files)

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Copy; short where the file ends."""
        data = self._files[file][offset:]
        got = 0
        for view in views:
            part = data[got : got + view.nbytes]
            view[: part.nbytes] = part
            got += part.nbytes
        return got

    def name(self, file: int) -> str:
        """Return a name."""
        return f"memory-{file}"

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


class _Wrapper(ByteSource):
    """Passes everything on."""

    def __init__(self, inner: ByteSource) -> None:
        self._inner = inner

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Pass on."""
        return self._inner.read_into(file, offset, views)

    def name(self, file: int) -> str:
        """Pass on."""
        return self._inner.name(file)

    def close(self) -> None:
        """Pass on."""
        self._inner.close()


class ReaderKilled(BaseException):
    """What `FaultySource` raises to end a reader thread: no reader catches it as an error of the read."""


class FaultySource(_Wrapper):
    """Goes wrong as told.

    `fault` is called with (number of the read, file, offset, wanted bytes) and returns what is to happen:
    None (nothing), "short" (half of the bytes), "wrong" (right length, each byte inverted), "die" (the thread
    ends), or an exception to raise.
    """

    def __init__(
        self, inner: ByteSource, fault: Callable[[int, int, int, int], str | BaseException | None]
    ) -> None:
        """Wrap a source."""
        super().__init__(inner)
        self._fault = fault
        self._lock = threading.Lock()  # protects the number of the read
        self._num_reads = 0

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Read, or go wrong."""
        with self._lock:
            number = self._num_reads
            self._num_reads += 1
        wanted = sum(view.nbytes for view in views)
        fault = self._fault(number, file, offset, wanted)
        if fault is None:
            return self._inner.read_into(file, offset, views)
        if isinstance(fault, BaseException):
            raise fault
        if fault == "die":
            raise ReaderKilled(f"read {number}")
        if fault == "short":
            return self._inner.read_into(file, offset, _shortened(views, wanted // 2))
        if fault == "wrong":
            got = self._inner.read_into(file, offset, views)
            for view in views:
                view[:] = bytes(byte ^ 0xFF for byte in view)
            return got
        raise AssertionError(f"unknown fault: {fault}")


def _shortened(views: Sequence[memoryview], length: int) -> list[memoryview]:
    parts: list[memoryview] = []
    for view in views:
        parts.append(view[:length])
        length -= parts[-1].nbytes
    return parts


class ThrottledSource(_Wrapper):
    """A slower drive: a latency per read and a bandwidth shared by all readers."""

    def __init__(
        self,
        inner: ByteSource,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap a source.

        Args:
            inner: What is read from.
            latency_s: Added to every read, beside its bytes' time; readers overlap in it.
            bytes_per_s: Of all readers together; None does not limit.
            sleep: How to wait, for tests without waiting.
            clock: Seconds.

        Raises:
            StoreError: There is no such drive.
        """
        super().__init__(inner)
        if latency_s < 0 or (bytes_per_s is not None and not bytes_per_s > 0):
            raise StoreError(
                f"No drive has {bytes_per_s} bytes a second and a latency of {latency_s} s",
                hint="give a bandwidth above zero and a latency that is not below",
            )
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()  # protects the moment the drive is free
        self._free_at_s = 0.0

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Read, then wait until this drive would have been done."""
        ready_s = self._take_turn(1, sum(view.nbytes for view in views))
        got = self._inner.read_into(file, offset, views)
        self._wait_until(ready_s)
        return got

    def read_runs(self, runs: Sequence[ReadOp], views: Sequence[memoryview]) -> int:
        """Do the reads of one record, one after the other, then wait until this drive would have done them.

        One sleep for all of them: a clock that wakes 0.1 ms late would make nine small reads twice as long.
        """
        ready_s = self._take_turn(len(runs), sum(run.length for run in runs))
        got = self._inner.read_runs(runs, views)
        self._wait_until(ready_s)
        return got

    def _take_turn(self, num_reads: int, num_bytes: int) -> float:
        """Return when reads that arrive now will be over.

        The turn is taken before the bytes are fetched: taken afterwards, it would go to whoever fetched
        faster, and a guess could overtake an exact read that was there first.
        """
        over_s = self._clock()
        if self._bytes_per_s is not None:
            with self._lock:
                over_s = self._free_at_s = max(self._free_at_s, over_s) + num_bytes / self._bytes_per_s
        return over_s + num_reads * self._latency_s

    def _wait_until(self, ready_s: float) -> None:
        left_s = ready_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)


@dataclass(frozen=True, slots=True)
class CountedRead:
    """One call of `read_into`."""

    file: int
    offset: int
    length: int
    thread: int


class CountingSource(_Wrapper):
    """Counts reads, bytes, threads and how many reads were on the wire at once."""

    def __init__(self, inner: ByteSource) -> None:
        """Wrap a source."""
        super().__init__(inner)
        self._lock = threading.Lock()  # protects the counts
        self._num_now = 0
        self.num_reads_max = 0
        self.num_bytes = 0
        self.reads: list[CountedRead] = []

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Count and read."""
        wanted = sum(view.nbytes for view in views)
        with self._lock:
            self.reads.append(CountedRead(file, offset, wanted, threading.get_ident()))
            self._num_now += 1
            self.num_reads_max = max(self.num_reads_max, self._num_now)
        got = 0
        try:
            got = self._inner.read_into(file, offset, views)
        finally:
            with self._lock:
                self._num_now -= 1
                self.num_bytes += got
        return got


class HeldSource(_Wrapper):
    """Keeps every read on the wire until released."""

    def __init__(self, inner: ByteSource) -> None:
        """Wrap a source; reads are held from the start."""
        super().__init__(inner)
        self._changed = threading.Condition()  # protects what follows
        self._num_held = 0
        self._num_allowed = 0
        self._is_open = False

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Wait for permission, then read."""
        with self._changed:
            self._num_held += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_open or self._num_allowed > 0)
            self._num_allowed -= not self._is_open
            self._num_held -= 1
        return self._inner.read_into(file, offset, views)

    def wait_held(self, num_reads: int, timeout_s: float = 30.0) -> None:
        """Block until so many reads are held."""
        with self._changed:
            is_held = self._changed.wait_for(lambda: self._num_held >= num_reads, timeout_s)
            assert is_held, f"{self._num_held} reads are held, not {num_reads}"

    def release(self, num_reads: int) -> None:
        """Let so many reads go on."""
        with self._changed:
            self._num_allowed += num_reads
            self._changed.notify_all()

    def release_all(self) -> None:
        """Let all reads go on, later ones too."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


class StepReader(Reader):
    """Reads on the thread that steps it, in any order it likes."""

    def __init__(self, *, num_readers: int = 1_000) -> None:
        """Do nothing until stepped.

        Args:
            num_readers: What the store is told; it bounds the guesses on the wire, not the jobs held here.
        """
        self._num_readers = num_readers
        self.held: list[Job] = []
        self.num_wakes = 0
        self.is_closed = False
        self._desk: Desk | None = None
        self._thread = threading.get_ident()

    @property
    def num_readers(self) -> int:
        """As told."""
        return self._num_readers

    def start(self, desk: Desk) -> None:
        """Remember the desk."""
        self._desk = desk

    def wake(self, num_jobs: int) -> None:
        """Count it."""
        del num_jobs
        self.num_wakes += 1

    def check(self) -> None:
        """Say so instead of hanging when the thread that would step waits instead."""
        assert threading.get_ident() != self._thread, "waiting on the thread that steps the reader"

    def close(self) -> None:
        """Hand in what is held, read."""
        while self.held:
            self.finish()
        self.is_closed = True

    def begin(self) -> Job | None:
        """Take the next job and hold it, as if its read were on the wire."""
        assert self._desk is not None
        with self._desk.lock:
            job = self._desk.next_job()
        if job is not None:
            self.held.append(job)
        return job

    def finish(self, index: int = 0) -> None:
        """Read a held job and hand it in."""
        assert self._desk is not None
        job = self.held.pop(index)
        error = attempt(job)
        with self._desk.lock:
            job.hand_in(error)

    def step(self, num_jobs: int = 1) -> int:
        """Take, read and hand in so many jobs; return how many there were."""
        for done in range(num_jobs):
            if self.begin() is None:
                return done
            self.finish(-1)
        return num_jobs

    def run(self) -> int:
        """Finish what is held and step until nothing is queued."""
        num_jobs = len(self.held)
        while self.held:
            self.finish()
        while self.step():
            num_jobs += 1
        return num_jobs


class FailingGuesses(ThreadReader):
    """Reader threads whose predicted reads fail: what a broken prefetcher is to exact demand."""

    def _exchange(self, done: Job | None, error: StoreError | None) -> Job | None:
        job = super()._exchange(done, error)
        return _FailingJob(job) if isinstance(job, Ticket) and job.is_predicted_read else job


class _FailingJob(Job):
    def __init__(self, job: Job) -> None:
        self._job = job

    def read(self) -> None:
        raise SourceFailed("A guess was to fail", hint="this is a test")

    def hand_in(self, error: StoreError | None) -> None:
        self._job.hand_in(error)


class ManualClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        """Start at zero."""
        self.now_ns = 0

    def __call__(self) -> int:
        """Return the time in nanoseconds."""
        return self.now_ns

    def advance(self, duration_ns: int) -> None:
        """Let time pass."""
        self.now_ns += duration_ns


@dataclass
class DictMemory:
    """Slots and rows in bytearrays, each component followed by guard bytes that nobody may write (FIELD P18).

    Attributes:
        slot_lengths: Component lengths by layer.
        row_lengths: Component lengths of a row.
        num_buffers: Row buffers.
        rows_per_buffer: Rows in each.
        guard_bytes: Bytes behind every component.
    """

    slot_lengths: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    row_lengths: Sequence[int] = ()
    num_buffers: int = 2
    rows_per_buffer: int = 64
    guard_bytes: int = 64
    _blocks: dict[tuple[object, ...], list[bytearray]] = field(
        default_factory=dict[tuple[object, ...], list[bytearray]], init=False, repr=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def views(self, layer: int, slot: int) -> list[memoryview]:
        """Return the memory of a slot."""
        return self._views(("slot", layer, slot), self.slot_lengths[layer])

    def row_views(self, buffer: int, index: int) -> list[memoryview]:
        """Return the memory of a row."""
        assert 0 <= buffer < self.num_buffers
        assert 0 <= index < self.rows_per_buffer
        return self._views(("row", buffer, index), self.row_lengths)

    def record(self, layer: int, slot: int) -> bytes:
        """Return what a slot holds, components joined."""
        return b"".join(self.views(layer, slot))

    def row(self, buffer: int, index: int) -> bytes:
        """Return what a row holds, components joined."""
        return b"".join(self.row_views(buffer, index))

    def check_guards(self) -> None:
        """Assert that nobody wrote behind a component."""
        for key, blocks in self._blocks.items():
            for component, block in enumerate(blocks):
                guard = block[len(block) - self.guard_bytes :]
                assert set(guard) <= {_GUARD}, f"guard of {key} component {component} was written"

    def _views(self, key: tuple[object, ...], lengths: Iterable[int]) -> list[memoryview]:
        with self._lock:
            blocks = self._blocks.get(key)
            if blocks is None:
                blocks = [bytearray(length) + bytes([_GUARD]) * self.guard_bytes for length in lengths]
                self._blocks[key] = blocks
        return [memoryview(block)[: len(block) - self.guard_bytes] for block in blocks]


_GUARD = 0xA5


def pattern(layer: int, expert: int, component: int, length: int) -> bytes:
    """Return bytes that tell layers, experts, components and positions apart."""
    seed = (layer * 1_000_003 + expert * 10_007 + component * 101) & 0xFFFFFFFF
    block = b"".join(
        ((seed + 2_654_435_761 * i) & 0xFFFFFFFF).to_bytes(4, "little") for i in range(-(-length // 4))
    )
    return block[:length]
