"""What became of every ticket: a promised read has exactly one end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from cli.html.drawing import Picture, legend, swatch, tick_text, ticks
from cli.html.figures import Cell, count, several, size, total
from cli.html.markup import Html
from cli.html.reading import Node
from cli.html.section import Section, figure
from cli.html.tables import Value, folded, table
from cli.html.variants import Variant, names_among

FATES: Final = (
    ("in_time", "in time", "ready before it was wanted"),
    ("joined", "joined", "wanted while on its way, ready before compute had to wait"),
    ("late", "late", "compute was waiting when it came"),
    ("unread", "unread", "cancelled or displaced in the queue: no byte was read"),
    ("stale", "stale", "came for a generation that had ended"),
    ("evicted_unused", "evicted unused", "left its slot without having been used"),
    ("failed", "failed", "could not be read"),
    ("unused", "still unused", "waiting in its slot at the end"),
)
_SERVED: Final = ("in_time", "joined")
_UNREAD: Final = ("cancelled", "dropped")
_CLASSES: Final = ("exact", "near", "speculative")
_LEFT_OUT: Final = "classes without tickets are left out"
_ROW, _BAR, _GROUP = 40, 14, 22


def ticket_fates(variants: Sequence[Variant]) -> Section | None:
    """Return the section; None without books."""
    known = [one for one in variants if one.node["books"]["classes"].members]
    if not known:
        return None
    headings = ("row", "class", "issued", *(name for _, name, _ in FATES))
    keys = [(swatch(f"fate-{key}"), f"{name}: {what}") for key, name, what in FATES]
    outcomes = names_among(known, "hints")
    body = [
        figure(
            legend(keys),
            _picture(known),
            caption="Guesses of near and speculative class, all repetitions; exact tickets are in the table.",
        ),
        table("t-fates", f"Tickets by fate, records; {_LEFT_OUT}", headings, _rows(known, "num")),
        folded(
            "The same in bytes",
            table(
                "t-fate-bytes", f"Tickets by fate, bytes; {_LEFT_OUT}", headings, _rows(known, "num_bytes")
            ),
        ),
    ]
    if outcomes:
        rows = [[one.name, *(count(one.node["hints"][name].number) for name in outcomes)] for one in known]
        named = ("row", *(name.replace("_", " ") for name in outcomes))
        body.append(
            folded(
                "What became of the hints before they were tickets",
                table(
                    "t-hints", "Hints handed over, by outcome; only accepted ones became tickets", named, rows
                ),
            )
        )
    return Section("fates", "What became of every ticket", _sentences(known), body)


def predicted(node: Node, fate: str, unit: str = "num") -> float:
    """Return the guessed tickets of a fate, in records or bytes."""
    if fate == "unused":
        return node["books"]["unused"][unit].number or 0.0
    names = _UNREAD if fate == "unread" else (fate,)
    classes = node["books"]["classes"]
    return sum(
        classes[kind]["fates"][name][unit].number or 0.0 for kind in ("near", "speculative") for name in names
    )


def _sentences(known: Sequence[Variant]) -> list[str]:
    found = [
        "A ticket is one promised read. From the left: guesses that served, ready in time or joined on their "
        "way; those that came late; those that left the queue unread, and so cost nothing; then what was "
        "read in vain. The length of a bar is how much was guessed."
    ]
    guessing = [one for one in known if sum(predicted(one.node, key) for key, _, _ in FATES)]
    if not guessing:
        return [*found, "Nobody guessed here: every ticket was exact."]

    def useful(one: Variant) -> float:
        read = sum(predicted(one.node, key) for key, _, _ in FATES if key != "unread")
        return sum(predicted(one.node, key) for key in _SERVED) / read if read else 0.0

    best = max(guessing, key=useful)
    found.append(f"Of the guesses that were read, most served with {best.name}: {100 * useful(best):.0f}%.")
    if any(one.node["books_add_up"].flag is False for one in known):
        wrong = [one.name for one in known if one.node["books_add_up"].flag is False]
        found.append(f"THE BOOKS DO NOT ADD UP, so these figures are void: {'; '.join(wrong)}.")
    else:
        issued = sum(
            one.node["books"]["classes"][kind]["issued"]["num"].number or 0.0
            for one in known
            for kind in _CLASSES
        )
        found.append(f"The books add up: each of {several(int(issued), 'ticket')} has exactly one fate.")
    return found


def _rows(known: Sequence[Variant], unit: str) -> list[list[Value]]:
    show = count if unit == "num" else size
    rows: list[list[Value]] = []
    for one in known:
        books = one.node["books"]
        for kind in _CLASSES:
            own = books["classes"][kind]
            if not own["issued"]["num"].number:
                continue
            cells: list[Cell] = []
            for key, _, _ in FATES:
                if key == "unused":
                    cells.append(show(None))
                    continue
                names = _UNREAD if key == "unread" else (key,)
                cells.append(show(total([own["fates"][name][unit].number for name in names])))
            rows.append([one.name, kind, show(own["issued"][unit].number), *cells])
        if books["unused"]["num"].number:
            blank: list[Value] = [show(None) for _ in FATES[:-1]]
            rows.append(
                [one.name, "near and speculative", show(None), *blank, show(books["unused"][unit].number)]
            )
    return rows


def _picture(known: Sequence[Variant]) -> Html:
    picture = Picture(
        "p-fates",
        "Guessed tickets by fate",
        "A bar for every row, divided by what became of its guesses.",
        "t-fates",
    )
    across = ticks(max(sum(predicted(one.node, key) for key, _, _ in FATES) for one in known))
    y = 4.0
    for group, rows in groupby(known, key=lambda one: f"{one.budget}, {one.draft}"):
        picture.text(0, y + 13, group, kind="group")
        y += _GROUP
        for one in rows:
            numbers = [(key, name, predicted(one.node, key)) for key, name, _ in FATES]
            guessed = sum(number for _, _, number in numbers)
            served = sum(number for key, _, number in numbers if key in _SERVED)
            # Short enough for a telephone: what became of the others is in the bar and in the table.
            told = (
                f"{served:,.0f} of {several(int(guessed), 'guess', 'guesses')} served"
                if guessed
                else "no guesses"
            )
            picture.text(0, y + 12, f"hints {one.hints}: {told}", kind="label")
            start = 0.0
            for key, name, number in numbers:
                if number:
                    end = start + number / across[-1]
                    picture.bar(f"fate-{key}", start, end, y + 18, _BAR, f"{one.name}: {number:,.0f} {name}")
                    start = end
            y += _ROW if guessed else _GROUP
        y += 6
    for value in across:
        picture.line("grid", value / across[-1], 4, value / across[-1], y)
        picture.text(value / across[-1], y + 15, tick_text(value), kind="tick", anchor="middle")
    picture.text(1, y + 33, "tickets", kind="axis", anchor="end")
    return picture.html(y + 40, kind="bars")
