"""Numbers as people read them, the exact one beside: what cells and sentences are made of. Entry: `Cell`.

The same roundings as the text report. A figure that is not there is a dash, never a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cli.console import size as in_units
from cli.html.markup import Html, tag
from cli.html.reading import exactly

UNKNOWN: Final = "\u2013"


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of a report.

    Attributes:
        value: as the report has it; None if it is not known.
        text: as people read it.
    """

    value: float | None
    text: str

    @property
    def html(self) -> Html:
        """Return the text, the exact number in its `data` element."""
        if self.value is None:
            return tag("span", self.text, title="not known")
        return tag("data", self.text, value=exactly(self.value))

    def __str__(self) -> str:
        return self.text


def ms(value_ns: float | None) -> Cell:
    """Return nanoseconds as milliseconds without a unit: the heading has it."""
    if value_ns is None:
        return Cell(None, UNKNOWN)
    milliseconds = value_ns / 1e6
    return Cell(value_ns, f"{milliseconds:.1f}" if abs(milliseconds) >= 100 else f"{milliseconds:.2f}")


def share(value: float | None, digits: int = 0) -> Cell:
    """Return a share as a percentage."""
    return Cell(None, UNKNOWN) if value is None else Cell(value, f"{100 * value:.{digits}f}%")


def size(num_bytes: float | None) -> Cell:
    """Return bytes in the unit that suits them."""
    return Cell(None, UNKNOWN) if num_bytes is None else Cell(num_bytes, in_units(num_bytes))


def count(value: float | None) -> Cell:
    """Return a whole number, thousands apart."""
    return Cell(None, UNKNOWN) if value is None else Cell(value, f"{value:,.0f}")


def plain(value: float | None, digits: int = 2) -> Cell:
    """Return a number with so many decimals."""
    return Cell(None, UNKNOWN) if value is None else Cell(value, f"{value:.{digits}f}")


def ratio_of(part: float | None, whole: float | None) -> float | None:
    """Return part over whole; None where either is unknown or there is no whole."""
    return part / whole if part is not None and whole else None


def total(values: Sequence[float | None]) -> float | None:
    """Return the sum of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def several(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: `1 layer`, `8 layers`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
