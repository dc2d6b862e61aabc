"""Lines over two axes that begin at zero: `line_chart`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cli.html.drawing import Picture, series_style, tick_text, ticks
from cli.html.markup import Html

HEIGHT: Final = 240
_TOP: Final = 24
_APART: Final = 15
"""Pixels between two labels at the ends of lines."""


@dataclass(frozen=True, slots=True)
class Point:
    """A place of a line.

    Attributes:
        told: what is said to whoever points at it.
        label: written beside it, if anything.
    """

    x: float
    y: float
    told: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """A line; `place` decides its colour, mark and dash, the same in every panel of a figure."""

    name: str
    place: int
    points: Sequence[Point]
    is_joined: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from 0.

    Attributes:
        title: with its unit.
        most: what it must reach.
        text: how a tick is written.
    """

    title: str
    most: float
    text: Callable[[float], str] = tick_text
    num_ticks: int = 5


def line_chart(picture: Picture, x: Axis, y: Axis, series: Sequence[Series]) -> Html:
    """Draw lines and return the picture."""
    across, up = ticks(x.most, x.num_ticks), ticks(y.most, y.num_ticks)
    end = min(across[-1], x.most * 1.04) or 1.0
    across = [value for value in across if value <= end]
    bottom = _TOP + HEIGHT

    def at(value: float) -> float:
        return min(1.0, max(0.0, value / end))

    def height(value: float) -> float:
        return bottom - HEIGHT * min(1.02, max(0.0, value / up[-1]))

    picture.text(0, _TOP - 12, y.title, kind="axis", shift=-40)
    for value in up:
        picture.line("grid", 0, height(value), 1, height(value))
        picture.text(0, height(value) + 4, y.text(value), kind="tick", anchor="end", shift=-8)
    for value in across:
        picture.line("grid", at(value), bottom, at(value), bottom + 5)
        picture.text(at(value), bottom + 19, x.text(value), kind="tick", anchor="middle")
    picture.text(1, bottom + 38, x.title, kind="axis", anchor="end")
    for one in series:
        kind, dash, _ = series_style(one.place)
        pairs = zip(one.points, one.points[1:], strict=False) if one.is_joined else ()
        for before, after in pairs:
            picture.line(
                f"line {kind}", at(before.x), height(before.y), at(after.x), height(after.y), dash=dash
            )
    for one in series:
        kind, _, shape = series_style(one.place)
        for point in one.points:
            picture.mark(f"dot {kind}", at(point.x), height(point.y), shape, point.told)
            if point.label:
                picture.text(at(point.x), height(point.y) - 9, point.label, kind="tick", anchor="middle")
    is_ended = _name_ends(picture, series, height)
    return picture.html(bottom + 46, kind="chart ended" if is_ended else "chart")


def _name_ends(picture: Picture, series: Sequence[Series], height: Callable[[float], float]) -> bool:
    """Write the names of lines beside their last points, apart; shown where there is room. Return if any."""
    ends = sorted((height(one.points[-1].y), one.name) for one in series if one.points and one.is_joined)
    if not ends:
        return False
    places = [ends[0][0]]
    for y, _ in ends[1:]:
        places.append(max(y, places[-1] + _APART))
    below = max(0.0, places[-1] - (_TOP + HEIGHT))
    for place, (_, name) in zip(places, ends, strict=True):
        picture.text(1, place - below + 4, name, kind="end", shift=12)
    return True
