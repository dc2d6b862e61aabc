"""The right to read slots, from the request to the release. Entry: `LeaseRequest.wait`, then `Lease.release`.

Ownership: `request` pins every slot it names. The pins belong to the lease from then on and are dropped
exactly once: by `release`, by `cancel`, or by the first failed read of the request. Until then no slot of it
changes. Release only after the host has seen the end of the last graph that reads the slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from expert_store.books import LayerCounters
from expert_store.completion import Completion
from expert_store.errors import StoreError, WouldBlock
from expert_store.keys import WaitCause
from expert_store.layout import RecordLayout
from expert_store.slots import SlotTable
from expert_store.stats import LayerStatistics
from expert_store.ticket import Need, Ticket

_NEEDS: Final = (Need.WANTED, Need.URGENT)  # by whether somebody waits


@dataclass(frozen=True, slots=True)
class Shelf:
    """One layer of the store, and what its leases need of the store itself.

    Attributes:
        layout: Where its records lie.
        table: Which of them are in slots.
        counters: What was asked of it.
        lock: The store's lock; protects table and counters.
        clock: Nanoseconds, for statistics.
        wait: Blocks until the last end of a completion, or so many seconds; says whether it is done, and
            raises if nobody is left to finish a read.
    """

    layout: RecordLayout
    table: SlotTable
    counters: LayerCounters
    lock: threading.Lock
    clock: Callable[[], int]
    wait: Callable[[Completion, float | None], bool]

    def statistics(self) -> LayerStatistics:
        """Return a snapshot of its counts; the caller holds the lock."""
        table, counters = self.table, self.counters
        return LayerStatistics(
            layer=table.layer,
            num_slots=table.num_slots,
            num_resident=table.num_resident,
            num_demands=counters.num_demands,
            num_hits=counters.num_demands - counters.num_joined - counters.num_misses,
            num_prefetched=counters.num_prefetched,
            num_joined=counters.num_joined,
            num_misses=counters.num_misses,
            num_evictions=table.num_evictions,
            waits=counters.snapshot_waits(),
        )


class Lease:
    """Slots whose records stay where they are until `release`.

    Attributes:
        experts: The experts asked for, in the order asked.
        slots: Where each of them is.
        is_released: Whether the pins are gone.
    """

    __slots__ = ("_shelf", "experts", "is_released", "slots")

    def __init__(self, shelf: Shelf, experts: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Own one pin of each slot."""
        self._shelf = shelf
        self.experts = experts
        self.slots = slots
        self.is_released = False

    @property
    def layer(self) -> int:
        """Layer index."""
        return self._shelf.table.layer

    def release(self) -> None:
        """Give the slots back. Idempotent; any thread."""
        with self._shelf.lock:
            self.drop()

    def drop(self) -> None:
        """Do what `release` does, for a caller that holds the store's lock."""
        if not self.is_released:
            self.is_released = True
            self._shelf.table.release(self.slots)

    def __enter__(self) -> Self:
        """Return itself; leaving the block releases it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release."""
        self.release()


class LeaseRequest:
    """A lease whose records may still be on their way. Wait for it or cancel it: it holds pins either way."""

    __slots__ = ("_completion", "_last", "_lease", "_shelf")

    def __init__(self, shelf: Shelf, lease: Lease, pending: int) -> None:
        """Wait for `pending` tickets; made by `ExpertStore.request`."""
        self._shelf = shelf
        self._lease = lease
        self._last: Ticket | None = None
        self._completion = Completion(pending) if pending else None

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._completion is None or not self._completion.pending

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody blocks, or has blocked, for it."""
        return self._completion is not None and self._completion.is_waited_for

    def wait(self, timeout_s: float | None = None) -> Lease:
        """Block until every record is in its slot. Wakes once, however many reads there are.

        Args:
            timeout_s: Give up after this many seconds; the request stays valid. None waits for ever.

        Returns:
            The lease; the same one however often this is called.

        Raises:
            WouldBlock: The time ran out.
            StoreError: A record could not be read; what the reader reported. All pins are dropped.
        """
        completion = self._completion
        if completion is not None:
            if completion.pending:
                self._stand_still(completion, timeout_s)
            if completion.error is not None:
                raise completion.error.again()
        if self._lease.is_released:
            raise StoreError("Lease request was cancelled", hint="ask for the experts again")
        return self._lease

    def wait_nowait(self) -> Lease:
        """Return the lease if every record is in its slot.

        Raises:
            WouldBlock: Not yet.
            StoreError: As `wait`.
        """
        if not self.is_ready:
            raise self._would_block("now")
        return self.wait()

    def cancel(self) -> None:
        """Drop the pins. Reads under way finish: exact tickets are never cancelled (T3). Idempotent."""
        self._lease.release()

    def ticket_ended(self, ticket: Ticket, error: StoreError | None) -> Need:
        """Take note of the end of one ticket; see `Waiter`."""
        completion, lease = self._completion, self._lease
        self._last = ticket
        assert completion is not None
        if error is not None:
            lease.drop()
        need = Need.NONE if lease.is_released else _NEEDS[completion.is_waited_for]
        completion.count_down(error)
        return need

    def _stand_still(self, completion: Completion, timeout_s: float | None) -> None:
        """Block, and count how long and why (exposed wait)."""
        shelf = self._shelf
        began_ns = shelf.clock()
        try:
            is_done = shelf.wait(completion, timeout_s)
        finally:
            with shelf.lock:
                self._count_wait(began_ns, shelf.clock())
        if not is_done:
            raise self._would_block(f"after {timeout_s:g} s")

    def _count_wait(self, began_ns: int, ended_ns: int) -> None:
        """Put a wait down to the record that came last: without it, it would have been shorter."""
        waited_ns = max(0, ended_ns - began_ns)
        completion, last = self._completion, self._last
        if completion is None or completion.pending or last is None:
            self._shelf.counters.stood_still(WaitCause.UNFINISHED, began_ns, 0, waited_ns)
            return
        started_ns = last.started_ns or ended_ns  # never started: drained when the store closed or broke
        queue_ns = min(max(0, started_ns - began_ns), waited_ns)
        self._shelf.counters.stood_still(last.cause, began_ns, queue_ns, waited_ns - queue_ns)

    def _would_block(self, when: str) -> WouldBlock:
        pending = 0 if self._completion is None else self._completion.pending
        wanted = len(self._lease.experts)
        return WouldBlock(
            f"{pending} of {wanted} records of layer {self._lease.layer} are not there {when}",
            hint="wait longer, or cancel the request",
            layer=self._lease.layer,
            pending=pending,
        )
