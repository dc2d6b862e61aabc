"""A countdown that wakes whoever waits once, when the last of several things ended: `Completion`, `Watcher`.

Invariants:
    C1  `pending` only falls, under the lock of the desk that counts it down;
    C2  the gate opens exactly once, when `pending` reaches zero, and stays open: no wake-up can be lost
        between looking and waiting, because the gate itself is what is looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from expert_store.errors import StoreError, WouldBlock
from expert_store.ticket import Need, Ticket

_CHECK_INTERVAL_S: Final = 0.5
"""How often a waiter looks whether anybody is left to wake it. Costs nothing against a read of a second."""


class Completion:
    """Counts ends; remembers the first error among them.

    Attributes:
        pending: Ends still to come.
        error: The first error, or None.
        is_waited_for: Whether somebody blocks, or has blocked, for it.
    """

    __slots__ = ("_gate", "error", "is_waited_for", "pending")

    def __init__(self, pending: int) -> None:
        """Expect `pending` ends; zero is done from the start."""
        self.pending = pending
        self.error: StoreError | None = None
        self.is_waited_for = False
        self._gate = threading.Lock()
        if pending:
            self._gate.acquire()

    def count_down(self, error: StoreError | None) -> None:
        """Note one end. The caller holds the desk's lock."""
        if error is not None and self.error is None:
            self.error = error
        self.pending -= 1
        assert self.pending >= 0, "more ends than were expected"
        if not self.pending:
            self._gate.release()

    def wait(self, timeout_s: float | None, check: Callable[[], None]) -> bool:
        """Block until the last end.

        Args:
            timeout_s: Give up after this many seconds; None never.
            check: Called now and then while blocked; raises if nobody can finish any more.

        Returns:
            Whether it is done.
        """
        self.is_waited_for = True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _CHECK_INTERVAL_S if deadline is None else deadline - time.monotonic()
            if self._gate.acquire(timeout=max(0.0, min(left, _CHECK_INTERVAL_S))):
                self._gate.release()
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            check()


class Watcher:
    """Waits for tickets without wanting their records."""

    __slots__ = ("_completion",)

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        """Watch tickets that have not ended; the caller holds the store's lock."""
        self._completion = Completion(len(tickets))
        for ticket in tickets:
            ticket.waiters.append(self)

    def wait(self, timeout_s: float | None, wait: Callable[[Completion, float | None], bool]) -> None:
        """Block until all have ended, by `wait`; raises `WouldBlock` when the time is up."""
        if not wait(self._completion, timeout_s):
            raise WouldBlock(f"{self._completion.pending} reads are under way after {timeout_s:g} s")

    def ticket_ended(self, ticket: Ticket, error: StoreError | None) -> Need:
        """Count one end; the record itself is not wanted."""
        del ticket
        self._completion.count_down(error)
        return Need.NONE
