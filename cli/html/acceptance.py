"""Acceptance by slot: of the cycles that proposed an i-th token, those in which the target agreed with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cli.html.charts import Axis, Point, Series, line_chart
from cli.html.drawing import Picture, legend, line_swatch
from cli.html.figures import Cell, plain, share
from cli.html.reading import MOST_COLUMNS
from cli.html.recall import percentage
from cli.html.section import Section, figure
from cli.html.tables import table


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a drafter's proposals came to.

    Attributes:
        name: of the row.
        by_slot: share accepted at each place.
        tokens: committed tokens of a cycle.
        more: further figures, in the order of their headings.
    """

    name: str
    by_slot: Sequence[float | None]
    tokens: float | None
    more: Sequence[Cell] = ()


def acceptance(
    drafters: Sequence[Accepted], rows: Sequence[Accepted], headings: Sequence[str] = ()
) -> Section | None:
    """Return the section; None if nobody proposed anything.

    Args:
        drafters: a line each.
        rows: of the table.
        headings: of what rows have more.
    """
    drawn = [one for one in drafters if any(value is not None for value in one.by_slot)]
    if not drawn:
        return None
    width = min(MOST_COLUMNS, max(len(one.by_slot) for one in rows))
    picture = Picture(
        "p-acceptance",
        "Share of proposals accepted, by place in the block",
        "A line for every drafter: the place of a proposal to the right, the share of cycles in which it was "
        "accepted upwards.",
        "t-acceptance",
    )
    series = [
        Series(
            one.name,
            place,
            [
                Point(float(slot), value, f"{one.name}, slot {slot}: {share(value)}")
                for slot, value in enumerate(one.by_slot[:width], start=1)
                if value is not None
            ],
        )
        for place, one in enumerate(drawn)
    ]
    cells = [
        [
            one.name,
            plain(one.tokens),
            *one.more,
            *(share(one.by_slot[slot] if slot < len(one.by_slot) else None) for slot in range(width)),
        ]
        for one in rows
    ]
    best = max(drawn, key=lambda one: one.tokens or 0.0)
    x = Axis("slot of the block", float(width), num_ticks=min(width, 8))
    return Section(
        "acceptance",
        "Acceptance by slot",
        [
            "A drafter proposes several tokens; the target keeps those it would have said itself, up to the "
            "first that differs. Each mark: of the cycles that proposed a token at this place, those that "
            "accepted it. A place can only be accepted if all before it were.",
            f"The most tokens a cycle: {plain(best.tokens)} with {best.name}; plain decode commits 1.",
        ],
        [
            figure(
                legend([(line_swatch(place), one.name) for place, one in enumerate(drawn)]),
                line_chart(picture, x, Axis("accepted", 1.0, percentage), series),
            ),
            table(
                "t-acceptance",
                "Proposals accepted, by slot",
                ("row", "tokens a cycle", *headings, *(f"slot {slot + 1}" for slot in range(width))),
                cells,
            ),
        ],
    )
