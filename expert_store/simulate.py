"""The store on a drive and a clock that are not there. Entry: `Simulated.open`, then `compute` and the store.

`ExpertStore` itself runs: slots, ranking, policy, tickets, queue, prefetcher, leases and books are its own;
hits, misses and fates are those of a run by construction. What is replaced is what it stands on: the clock,
the threads and the bytes, which are counted and not moved. Time passes where the caller says that it
computes, and where the store makes it wait.

The drive, as `testing.ThrottledSource` imitates it and as two figures describe a real one:

    begin   when a reader takes a ticket: `wake_ns` after it was told, if it slept; at once, if it was busy
    free    = max(free, begin) + bytes / bytes_per_s      bandwidth is shared, first come first served
    ready   = free + reads x latency_ns + overhead_ns         in a latency the drive serves other readers

and whoever waits goes on `wake_ns` after the last record was ready.

Invariants:
    V1  the clock never goes back;
    V2  what happens at the same moment happens in the order in which it was arranged, and nothing depends on
        threads, hashes or the time of day: the same calls give the same result;
    V3  at most `num_readers` reads are on the wire; each ticket that was taken is handed in once.
"""

from __future__ import annotations

import heapq
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Self

from expert_store.completion import Completion
from expert_store.dispatch import RecordTicket
from expert_store.errors import StoreError, WorkerDied
from expert_store.layout import ReadOp, RecordLayout, StackedComponent
from expert_store.prefetch import PrefetchLimits
from expert_store.reader import Desk, Reader, attempt
from expert_store.source import ByteSource
from expert_store.store import ExpertStore

_S: Final = 1_000_000_000
_FILE_BYTES: Final = 1 << 60

_Happens = RecordTicket | Callable[[], None] | None
"""A record is there; somebody else's read has ended; a reader wakes."""


@dataclass(frozen=True, slots=True)
class Drive:
    """What reads.

    Attributes:
        bytes_per_s: Of all readers together; None does not limit.
        latency_ns: Of every read of a record beside its bytes' time, one after the other; readers overlap.
        overhead_ns: What a reader adds to every record, beside the drive.
        wake_ns: Until a sleeping reader begins, and until whoever waited goes on.
        num_readers: Reads on the wire at once.
    """

    bytes_per_s: float | None = None
    latency_ns: int = 0
    overhead_ns: int = 0
    wake_ns: int = 0
    num_readers: int = 4

    def __post_init__(self) -> None:
        """Refuse what no drive is."""
        rate = self.bytes_per_s
        if rate is not None and not rate > 0:
            raise StoreError(f"No drive gives {rate} bytes a second", hint="give a rate above zero")
        for name in ("latency_ns", "overhead_ns", "wake_ns"):
            if getattr(self, name) < 0:
                raise StoreError(f"{name} is negative: {getattr(self, name)}", hint="give zero or more")
        if self.num_readers < 1:
            raise StoreError(f"num_readers is below one: {self.num_readers}", hint="give at least one")


class VirtualClock:
    """Nanoseconds that pass when told; never back (V1)."""

    __slots__ = ("now_ns",)

    def __init__(self) -> None:
        """Start at one: the books read 0 as `never`."""
        self.now_ns = 1

    def __call__(self) -> int:
        """Return the time."""
        return self.now_ns

    def reach(self, time_ns: int) -> None:
        """Let it become so late."""
        assert time_ns >= self.now_ns, f"the clock would go back from {self.now_ns} to {time_ns}"
        self.now_ns = time_ns


