"""Tables: every number of a picture, to be read, copied, or heard. Entry: `table`."""

from __future__ import annotations

from collections.abc import Sequence

from cli.html.figures import Cell
from cli.html.markup import Html, join, tag

Value = Cell | str


def table(
    identity: str,
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[Value]],
    *,
    bars: float | None = None,
) -> Html:
    """Return a table in a frame that scrolls where the page is narrow.

    Args:
        identity: id of the table, unique in the page; pictures name it.
        caption: what it says.
        headings: of the columns; the first is that of the rows' names.
        rows: a name, then cells.
        bars: underline each cell as far as its value is of this much; None: not at all.
    """
    is_text = [all(isinstance(row[place], str) for row in rows if place < len(row)) and bool(rows)
               for place in range(len(headings))]  # fmt: skip
    head = tag(
        "tr",
        *(
            tag("th", text, scope="col", class_="text" if words else None)
            for text, words in zip(headings, is_text, strict=True)
        ),
    )
    body = [tag("tr", _name(row[0]), *(_cell(value, bars=bars) for value in row[1:])) for row in rows]
    inner = tag(
        "table",
        tag("caption", caption),
        tag("thead", head),
        tag("tbody", join(body, "\n")),
        id=identity,
        class_="bars" if bars is not None else None,
    )
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def folded(summary: str, *inner: str) -> Html:
    """Return what is long and seldom read, folded away on a screen and open on paper."""
    return tag("details", tag("summary", summary), *inner)


def _name(value: Value) -> Html:
    # In a block of its own: a narrow page breaks long names in it, which the width of a cell could not ask.
    return tag("th", tag("span", value.html if isinstance(value, Cell) else value), scope="row")


def _cell(value: Value, *, bars: float | None) -> Html:
    if not isinstance(value, Cell):
        return tag("td", value, class_="text")
    style = None
    if bars and value.value is not None:
        style = f"--share:{min(1.0, max(0.0, value.value / bars)):.4f}"
    return tag("td", value.html, style=style)
