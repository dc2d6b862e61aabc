"""The expert store: ask for experts of a layer, get slots that hold them. Entry: `ExpertStore`.

    caller                         dispatch.py                    reader threads
    prefetch -> queue a predicted ticket per useful hint ---> next_job --> take a slot, read into it
    request --> pin hits, issue one exact ticket per miss --> next_job --> read into the slot
    wait    <-- last ticket ended <-------------------------- hand_in
    (compute)
    release --> unpin
    advance --> older guesses are stale, the block's demands count for the ranking

A request takes the one lock once and wakes the readers once for all its misses; its waiter is woken once. The
caller's thread makes no call that touches storage (FIELD P06). Nothing is ever substituted for a record that
could not be read (FIELD P26): its slot goes back to EMPTY and every waiter gets the error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, Self

from expert_store.books import LayerCounters
from expert_store.completion import Completion, Watcher
from expert_store.dispatch import Dispatcher
from expert_store.errors import SlotsExhausted, StoreClosed, StoreError, WouldBlock
from expert_store.keys import Prefetch, ReadClass, WaitCause
from expert_store.layout import RecordLayout
from expert_store.lease import Lease, LeaseRequest, Shelf
from expert_store.policy.base import EvictionPolicy
from expert_store.policy.lru import LeastRecentlyUsed
from expert_store.policy.slru import SegmentedLru
from expert_store.prefetch import NO_OUTLOOK, PrefetchLimits
from expert_store.reader import Reader, SlotMemory, ThreadReader
from expert_store.slots import SlotState, SlotTable
from expert_store.source import ByteSource
from expert_store.stats import HintOutcome, StoreStatistics
from expert_store.ticket import NO_SLOT
from expert_store.unverified import UnverifiedDemands
from expert_store.watch import StoreWatch

POLICIES: Final[Mapping[str, Callable[[int], EvictionPolicy]]] = MappingProxyType(
    {"lru": LeastRecentlyUsed, "slru": SegmentedLru}
)
"""Eviction policies by name; each takes the number of slots."""

_PRELOAD_BATCH: Final = 32
"""Records asked for at once while a layer is filled; two batches are under way, so readers never run dry."""


class ExpertStore:
    """Experts of any number of layers, each layer with its own slots and record size (FIELD P05)."""

    def __init__(
        self,
        layouts: Mapping[int, RecordLayout],
        source: ByteSource,
        memory: SlotMemory,
        *,
        slots: Mapping[int, int],
        policy: str = "lru",
        num_readers: int = 4,
        reader: Reader | None = None,
        limits: PrefetchLimits | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Start with every slot empty and the readers running.

        Args:
            layouts: Where the records of each layer lie.
            source: Where bytes come from. Whoever opened it closes it, after the store.
            memory: Where records go.
            slots: Slots of each layer; at least one. A slot for every expert makes slot == expert.
            policy: A name in `POLICIES`.
            num_readers: Reader threads, if no `reader` is given.
            reader: Who reads; for tests.
            limits: How much may be guessed.
            clock: Nanoseconds, for statistics alone.

        Raises:
            StoreError: An unknown policy, or a layer without slots.
        """
        if policy not in POLICIES:
            raise StoreError(
                f"Unknown eviction policy: {policy!r}",
                hint=f"choose one of: {', '.join(POLICIES)}",
                policy=policy,
            )
        self._lock = threading.Lock()
        self._unverified = UnverifiedDemands()
        self._leaving: deque[tuple[int, int]] = deque()
        self._is_closed = False
        limits = limits or PrefetchLimits()
        self._reader = ThreadReader(num_readers) if reader is None else reader
        shelves: dict[int, Shelf] = {}
        for layer, layout in sorted(layouts.items()):
            num_slots = slots.get(layer, 0)
            if num_slots < 1:
                raise StoreError(
                    f"Layer {layer} has {num_slots} slots",
                    hint="give every layer at least one slot",
                    layer=layer,
                )
            table = SlotTable(
                layer,
                layout.num_experts,
                num_slots,
                POLICIES[policy](num_slots),
                min_exact=limits.exact_slots(num_slots),
            )
            shelves[layer] = Shelf(layout, table, LayerCounters(), self._lock, clock, self._wait)
        self._shelves = shelves
        self._dispatcher = Dispatcher(shelves, source, memory, self._reader, self._lock, clock, limits)
        self._prefetcher = self._dispatcher.prefetcher
        self._reader.start(self._dispatcher)

    # What callers use.

    def request(
        self, layer: int, experts: Sequence[int], *, owner: int = 0, row_masks: Sequence[int] | None = None
    ) -> LeaseRequest:
        """Pin the experts that are resident and queue one exact read for each that is not.

        All reads are queued before this returns, and readers are told once. Any thread. Does not block, but
        for one case: guesses on the wire hold slots without which there is no room. Then it waits for those
        reads, so that no hint can make a request fail that would not have failed without (I1).

        Args:
            layer: Layer index.
            experts: Distinct experts of it; fewer than the slots that can be freed.
            owner: Id of the request on whose behalf it is.
            row_masks: For a block whose rows may still be rejected: bit r of an expert's mask says that row
                r chose it. The demand then counts for recency when `advance` says how many rows stay
                (unverified.py). None: it counts at once.

        Raises:
            SlotsExhausted: More are missing than slots can be freed now. Nothing was changed.
            StoreError: No such layer or expert, an expert named twice, a closed or broken store.
        """
        shelf = self._shelf(layer)
        wanted = tuple(experts)
        if wanted and not _are_experts(wanted, shelf.table.num_experts):
            raise StoreError(
                f"Experts must be distinct and below {shelf.table.num_experts}: {wanted}",
                hint="this is a bug of the caller",
                layer=layer,
            )
        masks = None if row_masks is None else tuple(row_masks)
        while True:
            with self._lock:
                self._finish_leaving()
                self._dispatcher.check_open()
                try:
                    return self._take(shelf, wanted, owner, masks)
                except SlotsExhausted as error:
                    watcher = self._watch_guesses(layer, wanted, error)
            self._stand_still(shelf, watcher, None)

    def acquire(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        owner: int = 0,
        row_masks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Lease:
        """Return a lease on the experts; blocks until they are in memory.

        Args:
            layer: Layer index.
            experts: As `request`.
            owner: As `request`.
            row_masks: As `request`.
            timeout_s: Give up after this many seconds; None never.
            meanwhile: Called once if there is anything to wait for, when its reads are queued: the moment to
                hand over hints, which then cannot overtake what is demanded.

        Raises:
            StoreError: As `request` and `LeaseRequest.wait`. Nothing stays pinned.
        """
        while True:
            try:
                request = self.request(layer, experts, owner=owner, row_masks=row_masks)
                break
            except SlotsExhausted as error:
                if not error.context["num_loading"]:
                    raise
                # Reads of cancelled requests hold slots until they end; no guess is queued before those.
                self._wait_for_slots(self._shelf(layer), timeout_s)
        try:
            if meanwhile is not None and not request.is_ready:
                meanwhile()
            return request.wait(timeout_s)
        except BaseException:  # KeyboardInterrupt included: an abandoned request must not keep pins
            request.cancel()
            raise

    def acquire_nowait(self, layer: int, experts: Sequence[int], *, owner: int = 0) -> Lease:
        """Return a lease if every expert is resident.

        Raises:
            WouldBlock: Some are not; reads for them were queued, nothing stays pinned.
            StoreError: As `request`.
        """
        request = self.request(layer, experts, owner=owner)
        try:
            return request.wait_nowait()
        except WouldBlock:
            request.cancel()
            raise

    def is_resident(self, layer: int, expert: int) -> bool:
        """Return whether the record is in a slot, whole."""
        with self._lock:
            return self._shelf(layer).table.state_of(expert) is SlotState.FULL

    def is_layer_resident(self, layer: int) -> bool:
        """Return whether every record of the layer is in memory for good, with slot == expert."""
        table = self._shelf(layer).table
        return table.is_identity and table.num_resident == table.num_experts

    def preload(self, layer: int, progress: Callable[[int], None] | None = None) -> None:
        """Fill a layer that has a slot for every expert; blocks.

        Args:
            layer: Layer index.
            progress: Called on this thread with the number of records in memory so far.

        Raises:
            StoreError: The layer has fewer slots, or a record could not be read.
        """
        table = self._shelf(layer).table
        if not table.is_identity:
            raise StoreError(
                f"Layer {layer} has {table.num_slots} slots for {table.num_experts} experts",
                hint="preload needs a slot for every expert",
                layer=layer,
            )
        everything = range(table.num_experts)
        batches = [everything[at : at + _PRELOAD_BATCH] for at in everything[::_PRELOAD_BATCH]]
        following = self.request(layer, batches[0])
        for number, batch in enumerate(batches):
            current = following
            if number + 1 < len(batches):
                following = self.request(layer, batches[number + 1])
            try:
                current.wait().release()
            except BaseException:
                following.cancel()
                current.cancel()
                raise
            if progress is not None:
                progress(batch.stop)

    def prefetch(
        self,
        requests: Sequence[Prefetch],
        *,
        owner: int,
        generation: int,
        issued: list[Prefetch] | None = None,
        outlook: Mapping[int, memoryview] = NO_OUTLOOK,
    ) -> int:
        """Hand over hints: records that will probably be demanded. Neither blocks nor reads nor raises.

        One acquisition of the lock and work bounded by `PrefetchLimits.max_hints`, whatever the hints say;
        senseless, late and too many ones are counted and forgotten (`StoreStatistics.hints`). Any thread.

        Args:
            requests: Hints, in any order.
            owner: Id of the request on whose behalf they are.
            generation: The owner's generation they belong to. An older one than `advance` has reached is
                refused; a later one is let in and outlives every `advance` before its own end.
            issued: The hints that led to tickets, whose number is returned, are appended here.
            outlook: How likely the next demand of a layer will name each of its experts, float32 by layer;
                guesses evict what is least likely. What is no such thing is ignored.
        """
        hints, num_invalid = self._prefetcher.good_hints(requests)
        with self._lock:
            self._finish_leaving()
            counts = self._dispatcher.ledger.hints
            counts[HintOutcome.INVALID] += num_invalid
            counts[HintOutcome.TOO_MANY] += len(requests) - len(hints) - num_invalid
            num_issued = self._prefetcher.hand_over(hints, owner, generation, issued, outlook)
            self._dispatcher.wake_for_guesses(num_issued)
        return num_issued

    def stop_prefetching(self) -> None:
        """Refuse hints for good and make every guess stale; exact demand goes on. Idempotent, any thread."""
        with self._lock:
            self._prefetcher.stop()

    def give_way_to(self, is_busy: Callable[[], bool]) -> None:
        """Begin no guess while another table's demanded reads are on the same drive.

        Args:
            is_busy: Whether they are; asked often, under the store's lock, so it may take no lock. Whoever
                answers calls `resume_guesses` when it turns false.
        """
        with self._lock:
            self._dispatcher.give_way_to(is_busy)

    def resume_guesses(self) -> None:
        """Tell the readers of guesses that have given way. Any thread; does not block."""
        with self._lock:
            self._dispatcher.wake_for_guesses(self._dispatcher.queue.num_predicted)

    def set_prefetch_budget(self, budget_bytes: int | None) -> None:
        """Change the bytes that one owner may have read ahead in one generation; None does not limit."""
        with self._lock:
            self._prefetcher.set_budget(budget_bytes)

    def advance(self, owner: int, generation: int, *, num_rows: int | None = None) -> None:
        """Begin a new generation of an owner, and close the cycle's statistics (`last_cycle`).

        Guesses of older generations are stale from now on: queued ones are cancelled, the others leave
        first and earn no credit (T4). Exact tickets stay (T3). Demands made with `row_masks` count for
        recency as far as their rows stay. The same generation again does nothing.

        Args:
            owner: Id of the request.
            generation: Its new generation.
            num_rows: Rows of the open block that stay, the first ones; None keeps all.

        Raises:
            StoreError: The generation goes backwards.
        """
        with self._lock:
            self._finish_leaving()
            current = self._prefetcher.generation(owner)
            if generation < current:
                raise StoreError(
                    f"Generation of owner {owner} goes backwards: {current} to {generation}",
                    hint="this is a bug of the caller",
                    owner=owner,
                )
            self._begin(owner, generation, num_rows)

    def leave(self, owner: int, generation: int) -> None:
        """Begin a generation as `advance` does, with no row of an open block, and never wait for the lock.

        An answer may be ended by the garbage collector: on any thread, between any two steps, with the lock
        held. What cannot be done at once is done by the next request, hand-over or generation.

        Args:
            owner: Id of the request.
            generation: Its new generation; an older one than the present does nothing.
        """
        self._leaving.append((owner, generation))
        if self._lock.acquire(blocking=False):
            try:
                self._finish_leaving()
            finally:
                self._lock.release()

    def _finish_leaving(self) -> None:
        """Do what `leave` could not, under the lock."""
        while self._leaving:
            self._begin(*self._leaving.popleft(), num_rows=0)

    def _begin(self, owner: int, generation: int, num_rows: int | None) -> None:
        """Begin a generation, if it is a new one, under the lock."""
        if generation > self._prefetcher.generation(owner):
            self._unverified.settle(owner, num_rows)
            self._prefetcher.advance(owner, generation)
            self._dispatcher.ledger.close_cycle(shelf.counters for shelf in self._shelves.values())

    def demand_counts(self) -> dict[int, tuple[int, ...]]:
        """Return how often each expert was demanded by committed rows, by layer; see popularity.py."""
        with self._lock:
            return {layer: tuple(shelf.table.ranking.counts) for layer, shelf in self._shelves.items()}

    def wait_idle(self, timeout_s: float | None = None) -> None:
        """Block until every ticket that is queued or being read now has ended, well or not.

        Raises:
            WouldBlock: The time ran out.
            WorkerDied: They will never end.
        """
        with self._lock:
            watcher = Watcher(self._dispatcher.queue.in_flight())
        watcher.wait(timeout_s, self._wait)

    def _take(
        self, shelf: Shelf, wanted: tuple[int, ...], owner: int, row_masks: tuple[int, ...] | None
    ) -> LeaseRequest:
        """Do what `request` says, under the lock; raises `SlotsExhausted` with nothing changed."""
        layer = shelf.table.layer
        slots, missing, joining = shelf.table.take(wanted, is_committed=row_masks is None)
        if row_masks is not None:
            self._unverified.add(owner, shelf.table, wanted, row_masks)
        counters = shelf.counters
        counters.num_demands += len(wanted)
        lease = Lease(shelf, wanted, tuple(slots))
        request = LeaseRequest(shelf, lease, len(missing) + len(joining))
        if joining:
            counters.num_joined += len(joining)
            self._dispatcher.join(layer, [wanted[position] for position in joining], request)
        if missing:
            pairs = [(wanted[position], slots[position]) for position in missing]
            generation = self._prefetcher.generation(owner)
            num_joined = self._dispatcher.issue(shelf, pairs, request, owner, generation)
            counters.num_joined += num_joined
            counters.num_misses += len(missing) - num_joined
        self._prefetcher.passed(layer, owner)
        return request

    def _watch_guesses(self, layer: int, experts: tuple[int, ...], error: SlotsExhausted) -> Watcher:
        """Watch the guesses that hold slots of a layer, if those are what a demand lacks; else raise."""
        room, num_guessed, wanted = (error.context[name] for name in ("room", "num_guessed", "wanted"))
        assert isinstance(room, int)
        assert isinstance(num_guessed, int)
        assert isinstance(wanted, int)
        if wanted > room + num_guessed:
            raise error
        held = [t for t in self._dispatcher.queue.in_flight() if t.key.layer == layer and t.slot != NO_SLOT]
        guesses = [ticket for ticket in held if ticket.read_class is not ReadClass.EXACT]
        return Watcher([ticket for ticket in guesses if ticket.key.expert not in experts])

    def _wait_for_slots(self, shelf: Shelf, timeout_s: float | None) -> None:
        """Block until every ticket that holds a slot of the layer now has ended; queued guesses hold none."""
        layer = shelf.table.layer
        with self._lock:
            tickets = self._dispatcher.queue.in_flight()
            watcher = Watcher([t for t in tickets if t.key.layer == layer and t.slot != NO_SLOT])
        self._stand_still(shelf, watcher, timeout_s)

    def _stand_still(self, shelf: Shelf, watcher: Watcher, timeout_s: float | None) -> None:
        """Wait for slots, and count how long (exposed wait)."""
        began_ns = shelf.clock()
        try:
            watcher.wait(timeout_s, self._wait)
        finally:
            with self._lock:
                waited_ns = max(0, shelf.clock() - began_ns)
                shelf.counters.stood_still(WaitCause.NO_SLOT, began_ns, waited_ns, 0)

    def statistics(self) -> StoreStatistics:
        """Return a snapshot of every count."""
        with self._lock:
            layers = tuple(shelf.statistics() for shelf in self._shelves.values())
            return self._dispatcher.ledger.snapshot(layers, num_queued=self._dispatcher.queue.num_queued)

    def watch(self, watch: StoreWatch | None) -> None:
        """Have somebody told of every wait and read from now on, or nobody any more; see watch.py."""
        with self._lock:
            self._dispatcher.watch = watch
            for layer, shelf in self._shelves.items():
                shelf.counters.watch = None if watch is None else partial(watch.stood_still, layer)

    def close(self) -> None:
        """Fail what is queued, let reads on the wire finish, join every thread. Idempotent.

        The source stays open: whoever opened it closes it, after this.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._dispatcher.reader_failed(StoreClosed("Store is closed", hint="open the model again"))
        self._reader.close()

    def __enter__(self) -> Self:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _shelf(self, layer: int) -> Shelf:
        """Return a layer; needs no lock, the set of layers never changes."""
        shelf = self._shelves.get(layer)
        if shelf is None:
            raise StoreError(
                f"No such layer: {layer}", hint=f"layers are {sorted(self._shelves)}", layer=layer
            )
        return shelf

    def _wait(self, completion: Completion, timeout_s: float | None) -> bool:
        """Block until the last end of a completion; return whether it is done. Without the lock."""
        return self._reader.wait_for(completion, timeout_s, self._check_reader)

    def _check_reader(self) -> None:
        """Break the store if a reader is gone; called by waiters, without the lock."""
        try:
            self._reader.check()
        except StoreError as error:
            with self._lock:
                self._dispatcher.reader_failed(error)
            raise


def _are_experts(experts: tuple[int, ...], num_experts: int) -> bool:
    return min(experts) >= 0 and max(experts) < num_experts and len(set(experts)) == len(experts)
