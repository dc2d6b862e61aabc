"""What the store writes down while it works: plain integers, changed under its lock. Entry: `Ledger`.

`stats.py` says what the counts mean and freezes them. (T6) `Ledger.close` is the one place where a ticket
gets its fate, and it asserts that it is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from expert_store.keys import ReadClass, WaitCause
from expert_store.stats import (
    NUM_BINS,
    ClassStatistics,
    CycleStatistics,
    Fate,
    FateCount,
    HintOutcome,
    LatencyStatistics,
    LayerStatistics,
    QueueStatistics,
    SlackStatistics,
    StoreStatistics,
    WaitSplit,
    bin_of,
)

_NUM_TIMES_MAX: Final = 1024
"""Reads whose times are kept as they are before they are sorted into bins."""
_EXACT: Final = ReadClass.EXACT


class TimedRead(Protocol):
    """What the ledger asks of a ticket."""

    issued_class: ReadClass
    num_bytes: int
    issued_ns: int
    started_ns: int
    ready_ns: int
    fate: Fate | None


class LayerCounters:
    """Counts of one layer, changed on every demand. `waits` is flat: queue and read time of each cause.

    Attributes:
        watch: Told of every wait as `stood_still` is; None tells nobody (watch.py).
    """

    __slots__ = ("num_demands", "num_joined", "num_misses", "num_prefetched", "waits", "watch")

    def __init__(self) -> None:
        self.num_demands = 0
        self.num_joined = 0
        self.num_misses = 0
        self.num_prefetched = 0
        self.waits = [0] * (2 * len(WaitCause))
        self.watch: Callable[[WaitCause, int, int, int], None] | None = None

    def stood_still(self, cause: WaitCause, began_ns: int, queue_ns: int, read_ns: int) -> None:
        """Note an exposed wait, and when it began."""
        self.waits[2 * cause] += queue_ns
        self.waits[2 * cause + 1] += read_ns
        if self.watch is not None:
            self.watch(cause, began_ns, queue_ns, read_ns)

    def snapshot_waits(self) -> Mapping[WaitCause, WaitSplit]:
        """Freeze the waits."""
        return MappingProxyType(
            {cause: WaitSplit(self.waits[2 * cause], self.waits[2 * cause + 1]) for cause in WaitCause}
        )


class _Latency:
    __slots__ = ("bins", "max_ns", "num", "total_ns")

    def __init__(self) -> None:
        self.num = self.total_ns = self.max_ns = 0
        self.bins = [0] * NUM_BINS

    def add(self, duration_ns: int) -> None:
        if duration_ns < 0:
            duration_ns = 0  # a clock that stepped back; nothing ends before it began (FIELD P21)
        self.num += 1
        self.total_ns += duration_ns
        if duration_ns > self.max_ns:
            self.max_ns = duration_ns
        self.bins[bin_of(duration_ns)] += 1

    def snapshot(self) -> LatencyStatistics:
        return LatencyStatistics(self.num, self.total_ns, self.max_ns, tuple(self.bins))


class _ClassBooks:
    """Tickets of one class."""

    __slots__ = ("fate_bytes", "fate_nums", "issue_to_ready", "num", "num_bytes")

    def __init__(self) -> None:
        self.num = self.num_bytes = 0
        self.fate_nums = [0] * len(Fate)
        self.fate_bytes = [0] * len(Fate)
        self.issue_to_ready = _Latency()

    def snapshot(self) -> ClassStatistics:
        fates = {fate: FateCount(self.fate_nums[fate], self.fate_bytes[fate]) for fate in Fate}
        return ClassStatistics(
            self.num, self.num_bytes, MappingProxyType(fates), self.issue_to_ready.snapshot()
        )


class Ledger:
    """Counts of the whole store, changed on every read."""

    __slots__ = (
        "_busy",
        "_busy_until_ns",
        "_closed",
        "_early",
        "_late",
        "_queue_depth_max",
        "_queue_depth_total",
        "_read_time",
        "_times",
        "classes",
        "exact_io_ns",
        "hints",
        "last_cycle",
        "num_cycles",
        "num_predicted_reading",
        "num_predicted_reads",
        "num_reading",
        "num_reads",
        "num_unused",
        "physical_bytes",
        "predicted_physical_bytes",
        "stale_evicted_bytes",
        "stale_used",
        "stale_used_bytes",
        "unused_bytes",
    )

    def __init__(self) -> None:
        self.classes = tuple(_ClassBooks() for _ in ReadClass)
        self.hints = [0] * len(HintOutcome)
        self.physical_bytes = self.predicted_physical_bytes = 0
        self.num_reading = self.num_predicted_reading = 0
        self.num_reads = self.num_predicted_reads = 0
        self.num_unused = self.unused_bytes = 0
        self.stale_used = self.stale_used_bytes = self.stale_evicted_bytes = 0
        self.exact_io_ns = self._busy_until_ns = 0
        self._read_time = _Latency()
        self._early = _Latency()
        self._late = _Latency()
        self._queue_depth_max = self._queue_depth_total = 0
        self._times: list[tuple[ReadClass, int, int, int]] = []
        self._busy: list[tuple[int, int]] = []
        self.num_cycles = 0
        self.last_cycle = CycleStatistics()
        self._closed = CycleStatistics()

    # Reads.

    def issued(self, read_class: ReadClass, num: int, num_bytes: int) -> None:
        """Note tickets that were issued."""
        books = self.classes[read_class]
        books.num += num
        books.num_bytes += num_bytes

    def read_started(self, num_queued: int, *, is_predicted: bool) -> None:
        """Note that a read goes on the wire and leaves so many tickets in the queue."""
        self.num_reading += 1
        self.num_reads += 1
        self._queue_depth_total += num_queued
        if num_queued > self._queue_depth_max:
            self._queue_depth_max = num_queued
        if is_predicted:
            self.num_predicted_reading += 1
            self.num_predicted_reads += 1

    def read_ended(self, physical_bytes: int, *, is_predicted: bool) -> None:
        """Note that a read is off the wire, whole or not."""
        self.physical_bytes += physical_bytes
        self.num_reading -= 1
        if is_predicted:
            self.num_predicted_reading -= 1
            self.predicted_physical_bytes += physical_bytes

    def ready(self, read: TimedRead, fate: Fate | None) -> None:
        """Note how long a read took that went well, and its fate if it is settled."""
        self._times.append((read.issued_class, read.issued_ns, read.started_ns, read.ready_ns))
        if fate is not None and fate is not Fate.STALE:
            self._busy.append((read.started_ns, read.ready_ns))
        if len(self._times) >= _NUM_TIMES_MAX:
            self._fold_times()
            self._join_intervals()
        if fate is not None:
            self.close(read, fate)

    def was_used(self, read: TimedRead) -> None:
        """Note that a native route used a record whose read had gone well before."""
        self._busy.append((read.started_ns, read.ready_ns))

    # Fates.

    def close(self, read: TimedRead, fate: Fate) -> None:
        """Give a ticket its fate (T6)."""
        assert read.fate is None, f"second fate of a ticket: {read.fate}, {fate}"
        read.fate = fate
        books = self.classes[read.issued_class]
        books.fate_nums[fate] += 1
        books.fate_bytes[fate] += read.num_bytes

    def slack(self, needed_ns: int, ready_ns: int) -> None:
        """Note how early or late a predicted record was."""
        if ready_ns <= needed_ns:
            self._early.add(needed_ns - ready_ns)
        else:
            self._late.add(ready_ns - needed_ns)

    def keep_unused(self, read: TimedRead, sign: int) -> None:
        """Note that a predicted record begins (1) or ceases (-1) to wait for its demand."""
        self.num_unused += sign
        self.unused_bytes += sign * read.num_bytes

    # Snapshots.

    def close_cycle(self, layers: Iterable[LayerCounters]) -> None:
        """Set `last_cycle` to what happened since the last call; times wait for their bins."""
        self._join_intervals()
        demands = joined = misses = waited = prefetched = 0
        for layer in layers:
            demands += layer.num_demands
            joined += layer.num_joined
            misses += layer.num_misses
            prefetched += layer.num_prefetched
            waited += sum(layer.waits)
        old = self._closed
        new = self._closed = CycleStatistics(
            num_demands=demands,
            num_hits=demands - joined - misses,
            num_joined=joined,
            num_misses=misses,
            num_prefetched=prefetched,
            exact_bytes=self.classes[_EXACT].num_bytes,
            physical_bytes=self.physical_bytes,
            predicted_physical_bytes=self.predicted_physical_bytes,
            exposed_wait_ns=waited,
            exact_io_ns=self.exact_io_ns,
        )
        self.last_cycle = CycleStatistics(
            num_demands=new.num_demands - old.num_demands,
            num_hits=new.num_hits - old.num_hits,
            num_joined=new.num_joined - old.num_joined,
            num_misses=new.num_misses - old.num_misses,
            num_prefetched=new.num_prefetched - old.num_prefetched,
            exact_bytes=new.exact_bytes - old.exact_bytes,
            physical_bytes=new.physical_bytes - old.physical_bytes,
            predicted_physical_bytes=new.predicted_physical_bytes - old.predicted_physical_bytes,
            exposed_wait_ns=new.exposed_wait_ns - old.exposed_wait_ns,
            exact_io_ns=new.exact_io_ns - old.exact_io_ns,
        )
        self.num_cycles += 1

    def snapshot(self, layers: tuple[LayerStatistics, ...], *, num_queued: int) -> StoreStatistics:
        """Return everything, frozen."""
        self._fold_times()
        self._join_intervals()
        classes = {read_class: self.classes[read_class].snapshot() for read_class in ReadClass}
        splits = [WaitSplit(0, 0)] * len(WaitCause)
        for layer in layers:
            splits = [
                WaitSplit(a.queue_ns + b.queue_ns, a.read_ns + b.read_ns)
                for a, b in zip(splits, layer.waits.values(), strict=True)
            ]
        return StoreStatistics(
            num_demands=sum(layer.num_demands for layer in layers),
            num_hits=sum(layer.num_hits for layer in layers),
            num_prefetched=sum(layer.num_prefetched for layer in layers),
            num_joined=sum(layer.num_joined for layer in layers),
            num_misses=sum(layer.num_misses for layer in layers),
            physical_bytes=self.physical_bytes,
            predicted_physical_bytes=self.predicted_physical_bytes,
            num_evictions=sum(layer.num_evictions for layer in layers),
            waits=MappingProxyType(dict(zip(WaitCause, splits, strict=True))),
            exact_io_ns=self.exact_io_ns,
            read_time=self._read_time.snapshot(),
            slack=SlackStatistics(self._early.snapshot(), self._late.snapshot()),
            classes=MappingProxyType(classes),
            hints=MappingProxyType({outcome: self.hints[outcome] for outcome in HintOutcome}),
            num_unused=self.num_unused,
            unused_bytes=self.unused_bytes,
            num_stale_used=self.stale_used,
            stale_used_bytes=self.stale_used_bytes,
            stale_evicted_bytes=self.stale_evicted_bytes,
            queue=QueueStatistics(
                num_reads=self.num_reads,
                num_predicted_reads=self.num_predicted_reads,
                depth_total=self._queue_depth_total,
                depth_max=self._queue_depth_max,
            ),
            num_queued=num_queued,
            num_reading=self.num_reading,
            num_cycles=self.num_cycles,
            last_cycle=self.last_cycle,
            layers=layers,
        )

    def _fold_times(self) -> None:
        """Sort noted times into bins: many together, off the path of most reads."""
        for read_class, issued_ns, started_ns, ready_ns in self._times:
            self.classes[read_class].issue_to_ready.add(ready_ns - issued_ns)
            self._read_time.add(ready_ns - started_ns)
        self._times.clear()

    def _join_intervals(self) -> None:
        """Add what used reads took together, overlaps once, to `exact_io_ns`."""
        # What lies before the end of the last union counts from there on: a guess may be used cycles later.
        until_ns = self._busy_until_ns
        self._busy.sort()
        for started_ns, ready_ns in self._busy:
            from_ns = max(started_ns, until_ns)
            if ready_ns > from_ns:
                self.exact_io_ns += ready_ns - from_ns
                until_ns = ready_ns
        self._busy_until_ns = until_ns
        self._busy.clear()
