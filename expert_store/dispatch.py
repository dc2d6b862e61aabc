"""From ticket to slot: queues reads, hands them out, brings each to its one end. Entry: `Dispatcher`.

The store calls `issue` and `join`, the prefetcher `guess`; a reader calls `next_job` and, through the job,
`read` and `end`. One lock protects tables, queue, tickets and counters: held for microseconds, never across a
read or a wait. Every method here but `read` runs under it.

No wake-up is lost: whatever makes a ticket readable wakes as many readers as there are such tickets. A guess
that may not be read now, because enough of them are on the wire, wakes nobody: that number falls only in the
hands of a reader that looks into the queue next. While others read what is demanded from the same drive
(`give_way_to`), no guess begins; they say when they are done (`wake_for_guesses`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from expert_store.books import Ledger
from expert_store.errors import RecordCorrupt, StoreError
from expert_store.keys import ExpertKey, Prefetch, ReadClass
from expert_store.layout import ReadOp
from expert_store.lease import Shelf
from expert_store.prefetch import Prefetcher, PrefetchLimits
from expert_store.read_queue import ReadQueue
from expert_store.reader import Job, Reader, SlotMemory, check_views
from expert_store.source import ByteSource, read_failed
from expert_store.stats import Fate
from expert_store.ticket import NO_SLOT, Need, Ticket, TicketState, Waiter
from expert_store.watch import StoreWatch

_EXACT: Final = ReadClass.EXACT
_EXACT_FATES: Final = {Need.NONE: Fate.STALE, Need.WANTED: Fate.IN_TIME, Need.URGENT: Fate.LATE}
_JOINED_FATES: Final = {Need.NONE: Fate.STALE, Need.WANTED: Fate.JOINED, Need.URGENT: Fate.LATE}
"""How a demanded ticket that was read well ended, by what its waiters needed: issued exact, or predicted."""


class Dispatcher:
    """The desk of the expert readers.

    Attributes:
        queue: Tickets that have not ended.
        ledger: What became of the others.
        prefetcher: What lets guesses in.
        watch: Told of every read that went well; None tells nobody.
    """

    def __init__(
        self,
        shelves: Mapping[int, Shelf],
        source: ByteSource,
        memory: SlotMemory,
        reader: Reader,
        lock: threading.Lock,
        clock: Callable[[], int],
        limits: PrefetchLimits,
    ) -> None:
        """Start with an empty queue; made by `ExpertStore`."""
        self.queue = ReadQueue(max_predicted=limits.max_queued)
        self.ledger = Ledger()
        self.prefetcher = Prefetcher(shelves, self, limits, clock)
        self._max_guesses_reading = (
            max(1, reader.num_readers // 2) if limits.max_reads is None else limits.max_reads
        )
        self._shelves = shelves
        self._source = source
        self._memory = memory
        self._reader = reader
        self._lock = lock
        self._clock = clock
        self.watch: StoreWatch | None = None
        self._refusal: StoreError | None = None
        self._gives_way: Callable[[], bool] = _to_nobody
        # Memory does not change its shape: one look at each slot is enough.
        self._is_checked = {layer: bytearray(shelf.table.num_slots) for layer, shelf in shelves.items()}

    # What the store calls.

    @property
    def is_open(self) -> bool:
        """Whether nothing has closed or broken the store."""
        return self._refusal is None

    def check_open(self) -> None:
        """Raise what closed or broke the store."""
        if self._refusal is not None:
            raise self._refusal.again()

    def issue(
        self, shelf: Shelf, missing: Sequence[tuple[int, int]], waiter: Waiter, owner: int, generation: int
    ) -> int:
        """Have one record read into each (expert, slot) as exact, then tell the readers once.

        Returns:
            How many of them a queued guess had named: its ticket is joined and gets the slot (T2).
        """
        now_ns = self._clock()
        layer = shelf.table.layer
        num_bytes = shelf.layout.record_bytes
        num_joined = 0
        for expert, slot in missing:
            key = ExpertKey(layer, expert)
            if self.queue.num_predicted and (guess := self.queue.find(key)) is not None:
                assert isinstance(guess, RecordTicket)
                self.prefetcher.left_queue(guess)
                guess.take_slot(slot, shelf.layout.reads(expert))
                guess.needed_ns = now_ns
                self.queue.join(key).waiters.append(waiter)
                num_joined += 1
                continue
            ticket = RecordTicket(
                key,
                slot=slot,
                num_bytes=num_bytes,
                owner=owner,
                generation=generation,
                issued_ns=now_ns,
                was_resident=shelf.table.has_been(expert),
            )
            ticket.bind(self, shelf.layout.reads(expert))
            ticket.waiters.append(waiter)
            self.queue.push(ticket)
        num_issued = len(missing) - num_joined
        self.ledger.issued(_EXACT, num_issued, num_bytes * num_issued)
        self._reader.wake(len(missing))
        return num_joined

    def join(self, layer: int, experts: Sequence[int], waiter: Waiter) -> None:
        """Promise a waiter records that are on their way into slots, as exact from now on (T2)."""
        for expert in experts:
            ticket = self.queue.join(ExpertKey(layer, expert))
            ticket.waiters.append(waiter)
            if not ticket.needed_ns and ticket.issued_class is not _EXACT:
                ticket.needed_ns = self._clock()

    # What the prefetcher calls (`Issuing`).

    def guess(self, shelf: Shelf, hint: Prefetch, owner: int, generation: int, now_ns: int) -> Ticket | None:
        """Queue one predicted ticket, without a slot; None if the queue is full of more urgent ones."""
        ticket = RecordTicket(
            ExpertKey(hint.layer, hint.expert),
            slot=NO_SLOT,
            num_bytes=shelf.layout.record_bytes,
            owner=owner,
            generation=generation,
            read_class=hint.read_class,
            issued_ns=now_ns,
            deadline=hint.deadline,
            confidence=hint.confidence,
        )
        ticket.bind(self, ())
        is_queued, displaced = self.queue.push_guess(ticket)
        if displaced is not None:
            self.end_unread(displaced, Fate.DROPPED)
        if not is_queued:
            return None
        self.ledger.issued(hint.read_class, 1, ticket.num_bytes)
        return ticket

    def wake_for_guesses(self, num_issued: int) -> None:
        """Tell the readers of guesses that were queued; no more than may go on the wire.

        A reader woken for nothing costs the inference thread the interpreter for as long as a useful one.
        """
        num_allowed = self._max_guesses_reading - self.ledger.num_predicted_reading
        if num_issued and num_allowed > 0 and not self._gives_way():
            self._reader.wake(min(num_issued, num_allowed))

    def give_way_to(self, is_busy: Callable[[], bool]) -> None:
        """Begin no guess while somebody else's demand is on the drive; asked under the lock, takes none."""
        self._gives_way = is_busy

    def end_unread(self, ticket: Ticket, fate: Fate) -> None:
        """Bring a predicted ticket that was taken out of the queue to its end."""
        self.prefetcher.left_queue(ticket)
        ticket.cancel()
        self.ledger.close(ticket, fate)

    def used(self, ticket: Ticket) -> None:
        """Note that a guess which holds a slot was demanded for the first time."""
        if ticket.fate is Fate.STALE:
            self.ledger.stale_used += 1
            self.ledger.stale_used_bytes += ticket.num_bytes
        elif ticket.state is TicketState.READY:  # on the wire, its fate is known when it ends
            self.prefetcher.went(ticket)
            self.ledger.close(ticket, Fate.IN_TIME)
            self.ledger.was_used(ticket)
            self.ledger.slack(self._clock(), ticket.ready_ns)
            self._shelves[ticket.key.layer].counters.num_prefetched += 1

    def evicted(self, ticket: Ticket) -> None:
        """Note that a guess left its slot unused."""
        if ticket.fate is Fate.STALE:
            self.ledger.stale_evicted_bytes += ticket.num_bytes
        else:
            self.prefetcher.went(ticket)
            self.ledger.close(ticket, Fate.EVICTED_UNUSED)

    # What readers call (`Desk`).

    @property
    def lock(self) -> threading.Lock:
        """The one lock; see the head of this file."""
        return self._lock

    def next_job(self) -> Job | None:
        """Take the most urgent ticket out of the queue that may be read now."""
        while (ticket := self.queue.first()) is not None:
            is_predicted = ticket.read_class is not _EXACT
            if is_predicted:
                if self.ledger.num_predicted_reading >= self._max_guesses_reading or self._gives_way():
                    return None
                if not self._find_slot(ticket):
                    self.queue.remove(ticket)
                    self.end_unread(ticket, Fate.DROPPED)
                    continue
                self.prefetcher.left_queue(ticket)
            self.queue.pop(self._clock())
            self.ledger.read_started(self.queue.num_queued, is_predicted=is_predicted)
            assert isinstance(ticket, RecordTicket)
            return ticket
        return None

    def reader_failed(self, error: StoreError) -> None:
        """Refuse all further work and fail what is queued; reads on the wire end by themselves."""
        if self._refusal is None:
            self._refusal = error
        self.prefetcher.stop()
        for ticket in self.queue.drain():
            self._fail(ticket, error)

    def read(self, ticket: RecordTicket) -> None:
        """Read a record into its slot (T5: nobody else has it while it is LOADING). Without the lock."""
        layer, slot = ticket.key.layer, ticket.slot
        views = self._memory.views(layer, slot)
        if not self._is_checked[layer][slot]:
            check_views(views, self._shelves[layer].layout.component_lengths, "slot", slot)
            self._is_checked[layer][slot] = True
        try:
            got = ticket.physical_bytes = self._source.read_runs(ticket.runs, views)
        except OSError as error:
            first = ticket.runs[0]
            raise read_failed(error, self._source.name(first.file), first.offset) from error
        if got != ticket.num_bytes:
            raise self._cut_short(ticket, got)

    def end(self, ticket: RecordTicket, error: StoreError | None) -> None:
        """Bring a ticket that was read to its end (T1)."""
        self.queue.forget(ticket)
        self.ledger.read_ended(ticket.physical_bytes, is_predicted=ticket.is_predicted_read)
        if error is not None:
            self._end_badly(ticket, error)
            return
        self._shelves[ticket.key.layer].table.loaded(ticket.slot)
        need = ticket.finish(self._clock())
        if ticket.issued_class is _EXACT:
            self.ledger.ready(ticket, _EXACT_FATES[need])
        elif ticket.read_class is _EXACT:
            self.ledger.ready(ticket, _JOINED_FATES[need])
            self.ledger.slack(ticket.needed_ns, ticket.ready_ns)
        else:
            self.ledger.ready(ticket, None)
            self.prefetcher.came_unused(ticket)
        if self.watch is not None:
            self.watch.read_ready(ticket)

    def _end_badly(self, ticket: RecordTicket, error: StoreError) -> None:
        """End a read that failed. What failed as a guess is read again for the demand that has joined it.

        A hint must not be able to fail a request (I1): the error that counts is that of an exact read.
        """
        is_guess = ticket.is_predicted_read and ticket.read_class is _EXACT
        if not is_guess or self._refusal is not None:
            self._fail(ticket, error)
            return
        waiters, ticket.waiters = ticket.waiters, []
        ticket.fail(error)
        self.ledger.close(ticket, Fate.FAILED)
        again = RecordTicket(
            ticket.key,
            slot=ticket.slot,
            num_bytes=ticket.num_bytes,
            owner=ticket.owner,
            generation=ticket.generation,
            issued_ns=self._clock(),
            was_resident=self._shelves[ticket.key.layer].table.has_been(ticket.key.expert),
        )
        again.bind(self, ticket.runs)
        again.waiters = waiters
        self.queue.push(again)
        self.ledger.issued(_EXACT, 1, again.num_bytes)
        self._reader.wake(1)

    def _fail(self, ticket: Ticket, error: StoreError) -> None:
        """Bring a ticket to its end without a record: waiters drop their pins, then the slot empties."""
        ticket.fail(error)
        self._shelves[ticket.key.layer].table.failed(ticket.slot)
        self.ledger.close(ticket, Fate.FAILED)

    def _find_slot(self, ticket: Ticket) -> bool:
        """Give a guess whose read is about to begin its slot; return whether there was one."""
        assert isinstance(ticket, RecordTicket)
        shelf = self._shelves[ticket.key.layer]
        slot = shelf.table.guess(ticket.key.expert, ticket)
        if slot is None:
            return False
        ticket.take_slot(slot, shelf.layout.reads(ticket.key.expert))
        return True

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

    def take_slot(self, slot: int, runs: tuple[ReadOp, ...]) -> None:
        """Give a guess the slot that it did without while it was only that."""
        assert self.slot == NO_SLOT, f"second slot for {self.key}"
        self.slot = slot
        self.runs = runs

    def read(self) -> None:
        """Do what `Job` says."""
        self._dispatcher.read(self)

    def hand_in(self, error: StoreError | None) -> None:
        """Do what `Job` says."""
        self._dispatcher.end(self, error)

    @property
    def is_due(self) -> bool:
        """Do what `Guess` says."""
        return self.read_class is ReadClass.NEAR

    def used(self) -> None:
        """Do what `Guess` says."""
        self._dispatcher.used(self)

    def evicted(self) -> None:
        """Do what `Guess` says."""
        self._dispatcher.evicted(self)


def _to_nobody() -> bool:
    return False
