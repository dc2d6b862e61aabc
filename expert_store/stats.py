"""What happened in the store, in the words of METRICS.md. Entry: `StoreStatistics`, from `statistics()`.

Frozen snapshots, never live; `books.py` keeps the counts. Two sums hold at any moment, in records and bytes:

    demands    num_demands = num_hits + num_joined + num_misses
    fates      tickets of a class = ends by fate, and of all classes together
               num_tickets = ends + num_queued + num_reading + num_unused          (T6)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from expert_store.keys import ReadClass, WaitCause

_SUB_BITS: Final = 3
NUM_BINS: Final = 64 << _SUB_BITS
"""Bins of an eighth of an octave each: more octaves than any clock can count, quantiles within 12.5 %."""


class Fate(IntEnum):
    """What became of a ticket. An exact one is used by definition; of a predicted one this is the verdict."""

    IN_TIME = 0
    """Exact: ready before compute stood still for it. Predicted: ready before it was demanded."""
    LATE = 1
    """Ready after compute had begun to wait for it."""
    JOINED = 2
    """Predicted, demanded while in flight, and ready before compute stood still for it."""
    CANCELLED = 3
    """Predicted, and taken out of the queue unread: its generation ended, or prefetching was stopped."""
    STALE = 4
    """Nobody wanted it any more: its request was cancelled, or its generation ended before it was used."""
    EVICTED_UNUSED = 5
    """Predicted; its record left within its generation without having been used."""
    FAILED = 6
    """Could not be read. A demand that had joined a predicted read has it read again, as an exact ticket."""
    DROPPED = 7
    """Predicted, and taken out of the queue unread: more urgent guesses needed its place, or no slot was to
    be had when its read should have begun."""


class HintOutcome(IntEnum):
    """What became of a hint that was handed over. Only `ACCEPTED` made a ticket."""

    ACCEPTED = 0
    RESIDENT = 1
    """Its record was in a slot."""
    IN_FLIGHT = 2
    """Its record was queued or on the wire."""
    INVALID = 3
    """It named a layer, expert, class, confidence or deadline that does not exist."""
    STALE = 4
    """Its generation had ended."""
    OVER_BUDGET = 5
    """Its owner had used up the bytes of the generation."""
    QUEUE_FULL = 6
    """The queue was full of more urgent ones."""
    NO_ROOM = 7
    """Its layer leaves no slot to guesses, or guesses for it already fill what it leaves."""
    TOO_MANY = 8
    """It lay beyond the hints that one hand-over may bring."""
    STOPPED = 9
    """Prefetching was stopped, or the store is closed or broken."""


@dataclass(frozen=True, slots=True)
class FateCount:
    """Tickets of one fate, and their logical bytes."""

    num: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """Durations. `bins[i]` counts those for which `bin_of` says i."""

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
                return min(_bin_end(index), self.max_ns)
        return self.max_ns


@dataclass(frozen=True, slots=True)
class SlackStatistics:
    """How long before its demand a predicted record was ready (early), or how long after (late)."""

    early: LatencyStatistics
    late: LatencyStatistics


@dataclass(frozen=True, slots=True)
class WaitSplit:
    """Exposed wait: before the read of the record that ended it had begun, and after."""

    queue_ns: int
    read_ns: int

    @property
    def total_ns(self) -> int:
        """Both."""
        return self.queue_ns + self.read_ns


@dataclass(frozen=True, slots=True)
class ClassStatistics:
    """Tickets by the class under which they were issued, whatever a join made of them.

    Attributes:
        num: Tickets issued.
        num_bytes: Their logical bytes.
        fates: Ends of them.
        issue_to_ready: From the queueing of a ticket to its record being usable.
    """

    num: int
    num_bytes: int
    fates: Mapping[Fate, FateCount]
    issue_to_ready: LatencyStatistics

    @property
    def num_ended(self) -> int:
        """Tickets that have a fate."""
        return sum(count.num for count in self.fates.values())


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """The queue as each read that began left it behind.

    Attributes:
        num_reads: Reads that began.
        num_predicted_reads: Of them, those that nobody had demanded by then.
        depth_total: Tickets left waiting, summed over reads.
        depth_max: The most at once.
    """

    num_reads: int
    num_predicted_reads: int
    depth_total: int
    depth_max: int

    @property
    def depth_mean(self) -> float | None:
        """Tickets left waiting on average; None before the first read."""
        return self.depth_total / self.num_reads if self.num_reads else None


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """One layer. Demands are native selections: num_demands = num_hits + num_joined + num_misses."""

    layer: int
    num_slots: int
    num_resident: int
    num_demands: int
    num_hits: int
    num_prefetched: int
    num_joined: int
    num_misses: int
    num_evictions: int
    waits: Mapping[WaitCause, WaitSplit]

    @property
    def exposed_wait_ns(self) -> int:
        """Wall time in which a caller stood still for records of this layer."""
        return sum(split.total_ns for split in self.waits.values())


@dataclass(frozen=True, slots=True)
class CycleStatistics:
    """Between two calls of `advance`; words as in `StoreStatistics`."""

    num_demands: int = 0
    num_hits: int = 0
    num_joined: int = 0
    num_misses: int = 0
    num_prefetched: int = 0
    exact_bytes: int = 0
    physical_bytes: int = 0
    predicted_physical_bytes: int = 0
    exposed_wait_ns: int = 0
    exact_io_ns: int = 0


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Everything since the store was opened.

    Attributes:
        num_demands: Native selections asked for.
        num_hits: Of them, those whose record was resident.
        num_prefetched: Of the hits, those that a predicted ticket of the generation had brought and nobody
            had used before. `num_hits - num_prefetched` were resident for their own sake.
        num_joined: Of the demands, those whose record was in flight, queued included: no second read.
        num_misses: Of the demands, the rest.
        physical_bytes: Bytes the source really delivered, failed reads included.
        predicted_physical_bytes: Of them, by reads that nobody had demanded when they began.
        num_evictions: Records that left for another.
        waits: Exposed wait by cause. A wait counts under the cause of the record that ended it.
        exact_io_ns: Exact I/O wall time: union of the intervals in which a record was being read that a
            native route used. A guess counts once it is used; what then lies before the end of a cycle
            that is closed counts from there on.
        read_time: From the start of a read to its record being usable.
        slack: Of predicted records that were demanded.
        classes: Tickets by the class under which they were issued.
        hints: Hints handed over, by what became of them.
        num_unused: Predicted records in slots that may still be used in time.
        unused_bytes: Their bytes.
        num_stale_used: Tickets of fate STALE whose record was demanded later all the same: luck, no credit.
        stale_used_bytes: Their bytes.
        stale_evicted_bytes: Bytes of tickets of fate STALE whose record left without having been used.
        queue: What reads left waiting.
        num_queued: Tickets that wait for a reader now.
        num_reading: Reads on the wire now.
        num_cycles: Calls of `advance` that began a new generation.
        last_cycle: The cycle that the last of them closed.
        layers: The same by layer, in layer order.
    """

    num_demands: int
    num_hits: int
    num_prefetched: int
    num_joined: int
    num_misses: int
    physical_bytes: int
    predicted_physical_bytes: int
    num_evictions: int
    waits: Mapping[WaitCause, WaitSplit]
    exact_io_ns: int
    read_time: LatencyStatistics
    slack: SlackStatistics
    classes: Mapping[ReadClass, ClassStatistics]
    hints: Mapping[HintOutcome, int]
    num_unused: int
    unused_bytes: int
    num_stale_used: int
    stale_used_bytes: int
    stale_evicted_bytes: int
    queue: QueueStatistics
    num_queued: int
    num_reading: int
    num_cycles: int
    last_cycle: CycleStatistics
    layers: tuple[LayerStatistics, ...]

    @property
    def num_exact(self) -> int:
        """Exact tickets issued."""
        return self.classes[ReadClass.EXACT].num

    @property
    def exact_bytes(self) -> int:
        """Logical bytes of them."""
        return self.classes[ReadClass.EXACT].num_bytes

    @property
    def predicted_bytes(self) -> int:
        """Logical bytes of the predicted tickets issued."""
        return self.logical_bytes - self.exact_bytes

    @property
    def logical_bytes(self) -> int:
        """Bytes of all records that tickets were issued for, whatever the class."""
        return sum(books.num_bytes for books in self.classes.values())

    @property
    def rejected_bytes(self) -> int:
        """Predicted bytes that were cancelled, dropped, or evicted without having been used."""
        ends = (Fate.CANCELLED, Fate.DROPPED, Fate.EVICTED_UNUSED)
        return self.stale_evicted_bytes + sum(self.fates[fate].num_bytes for fate in ends)

    @property
    def fates(self) -> Mapping[Fate, FateCount]:
        """Ends of the tickets of all classes together."""
        classes = [books.fates for books in self.classes.values()]
        return {
            fate: FateCount(sum(c[fate].num for c in classes), sum(c[fate].num_bytes for c in classes))
            for fate in Fate
        }

    @property
    def issue_to_ready(self) -> LatencyStatistics:
        """From the queueing of a ticket to its record being usable, whatever the class."""
        parts = [books.issue_to_ready for books in self.classes.values()]
        return LatencyStatistics(
            sum(part.num for part in parts),
            sum(part.total_ns for part in parts),
            max(part.max_ns for part in parts),
            tuple(sum(nums) for nums in zip(*(part.bins for part in parts), strict=True)),
        )

    @property
    def exposed_wait_ns(self) -> int:
        """Wall time in which a caller stood still for records."""
        return sum(split.total_ns for split in self.waits.values())

    @property
    def hit_rate(self) -> float | None:
        """Share of demands whose record was resident; None before the first."""
        return self.num_hits / self.num_demands if self.num_demands else None

    @property
    def hidden_fraction(self) -> float | None:
        """1 - exposed wait / exact I/O wall time; None before the first read."""
        return 1.0 - self.exposed_wait_ns / self.exact_io_ns if self.exact_io_ns else None

    @property
    def useful_prefetch_ratio(self) -> float | None:
        """Bytes of predicted records used, of those read; None before the first was read (FIELD P15).

        Used in their generation, or by luck later; what is on the wire does not count yet.
        """
        predicted = [
            books.fates for books in (self.classes[ReadClass.NEAR], self.classes[ReadClass.SPECULATIVE])
        ]

        def num_bytes(*fates: Fate) -> int:
            return sum(books[fate].num_bytes for books in predicted for fate in fates)

        used = num_bytes(Fate.IN_TIME, Fate.JOINED, Fate.LATE)
        read = used + num_bytes(Fate.STALE, Fate.EVICTED_UNUSED) + self.unused_bytes
        return (used + self.stale_used_bytes) / read if read else None


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


def bin_of(duration_ns: int) -> int:
    """Return the bin of a duration: its highest bit and the three below it."""
    shift = max(0, duration_ns.bit_length() - 1 - _SUB_BITS)
    return (shift << _SUB_BITS) + (duration_ns >> shift)


def _bin_end(index: int) -> int:
    """Return the smallest duration beyond a bin."""
    shift = max(0, (index >> _SUB_BITS) - 1)
    return (index - (shift << _SUB_BITS) + 1) << shift
