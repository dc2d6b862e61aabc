"""Colours by what they mean, for light and dark pages. Entry: `variables`.

Chosen by search in OKLab so that within each set every two stay apart for readers without red, green or
blue cones (a test computes it), and each stands out from the page by 3:1 at least. Colour is never alone:
lines have marks and dashes of their own, bars have their numbers in the table below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PAGE: Final = {"light": "#ffffff", "dark": "#14181c"}
INK: Final = {
    "light": {"ink": "#1b1f24", "soft": "#545c66", "rule": "#d9dde2", "tint": "#f4f6f8"},
    "dark": {"ink": "#e9edf1", "soft": "#a9b2bc", "rule": "#39414a", "tint": "#1d2329"},
}
STEPS: Final = {
    "light": {
        "compute": "#6b7383",
        "wait": "#e67427",
        "exact": "#4194fe",
        "near": "#11562d",
        "speculative": "#7805a5",
    },
    "dark": {
        "compute": "#9eaab9",
        "wait": "#f2610a",
        "exact": "#236ade",
        "near": "#9ef4c5",
        "speculative": "#8f5372",
    },
}
"""What happens in a cycle: compute, exposed wait, reads by class."""
FATES: Final = {
    "light": {
        "in_time": "#3d95e8",
        "joined": "#267196",
        "late": "#b44031",
        "unread": "#babdc4",
        "stale": "#b6901c",
        "evicted_unused": "#641180",
        "failed": "#070603",
        "unused": "#053828",
    },
    "dark": {
        "in_time": "#2770e4",
        "joined": "#4ebefc",
        "late": "#d53e1d",
        "unread": "#424344",
        "stale": "#daad05",
        "evicted_unused": "#944d96",
        "failed": "#979998",
        "unused": "#b8ead1",
    },
}
"""What became of tickets. `unread` moved no byte: it stays in the background, with an outline."""
SERIES: Final = {
    "light": ("#335bbe", "#a6450c", "#32a59a", "#5d2569", "#b68911", "#17161a"),
    "dark": ("#2277e7", "#d13600", "#6deacc", "#8f5080", "#f5cb18", "#a8989b"),
}
"""Lines of a chart, in order; beyond the last they begin again, with another dash."""


def variables(scheme: str) -> str:
    """Return the custom properties of `light` or `dark`."""
    named: dict[str, str] = {"page": PAGE[scheme], **INK[scheme], **STEPS[scheme]}
    named |= {f"fate-{name}": colour for name, colour in FATES[scheme].items()}
    named |= {f"s{place}": colour for place, colour in enumerate(SERIES[scheme])}
    return _declared(named)


def _declared(named: Mapping[str, str]) -> str:
    return "".join(f"--{name.replace('_', '-')}:{colour};" for name, colour in named.items())
