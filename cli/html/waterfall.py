"""One recorded cycle: layers against time, with what was computed, waited for, and read by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cli.html.cycle import Cycle, Read, Row, cycle_of
from cli.html.drawing import Picture, legend, swatch, tick_text, ticks
from cli.html.figures import UNKNOWN, count, ms, several, share, size, total
from cli.html.markup import Html, join, tag
from cli.html.section import Section, figure
from cli.html.tables import Value, folded, table
from cli.html.variants import Variant

CLASSES: Final = (("exact", "exact"), ("near", "near"), ("speculative", "speculative"))
MOST_FOLDED: Final = 24
"""Cycles that are drawn, folded away, beyond the two that are shown."""
_BAR, _LANE, _GAP, _MOST_LANES = 9, 4, 6, 8
WASTED: Final = frozenset({"stale", "evicted_unused", "unused", "failed"})
_CAUSES: Final = {
    "cold": "never read before",
    "evicted": "evicted",
    "late_hint": "late hint",
    "no_slot": "no slot",
    "unfinished": "given up",
    "ngram": "n-gram rows",
}


def waterfalls(variants: Sequence[Variant], *, prefix: str = "cycle") -> Section | None:
    """Return the section: of the rows that read, that which waits most and least shown, the others folded."""
    drawn = [(one, cycle) for one in variants if (cycle := cycle_of(one.node)) is not None]
    if not drawn:
        return None
    ordered = sorted(drawn, key=lambda pair: -(pair[0].node["exposed_wait_ns"].number or 0.0))
    reading = [pair for pair in ordered if pair[1].layers] or ordered
    shown = [reading[0]] if len(reading) == 1 else [reading[0], reading[-1]]
    hidden = [pair for pair in drawn if all(pair is not other for other in shown)]
    body = [_drawn(f"{prefix}-{drawn.index(pair)}", *pair) for pair in shown]
    body += [
        folded(f"The cycle of {one.name}", _drawn(f"{prefix}-{drawn.index((one, cycle))}", one, cycle))
        for one, cycle in hidden[:MOST_FOLDED]
    ]
    sentences: list[str | Html] = [
        "A cycle is one turn of the main loop: propose, verify, commit. Time runs to the right, layers run "
        "down; each layer's turn begins when the layer before it has its experts. Grey is computing, orange "
        "is standing still. Beneath hang the reads for that layer: a thin line while a read waits in the "
        "queue, a bar while it is on the wire. A read left of its layer's turn was begun ahead of its "
        "demand, one to the right of it is for a block to come; one under an orange bar is what was being "
        "waited for. Where orange goes on after the last read has ended, the waiting thread was slow to "
        "wake.",
        "These cycles are real: each row answered once more with its steps written down, and the cycle of "
        "middle length is shown. No other figure of this page was taken of that run.",
    ]
    if len(hidden) > MOST_FOLDED:
        more = several(len(hidden) - MOST_FOLDED, "more cycle")
        sentences.append(f"{more} can be had from --json.")
    return Section("waterfall", "One cycle, step by step", sentences, body)


def _drawn(identity: str, variant: Variant, cycle: Cycle) -> Html:
    kinds = {read.read_class for read in cycle.reads}
    keys = [
        (swatch("f-compute"), "compute"),
        (swatch("f-wait"), "exposed wait"),
        *((swatch(f"f-{kind}"), f"{text} read") for kind, text in CLASSES if kind in kinds),
    ]
    if any(read.fate in WASTED for read in cycle.reads):
        keys.append((swatch("hollow f-compute"), "hollow: read and never used"))
    return join(
        [
            tag("h3", variant.name),
            tag("p", _sentence(cycle)),
            figure(legend(keys), _picture(identity, variant, cycle)),
            table(
                f"t-{identity}",
                f"The same cycle in numbers, ms: {variant.name}",
                ("turn", "begins", "ends", "compute", "waited", "because", "exact reads", "near",
                 "speculative", "bytes read"),
                [_numbers(row) for row in cycle.rows],
            ),
            folded(
                f"Every read of this cycle: {several(len(cycle.reads), 'read')}",
                table(
                    f"t-{identity}-reads",
                    "Reads, ms since the cycle began; below 0: before it",
                    ("record", "class", "queued", "begins", "ready", "bytes", "fate"),
                    [_read_numbers(read) for read in cycle.reads],
                ),
            ) if cycle.reads else Html(""),
        ],
        "\n",
    )  # fmt: skip


def _sentence(cycle: Cycle) -> str:
    node = cycle.node
    rows, kept = node["num_rows"].whole, node["num_kept"].whole
    told = f"It took {ms(cycle.took_ns)} ms"
    if rows and kept:
        told += f" for a block of {several(rows, 'row')}, of which {kept} stayed"
    waited, busy = (share(part / cycle.took_ns) for part in (cycle.waited_ns, cycle.busy_ns))
    told += f". Compute stood still for {ms(cycle.waited_ns)} ms of them ({waited})"
    told += f", the drive was busy for {ms(cycle.busy_ns)} ms ({busy})"
    others = [value for value in node["cycles_ns"].numbers if value is not None]
    if len(others) > 1:
        told += f". The {len(others)} cycles recorded took {ms(min(others))} to {ms(max(others))} ms"
    if not cycle.layers:
        told += (
            ". Every expert was in memory: no layer read anything back, so the layers cannot be told apart"
        )
    return told + "."


def _picture(identity: str, variant: Variant, cycle: Cycle) -> Html:
    milliseconds = cycle.took_ns / 1e6
    across = [value for value in ticks(milliseconds) if value <= milliseconds]
    picture = Picture(
        f"p-{identity}",
        f"One cycle: {variant.name}",
        "A row for every layer, from top to bottom; a grey bar while it is computed, an orange one while "
        "compute stands still, and beneath them the reads of its records. The table has every number.",
        f"t-{identity}",
    )
    y, heights = 8.0, [(_height(row), row) for row in cycle.rows]
    bottom = y + sum(height for height, _ in heights)
    for value in across:
        picture.line("grid", value / milliseconds, y - 4, value / milliseconds, bottom)
        picture.text(value / milliseconds, bottom + 15, tick_text(value), kind="tick", anchor="middle")
    for height, row in heights:
        _row(picture, row, y, cycle.took_ns)
        y += height
    picture.text(1, bottom + 32, "ms since the cycle began", kind="axis", anchor="end")
    return picture.html(bottom + 38, kind="waterfall")


def _row(picture: Picture, row: Row, y: float, took_ns: float) -> None:
    picture.text(0, y + _BAR, row.name, kind="tick", anchor="end", shift=-8)
    span = row.span
    if span.took_ns > 0:
        told = f"{row.name}: {ms(span.began_ns)} to {ms(span.ended_ns)} ms, waited {ms(row.waited_ns)}"
        picture.bar("f-compute", span.began_ns / took_ns, span.ended_ns / took_ns, y, _BAR, told)
    for wait in row.waits:
        told = f"{row.name}: waited {ms(wait.span.took_ns)} ms, {_CAUSES.get(wait.cause, wait.cause)}"
        picture.bar("f-wait", wait.span.began_ns / took_ns, wait.span.ended_ns / took_ns, y, _BAR, told)
    for lane, read in _lanes(row.reads):
        top = y + _BAR + 1 + lane * _LANE
        kind = f"f-{read.read_class}" if read.read_class in dict(CLASSES) else "f-compute"
        middle = top + 1.5
        if read.issued_ns < read.span.began_ns:
            start = max(0.0, read.issued_ns / took_ns)
            picture.line(f"queued {kind}", start, middle, max(start, read.span.began_ns / took_ns), middle)
        is_wasted = read.fate in WASTED
        picture.bar(
            f"hollow {kind}" if is_wasted else kind,
            read.span.began_ns / took_ns,
            read.span.ended_ns / took_ns,
            top,
            _LANE - 1,
            f"{read.what}, {read.read_class}: {ms(read.span.took_ns)} ms on the wire, {_fate(read.fate)}",
        )


def _height(row: Row) -> float:
    lanes = max((lane for lane, _ in _lanes(row.reads)), default=-1) + 1
    return _BAR + 1 + lanes * _LANE + _GAP


def _lanes(reads: Sequence[Read]) -> list[(tuple[int, Read])]:
    """Return reads with the lane each is drawn in: the first that is free from its queueing to its end."""
    free: list[float] = []
    found: list[tuple[int, Read]] = []
    for read in sorted(reads, key=lambda read: (read.issued_ns, read.span.began_ns)):
        lane = next((at for at, until in enumerate(free) if until <= read.issued_ns), len(free))
        if lane >= _MOST_LANES:
            lane = min(range(_MOST_LANES), key=free.__getitem__)
        elif lane == len(free):
            free.append(0.0)
        free[lane] = max(free[lane], read.span.ended_ns)
        found.append((lane, read))
    return found


def _numbers(row: Row) -> list[Value]:
    span = row.span
    is_turn = span.took_ns > 0
    kinds = [[read for read in row.reads if read.read_class == kind] for kind, _ in CLASSES]
    causes = dict.fromkeys(_CAUSES.get(wait.cause, wait.cause) for wait in row.waits)
    return [
        row.name,
        ms(span.began_ns if is_turn else None),
        ms(span.ended_ns if is_turn else None),
        ms(span.took_ns - row.waited_ns if is_turn else None),
        ms(row.waited_ns if is_turn else None),
        ", ".join(causes),
        *(count(len(kind)) for kind in kinds),
        size(total([read.num_bytes for read in row.reads]) or 0.0),
    ]


def _read_numbers(read: Read) -> list[Value]:
    return [
        read.what,
        read.read_class,
        ms(read.issued_ns),
        ms(read.span.began_ns),
        ms(read.span.ended_ns),
        size(read.num_bytes),
        _fate(read.fate),
    ]


def _fate(fate: str) -> str:
    return fate.replace("_", " ") or UNKNOWN
