"""From hint to ticket: what is let in, what it costs, when it grows stale. Entry: `Prefetcher.hand_over`.

A hint moves bytes and never decides anything (I1): it is accepted or refused and counted, and nothing it says
can raise. All methods run under the store's lock, one hand-over in one acquisition, its work bounded by
`PrefetchLimits.max_hints`.

What a guess may take. Queued, nothing. When its read begins (dispatch.py) it takes an EMPTY slot, else that
of a wrong guess, else the one the policy would free next - the last only while fewer than `num_slots -
min_exact_slots` guesses of the layer are expected (slots.py S6, ranking.py K3), and never that of a record
which the coming demand is as likely to want: a hint for what is resident, and an outlook on all experts of a
layer, keep it from guesses that are less sure (K4). At most `max_reads`
guesses are on the wire, half the readers, so that an exact read starts at once and shares the drive with few:
two of four cost it one record's time and keep the drive busy, three cost two, four cost three (measured:
bench/studies/guess_interference.py). With a single reader it waits for the one read on the wire (T3).

What becomes of it. Demanded in a slot: used. Demanded queued or on the wire: joined, exact from then on.
What waits when its layer has been demanded without it is cancelled, if it was for that demand (near).
`advance` makes the owner's older guesses stale: queued ones are cancelled, those in slots or on the wire
become the first entries to leave and earn no credit (T4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, cast

from expert_store.books import Ledger
from expert_store.errors import StoreError
from expert_store.keys import ExpertKey, Prefetch, ReadClass
from expert_store.lease import Shelf
from expert_store.read_queue import ReadQueue
from expert_store.stats import Fate, HintOutcome
from expert_store.ticket import Ticket, TicketState

_EXACT: Final = ReadClass.EXACT
_NEAR: Final = ReadClass.NEAR
_GUESSES: Final = (_NEAR, ReadClass.SPECULATIVE)
NO_OUTLOOK: Final[Mapping[int, memoryview]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """How much may be guessed.

    Attributes:
        max_queued: Predicted tickets that may wait for a reader at once, over all layers and owners.
        max_hints: Hints looked at in one hand-over; what lies beyond is counted and refused unseen.
        max_reads: Guesses on the wire at once; None: half as many as there are readers, at least one.
        budget_bytes: What one owner may have read in one generation; None does not limit.
        min_exact_slots: Slots of each layer that guesses may not take: as many as the widest block can need
            (top_k x rows). None: half of them, rounded up. Layers with a slot for every expert need none.
    """

    max_queued: int = 1024
    max_hints: int = 2048
    max_reads: int | None = None
    budget_bytes: int | None = None
    min_exact_slots: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is negative."""
        for name in ("max_queued", "max_hints", "max_reads", "budget_bytes", "min_exact_slots"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise StoreError(f"{name} is negative: {value}", hint="give zero or more")

    def exact_slots(self, num_slots: int) -> int:
        """Return the slots of a layer that guesses may not take."""
        wanted = (num_slots + 1) // 2 if self.min_exact_slots is None else self.min_exact_slots
        return min(num_slots, wanted)


class Issuing(Protocol):
    """What the prefetcher asks of the dispatcher."""

    queue: ReadQueue
    ledger: Ledger

    def guess(self, shelf: Shelf, hint: Prefetch, owner: int, generation: int, now_ns: int) -> Ticket | None:
        """Queue one predicted ticket; None if the queue is full."""
        ...

    def end_unread(self, ticket: Ticket, fate: Fate) -> None:
        """Bring a predicted ticket that was taken out of the queue to its end."""
        ...


class Prefetcher:
    """Generations, budgets and unused guesses of all owners.

    Attributes:
        is_stopped: Whether hints are refused for good.
    """

    def __init__(
        self,
        shelves: Mapping[int, Shelf],
        issuing: Issuing,
        limits: PrefetchLimits,
        clock: Callable[[], int],
    ) -> None:
        """Start with every owner at generation 0."""
        self.is_stopped = False
        self._shelves = shelves
        self._issuing = issuing
        self._limits = limits
        self._clock = clock
        self._generations: dict[int, int] = {}
        self._spent: dict[int, int] = {}  # bytes by owner, of its present generation
        self._waiting: dict[int, int] = dict.fromkeys(shelves, 0)  # queued guesses by layer
        self._unused: dict[int, dict[ExpertKey, Ticket]] = {}  # by owner: in slots, not demanded yet

    def generation(self, owner: int) -> int:
        """Return the present generation of an owner."""
        return self._generations.get(owner, 0)

    def is_stale(self, ticket: Ticket) -> bool:
        """Whether the generation of a predicted ticket has ended."""
        return self.is_stopped or ticket.generation < self._generations.get(ticket.owner, 0)

    def set_budget(self, budget_bytes: int | None) -> None:
        """Change the byte budget from the next hint on; what was let in stays."""
        limits = self._limits
        self._limits = PrefetchLimits(
            limits.max_queued, limits.max_hints, limits.max_reads, budget_bytes, limits.min_exact_slots
        )

    def good_hints(self, requests: Sequence[Prefetch]) -> tuple[list[Prefetch], int]:
        """Return the hints that are some, and how many of those looked at are not; without the lock."""
        looked_at = requests[: self._limits.max_hints]
        good = [hint for hint in looked_at if _is_hint(hint)]
        return good, len(looked_at) - len(good)

    def hand_over(
        self,
        hints: Sequence[Prefetch],
        owner: int,
        generation: int,
        issued: list[Prefetch] | None = None,
        outlook: Mapping[int, memoryview] = NO_OUTLOOK,
    ) -> int:
        """Let in what may be, the most urgent first, noting it in `issued`; return the tickets issued.

        Args:
            hints: that are some, see `good_hints`.
            owner: of the tickets.
            generation: of the owner.
            issued: as `ExpertStore.prefetch`.
            outlook: as `ExpertStore.prefetch`.
        """
        counts = self._issuing.ledger.hints
        if self.is_stopped:
            counts[HintOutcome.STOPPED] += len(hints)
            return 0
        if generation < self._generations.get(owner, 0):
            counts[HintOutcome.STALE] += len(hints)
            return 0
        for layer, chances in outlook.items():
            self._foresee(layer, chances)
        absent = self._absent(hints)
        counts[HintOutcome.RESIDENT] += len(hints) - len(absent)
        if not absent:
            return 0
        absent.sort(key=_urgency)
        num_issued = 0
        now_ns = self._clock()
        for hint in absent:
            outcome = self._let_in(hint, owner, generation, now_ns)
            counts[outcome] += 1
            if outcome is HintOutcome.ACCEPTED:
                num_issued += 1
                if issued is not None:
                    issued.append(hint)
        return num_issued

    def advance(self, owner: int, generation: int) -> None:
        """Make the owner's guesses of older generations stale (T4)."""
        self._generations[owner] = generation
        self._spent[owner] = 0
        queue = self._issuing.queue
        if queue.num_predicted:
            self._cancel([t for t in queue.guesses() if t.owner == owner and t.generation < generation])
        unused = self._unused.get(owner)
        if unused:
            self._give_up([ticket for ticket in unused.values() if ticket.generation < generation])

    def passed(self, layer: int, owner: int) -> None:
        """Cancel the owner's queued guesses for the demand that a layer has just had without them."""
        if self._waiting[layer]:
            queued = self._issuing.queue.guesses()
            self._cancel(
                [t for t in queued if t.key.layer == layer and t.owner == owner and t.read_class is _NEAR]
            )

    def stop(self) -> None:
        """Refuse hints from now on and make every guess stale."""
        self.is_stopped = True
        self._cancel(self._issuing.queue.guesses())
        for unused in list(self._unused.values()):
            self._give_up(list(unused.values()))

    # What the dispatcher tells.

    def left_queue(self, ticket: Ticket) -> None:
        """Take note that a ticket of this layer is not both QUEUED and predicted any more."""
        self._waiting[ticket.key.layer] -= 1

    def came_unused(self, ticket: Ticket) -> None:
        """Take in a guess that is in its slot and was not demanded."""
        self._unused.setdefault(ticket.owner, {})[ticket.key] = ticket
        self._issuing.ledger.keep_unused(ticket, 1)
        if self.is_stale(ticket):
            self._give_up([ticket])

    def went(self, ticket: Ticket) -> None:
        """Forget a guess that was used, evicted or given up."""
        del self._unused[ticket.owner][ticket.key]
        self._issuing.ledger.keep_unused(ticket, -1)

    def _give_up(self, tickets: Sequence[Ticket]) -> None:
        """Let guesses leave first that nobody has used; the least confident of them before the others."""
        for ticket in sorted(tickets, key=_confidence):
            self.went(ticket)
            self._shelves[ticket.key.layer].table.ranking.doubt(ticket.key.expert)
            self._issuing.ledger.close(ticket, Fate.STALE)

    def _cancel(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._issuing.queue.remove(ticket)
            self._issuing.end_unread(ticket, Fate.CANCELLED)

    def _absent(self, hints: Sequence[Prefetch]) -> list[Prefetch]:
        """Return the hints whose record is not in a slot, whole; the others keep theirs from guesses (K4)."""
        shelves = self._shelves
        found: list[Prefetch] = []
        for hint in hints:
            shelf = shelves.get(hint[0])
            if shelf is None or not shelf.table.is_full(hint[1]):
                found.append(hint)
            else:
                shelf.table.ranking.want(hint[1], hint[3])
        return found

    def _foresee(self, layer: int, chances: object) -> None:
        """Pass on what is said of all experts of a layer, if it is that."""
        shelf = self._shelves.get(layer)
        if shelf is None or not isinstance(chances, memoryview) or chances.format != "f":
            return
        if chances.shape == (shelf.table.num_experts,):
            shelf.table.ranking.foresee(cast("memoryview", chances))

    def _let_in(self, hint: Prefetch, owner: int, generation: int, now_ns: int) -> HintOutcome:
        layer, expert, read_class, confidence, deadline = hint
        shelf = self._shelves.get(layer)
        if shelf is None or not 0 <= expert < shelf.table.num_experts:
            return HintOutcome.INVALID
        table = shelf.table
        issuing = self._issuing
        ticket = issuing.queue.find(ExpertKey(layer, expert)) if len(issuing.queue) else None
        if ticket is not None:
            self._hint_again(ticket, read_class, deadline, confidence, owner, generation)
            return HintOutcome.IN_FLIGHT
        if not table.has_room_for_guesses(self._waiting[layer]):
            return HintOutcome.NO_ROOM
        spent = self._spent.get(owner, 0) + shelf.layout.record_bytes
        budget = self._limits.budget_bytes
        if budget is not None and spent > budget:
            return HintOutcome.OVER_BUDGET
        if issuing.guess(shelf, hint, owner, generation, now_ns) is None:
            return HintOutcome.QUEUE_FULL
        self._spent[owner] = spent
        self._waiting[layer] = (
            self._waiting[layer] + 1
        )  # again: a displaced ticket may have been of this layer
        return HintOutcome.ACCEPTED

    def _hint_again(
        self,
        ticket: Ticket,
        read_class: ReadClass,
        deadline: int,
        confidence: float,
        owner: int,
        generation: int,
    ) -> None:
        """Let a newer hint take over a guess in flight, if it is more urgent or the old one is stale."""
        if ticket.read_class is _EXACT:
            return
        is_higher = ticket.state is TicketState.QUEUED and self._issuing.queue.reorder(
            ticket, read_class, deadline, confidence
        )
        if is_higher or self.is_stale(ticket):
            ticket.owner, ticket.generation = owner, generation


def _urgency(hint: Prefetch) -> tuple[int, int, float]:
    return (hint[2], hint[4], -hint[3])


def _confidence(ticket: Ticket) -> float:
    return ticket.confidence


def _is_hint(hint: object) -> bool:
    """Whether a hint is what `Prefetch` says; hints come from predictors, whose arithmetic may go wrong."""
    if not isinstance(hint, Prefetch):
        return False
    layer, expert, read_class, confidence, deadline = hint
    return (
        type(layer) is int
        and type(expert) is int
        and type(deadline) is int
        and read_class in _GUESSES
        and type(confidence) in (float, int)
        and 0.0 <= confidence <= 1.0
    )
