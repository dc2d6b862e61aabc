"""A recorded cycle as it is drawn: rows downwards, each with its waits and reads. Entry: `cycle_of`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cli.html.figures import several
from cli.html.reading import MOST_COLUMNS, Node

PHASES: Final = {"draft": "propose", "verify": "head, verify", "commit": "commit", "observe": "take in"}


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a cycle, in nanoseconds since it began."""

    began_ns: float
    ended_ns: float

    @property
    def took_ns(self) -> float:
        """How long it is."""
        return self.ended_ns - self.began_ns

    def holds(self, at_ns: float) -> bool:
        """Return whether a moment lies in it."""
        return self.began_ns <= at_ns <= self.ended_ns


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute stood still."""

    span: Span
    layer: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class Read:
    """A record on its way, or rows of the n-gram table; `layer` is None for those."""

    span: Span
    issued_ns: float
    layer: int | None
    what: str
    read_class: str
    num_bytes: float | None
    fate: str


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the picture: a layer's turn or a phase, with what was waited for in it and read for it."""

    name: str
    span: Span
    waits: tuple[Wait, ...]
    reads: tuple[Read, ...]

    @property
    def waited_ns(self) -> float:
        """Exposed wait within it."""
        return sum(wait.span.took_ns for wait in self.waits)


@dataclass(frozen=True, slots=True)
class Cycle:
    """A cycle as it is drawn.

    Attributes:
        rows: from top to bottom.
        took_ns: how long it took.
    """

    rows: tuple[Row, ...]
    took_ns: float
    node: Node

    @property
    def layers(self) -> int:
        """Streamed layers; none where every expert is in memory."""
        return len(self.node["layers"].items)

    @property
    def waits(self) -> list[Wait]:
        """Every wait."""
        return [wait for row in self.rows for wait in row.waits]

    @property
    def reads(self) -> list[Read]:
        """Every read."""
        return [read for row in self.rows for read in row.reads]

    @property
    def waited_ns(self) -> float:
        """Exposed wait."""
        return sum(row.waited_ns for row in self.rows)

    @property
    def busy_ns(self) -> float:
        """Time in which at least one read was on the wire."""
        busy_ns = until_ns = 0.0
        for read in sorted(self.reads, key=lambda read: read.span.began_ns):
            start, end = max(until_ns, read.span.began_ns), min(self.took_ns, read.span.ended_ns)
            if end > start:
                busy_ns, until_ns = busy_ns + end - start, end
        return busy_ns


def cycle_of(variant: Node) -> Cycle | None:
    """Return the recorded cycle of a row of a report; None if there is none that can be drawn."""
    node = variant["cycle"]
    took_ns = node["took_ns"].number
    if not took_ns or took_ns <= 0:
        return None
    waits = [wait for one in node["waits"].items if (wait := _wait(one)) is not None]
    reads = [read for one in node["reads"].items if (read := _read(one)) is not None]
    reads += [read for one in node["row_reads"].items if (read := _row_read(one)) is not None]
    rows: list[Row] = []
    spans = _spans(node)
    for place, (name, layer, span) in enumerate(spans):
        own_waits = tuple(wait for wait in waits if _is_first(spans, place, wait.span.began_ns))
        if layer is not None:
            own = tuple(read for read in reads if read.layer == layer)
        else:
            others = {other for _, other, _ in spans if other is not None}
            own = tuple(
                read
                for read in reads
                if read.layer not in others and _is_first(spans, place, max(0.0, read.issued_ns))
            )
        rows.append(Row(name, span, own_waits, own))
    ngram = tuple(read for read in reads if read.layer is None)
    if ngram:
        rows = [_without_ngram(row) for row in rows]
        is_after = [layer is not None or name == PHASES["verify"] for name, layer, _ in spans]
        at = is_after.index(True) if True in is_after else len(rows)
        rows.insert(at, Row("n-gram", Span(0, 0), (), ngram))
    return Cycle(tuple(rows), took_ns, node)


def _spans(node: Node) -> list[tuple[str, int | None, Span]]:
    """Return the rows in order: what is before the layers, the layers, what is after them."""
    phases = {one["phase"].text: span for one in node["phases"].items if (span := _span(one)) is not None}
    turns: dict[int, Span] = {}
    for one in node["layers"].items:
        span, layer = _span(one), one["layer"].whole
        if span is not None and layer is not None:
            turns.setdefault(layer, span)
    layers = [(f"layer {layer}", layer, span) for layer, span in list(turns.items())[:MOST_COLUMNS]]
    found: list[tuple[str, int | None, Span]] = []
    for phase, name in PHASES.items():
        span = phases.get(phase)
        if span is None:
            continue
        if phase == "verify" and layers:
            found += layers
            span = Span(min(span.ended_ns, layers[-1][2].ended_ns), span.ended_ns)
        found.append((name, None, span))
    return found


def _is_first(spans: Sequence[tuple[str, int | None, Span]], place: int, at_ns: float) -> bool:
    """Return whether a row is the first one that a moment lies in."""
    return spans[place][2].holds(at_ns) and not any(span.holds(at_ns) for _, _, span in spans[:place])


def _without_ngram(row: Row) -> Row:
    return Row(row.name, row.span, row.waits, tuple(read for read in row.reads if read.layer is not None))


def _span(node: Node, start: str = "began_ns", end: str = "ended_ns") -> Span | None:
    began, ended = node[start].number, node[end].number
    return None if began is None or ended is None or ended < began else Span(began, ended)


def _wait(node: Node) -> Wait | None:
    span = _span(node)
    return None if span is None else Wait(span, node["layer"].whole, node["cause"].text)


def _read(node: Node) -> Read | None:
    span, layer = _span(node, end="ready_ns"), node["layer"].whole
    if span is None or layer is None:
        return None
    issued = node["issued_ns"].number
    return Read(
        span,
        span.began_ns if issued is None else issued,
        layer,
        f"layer {layer} expert {node['expert'].text}",
        node["read_class"].text,
        node["num_bytes"].number,
        node["fate"].text,
    )


def _row_read(node: Node) -> Read | None:
    span = _span(node, end="ready_ns")
    if span is None:
        return None
    rows = node["num_rows"].whole
    what = "n-gram rows" if rows is None else several(rows, "n-gram row")
    return Read(span, span.began_ns, None, what, "exact", node["num_bytes"].number, "in_time")