class VirtualReader(Reader):
    """Readers without threads: events in order of time, on the thread that computes or waits."""

    def __init__(self, drive: Drive, clock: VirtualClock) -> None:
        """Start with every reader asleep."""
        self.drive = drive
        self._clock = clock
        self._num_asleep = drive.num_readers
        self._events: list[tuple[int, int, _Happens]] = []
        self._order = count()
        self._free_ns = 0
        self._desk: Desk | None = None

    @property
    def num_readers(self) -> int:
        """See `Reader`."""
        return self.drive.num_readers

    def start(self, desk: Desk) -> None:
        """See `Reader`."""
        self._desk = desk

    def wake(self, num_jobs: int) -> None:
        """Let readers that sleep wake in a moment; see `Reader`."""
        num = min(num_jobs, self._num_asleep)
        self._num_asleep -= num
        for _ in range(num):
            self._arrange(self._clock.now_ns + self.drive.wake_ns, None)

    def check(self) -> None:
        """Do nothing: nobody can die."""

    def close(self) -> None:
        """Hand in what is on the wire; see `Reader`."""
        while self._events:
            self.step()

    def wait_for(self, completion: Completion, timeout_s: float | None, check: Callable[[], None]) -> bool:
        """Let time pass until the last end of a completion; see `Reader`.

        Raises:
            WorkerDied: Nothing is on the wire that could bring it about.
        """
        check()
        completion.is_waited_for = True
        until_ns = None if timeout_s is None else self._clock.now_ns + round(timeout_s * _S)
        while completion.pending:
            if not self._events:
                raise WorkerDied("Somebody waits for what nobody reads", hint="this is a bug of the store")
            if until_ns is not None and self._events[0][0] > until_ns:
                self.pass_until(until_ns)
                return False
            self.step()
        self.pass_until(self._clock.now_ns + self.drive.wake_ns)
        return True

    def read_beside(self, num_bytes: int, ended: Callable[[], None]) -> None:
        """Read for another table, on readers of its own which sleep, from the same drive."""
        begin_ns = self._clock.now_ns + self.drive.wake_ns
        self._arrange(self._ready_ns(begin_ns, num_bytes, 1), ended)

    def pass_until(self, time_ns: int, record_ns: int = 0) -> None:
        """Let time pass, and whatever is due meanwhile happen; each record that comes takes so much more."""
        while self._events and self._events[0][0] <= time_ns:
            if isinstance(self._events[0][2], RecordTicket):
                time_ns += record_ns
            self.step()
        self._clock.reach(time_ns)

    def hold_until(self, time_ns: int) -> None:
        """Let time pass in which no reader can do anything; what was due happens at its end, in its order."""
        due = sorted(event for event in self._events if event[0] <= time_ns)
        self._events = [event for event in self._events if event[0] > time_ns]
        self._events += [(time_ns, next(self._order), ticket) for _, _, ticket in due]
        heapq.heapify(self._events)
        self._clock.reach(time_ns)

    def step(self) -> None:
        """Let time pass until the next event has happened."""
        time_ns, _, ticket = heapq.heappop(self._events)
        self._clock.reach(time_ns)
        assert self._desk is not None
        if callable(ticket):
            ticket()
            return
        error = None if ticket is None else attempt(ticket)
        with self._desk.lock:
            if ticket is not None:
                ticket.hand_in(error)
            job = self._desk.next_job()
        if job is None:
            self._num_asleep += 1
            return
        assert isinstance(job, RecordTicket)
        self._arrange(self._ready_ns(self._clock.now_ns, job.num_bytes, len(job.runs)), job)

    def _arrange(self, time_ns: int, happens: _Happens) -> None:
        heapq.heappush(self._events, (time_ns, next(self._order), happens))

    def _ready_ns(self, begin_ns: int, num_bytes: int, num_reads: int) -> int:
        """Return when a read will be done, and take the drive for it."""
        drive = self.drive
        over_ns = begin_ns
        if drive.bytes_per_s is not None:
            over_ns = max(self._free_ns, begin_ns) + round(num_bytes / drive.bytes_per_s * _S)
            self._free_ns = over_ns
        return over_ns + num_reads * drive.latency_ns + drive.overhead_ns


class CountedBytes(ByteSource):
    """Delivers whatever is asked for, without moving it."""

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """See `ByteSource`."""
        del file, offset
        return sum(view.nbytes for view in views)

    def read_runs(self, runs: Sequence[ReadOp], views: Sequence[memoryview]) -> int:
        """See `ByteSource`."""
        del views
        return sum(run.length for run in runs)

    def name(self, file: int) -> str:
        """See `ByteSource`."""
        return f"simulated-{file}"

    def close(self) -> None:
        """See `ByteSource`."""


class _OneSlot:
    """Memory that all slots of a layer share: nothing is ever written there."""

    def __init__(self, layouts: Mapping[int, RecordLayout]) -> None:
        # Mapped and never touched: a record takes addresses and no memory.
        most = max((one.record_bytes for one in layouts.values()), default=0)
        shared = memoryview(mmap.mmap(-1, max(1, most)))
        self._views = {
            layer: [shared[:length] for length in layout.component_lengths]
            for layer, layout in layouts.items()
        }

    def views(self, layer: int, slot: int) -> Sequence[memoryview]:
        """See `SlotMemory`."""
        del slot
        return self._views[layer]


