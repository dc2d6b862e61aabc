"""Bytes against recall: what share of the records was there in time, and what that cost in reads."""

from __future__ import annotations

from collections.abc import Sequence

from cli.html.charts import Axis, Point, Series, line_chart
from cli.html.drawing import Picture, legend, line_swatch, tick_text
from cli.html.figures import plain, share, size, total
from cli.html.markup import Html, tag
from cli.html.section import Section, figure
from cli.html.tables import Value, table
from cli.html.variants import Variant, drafts_among, hints_among

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def bytes_against_recall(variants: Sequence[Variant]) -> Section | None:
    """Return the section; None without a row whose reads and recall are known."""
    known = [one for one in variants if _read(one) is not None and _timely(one) is not None]
    if not known:
        return None
    hints = hints_among(known)
    body = [
        legend([(line_swatch(place, is_joined=False), f"hints {name}") for place, name in enumerate(hints)])
    ]
    drafts = drafts_among(known)
    for place, draft in enumerate(drafts):
        if len(drafts) > 1:
            body.append(tag("h3", draft))
        body.append(_picture(f"p-recall-{place}", draft, [one for one in known if one.draft == draft], known))
    headings = ("row", "in time", "resident", "prefetched", "read a token", "required", "exact",
                "predicted", "rejected", "read/asked", "recall of guesses", "precision", "useful bytes",
                "error")  # fmt: skip
    return Section(
        "recall",
        "Bytes against recall",
        _sentences(known),
        [
            figure(*body, caption="The number at a mark is the budget: experts of each layer in memory."),
            table(
                "t-recall",
                "Native selections that were there in time, and bytes of a committed token. Required: "
                "records used that had not stayed in memory; rejected: predicted and never used; recall, "
                "precision and error (of the confidences) are those of the guesses",
                headings,
                [_numbers(one) for one in variants],
            ),
        ],
    )


def unit_for(most: float) -> tuple[str, int]:
    """Return the unit in which the largest of some sizes has few digits."""
    return next(((unit, scale) for unit, scale in UNITS if most >= scale), UNITS[-1])


def percentage(value: float) -> str:
    """Return a tick of a share."""
    return f"{100 * value:.0f}%"


def _read(one: Variant) -> float | None:
    return one.node["physical_bytes"].number


def _timely(one: Variant) -> float | None:
    return total([one.node["resident_recall"].number, one.node["prefetched_recall"].number])


def _sentences(known: Sequence[Variant]) -> list[str]:
    found = [
        "Upwards: of the experts that the routers chose, the share whose record was in memory before compute "
        "wanted it, whether it had stayed there or was read ahead. To the right: bytes really read for a "
        "token. Up and to the left is better; right hints that read no more than was needed go straight up."
    ]
    pairs = [
        (plain_row, one)
        for one in known
        for plain_row in known
        if one.hints != "off" == plain_row.hints
        and (one.slots, one.draft) == (plain_row.slots, plain_row.draft)
    ]
    if pairs:
        base, best = max(pairs, key=lambda pair: (_timely(pair[1]) or 0.0) - (_timely(pair[0]) or 0.0))
        found.append(
            f"The largest step: {best.hints} hints with {best.budget}, {best.draft}, bring what is there in "
            f"time from {share(_timely(base))} to {share(_timely(best))}, and bytes a token from "
            f"{size(_read(base))} to {size(_read(best))}."
        )
    return found


def _numbers(one: Variant) -> list[Value]:
    node = one.node
    sizes = ("physical_bytes", "required_bytes", "exact_bytes", "predicted_bytes", "rejected_bytes")
    return [
        one.name,
        share(_timely(one)),
        share(node["resident_recall"].number),
        share(node["prefetched_recall"].number),
        *(size(node[name].number) for name in sizes),
        plain(node["amplification"].number, 3),
        share(node["recall"].number),
        share(node["precision"].number),
        share(node["useful_prefetch_ratio"].number),
        plain(node["calibration_error"].number, 3),
    ]


def _picture(identity: str, draft: str, shown: Sequence[Variant], known: Sequence[Variant]) -> Html:
    unit, scale = unit_for(max(_read(one) or 0.0 for one in known))
    picture = Picture(
        identity,
        f"Selections that were there in time against bytes read for a token, {draft}",
        "A mark for every row: bytes read for a token to the right, share of selections that were there in "
        "time upwards.",
        "t-recall",
    )
    series: list[Series] = []
    for place, name in enumerate(hints_among(known)):
        points = [
            Point(
                (_read(one) or 0.0) / scale,
                _timely(one) or 0.0,
                f"{one.name}: {share(_timely(one))} in time, {size(_read(one))} a token",
                "" if one.slots is None else str(one.slots),
            )
            for one in shown
            if one.hints == name
        ]
        if points:
            series.append(Series(f"hints {name}", place, points, is_joined=False))
    x = Axis(f"read for a token, {unit}", max(_read(one) or 0.0 for one in known) / scale, tick_text)
    return line_chart(picture, x, Axis("in time", 1.0, percentage), series)
