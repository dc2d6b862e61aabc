"""Inline SVG whose text keeps its size: positions across are shares of the width, all else is pixels.

Entry: `Picture`. So one drawing serves a wide screen, a telephone and paper, without scripts and without a
second version. Every picture has a title and a description to be heard, and names the table of its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import Final, Literal

from cli.html.markup import Html, join, tag

Anchor = Literal["start", "middle", "end"]
SHAPES: Final = (
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0z",
    "M-4,-4h8v8h-8z",
    "M0,-5.5L5,4H-5z",
    "M0,-5.5L5,0L0,5.5L-5,0z",
    "M0,5.5L5,-4H-5z",
    "M-1.7,-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
)
"""Marks of lines, about the same size; the first of them a disc."""
DASHES: Final = (None, "7 3", "2 3", "9 3 2 3")


class Picture:
    """A drawing in the making.

    Args:
        identity: id, unique in the page.
        title: one line, also heard.
        description: what it shows, for those who do not see it.
        table: id of the table that has its numbers.
    """

    def __init__(self, identity: str, title: str, description: str, table: str) -> None:
        self._identity, self._table = identity, table
        self._behind: list[Html] = []
        self._parts: list[Html] = []
        self._told = (
            tag("title", title, id=f"{identity}-title"),
            tag("desc", description, id=f"{identity}-desc"),
        )

    def bar(self, kind: str, start: float, end: float, top: float, height: float, told: str = "") -> None:
        """Draw a bar from one share of the width to another; `told` is shown to whoever points at it."""
        start, end = _clipped(start), _clipped(end)
        width = percent(max(0.0, end - start))
        shown = tag("rect", x=percent(start), y=top, width=width, height=height, class_=kind)
        self._parts.append(tag("g", tag("title", told), shown) if told else shown)

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float, *, dash: str | None = None) -> None:
        """Draw a line; x are shares of the width, y pixels. A `grid` lies behind everything else."""
        (self._behind if kind == "grid" else self._parts).append(
            tag(
                "line",
                x1=percent(x1),
                y1=y1,
                x2=percent(x2),
                y2=y2,
                class_=kind,
                stroke_dasharray=dash,
            )
        )

    def upright(self, kind: str, at: float, top: float, bottom: float) -> None:
        """Draw an upright line that is seen on bars of any colour."""
        self.line("halo", at, top, at, bottom)
        self.line(kind, at, top, at, bottom)

    def text(
        self, at: float, y: float, text: str, *, kind: str = "", anchor: Anchor = "start", shift: float = 0
    ) -> None:
        """Write at a share of the width, shifted by so many pixels."""
        self._parts.append(
            tag(
                "text",
                text,
                x=percent(at),
                y=y,
                dx=shift or None,
                class_=kind or None,
                text_anchor=anchor if anchor != "start" else None,
            )
        )

    def mark(self, kind: str, at: float, y: float, shape: str, told: str) -> None:
        """Draw one of `SHAPES` around a point."""
        shown = tag("path", d=shape, class_=kind)
        self._parts.append(
            tag("svg", tag("title", told), shown, x=percent(at), y=y, width=1, height=1, class_="mark")
        )

    def html(self, height: float, *, kind: str = "") -> Html:
        """Return the drawing."""
        drawing = tag(
            "svg",
            join([*self._told, *self._behind, *self._parts], "\n"),
            xmlns="http://www.w3.org/2000/svg",
            role="img",
            aria_labelledby=f"{self._identity}-title",
            aria_describedby=f"{self._identity}-desc",
            data_table=self._table,
            width="100%",
            height=height,
        )
        return tag("div", drawing, class_=f"plot {kind}".strip())


def percent(value: float) -> str:
    """Return a share of the width as SVG has it."""
    return f"{100 * value:.3f}".rstrip("0").rstrip(".") + "%"


def ticks(most: float, wanted: int = 5) -> list[float]:
    """Return round numbers from 0 to at least `most`, about as many as wanted."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / wanted
    scale = 10.0 ** floor(log10(rough))
    step = next(scale * one for one in (1, 2, 2.5, 5, 10) if scale * one >= rough * 0.999)
    number = 0
    found: list[float] = []
    while not found or found[-1] < most * 0.999:
        found.append(number * step)
        number += 1
    return found


def tick_text(value: float) -> str:
    """Return a tick's number."""
    return f"{value:,.10g}"


def swatch(kind: str) -> Html:
    """Return a small field of a colour for a legend."""
    return tag(
        "svg",
        tag("rect", x=0.5, y=0.5, width=13, height=11, class_=kind),
        width=14,
        height=12,
        aria_hidden="true",
        class_="swatch",
    )


def line_swatch(place: int, *, is_joined: bool = True) -> Html:
    """Return the mark of a series for a legend, on its line if it has one."""
    kind, dash, shape = series_style(place)
    line = tag("line", x1=0, y1=6, x2=28, y2=6, class_=f"line {kind}", stroke_dasharray=dash)
    return tag(
        "svg",
        line if is_joined else Html(""),
        tag("svg", tag("path", d=shape, class_=f"dot {kind}"), x=14, y=6, width=1, height=1, class_="mark"),
        width=28,
        height=12,
        aria_hidden="true",
        class_="swatch",
    )


def series_style(place: int) -> tuple[str, str | None, str]:
    """Return class, dash and mark of a series: after six again, but dashed, and hollow every second time."""
    rounds, turn = divmod(place, len(SHAPES))
    return f"s{turn} open" if rounds % 2 else f"s{turn}", DASHES[rounds % len(DASHES)], SHAPES[turn]


def legend(entries: Sequence[tuple[Html, str]]) -> Html:
    """Return what the colours and marks mean."""
    return tag("ul", *(tag("li", mark, " ", text) for mark, text in entries), class_="legend")


def _clipped(share: float) -> float:
    return min(1.0, max(0.0, share))
