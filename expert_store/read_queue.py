"""Which ticket is read next, and which read a demand may join. Entry: `ReadQueue`.

Pure data: no lock of its own; the store's lock protects it. Exact tickets wait in a line; guesses in a sorted
list, most urgent last: by class, then deadline, then confidence, then arrival. Inserting there moves a few
kilobytes of pointers at worst, which costs less than the books of a heap whose entries may be raised,
displaced and cancelled.

Invariants:
    Q1  (T2) at most one ticket that has not ended per key;
    Q2  (T3) an exact ticket is never refused, displaced or cancelled: each owns a slot, so slots bound them;
    Q3  near and speculative tickets together never exceed `max_predicted`: a newcomer that is more urgent
        than the least urgent of them displaces it, any other is refused; both are counted;
    Q4  `first` is the oldest exact ticket (a guess that is joined counts from then on); without one it is the
        most urgent guess, first come first served within class, deadline and confidence.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import count
from typing import Final

from expert_store.keys import ExpertKey, ReadClass
from expert_store.ticket import Ticket, TicketState

_EXACT: Final = ReadClass.EXACT
_Entry = tuple[int, int, float, int, Ticket]


class ReadQueue:
    """Tickets from the moment they are issued until they end.

    Attributes:
        max_predicted: Near and speculative tickets that may wait at once.
        num_predicted: Those that wait.
    """

    __slots__ = (
        "_arrivals",
        "_entry_of",
        "_exact",
        "_guesses",
        "_in_flight",
        "max_predicted",
        "num_predicted",
    )

    def __init__(self, *, max_predicted: int = 1024) -> None:
        """Start empty."""
        self.max_predicted = max_predicted
        self.num_predicted = 0
        self._in_flight: dict[ExpertKey, Ticket] = {}
        self._exact: deque[Ticket] = deque()
        self._guesses: list[_Entry] = []
        self._entry_of: dict[ExpertKey, _Entry] = {}
        self._arrivals = count()

    def __len__(self) -> int:
        """Return the tickets that have not ended, those being read included."""
        return len(self._in_flight)

    @property
    def num_queued(self) -> int:
        """Tickets waiting for a reader."""
        return len(self._exact) + self.num_predicted

    def in_flight(self) -> list[Ticket]:
        """Return the tickets that have not ended."""
        return list(self._in_flight.values())

    def find(self, key: ExpertKey) -> Ticket | None:
        """Return the ticket in flight for a key."""
        return self._in_flight.get(key)

    def push(self, ticket: Ticket) -> None:
        """Queue a new exact ticket."""
        assert ticket.key not in self._in_flight, f"second read in flight: {ticket.key}"
        self._in_flight[ticket.key] = ticket
        self._exact.append(ticket)

    def push_guess(self, ticket: Ticket) -> tuple[bool, Ticket | None]:
        """Queue a new predicted ticket.

        Returns:
            is_queued: False if the queue is full of more urgent ones (Q3).
            displaced: A ticket taken out to make room; the caller must bring it to its end.
        """
        assert ticket.key not in self._in_flight, f"second read in flight: {ticket.key}"
        displaced: Ticket | None = None
        if self.num_predicted >= self.max_predicted:
            if not self.num_predicted or _urgency(ticket) <= self._guesses[0][:3]:
                return False, None
            displaced = self._guesses[0][4]
            self.remove(displaced)
        self._in_flight[ticket.key] = ticket
        self._enter(ticket)
        return True, displaced

    def join(self, key: ExpertKey) -> Ticket:
        """Return the ticket in flight for a key, exact from now on."""
        ticket = self._in_flight[key]
        if ticket.read_class is not _EXACT:
            if ticket.state is TicketState.QUEUED:
                self._take_out(ticket)
                self._exact.append(ticket)
            ticket.upgrade(_EXACT)
        return ticket

    def reorder(self, ticket: Ticket, read_class: ReadClass, deadline: int, confidence: float) -> bool:
        """Raise a QUEUED guess to where a newer hint wants it; return whether that is higher."""
        if (-read_class, -deadline, confidence) <= _urgency(ticket):
            return False
        self._take_out(ticket)
        ticket.upgrade(read_class)
        ticket.deadline, ticket.confidence = deadline, confidence
        self._enter(ticket)
        return True

    def first(self) -> Ticket | None:
        """Return the most urgent QUEUED ticket."""
        if self._exact:
            return self._exact[0]
        return self._guesses[-1][4] if self._guesses else None

    def pop(self, now_ns: int) -> Ticket | None:
        """Start the most urgent ticket and return it; None when nothing is queued."""
        if self._exact:
            ticket = self._exact.popleft()
        elif self._guesses:
            ticket = self._guesses[-1][4]
            self._take_out(ticket)
        else:
            return None
        ticket.start(now_ns)
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """Drop a ticket that has been read, so that its key may be asked for anew."""
        assert self._in_flight.get(ticket.key) is ticket, f"not in flight: {ticket.key}"
        assert ticket.state is not TicketState.QUEUED, f"still queued: {ticket.key}"
        del self._in_flight[ticket.key]

    def remove(self, ticket: Ticket) -> None:
        """Take out a QUEUED guess; the caller must bring it to its end."""
        self._take_out(ticket)
        del self._in_flight[ticket.key]

    def guesses(self) -> list[Ticket]:
        """Return the QUEUED guesses, least urgent first."""
        return [entry[4] for entry in self._guesses]

    def drain(self) -> list[Ticket]:
        """Take out every exact ticket that is queued, oldest first; the caller must bring each to its end."""
        drained = list(self._exact)
        self._exact.clear()
        for ticket in drained:
            del self._in_flight[ticket.key]
        return drained

    def _enter(self, ticket: Ticket) -> None:
        entry = (*_urgency(ticket), -next(self._arrivals), ticket)
        self._entry_of[ticket.key] = entry
        self.num_predicted += 1
        insort(self._guesses, entry)

    def _take_out(self, ticket: Ticket) -> None:
        entry = self._entry_of.pop(ticket.key)
        self.num_predicted -= 1
        place = bisect_left(self._guesses, entry)
        assert self._guesses[place] is entry
        del self._guesses[place]


def _urgency(ticket: Ticket) -> tuple[int, int, float]:
    return (-ticket.read_class, -ticket.deadline, ticket.confidence)
