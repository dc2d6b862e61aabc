"""From ticket to slot: queues exact reads, hands them out, brings each to its one end. Entry: `Dispatcher`.

The store calls `issue` and `join`; a reader calls `next_job` and, through the job, `hand_in`. One lock
protects tables, queue, tickets and counters: held for microseconds, never across a read or a wait. Every
method here but `_RecordRead.read` runs under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from expert_store.errors import RecordCorrupt, StoreError
from expert_store.keys import ExpertKey, ReadClass
from expert_store.layout import RecordLayout
from expert_store.lease import Shelf
from expert_store.read_queue import ReadQueue
from expert_store.reader import Job, Reader, SlotMemory, check_views
from expert_store.source import ByteSource
from expert_store.stats import Fate, Ledger
from expert_store.ticket import Ticket, Waiter


class Dispatcher:
    """The desk of the expert readers.

    Attributes:
        queue: Tickets that have not ended.
        ledger: What became of the others.
    """

    def __init__(
        self,
        shelves: Mapping[int, Shelf],
        source: ByteSource,
        memory: SlotMemory,
        reader: Reader,
        lock: threading.Lock,
        clock: Callable[[], int],
    ) -> None:
        """Start with an empty queue; made by `ExpertStore`."""
        self.queue = ReadQueue()
        self.ledger = Ledger()
        self._shelves = shelves
        self._source = source
        self._memory = memory
        self._reader = reader
        self._lock = lock
        self._clock = clock
        self._refusal: StoreError | None = None

    # What the store calls.

    def check_open(self) -> None:
        """Raise what closed or broke the store."""
        if self._refusal is not None:
            raise self._refusal.again()

    def issue(
        self, shelf: Shelf, missing: Sequence[tuple[int, int]], waiter: Waiter, owner: int, generation: int
    ) -> None:
        """Queue one exact ticket for each (expert, slot), then tell the readers once."""
        now_ns = self._clock()
        layer = shelf.table.layer
        num_bytes = shelf.layout.record_bytes
        for expert, slot in missing:
            ticket = Ticket(
                ExpertKey(layer, expert),
                slot=slot,
                num_bytes=num_bytes,
                owner=owner,
                generation=generation,
                issued_ns=now_ns,
            )
            ticket.waiters.append(waiter)
            self.queue.push(ticket)
        self.ledger.num_exact += len(missing)
        self.ledger.exact_bytes += num_bytes * len(missing)
        self._reader.wake(len(missing))

    def join(self, layer: int, experts: Sequence[int], waiter: Waiter) -> None:
        """Promise a waiter records that are in flight, as exact from now on (T2)."""
        for expert in experts:
            self.queue.join(ExpertKey(layer, expert), ReadClass.EXACT).waiters.append(waiter)

    def cancel_older(self, owner: int, generation: int) -> None:
        """Cancel queued predicted tickets of older generations and empty their slots (T4)."""
        for ticket in self.queue.cancel_older(owner, generation):
            self._shelves[ticket.key.layer].table.failed(ticket.slot)
            self.ledger.ended(Fate.CANCELLED, ticket.num_bytes)

    # What readers call (`Desk`).

    @property
    def lock(self) -> threading.Lock:
        """The one lock; see the head of this file."""
        return self._lock

    def next_job(self) -> Job | None:
        """Take the most urgent ticket out of the queue."""
        now_ns = self._clock()
        ticket = self.queue.pop(now_ns)
        if ticket is None:
            return None
        self.ledger.read_started(now_ns)
        return _RecordRead(self, self._shelves[ticket.key.layer].layout, self._source, self._memory, ticket)

    def reader_failed(self, error: StoreError) -> None:
        """Refuse all further work and fail what is queued; reads on the wire end by themselves."""
        if self._refusal is None:
            self._refusal = error
        for ticket in self.queue.drain():
            self._fail(ticket, error)

    def hand_in(self, ticket: Ticket, physical_bytes: int, error: StoreError | None) -> None:
        """Bring a ticket that was read to its end (T1)."""
        now_ns = self._clock()
        self.ledger.read_ended(now_ns, physical_bytes)
        self.queue.forget(ticket)
        if error is not None:
            self._fail(ticket, error)
            return
        self.ledger.ended(_fate(ticket), ticket.num_bytes)
        self.ledger.issue_to_ready.add(now_ns - ticket.issued_ns)
        self.ledger.read_time.add(now_ns - ticket.started_ns)
        self._shelves[ticket.key.layer].table.loaded(ticket.slot)
        ticket.finish()

    def _fail(self, ticket: Ticket, error: StoreError) -> None:
        """Bring a ticket to its end without a record: waiters drop their pins, then the slot empties."""
        ticket.fail(error)
        self._shelves[ticket.key.layer].table.failed(ticket.slot)
        self.ledger.ended(Fate.FAILED, ticket.num_bytes)


class _RecordRead:
    """The job of reading one ticket."""

    __slots__ = ("_dispatcher", "_layout", "_memory", "_physical_bytes", "_source", "ticket")

    def __init__(
        self,
        dispatcher: Dispatcher,
        layout: RecordLayout,
        source: ByteSource,
        memory: SlotMemory,
        ticket: Ticket,
    ) -> None:
        self.ticket = ticket
        self._dispatcher = dispatcher
        self._layout = layout
        self._source = source
        self._memory = memory
        self._physical_bytes = 0

    def read(self) -> None:
        """Read the record into its slot (T5: nobody else has it while it is LOADING)."""
        layer, expert = self.ticket.key
        views = self._memory.views(layer, self.ticket.slot)
        check_views(views, self._layout.component_lengths, f"slot {self.ticket.slot} of layer {layer}")
        for file, offset, length, first, end in self._layout.reads(expert):
            got = self._source.read_into(file, offset, views[first:end])
            self._physical_bytes += got
            if got != length:
                raise _cut_short(self.ticket.key, self._source.name(file), offset, length, got)

    def finish(self, error: StoreError | None) -> None:
        self._dispatcher.hand_in(self.ticket, self._physical_bytes, error)


def _fate(ticket: Ticket) -> Fate:
    """Return how a ticket that was read well ended for those who waited."""
    live = [waiter for waiter in ticket.waiters if waiter.is_live]
    if not live:
        return Fate.STALE
    return Fate.LATE if any(waiter.is_waited_for for waiter in live) else Fate.IN_TIME


def _cut_short(key: ExpertKey, file: str, offset: int, wanted: int, got: int) -> RecordCorrupt:
    return RecordCorrupt(
        f"Record is cut short: layer {key.layer} expert {key.expert} in {file} at {offset}: "
        f"wanted {wanted} bytes, got {got}",
        hint="fetch this file again",
        layer=key.layer,
        expert=key.expert,
        file=file,
        offset=offset,
        wanted=wanted,
        got=got,
    )
