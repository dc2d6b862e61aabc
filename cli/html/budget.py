"""Exposed wait against budget: how fast the wait falls as more experts stay in memory."""

from __future__ import annotations

from collections.abc import Sequence

from cli.html.charts import Axis, Point, Series, line_chart
from cli.html.drawing import Picture, legend, line_swatch
from cli.html.figures import count, ms, several, share
from cli.html.markup import Html, tag
from cli.html.section import Section, figure
from cli.html.tables import table
from cli.html.variants import Variant, drafts_among, hints_among


def wait_against_budget(variants: Sequence[Variant]) -> Section | None:
    """Return the section; None without a row whose wait and budget are known."""
    known = [one for one in variants if one.slots and _waited(one) is not None]
    if not known:
        return None
    hints = hints_among(known)
    body = [legend([(line_swatch(place), f"hints {name}") for place, name in enumerate(hints)])]
    drafts = drafts_among(known)
    for place, draft in enumerate(drafts):
        if len(drafts) > 1:
            body.append(tag("h3", draft))
        body.append(_picture(f"p-budget-{place}", draft, [one for one in known if one.draft == draft], known))
    rows = [
        (one.name, count(one.slots), ms(_waited(one)), share(one.node["hit_rate"].number)) for one in known
    ]
    return Section(
        "budget",
        "Wait against budget",
        _sentences(known),
        [
            figure(*body),
            table(
                "t-budget",
                "Exposed wait of a token by budget",
                ("row", "experts of each layer", "waited, ms", "found in a slot"),
                rows,
            ),
        ],
    )


def _waited(one: Variant) -> float | None:
    return one.node["exposed_wait_ns"].number


def _sentences(known: Sequence[Variant]) -> list[str]:
    budgets = sorted({one.slots or 0 for one in known})
    if len(budgets) == 1:
        return [
            f"Only one budget was measured: {several(budgets[0], 'expert')} of each layer in memory. "
            "A list of --budgets makes a curve of it."
        ]
    found = [
        "To the right more experts stay in memory, upwards compute stands still longer. A curve that has "
        "gone flat says where more memory buys no more time."
    ]
    first = [one for one in known if (one.draft, one.hints) == (known[0].draft, known[0].hints)]
    first.sort(key=lambda one: one.slots or 0)
    if len(first) > 1:
        small, large = first[0], first[-1]
        found.append(
            f"With {first[0].draft} and hints {first[0].hints}: {ms(_waited(small))} ms a token with "
            f"{small.slots} experts of each layer, {ms(_waited(large))} ms with {large.slots}."
        )
    return found


def _picture(identity: str, draft: str, shown: Sequence[Variant], known: Sequence[Variant]) -> Html:
    picture = Picture(
        identity,
        f"Exposed wait of a token against experts in memory, {draft}",
        "A line for every source of hints: experts of each layer in memory to the right, milliseconds of "
        "exposed wait upwards.",
        "t-budget",
    )
    hints = hints_among(known)
    series: list[Series] = []
    for place, name in enumerate(hints):
        own = sorted((one for one in shown if one.hints == name), key=lambda one: one.slots or 0)
        points = [
            Point(float(one.slots or 0), (_waited(one) or 0.0) / 1e6, f"{one.name}: {ms(_waited(one))} ms")
            for one in own
        ]
        if points:
            series.append(Series(f"hints {name}", place, points))
    x = Axis("experts of each layer in memory", float(max(one.slots or 0 for one in known)))
    y = Axis("waited, ms a token", max((_waited(one) or 0.0) / 1e6 for one in known))
    return line_chart(picture, x, y, series)
