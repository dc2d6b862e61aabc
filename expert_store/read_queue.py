"""Which ticket is read next, and which read a demand may join. Entry: `ReadQueue`.

Pure data: no lock of its own; the store's lock protects it. One heap for all classes, ordered by class, then
deadline, then arrival; an upgraded ticket is entered again and its old entry skipped when it surfaces.

Invariants:
    Q1  (T2) at most one ticket that has not ended per key;
    Q2  (T3) an exact ticket is never refused or cancelled: each owns a slot, so slots bound their number;
    Q3  near and speculative tickets together never exceed `max_predicted`; refusals are counted;
    Q4  `pop` returns the most urgent QUEUED ticket, first come first served within class and deadline.
"""

from __future__ import annotations

import heapq
from itertools import count

from expert_store.keys import ExpertKey, ReadClass
from expert_store.ticket import Ticket, TicketState


class ReadQueue:
    """Tickets from the moment they are issued until they end.

    Attributes:
        num_refused: Predicted tickets that found the queue full (Q3).
        num_queued: Tickets waiting for a reader.
    """

    __slots__ = (
        "_arrivals",
        "_heap",
        "_in_flight",
        "_max_predicted",
        "_num_predicted",
        "num_queued",
        "num_refused",
    )

    def __init__(self, *, max_predicted: int = 256) -> None:
        """Start empty.

        Args:
            max_predicted: Near and speculative tickets that may wait at once.
        """
        self.num_refused = 0
        self.num_queued = 0
        self._max_predicted = max_predicted
        self._num_predicted = 0
        self._in_flight: dict[ExpertKey, Ticket] = {}
        self._heap: list[tuple[ReadClass, int, int, Ticket]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        """Return the tickets that have not ended, those being read included."""
        return len(self._in_flight)

    def in_flight(self) -> list[Ticket]:
        """Return the tickets that have not ended."""
        return list(self._in_flight.values())

    def find(self, key: ExpertKey) -> Ticket | None:
        """Return the ticket in flight for a key."""
        return self._in_flight.get(key)

    def push(self, ticket: Ticket) -> bool:
        """Queue a new ticket; return False if it is predicted and the queue is full (Q3)."""
        assert ticket.key not in self._in_flight, f"second read in flight: {ticket.key}"
        if ticket.read_class is not ReadClass.EXACT:
            if self._num_predicted >= self._max_predicted:
                self.num_refused += 1
                return False
            self._num_predicted += 1
        self._in_flight[ticket.key] = ticket
        self.num_queued += 1
        self._enter(ticket)
        return True

    def join(self, key: ExpertKey, read_class: ReadClass) -> Ticket:
        """Return the ticket in flight for a key, its class raised to `read_class` if that is more urgent."""
        ticket = self._in_flight[key]
        was_predicted = ticket.read_class is not ReadClass.EXACT
        if ticket.upgrade(read_class) and ticket.state is TicketState.QUEUED:
            self._num_predicted -= was_predicted and read_class is ReadClass.EXACT
            self._enter(ticket)
        return ticket

    def pop(self, now_ns: int) -> Ticket | None:
        """Start the most urgent ticket and return it; None when nothing is queued."""
        while self._heap:
            read_class, _, _, ticket = heapq.heappop(self._heap)
            if ticket.state is TicketState.QUEUED and ticket.read_class is read_class:
                self._leave_queue(ticket)
                ticket.start(now_ns)
                return ticket
        return None

    def forget(self, ticket: Ticket) -> None:
        """Drop a ticket that has been read, so that its key may be asked for anew."""
        assert self._in_flight.get(ticket.key) is ticket, f"not in flight: {ticket.key}"
        assert ticket.state is not TicketState.QUEUED, f"still queued: {ticket.key}"
        del self._in_flight[ticket.key]

    def cancel_older(self, owner: int, generation: int) -> list[Ticket]:
        """Cancel the owner's queued predicted tickets of older generations (T4); return them."""
        stale = [
            ticket
            for ticket in self._in_flight.values()
            if ticket.owner == owner
            and ticket.generation < generation
            and ticket.state is TicketState.QUEUED
            and ticket.read_class is not ReadClass.EXACT
        ]
        for ticket in stale:
            self._leave_queue(ticket)
            del self._in_flight[ticket.key]
            ticket.cancel()
        return stale

    def drain(self) -> list[Ticket]:
        """Take out every queued ticket, most urgent first; the caller must bring each to its end."""
        drained: list[Ticket] = []
        while self._heap:
            read_class, _, _, ticket = heapq.heappop(self._heap)
            if ticket.state is TicketState.QUEUED and ticket.read_class is read_class:
                self._leave_queue(ticket)
                del self._in_flight[ticket.key]
                drained.append(ticket)
        return drained

    def _enter(self, ticket: Ticket) -> None:
        heapq.heappush(self._heap, (ticket.read_class, ticket.deadline_ns, next(self._arrivals), ticket))

    def _leave_queue(self, ticket: Ticket) -> None:
        self.num_queued -= 1
        self._num_predicted -= ticket.read_class is not ReadClass.EXACT
