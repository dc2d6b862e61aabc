"""Which ticket is read next, and which read a demand may join. Entry: `ReadQueue`.

Pure data: no lock of its own; the store's lock protects it. One sorted list for all classes, most urgent
last: by class, then deadline, then confidence, then arrival. Insertion moves a few kilobytes of pointers at
worst, which costs less than the bookkeeping of a heap whose entries may be raised, displaced and cancelled.

Invariants:
    Q1  (T2) at most one ticket that has not ended per key;
    Q2  (T3) an exact ticket is never refused, displaced or cancelled: each owns a slot, so slots bound them;
    Q3  near and speculative tickets together never exceed `max_predicted`: a newcomer that is more urgent
        than the least urgent of them displaces it, any other is refused; both are counted;
    Q4  `first` is the most urgent QUEUED ticket, first come first served within class, deadline, confidence.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

from expert_store.keys import ExpertKey, ReadClass
from expert_store.ticket import Ticket, TicketState

_EXACT = ReadClass.EXACT
_Entry = tuple[int, int, float, int, Ticket]


class ReadQueue:
    """Tickets from the moment they are issued until they end.

    Attributes:
        max_predicted: Near and speculative tickets that may wait at once.
        num_predicted: Of those that wait for a reader, the near and speculative ones.
    """

    __slots__ = ("_arrivals", "_entries", "_entry_of", "_in_flight", "max_predicted", "num_predicted")

    def __init__(self, *, max_predicted: int = 1024) -> None:
        """Start empty."""
        self.max_predicted = max_predicted
        self.num_predicted = 0
        self._in_flight: dict[ExpertKey, Ticket] = {}
        self._entries: list[_Entry] = []
        self._entry_of: dict[
            ExpertKey, _Entry
        ] = {}  # of predicted ones: those that may leave from the middle
        self._arrivals = count()

    def __len__(self) -> int:
        """Return the tickets that have not ended, those being read included."""
        return len(self._in_flight)

    @property
    def num_queued(self) -> int:
        """Tickets waiting for a reader."""
        return len(self._entries)

    def in_flight(self) -> list[Ticket]:
        """Return the tickets that have not ended."""
        return list(self._in_flight.values())

    def find(self, key: ExpertKey) -> Ticket | None:
        """Return the ticket in flight for a key."""
        return self._in_flight.get(key)

    def push(self, ticket: Ticket) -> tuple[bool, Ticket | None]:
        """Queue a new ticket.

        Returns:
            is_queued: False if it is predicted and the queue is full of more urgent ones (Q3).
            displaced: A ticket taken out to make room; the caller must bring it to its end.
        """
        assert ticket.key not in self._in_flight, f"second read in flight: {ticket.key}"
        displaced: Ticket | None = None
        if ticket.read_class is not _EXACT and self.num_predicted >= self.max_predicted:
            worst = self._entries[0] if self.num_predicted else None
            if worst is None or _urgency(ticket) <= worst[:3]:
                return False, None
            displaced = worst[4]
            self.remove(displaced)
        self._in_flight[ticket.key] = ticket
        self._enter(ticket)
        return True, displaced

    def join(self, key: ExpertKey, read_class: ReadClass) -> Ticket:
        """Return the ticket in flight for a key, its class raised to `read_class` if that is more urgent."""
        ticket = self._in_flight[key]
        if ticket.state is TicketState.QUEUED and read_class < ticket.read_class:
            self._take_out(ticket)
            ticket.upgrade(read_class)
            self._enter(ticket)
        else:
            ticket.upgrade(read_class)
        return ticket

    def reorder(self, ticket: Ticket, read_class: ReadClass, deadline: int, confidence: float) -> bool:
        """Raise a QUEUED predicted ticket to where a newer hint wants it; return whether that is higher."""
        if (-read_class, -deadline, confidence) <= _urgency(ticket):
            return False
        self._take_out(ticket)
        ticket.upgrade(read_class)
        ticket.deadline, ticket.confidence = deadline, confidence
        self._enter(ticket)
        return True

    def first(self) -> Ticket | None:
        """Return the most urgent QUEUED ticket."""
        return self._entries[-1][4] if self._entries else None

    def pop(self, now_ns: int) -> Ticket | None:
        """Start the most urgent ticket and return it; None when nothing is queued."""
        if not self._entries:
            return None
        ticket = self._entries.pop()[4]
        if ticket.read_class is not _EXACT:
            self.num_predicted -= 1
            del self._entry_of[ticket.key]
        ticket.start(now_ns)
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """Drop a ticket that has been read, so that its key may be asked for anew."""
        assert self._in_flight.get(ticket.key) is ticket, f"not in flight: {ticket.key}"
        assert ticket.state is not TicketState.QUEUED, f"still queued: {ticket.key}"
        del self._in_flight[ticket.key]

    def remove(self, ticket: Ticket) -> None:
        """Take out a QUEUED predicted ticket; the caller must bring it to its end."""
        self._take_out(ticket)
        del self._in_flight[ticket.key]

    def predicted(self) -> list[Ticket]:
        """Return the QUEUED predicted tickets, in no order."""
        return [entry[4] for entry in self._entry_of.values()]

    def drain(self) -> list[Ticket]:
        """Take out every queued ticket, most urgent first; the caller must bring each to its end."""
        drained = [entry[4] for entry in reversed(self._entries)]
        self._entries.clear()
        self._entry_of.clear()
        self.num_predicted = 0
        for ticket in drained:
            del self._in_flight[ticket.key]
        return drained

    def _enter(self, ticket: Ticket) -> None:
        entry = (-ticket.read_class, -ticket.deadline, ticket.confidence, -next(self._arrivals), ticket)
        if ticket.read_class is not _EXACT:
            self.num_predicted += 1
            self._entry_of[ticket.key] = entry
        insort(self._entries, entry)

    def _take_out(self, ticket: Ticket) -> None:
        entry = self._entry_of.pop(ticket.key)
        self.num_predicted -= 1
        place = bisect_left(self._entries, entry)
        assert self._entries[place] is entry
        del self._entries[place]


def _urgency(ticket: Ticket) -> tuple[int, int, float]:
    return (-ticket.read_class, -ticket.deadline, ticket.confidence)
