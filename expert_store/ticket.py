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
        nothing into the new generation (read_queue.py, store.py);
    T5  its slot is written only while LOADING, which no lease and no other ticket shares (slots.py);
    T6  its end is counted once, in records and bytes (stats.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final, Protocol

from expert_store.errors import StoreError
from expert_store.keys import ExpertKey, ReadClass


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

    def ticket_ended(self, error: StoreError | None) -> Need:
        """Take note of the end of one ticket; say how much it was needed. Under the store's lock."""
        ...


class Ticket:
    """One promised read.

    Attributes:
        key: Layer and expert.
        owner: Id of the request that issued it.
        generation: The owner's generation at that moment.
        read_class: Why it is read; a join may raise it.
        slot: Where the record goes.
        num_bytes: Logical bytes of the record.
        issued_ns: When it was queued.
        deadline_ns: When compute is expected to need it; orders tickets of one class. 0 is "now".
        started_ns: When its read began, 0 before.
        state: Where it stands.
        waiters: Who was promised it; each is told once.
    """

    __slots__ = (
        "deadline_ns",
        "generation",
        "issued_ns",
        "key",
        "num_bytes",
        "owner",
        "read_class",
        "slot",
        "started_ns",
        "state",
        "waiters",
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
        deadline_ns: int = 0,
    ) -> None:
        """Start QUEUED, with nobody waiting."""
        self.key = key
        self.slot = slot
        self.num_bytes = num_bytes
        self.owner = owner
        self.generation = generation
        self.read_class = read_class
        self.issued_ns = issued_ns
        self.deadline_ns = deadline_ns
        self.started_ns = 0
        self.state = TicketState.QUEUED
        self.waiters: list[Waiter] = []

    @property
    def is_ended(self) -> bool:
        """Whether it has reached its one end."""
        return not TRANSITIONS[self.state]

    def start(self, now_ns: int) -> None:
        """QUEUED -> READING."""
        self._move(TicketState.READING)
        self.started_ns = now_ns

    def finish(self) -> Need:
        """READING -> READY, and tell the waiters; return the most urgent need among them."""
        self._move(TicketState.READY)
        return self._tell(None)

    def fail(self, error: StoreError) -> None:
        """QUEUED or READING -> FAILED, and tell the waiters why."""
        self._move(TicketState.FAILED)
        self._tell(error)

    def cancel(self) -> None:
        """QUEUED -> CANCELLED. Only a ticket that nobody was promised can be cancelled (T3)."""
        assert self.read_class is not ReadClass.EXACT, f"exact ticket cancelled: {self.key}"
        assert not self.waiters, f"promised ticket cancelled: {self.key}"
        self._move(TicketState.CANCELLED)

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
            its_need = waiter.ticket_ended(error)
            if its_need > need:
                need = its_need
        return need
