"""Colours of pages: told apart by everybody, on light pages and dark ones. Nothing here looks at a screen.

Sources: contrast is WCAG 2.2's; missing cones are G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, 2009,
severity 1; distances are Euclidean in OKLab, B. Ottosson, 2020, times 100.
"""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from cli.html import palette
from cli.html.drawing import series_style
from cli.html.style import STYLE

SCHEMES = ("light", "dark")
APART = 12.0
CONES = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no blue": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour: str) -> list[float]:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def contrast(one: str, other: str) -> float:
    low, high = sorted(
        sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))
        for colour in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


def seen(colour: str, cones: str) -> tuple[float, float, float]:
    """Return OKLab coordinates of a colour as somebody sees it."""
    rgb = linear(colour)
    r, g, b = (min(1, max(0, sum(a * c for a, c in zip(row, rgb, strict=True)))) for row in CONES[cones])
    long = math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b)
    middle = math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b)
    short = math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def closest(colours: list[str], cones: str) -> float:
    places = [seen(colour, cones) for colour in colours]
    return min(100 * math.dist(one, other) for one, other in combinations(places, 2))


def sets(scheme: str) -> dict[str, list[str]]:
    return {
        "steps": list(palette.STEPS[scheme].values()),
        "fates": list(palette.FATES[scheme].values()),
        "series": list(palette.SERIES[scheme]),
    }


@pytest.mark.parametrize("cones", CONES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_of_a_set_stay_apart_whatever_cones_are_missing(scheme, cones):
    for name, colours in sets(scheme).items():
        assert closest(colours, cones) >= APART, name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_everything_drawn_stands_out_from_the_page_and_every_text_can_be_read(scheme):
    page, ink = palette.PAGE[scheme], palette.INK[scheme]
    for name, colours in sets(scheme).items():
        named = dict(zip(palette.FATES[scheme], colours, strict=True)) if name == "fates" else {}
        for colour in colours:
            if colour != named.get("unread"):  # outlined in the colour of soft text
                assert contrast(colour, page) >= 3, (name, colour)
    for text in ("ink", "soft"):
        for ground in (page, ink["tint"]):
            assert contrast(ink[text], ground) >= 4.5, (text, ground)


def test_the_usual_pair_of_red_and_green_would_be_found():
    assert closest(["#c0392b", "#6b8e23"], "no green") < APART
    assert contrast("#ffd500", palette.PAGE["light"]) < 3


def test_every_colour_is_declared_for_both_kinds_of_page_and_used():
    light, dark = (palette.variables(scheme) for scheme in SCHEMES)
    names = [part.split(":")[0] for part in light.split(";") if part]
    assert names == [part.split(":")[0] for part in dark.split(";") if part]
    assert len(names) == len(set(names))
    assert [name for name in names if f"var({name})" not in STYLE] == []
    assert STYLE.count(dark) == 1
    assert STYLE.count(light) == 2, "for screens, and for paper whatever the screen is"


def test_marks_without_lines_are_told_apart_up_to_twelve():
    """There are ten sources of hints, and a scatter of them has no dashes."""
    looks = [(kind, shape) for kind, _, shape in map(series_style, range(12))]
    assert len(set(looks)) == len(looks)
    for kind, _ in looks:
        filled, _, rest = kind.partition(" ")
        rule = STYLE.split(f"{{fill:var(--page);stroke:var(--{filled})")[0].rsplit("\n", 1)[-1]
        assert not rest or rule == f".dot.{rest}.{filled}"
