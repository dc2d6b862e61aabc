"""A report as it may come: what is missing, of the wrong kind, or not finite reads as None. Entry: `Node`.

Pages are made of what a run has just measured, and of files that were saved by some version or made by hand.
What is not there is shown as not known; nothing is guessed in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

MOST_ITEMS: Final = 4096
"""Items of one list that are shown: more than any run has rows, layers or reads of a cycle."""

MOST_ROWS: Final = 512
MOST_COLUMNS: Final = 128
"""Of a table: each is more than a sweep has rows or a model layers, and their product is still a page."""

MOST: Final = 1e18
"""The largest number that is shown: nanoseconds of thirty years, or an exabyte. Sums of such stay finite."""
LEAST: Final = 1e-100
"""What is nearer to nothing is nothing. Ratios of what is left stay finite."""


def exactly(value: float) -> str:
    """Return a number such that it reads back as the same one."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


class Node:
    """A place in a document, there or not."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, key: str | int) -> Node:
        """Return what is below it: a member by name, an item by place; an empty place if there is none."""
        value = self.value
        if isinstance(key, str) and isinstance(value, Mapping):
            return Node(cast("Mapping[str, Any]", value).get(key))
        if isinstance(key, int) and isinstance(value, list | tuple):
            items = cast("Sequence[Any]", value)
            return Node(items[key] if -len(items) <= key < len(items) else None)
        return Node(None)

    @property
    def number(self) -> float | None:
        """Return a number of a size that can be measured; None for anything else."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None
        if 0 < abs(number) < LEAST:
            return 0.0
        return number if abs(number) <= MOST else None  # False for what is no number

    @property
    def whole(self) -> int | None:
        """Return a whole number."""
        number = self.number
        return None if number is None or number != int(number) else int(number)

    @property
    def flag(self) -> bool | None:
        """Return a truth value."""
        return self.value if isinstance(self.value, bool) else None

    @property
    def text(self) -> str:
        """Return a text; a number as text, anything else as nothing."""
        if isinstance(self.value, str):
            return self.value
        number = self.number
        return "" if number is None else exactly(number)

    @property
    def items(self) -> list[Node]:
        """Return the items of a list."""
        if not isinstance(self.value, list | tuple):
            return []
        return [Node(item) for item in cast("Sequence[Any]", self.value)[:MOST_ITEMS]]

    @property
    def rows(self) -> list[Node]:
        """Return the items of a list, no more than a table shows rows."""
        return self.items[:MOST_ROWS]

    @property
    def members(self) -> list[tuple[str, Node]]:
        """Return the members of an object, in its order."""
        if not isinstance(self.value, Mapping):
            return []
        pairs = cast("Mapping[Any, Any]", self.value).items()
        return [(str(key), Node(item)) for key, item in list(pairs)[:MOST_ITEMS]]

    @property
    def numbers(self) -> list[float | None]:
        """Return a list of numbers; what is none among them as None."""
        return [item.number for item in self.items]

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return self.value is not None
