"""When things happened in one cycle: phases, layers, waits and reads on one clock. Entry: `CycleRecorder`.

Nothing here runs while figures are taken: a report answers one prompt more with a recorder, and shows the
cycle that took as long as half of the others. No wait for the device is added: where one layer ends and the
next begins is known from the one read-back that every streamed layer has (experts.py). So a layer's time runs
from the moment the layer before it had its experts to the moment it has its own:

    compute   the device computes the experts of the layer before, then this layer's mixing and router, while
              the host describes that work to it; the end is the read-back of this layer's ids
    waits     the host stands still for records of this layer, its device idle

What follows the last layer's experts (their computation, head, verification) is the rest of `verify`.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import mlx.core as mx

from expert_store.keys import WaitCause
from expert_store.ticket import Ticket
from mlx_flashnext.engine.cycle import Target
from mlx_flashnext.engine.laps import Laps, Phase
from mlx_flashnext.engine.routes import RouteLog

MOST_TOKENS: Final = 32
"""Tokens of the answer that is recorded at most: enough cycles for a middle one, few enough to keep."""
NGRAM: Final = "ngram"


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of the cycle: `draft`, `verify`, `commit` or `observe`."""

    phase: str
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """A streamed layer's turn.

    Attributes:
        began_ns: when the layer before had its experts; for the first one, when the block began.
        routed_ns: when the host knew which experts this one wants, its exact reads queued by then.
        ended_ns: when they were all in memory.
    """

    layer: int
    began_ns: int
    routed_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """Compute stood still.

    Attributes:
        layer: for whose experts; None for rows of the n-gram table.
        cause: as in `Waits` of ssd_wait.py, or `no_slot` and `unfinished`, which are `other` there.
        queue_ns: of it, before the read that ended it had begun; None where that is not known.
    """

    layer: int | None
    cause: str
    began_ns: int
    ended_ns: int
    queue_ns: int | None


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A record on its way.

    Attributes:
        read_class: why it was issued: `exact`, `near` or `speculative`.
        issued_ns: when it was queued.
        began_ns: when its read began.
        ready_ns: when it was in its slot.
        fate: what became of it (`Fate`); `unused` if that was open when the answer had ended.
    """

    layer: int
    expert: int
    read_class: str
    issued_ns: int
    began_ns: int
    ready_ns: int
    num_bytes: int
    fate: str


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of the n-gram table, read together by one reader."""

    began_ns: int
    ready_ns: int
    num_rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RecordedCycle:
    """One cycle; times in nanoseconds since it began, below 0 for what was issued before.

    Attributes:
        number: which of the recorded cycles, from 0.
        cycles_ns: how long each of those took, this one included.
        num_rows: of its block.
        num_kept: tokens it committed.
        took_ns: how long it took.
        phases: in order.
        layers: streamed ones, in order; none where every expert is resident.
        waits: in order of their ends.
        reads: records that were on their way while it ran.
        row_reads: n-gram rows likewise.
    """

    number: int
    cycles_ns: tuple[int, ...]
    num_rows: int
    num_kept: int
    took_ns: int
    phases: tuple[PhaseSpan, ...]
    layers: tuple[LayerSpan, ...]
    waits: tuple[WaitSpan, ...]
    reads: tuple[ReadSpan, ...]
    row_reads: tuple[RowSpan, ...]


@dataclass(frozen=True, slots=True)
class _Cycle:
    """A cycle on the clock's own scale."""

    began_ns: int
    ended_ns: int
    num_rows: int
    num_kept: int
    phases: tuple[PhaseSpan, ...]


class _TimedRoutes(RouteLog):
    """Notes when the routes of each layer became known."""

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__()
        self.known: list[tuple[int, int]] = []
        self._clock = clock

    def routed(self, layer: int, ids_TK: Sequence[Sequence[int]]) -> None:
        """See `RouteLog.routed`."""
        super().routed(layer, ids_TK)
        self.known.append((layer, self._clock()))