class Simulated:
    """A store, and the time that passes around it.

    Attributes:
        store: The store; what it waits for passes on the virtual clock.
        clock: The virtual clock.
    """

    def __init__(self, store: ExpertStore, reader: VirtualReader, clock: VirtualClock) -> None:
        """Use `open` instead."""
        self.store = store
        self.clock = clock
        self._reader = reader
        self._num_rows_reading = 0
        store.give_way_to(lambda: self._num_rows_reading > 0)

    @classmethod
    def open(
        cls,
        layouts: Mapping[int, RecordLayout],
        drive: Drive,
        *,
        slots: Mapping[int, int],
        policy: str = "lru",
        limits: PrefetchLimits | None = None,
    ) -> Self:
        """Open a store over records that need not exist; parameters as of `ExpertStore`.

        Raises:
            StoreError: As `ExpertStore`.
        """
        clock = VirtualClock()
        reader = VirtualReader(drive, clock)
        store = ExpertStore(
            layouts,
            CountedBytes(),
            _OneSlot(layouts),
            slots=slots,
            policy=policy,
            reader=reader,
            limits=limits,
            clock=clock,
        )
        return cls(store, reader, clock)

    def compute(self, duration_ns: int, record_ns: int = 0) -> None:
        """Let time pass while readers work on.

        Args:
            duration_ns: What computing takes by itself.
            record_ns: What every record that comes meanwhile takes from it.

        Raises:
            StoreError: One is negative.
        """
        if min(duration_ns, record_ns) < 0:
            raise StoreError(f"Nothing takes {min(duration_ns, record_ns)} ns", hint="give zero or more")
        self._reader.pass_until(self.clock.now_ns + duration_ns, record_ns)

    def read_rows(self, num_bytes: int) -> None:
        """Ask for rows of another table on the same drive, as `RowTable.gather`: guesses give way to them.

        Args:
            num_bytes: Of all of them; they are read at once.

        Raises:
            StoreError: It is negative.
        """
        if num_bytes < 0:
            raise StoreError(f"Nothing has {num_bytes} bytes", hint="give zero or more")
        self._num_rows_reading += 1
        self._reader.read_beside(num_bytes, self._rows_ended)

    def wait_for_rows(self) -> None:
        """Let time pass until all rows are there."""
        if not self._num_rows_reading:
            return
        while self._num_rows_reading:
            self._reader.step()
        self._reader.pass_until(self.clock.now_ns + self._reader.drive.wake_ns)

    def _rows_ended(self) -> None:
        self._num_rows_reading -= 1
        if not self._num_rows_reading:
            self.store.resume_guesses()

    def hold(self, duration_ns: int) -> None:
        """Let time pass in which the host keeps readers from working: they need the interpreter as well.

        Raises:
            StoreError: It is negative.
        """
        if duration_ns < 0:
            raise StoreError(f"Nothing takes {duration_ns} ns", hint="give zero or more")
        self._reader.hold_until(self.clock.now_ns + duration_ns)

    def __enter__(self) -> Self:
        """Return itself; leaving the block closes the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.store.close()


def plain_layouts(
    num_experts: Mapping[int, int], record_bytes: int, *, reads_per_record: int = 1
) -> dict[int, RecordLayout]:
    """Return layouts of records that need not exist.

    Args:
        num_experts: Experts of each layer.
        record_bytes: Of every record; at least one byte a read.
        reads_per_record: Reads that fetch one: nine of an MLX pack whose stacks are apart, one of our own.

    Raises:
        CheckpointCorrupt: There is no such record.
    """
    part, rest = divmod(record_bytes, max(1, reads_per_record))
    found: dict[int, RecordLayout] = {}
    for layer, experts in num_experts.items():
        components = [
            StackedComponent(f"part-{number}", number, 0, length, 0, length)
            for number in range(reads_per_record)
            for length in [part + (rest if number == 0 else 0)]
        ]
        found[layer] = RecordLayout.stacked(
            layer, experts, components, file_sizes=[_FILE_BYTES] * reads_per_record
        )
    return found
