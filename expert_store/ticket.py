"""A ticket: one promised read of one record, and the states it may pass through.

    QUEUED -> READING -> READY
    QUEUED -> CANCELLED          near and speculative only (T3)
    READING -> FAILED
    QUEUED -> FAILED             nobody is left to read it: the store was closed, or a reader died

Only this file assigns a state. What tickets promise (kept here unless another place is named):
    T1  a ticket reaches exactly one end, and releases what it holds once, there;
    T2  one ticket in flight per key; later demands join it; joining can raise its class, never lower it
        (read_queue.py);
    T3  exact tickets are never cancelled;
    T4  `advance` cancels the queued tickets of older generations; a read on the wire finishes and publishes
        nothing into the new generation (read_queue.py, prefetch.py);
    T5  its slot is written only while LOADING, which no lease and no other ticket shares (slots.py);
    T6  its fate is counted once, in records and bytes (stats.py).

A predicted ticket holds no slot while it is QUEUED: it gets one when its read begins (dispatch.py), so that
guesses that wait take nothing from anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final, Protocol

from expert_store.errors import StoreError
from expert_store.keys import ExpertKey, ReadClass, WaitCause
from expert_store.stats import Fate

NO_SLOT: Final = -1
"""The slot of a ticket that has none yet."""


class TicketState(IntEnum):
    """Where a promised read stands."""

    QUEUED = 0
    READING = 1
    READY = 2
    FAILED = 3
    CANCELLED = 4


TRANSITIONS: Final[Mapping[TicketState, frozenset[TicketState]]] = MappingProxyType(
    {
        TicketState.QUEUED: frozenset({TicketState.READING, TicketState.CANCELLED, TicketState.FAILED}),
        TicketState.READING: frozenset({TicketState.READY, TicketState.FAILED}),
        TicketState.READY: frozenset(),
        TicketState.FAILED: frozenset(),
        TicketState.CANCELLED: frozenset(),
    }
)
"""Every allowed step. A state without steps is an end (T1)."""


class Need(IntEnum):
    """How much somebody needed a record at the moment it was ready."""

    NONE = 0
    """Not any more."""
    WANTED = 1
    """Soon."""
    URGENT = 2
    """Compute stands still for it."""


class Waiter(Protocol):
    """Somebody who was promised the record of a ticket."""

    def ticket_ended(self, ticket: Ticket, error: StoreError | None) -> Need:
        """Take note of the end of one ticket; say how much it was needed. Under the store's lock."""
        ...


class Ticket:
    """One promised read.

    Attributes:
        key: Layer and expert.
        owner: Id of the request that issued it.
        generation: The owner's generation at that moment.
        issued_class: Why it was issued; its books are kept under this class.
        read_class: Why it is read; a join may raise it.
        slot: Where the record goes; `NO_SLOT` while it is predicted and QUEUED.
        num_bytes: Logical bytes of the record.
        issued_ns: When it was queued.
        deadline: When compute is expected to need it; orders tickets of one class (`Prefetch.deadline`).
        confidence: Orders tickets of one deadline.
        started_ns: When its read began, 0 before.
        ready_ns: When its record was usable, 0 before.
        needed_ns: When it was first demanded while in flight, 0 if it was not.
        was_resident: Whether its record has been in a slot before.
        is_predicted_read: Whether it was still predicted when its read began.
        state: Where it stands.
        waiters: Who was promised it; each is told once.
        fate: What became of it, once that is counted (stats.py).
    """

    __slots__ = (
        "confidence",
        "deadline",
        "fate",
        "generation",
        "is_predicted_read",
        "issued_class",
        "issued_ns",
        "key",
        "needed_ns",
        "num_bytes",
        "owner",
        "read_class",
        "ready_ns",
        "slot",
        "started_ns",
        "state",
        "waiters",
        "was_resident",
    )

    def __init__(
        self,
        key: ExpertKey,
        *,
        slot: int,
        num_bytes: int,
        owner: int = 0,
        generation: int = 0,
        read_class: ReadClass = ReadClass.EXACT,
        issued_ns: int = 0,
        deadline: int = 0,
        confidence: float = 1.0,
        was_resident: bool = False,
    ) -> None:
        """Start QUEUED, with nobody waiting."""
        self.key = key
        self.slot = slot
        self.num_bytes = num_bytes
        self.owner = owner
        self.generation = generation
        self.issued_class = self.read_class = read_class
        self.issued_ns = issued_ns
        self.deadline = deadline
        self.confidence = confidence
        self.was_resident = was_resident
        self.is_predicted_read = False
        self.started_ns = self.ready_ns = self.needed_ns = 0
        self.state = TicketState.QUEUED
        self.waiters: list[Waiter] = []
        self.fate: Fate | None = None

    @property
    def cause(self) -> WaitCause:
        """Why its record is not there for whoever waits for it."""
        if self.issued_class is not ReadClass.EXACT:
            return WaitCause.LATE_HINT
        return WaitCause.EVICTED if self.was_resident else WaitCause.COLD

    @property
    def is_ended(self) -> bool:
        """Whether it has reached its one end."""
        return not TRANSITIONS[self.state]

    def start(self, now_ns: int) -> None:
        """QUEUED -> READING."""
        self._move(TicketState.READING)
        self.started_ns = now_ns
        self.is_predicted_read = self.read_class is not ReadClass.EXACT

    def finish(self, now_ns: int) -> Need:
        """READING -> READY, and tell the waiters; return the most urgent need among them."""
        self._move(TicketState.READY)
        self.ready_ns = now_ns
        return self._tell(None)

    def fail(self, error: StoreError) -> None:
        """QUEUED or READING -> FAILED, and tell the waiters why."""
        self._move(TicketState.FAILED)
        self._tell(error)

    def cancel(self) -> None:
        """QUEUED -> CANCELLED. Whoever demands a record makes its ticket exact, and those stay (T3)."""
        assert self.read_class is not ReadClass.EXACT, f"exact ticket cancelled: {self.key}"
        self._move(TicketState.CANCELLED)
        self._tell(None)

    def upgrade(self, read_class: ReadClass) -> bool:
        """Raise the class to `read_class` if that is more urgent (T2); return whether it changed."""
        if read_class >= self.read_class or self.is_ended:
            return False
        self.read_class = read_class
        return True

    def _move(self, state: TicketState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.key}: {self.state.name} -> {state.name}"
        self.state = state

    def _tell(self, error: StoreError | None) -> Need:
        waiters, self.waiters = self.waiters, []
        need = Need.NONE
        for waiter in waiters:
            its_need = waiter.ticket_ended(self, error)
            if its_need > need:
                need = its_need
        return need