class CycleRecorder(Laps):
    """Notes when phases end, waits for nothing, and hears the store within `watching`.

    One answer, one recorder. Give it to the session as its laps, and its `routes` to the session's hints.

    Args:
        clock: nanoseconds; the store's own, or times do not fit together.

    Attributes:
        routes: log of the session's hints.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.routes = _TimedRoutes(clock)
        self._clock = clock
        self._phases: list[PhaseSpan] = []
        self._since_ns = 0
        self._cycles: list[_Cycle] = []
        self._waits: list[WaitSpan] = []
        self._tickets: list[Ticket] = []
        self._rows: list[RowSpan] = []

    @contextmanager
    def watching(self, target: Target) -> Generator[None]:
        """Hear of every wait and read while the block runs; then of those that are under way."""
        target.store.watch(self)
        target.rows.watch(self)
        try:
            yield
            target.store.wait_idle()
        finally:
            target.store.watch(None)
            target.rows.watch(None)

    # What a timeline calls (`Laps`).

    def begin(self) -> None:
        """See `Laps.begin`."""
        self._since_ns = self._clock()

    def end(self, phase: Phase, arrays: Callable[[], Sequence[mx.array]] = tuple) -> None:
        """See `Laps.end`."""
        del arrays
        now_ns = self._clock()
        self._phases.append(PhaseSpan(phase, self._since_ns, now_ns))
        self._since_ns = now_ns

    def cycle(self, num_rows: int, num_kept: int) -> None:
        """See `Laps.cycle`."""
        phases, self._phases = tuple(self._phases), []
        self._cycles.append(_Cycle(phases[0].began_ns, phases[-1].ended_ns, num_rows, num_kept, phases))

    # What store and rows call (`StoreWatch`, `RowWatch`).

    def stood_still(self, layer: int, cause: WaitCause, began_ns: int, queue_ns: int, read_ns: int) -> None:
        """See `StoreWatch.stood_still`."""
        ended_ns = began_ns + queue_ns + read_ns
        self._waits.append(WaitSpan(layer, cause.name.lower(), began_ns, ended_ns, queue_ns))

    def read_ready(self, ticket: Ticket) -> None:
        """See `StoreWatch.read_ready`."""
        self._tickets.append(ticket)

    def rows_stood_still(self, began_ns: int, waited_ns: int) -> None:
        """See `RowWatch.rows_stood_still`."""
        self._waits.append(WaitSpan(None, NGRAM, began_ns, began_ns + waited_ns, None))

    def rows_ready(self, began_ns: int, ended_ns: int, num_rows: int, num_bytes: int) -> None:
        """See `RowWatch.rows_ready`."""
        self._rows.append(RowSpan(began_ns, ended_ns, num_rows, num_bytes))

    # What was recorded.

    def typical(self) -> RecordedCycle | None:
        """Return the cycle than which as many took less time as took more; None without a cycle.

        The first cycle is left out where there are others: it follows the prompt, not an answer.
        """
        numbers = range(1 if len(self._cycles) > 1 else 0, len(self._cycles))
        if not numbers:
            return None
        took_ns = {
            number: self._cycles[number].ended_ns - self._cycles[number].began_ns for number in numbers
        }
        return self.recorded(sorted(numbers, key=took_ns.__getitem__)[(len(numbers) - 1) // 2])

    def recorded(self, number: int) -> RecordedCycle:
        """Return one of the recorded cycles; `watching` is over."""
        one = self._cycles[number]
        start_ns, end_ns = one.began_ns, one.ended_ns
        waits = [wait for wait in self._waits if start_ns <= wait.began_ns < end_ns]
        layers = _layers(self.routes.known, waits, one)
        return RecordedCycle(
            number=number,
            cycles_ns=tuple(cycle.ended_ns - cycle.began_ns for cycle in self._cycles),
            num_rows=one.num_rows,
            num_kept=one.num_kept,
            took_ns=end_ns - start_ns,
            phases=tuple(
                replace(span, began_ns=span.began_ns - start_ns, ended_ns=span.ended_ns - start_ns)
                for span in one.phases
            ),
            layers=tuple(
                LayerSpan(
                    span.layer,
                    span.began_ns - start_ns,
                    span.routed_ns - start_ns,
                    span.ended_ns - start_ns,
                )
                for span in layers
            ),
            waits=tuple(
                replace(wait, began_ns=wait.began_ns - start_ns, ended_ns=wait.ended_ns - start_ns)
                for wait in waits
            ),
            reads=tuple(
                _read(ticket, start_ns)
                for ticket in sorted(self._tickets, key=lambda ticket: ticket.started_ns)
                if ticket.issued_ns < end_ns and ticket.ready_ns > start_ns
            ),
            row_reads=tuple(
                replace(span, began_ns=span.began_ns - start_ns, ready_ns=span.ready_ns - start_ns)
                for span in sorted(self._rows, key=lambda span: span.began_ns)
                if span.began_ns < end_ns and span.ready_ns > start_ns
            ),
        )


def _layers(known: Sequence[tuple[int, int]], waits: Sequence[WaitSpan], one: _Cycle) -> list[LayerSpan]:
    """Return the turns of the layers of a cycle, each from the end of the one before."""
    began_ns = next(span.began_ns for span in one.phases if span.phase == "verify")
    inside = [(layer, at_ns) for layer, at_ns in known if began_ns <= at_ns < one.ended_ns]
    found: list[LayerSpan] = []
    for layer, routed_ns in inside:
        ends = [wait.ended_ns for wait in waits if wait.layer == layer and wait.began_ns >= began_ns]
        found.append(LayerSpan(layer, began_ns, routed_ns, max([routed_ns, *ends])))
        began_ns = found[-1].ended_ns
    assert all(one.ended_ns <= after.routed_ns for one, after in pairwise(found)), "layers overlap"
    return found


def _read(ticket: Ticket, start_ns: int) -> ReadSpan:
    return ReadSpan(
        layer=ticket.key.layer,
        expert=ticket.key.expert,
        read_class=ticket.issued_class.name.lower(),
        issued_ns=ticket.issued_ns - start_ns,
        began_ns=ticket.started_ns - start_ns,
        ready_ns=ticket.ready_ns - start_ns,
        num_bytes=ticket.num_bytes,
        fate="unused" if ticket.fate is None else ticket.fate.name.lower(),
    )
