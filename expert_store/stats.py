"""What happened in the store, in the words of METRICS.md. Entry: `StoreStatistics`, from `statistics()`.

`Ledger` and `LayerCounters` hold plain integers, changed under the store's lock; the frozen classes are
snapshots of them, never live. (T6) every ticket's end is counted once, in records and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final, Protocol

_NUM_BINS: Final = 64
"""Bins of powers of two nanoseconds: more than any clock can count."""


_NUM_TIMES_MAX: Final = 256
"""Reads whose times are kept as they are before they are sorted into bins."""


class TimedRead(Protocol):
    """What the ledger asks of a ticket."""

    num_bytes: int
    issued_ns: int
    started_ns: int


class Fate(IntEnum):
    """How a ticket ended."""

    IN_TIME = 0
    """Ready before compute stood still for it."""
    LATE = 1
    """Ready after compute had begun to wait."""
    JOINED = 2
    """Issued by a prediction, then demanded exactly while in flight."""
    CANCELLED = 3
    """Taken out of the queue unread."""
    STALE = 4
    """Finished when nobody wanted it any more; its record stays as an ordinary entry."""
    EVICTED_UNUSED = 5
    """Issued by a prediction; its record left without having been used."""
    FAILED = 6
    """Could not be read."""


@dataclass(frozen=True, slots=True)
class FateCount:
    """Tickets of one fate, and their logical bytes."""

    num: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """Durations. `bins[i]` counts those of 2**(i-1) ns up to, not including, 2**i ns."""

    num: int
    total_ns: int
    max_ns: int
    bins: tuple[int, ...]

    def quantile_ns(self, share: float) -> int:
        """Return a bound that `share` of the durations stay below, at the resolution of the bins."""
        wanted, seen = share * self.num, 0
        for index, num in enumerate(self.bins):
            seen += num
            if num and seen >= wanted:
                return min(1 << index, self.max_ns)
        return self.max_ns


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """One layer. Demands are native selections: num_demands = num_hits + num_joined + num_misses."""

    layer: int
    num_slots: int
    num_resident: int
    num_demands: int
    num_hits: int
    num_joined: int
    num_misses: int
    num_evictions: int
    exposed_wait_ns: int


@dataclass(frozen=True, slots=True)
class CycleStatistics:
    """Between two calls of `advance`."""

    num_demands: int = 0
    num_hits: int = 0
    num_joined: int = 0
    num_misses: int = 0
    exact_bytes: int = 0
    physical_bytes: int = 0
    exposed_wait_ns: int = 0
    exact_io_ns: int = 0


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Everything since the store was opened.

    Attributes:
        num_demands: Native selections asked for.
        num_hits: Of them, those whose record was resident.
        num_joined: Of them, those whose record was in flight: no second read.
        num_misses: Of them, the rest.
        num_exact: Exact reads issued.
        exact_bytes: Logical bytes of them.
        logical_bytes: Bytes of all records asked for, whatever the class.
        physical_bytes: Bytes the source really delivered, failed reads included.
        num_evictions: Records that left for another.
        exposed_wait_ns: Wall time in which a caller stood still for records.
        exact_io_ns: Exact I/O wall time: union of the intervals in which a record was being read.
        issue_to_ready: From the queueing of a ticket to its record being usable.
        read_time: From the start of its read to its record being usable.
        fates: Ends of tickets.
        num_queued: Tickets that wait for a reader now.
        num_reading: Reads on the wire now.
        num_cycles: Calls of `advance` that began a new generation.
        last_cycle: The cycle that the last of them closed.
        layers: The same by layer, in layer order.
    """

    num_demands: int
    num_hits: int
    num_joined: int
    num_misses: int
    num_exact: int
    exact_bytes: int
    logical_bytes: int
    physical_bytes: int
    num_evictions: int
    exposed_wait_ns: int
    exact_io_ns: int
    issue_to_ready: LatencyStatistics
    read_time: LatencyStatistics
    fates: Mapping[Fate, FateCount]
    num_queued: int
    num_reading: int
    num_cycles: int
    last_cycle: CycleStatistics
    layers: tuple[LayerStatistics, ...]

    @property
    def hit_rate(self) -> float | None:
        """Share of demands whose record was resident; None before the first."""
        return self.num_hits / self.num_demands if self.num_demands else None

    @property
    def hidden_fraction(self) -> float | None:
        """1 - exposed wait / exact I/O wall time; None before the first read."""
        return 1.0 - self.exposed_wait_ns / self.exact_io_ns if self.exact_io_ns else None


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Row reads since the table was opened; every row is exact.

    Attributes:
        num_batches: Calls of `gather`.
        num_rows: Rows asked for.
        num_unique: Rows that had to be read, duplicates within a batch counted once.
        logical_bytes: Bytes of those.
        physical_bytes: Bytes the source really delivered.
        num_reads: Reads the source was asked for.
        exposed_wait_ns: Wall time in which a caller stood still for rows.
    """

    num_batches: int
    num_rows: int
    num_unique: int
    logical_bytes: int
    physical_bytes: int
    num_reads: int
    exposed_wait_ns: int


class LayerCounters:
    """Counts of one layer, changed on every demand."""

    __slots__ = ("exposed_wait_ns", "num_demands", "num_joined", "num_misses")

    def __init__(self) -> None:
        self.num_demands = 0
        self.num_joined = 0
        self.num_misses = 0
        self.exposed_wait_ns = 0


class _Latency:
    __slots__ = ("bins", "max_ns", "num", "total_ns")

    def __init__(self) -> None:
        self.num = self.total_ns = self.max_ns = 0
        self.bins = [0] * _NUM_BINS

    def add(self, duration_ns: int) -> None:
        self.num += 1
        self.total_ns += duration_ns
        if duration_ns > self.max_ns:
            self.max_ns = duration_ns
        self.bins[duration_ns.bit_length()] += 1

    def snapshot(self) -> LatencyStatistics:
        return LatencyStatistics(self.num, self.total_ns, self.max_ns, tuple(self.bins))


class Ledger:
    """Counts of the whole store, changed on every read."""

    __slots__ = (
        "_busy_since_ns",
        "_closed",
        "_fate_bytes",
        "_fate_nums",
        "_issue_to_ready",
        "_read_time",
        "_times",
        "exact_bytes",
        "exact_io_ns",
        "last_cycle",
        "num_cycles",
        "num_exact",
        "num_reading",
        "physical_bytes",
    )

    def __init__(self) -> None:
        self.num_exact = self.exact_bytes = self.physical_bytes = 0
        self.num_reading = self.exact_io_ns = self._busy_since_ns = 0
        self._issue_to_ready = _Latency()
        self._read_time = _Latency()
        self._times: list[tuple[int, int]] = []
        self._fate_nums = [0] * len(Fate)
        self._fate_bytes = [0] * len(Fate)
        self.num_cycles = 0
        self.last_cycle = CycleStatistics()
        self._closed = CycleStatistics()

    def read_started(self, now_ns: int) -> None:
        """Note that a read goes on the wire."""
        if not self.num_reading:
            self._busy_since_ns = now_ns
        self.num_reading += 1

    def read_ended(self, now_ns: int, physical_bytes: int) -> None:
        """Note that a read is off the wire, whole or not."""
        self.physical_bytes += physical_bytes
        self.num_reading -= 1
        if not self.num_reading:
            self.exact_io_ns += now_ns - self._busy_since_ns

    def ready(self, read: TimedRead, now_ns: int, fate: Fate) -> None:
        """Count the end of a ticket that was read well (T6), and note how long it took."""
        self._fate_nums[fate] += 1
        self._fate_bytes[fate] += read.num_bytes
        self._times.append((now_ns - read.issued_ns, now_ns - read.started_ns))
        if len(self._times) >= _NUM_TIMES_MAX:
            self._fold_times()

    def _fold_times(self) -> None:
        """Sort noted times into bins: together, off the path of most reads."""
        for since_issue_ns, since_start_ns in self._times:
            self._issue_to_ready.add(since_issue_ns)
            self._read_time.add(since_start_ns)
        self._times.clear()

    def ended(self, fate: Fate, num_bytes: int) -> None:
        """Count the end of a ticket that was not read well (T6)."""
        self._fate_nums[fate] += 1
        self._fate_bytes[fate] += num_bytes

    def close_cycle(self, layers: Iterable[LayerCounters]) -> None:
        """Set `last_cycle` to what happened since the last call."""
        counters = tuple(layers)
        misses = sum(layer.num_misses for layer in counters)
        joined = sum(layer.num_joined for layer in counters)
        demands = sum(layer.num_demands for layer in counters)
        waited = sum(layer.exposed_wait_ns for layer in counters)
        old = self._closed
        self._closed = CycleStatistics(
            num_demands=demands,
            num_hits=demands - joined - misses,
            num_joined=joined,
            num_misses=misses,
            exact_bytes=self.exact_bytes,
            physical_bytes=self.physical_bytes,
            exposed_wait_ns=waited,
            exact_io_ns=self.exact_io_ns,
        )
        new = self._closed
        self.last_cycle = CycleStatistics(
            num_demands=new.num_demands - old.num_demands,
            num_hits=new.num_hits - old.num_hits,
            num_joined=new.num_joined - old.num_joined,
            num_misses=new.num_misses - old.num_misses,
            exact_bytes=new.exact_bytes - old.exact_bytes,
            physical_bytes=new.physical_bytes - old.physical_bytes,
            exposed_wait_ns=new.exposed_wait_ns - old.exposed_wait_ns,
            exact_io_ns=new.exact_io_ns - old.exact_io_ns,
        )
        self.num_cycles += 1

    def snapshot(self, layers: tuple[LayerStatistics, ...], *, num_queued: int) -> StoreStatistics:
        """Return everything, frozen."""
        self._fold_times()
        fates = {fate: FateCount(self._fate_nums[fate], self._fate_bytes[fate]) for fate in Fate}
        return StoreStatistics(
            num_demands=sum(layer.num_demands for layer in layers),
            num_hits=sum(layer.num_hits for layer in layers),
            num_joined=sum(layer.num_joined for layer in layers),
            num_misses=sum(layer.num_misses for layer in layers),
            num_exact=self.num_exact,
            exact_bytes=self.exact_bytes,
            logical_bytes=self.exact_bytes,
            physical_bytes=self.physical_bytes,
            num_evictions=sum(layer.num_evictions for layer in layers),
            exposed_wait_ns=sum(layer.exposed_wait_ns for layer in layers),
            exact_io_ns=self.exact_io_ns,
            issue_to_ready=self._issue_to_ready.snapshot(),
            read_time=self._read_time.snapshot(),
            fates=MappingProxyType(fates),
            num_queued=num_queued,
            num_reading=self.num_reading,
            num_cycles=self.num_cycles,
            last_cycle=self.last_cycle,
            layers=layers,
        )
