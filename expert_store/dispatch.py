"""From ticket to slot: queues exact reads, hands them out, brings each to its one end. Entry: `Dispatcher`.

The store calls `issue` and `join`; a reader calls `next_job` and, through the job, `read` and `end`. One lock
protects tables, queue, tickets and counters: held for microseconds, never across a read or a wait. Every
method here but `read` runs under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from expert_store.errors import RecordCorrupt, StoreError
from expert_store.keys import ExpertKey, ReadClass
from expert_store.layout import ReadOp
from expert_store.lease import Shelf
from expert_store.read_queue import ReadQueue
from expert_store.reader import Job, Reader, SlotMemory, check_views
from expert_store.source import ByteSource
from expert_store.stats import Fate, Ledger
from expert_store.ticket import Need, Ticket, Waiter

_FATES: Final = {Need.NONE: Fate.STALE, Need.WANTED: Fate.IN_TIME, Need.URGENT: Fate.LATE}
"""How a ticket that was read well ended, by what its waiters needed."""


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
        # Memory does not change its shape: one look at each slot is enough.
        self._is_checked = {layer: bytearray(shelf.table.num_slots) for layer, shelf in shelves.items()}

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
            ticket = RecordTicket(
                ExpertKey(layer, expert),
                slot=slot,
                num_bytes=num_bytes,
                owner=owner,
                generation=generation,
                issued_ns=now_ns,
            )
            ticket.bind(self, shelf.layout.reads(expert))
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
        assert isinstance(ticket, RecordTicket)
        return ticket

    def reader_failed(self, error: StoreError) -> None:
        """Refuse all further work and fail what is queued; reads on the wire end by themselves."""
        if self._refusal is None:
            self._refusal = error
        for ticket in self.queue.drain():
            self._fail(ticket, error)

    def read(self, ticket: RecordTicket) -> None:
        """Read a record into its slot (T5: nobody else has it while it is LOADING). Without the lock."""
        layer, slot = ticket.key.layer, ticket.slot
        views = self._memory.views(layer, slot)
        if not self._is_checked[layer][slot]:
            check_views(views, self._shelves[layer].layout.component_lengths, "slot", slot)
            self._is_checked[layer][slot] = True
        got = ticket.physical_bytes = self._source.read_runs(ticket.runs, views)
        if got != ticket.num_bytes:
            raise self._cut_short(ticket, got)

    def end(self, ticket: RecordTicket, error: StoreError | None) -> None:
        """Bring a ticket that was read to its end (T1)."""
        now_ns = self._clock()
        self.queue.forget(ticket)
        self.ledger.read_ended(now_ns, ticket.physical_bytes)
        if error is not None:
            self._fail(ticket, error)
            return
        self._shelves[ticket.key.layer].table.loaded(ticket.slot)
        self.ledger.ready(ticket, now_ns, _FATES[ticket.finish()])

    def _fail(self, ticket: Ticket, error: StoreError) -> None:
        """Bring a ticket to its end without a record: waiters drop their pins, then the slot empties."""
        ticket.fail(error)
        self._shelves[ticket.key.layer].table.failed(ticket.slot)
        self.ledger.ended(Fate.FAILED, ticket.num_bytes)

    def _cut_short(self, ticket: RecordTicket, got: int) -> RecordCorrupt:
        """Return the error for a record that came out `got` bytes long: it says which read was short."""
        layer, expert = ticket.key
        short = ticket.runs[-1]
        for run in ticket.runs:
            if got < run.length:
                short = run
                break
            got -= run.length
        name = self._source.name(short.file)
        return RecordCorrupt(
            f"Record is cut short: layer {layer} expert {expert} in {name} at {short.offset}: "
            f"wanted {short.length} bytes, got {got}",
            hint="fetch this file again",
            layer=layer,
            expert=expert,
            file=name,
            offset=short.offset,
            wanted=short.length,
            got=got,
        )


class RecordTicket(Ticket):
    """A ticket that is its own job. What can be known when it is issued is worked out then.

    A reader comes back from each record with cold caches: every object that it need not touch is time saved
    (measured: 56 us a record before this and its like, 39 after; a warm 2.76 MB read takes 530 to 620).

    Attributes:
        runs: The reads that fetch the record.
        physical_bytes: What they have delivered so far.
    """

    __slots__ = ("_dispatcher", "physical_bytes", "runs")

    def bind(self, dispatcher: Dispatcher, runs: tuple[ReadOp, ...]) -> None:
        """Say who reads it and how."""
        self._dispatcher = dispatcher
        self.runs = runs
        self.physical_bytes = 0

    def read(self) -> None:
        """Do what `Job` says."""
        self._dispatcher.read(self)

    def hand_in(self, error: StoreError | None) -> None:
        """Do what `Job` says."""
        self._dispatcher.end(self, error)
