"""What each source of hints knows: recall by what it may read, by layer and row of the block, and honesty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cli.html.charts import Axis, Point, Series, line_chart
from cli.html.drawing import Picture, legend, line_swatch
from cli.html.figures import count, ms, several, share, size
from cli.html.reading import MOST_COLUMNS, Node
from cli.html.recall import percentage, unit_for
from cli.html.section import Section, figure
from cli.html.tables import Value, table

EARLY: Final = "sidecar-early"
AT: Final = 2
"""Which of the sizes single figures are quoted at, as in the report: 2 x top_k."""


def recall_by_bytes(report: Node) -> Section | None:
    """Return recall against what a predictor may read; None without figures."""
    figures = [
        one for one in report["figures"].rows if any(value is not None for value in one["recall"].numbers)
    ]
    sizes = report["sizes"].numbers
    if not figures or not sizes:
        return None
    num_layers = len(report["layers"].items)
    record = report["wait"]["conditions"]["record_bytes"].number
    per_row = [None if named is None or record is None else named * record * num_layers for named in sizes]
    known = [value for value in per_row if value is not None]
    unit, scale = unit_for(max(known, default=0.0)) if known else ("experts of a layer", 1)
    xs = [value / scale if value is not None else named for value, named in zip(per_row, sizes, strict=True)]
    picture = Picture(
        "p-predictors",
        "Recall of a row's experts against bytes that may be read for it",
        "A line for every predictor: bytes named for a row in all layers to the right, share of the row's "
        "experts that are among them upwards.",
        "t-predictors",
    )
    series = [
        Series(
            one["name"].text,
            place,
            [
                Point(x, recall, f"{one['name'].text}: {share(recall, 1)} with {count(named)} named")
                for x, named, recall in zip(xs, sizes, one["recall"].numbers, strict=False)
                if x is not None and recall is not None
            ],
        )
        for place, one in enumerate(figures)
    ]
    title = f"named for a row, all layers, {unit}" if known else "experts named of a layer"
    x = Axis(title, max((x for x in xs if x is not None), default=1.0))
    headings = ("predictor", *(f"@{count(named)}" for named in sizes), "precision", "off by")
    rows: list[list[Value]] = [
        [
            one["name"].text,
            *(share(one["recall"][place].number, 1) for place in range(len(sizes))),
            share(one["precision"].number, 1),
            share(one["calibration_error"].number, 1),
        ]
        for one in figures
    ]
    costs: list[list[Value]] = [
        [f"@{count(named)}", count(named), size(value)] for named, value in zip(sizes, per_row, strict=True)
    ]
    return Section(
        "knowledge",
        "Bytes against recall: what each predictor knows",
        _knowledge(report, figures),
        [
            figure(
                legend([(line_swatch(place), one["name"].text) for place, one in enumerate(figures)]),
                line_chart(picture, x, Axis("recall", 1.0, percentage), series),
            ),
            table("t-predictors", "Recall with so many experts named of each layer; precision and error of "
                  f"the confidences at @{count(sizes[AT] if len(sizes) > AT else None)}", headings, rows),
            table("t-sizes", "What naming so many costs, if nothing is in memory",
                  ("size", "experts of a layer", "bytes of a row, all layers"), costs),
        ],
    )  # fmt: skip


def recall_by_place(report: Node) -> Section | None:
    """Return recall by layer and by row of the block; None without figures."""
    figures = [one for one in report["figures"].rows if one["by_layer"].items]
    if not figures:
        return None
    layers = [node.text for node in report["layers"].items[:MOST_COLUMNS]]
    num_rows, num_kept = report["num_rows"].numbers, report["num_kept"].numbers
    rows = [place for place, number in enumerate(num_rows) if number]
    by_layer: list[list[Value]] = [
        [one["name"].text, *(share(one["by_layer"][place].number) for place in range(len(layers)))]
        for one in figures
    ]
    by_row: list[list[Value]] = [
        [one["name"].text, *(share(one["by_row"][place].number) for place in rows)] for one in figures
    ]
    kept = [num_kept[place] if place < len(num_kept) else None for place in rows]
    by_row.append(
        [
            "rows that the answer kept",
            *(
                share(None if stayed is None else stayed / (num_rows[place] or 1))
                for place, stayed in zip(rows, kept, strict=True)
            ),
        ]
    )
    body = [
        table("t-by-layer", "Recall at 2 x top_k by layer",
              ("predictor", *(f"layer {name}" for name in layers)), by_layer, bars=1.0)
    ]  # fmt: skip
    if rows:
        headings = ("predictor", *("anchor" if place == 0 else f"row {place}" for place in rows))
        body.append(table("t-by-row", "Recall at 2 x top_k by row of the block", headings, by_row, bars=1.0))
    return Section(
        "places",
        "Where predictors are right",
        [
            "The bar under a number is its share of all. A predictor that watches earlier layers knows "
            "nothing of the first ones; one that knows the tokens to come is as good in the last row as in "
            "the first."
        ],
        body,
    )


def in_service(report: Node) -> Section | None:
    """Return what each source of hints brought, with the same bytes allowed; None without any."""
    served = report["served"].rows
    if not served:
        return None
    rows: list[list[Value]] = []
    for one in served:
        stopped = one["stopped"].text
        rows.append(
            [
                one["slots"].text,
                one["hints"].text + (" (stopped)" if stopped else ""),
                share(one["timely"].number, 1),
                share(one["resident"].number, 1),
                share(one["precision"].number, 1),
                size(one["predicted_bytes"].number),
                size(one["physical_bytes"].number),
                ms(one["exposed_wait_ns"].number),
                ms(one["token_ns"].number),
            ]
        )
    known = [one for one in served if one["exposed_wait_ns"].number is not None]
    sentences = [
        f"Every source answered the same prompts, allowed {size(report['hint_bytes'].number)} of reads ahead "
        "a block. Timely: native selections that were ready because of a prediction; resident: those that "
        "were in memory for their own sake."
    ]
    if known:
        best = min(known, key=lambda one: one["exposed_wait_ns"].number or 0.0)
        waited = ms(best["exposed_wait_ns"].number)
        under = f", {best['slots'].text} experts of a layer in memory," if best["slots"].text else ""
        sentences.append(f"Least wait: {best['hints'].text}{under} with {waited} ms a token.")
    sentences += [
        f"{one['hints'].text} was stopped: {one['stopped'].text}" for one in served if one["stopped"].text
    ]
    return Section(
        "service",
        "In service",
        sentences,
        [
            table(
                "t-served",
                "Sources of hints in service, per committed token",
                ("experts in memory", "hints", "timely", "resident", "used of read", "read ahead", "read",
                 "waited, ms", "ms"),
                rows,
            )
        ],
    )  # fmt: skip


def bars(report: Node) -> Section | None:
    """Return what a sidecar is held to, and whether it holds; None if nothing is known of it."""
    judged = report["bars"]
    gap, above = judged["gap_closed"].number, judged["above_frequency"]
    rows: list[list[Value]] = []
    if gap is not None:
        rows.append(["half of frequency's distance to 1 is closed", share(gap), _verdict(gap >= 0.5)])
    if above[0].whole is not None and above[1].whole is not None:
        told = f"{above[0].whole} of {several(above[1].whole, 'layer')}"
        rows.append(["above frequency in every layer", told, _verdict(above[0].whole == above[1].whole)])
    for key, said in (
        ("above_previous", "above the last token's route"),
        ("both_over_either", "with near hints more often timely than either alone"),
    ):
        if judged[key].flag is not None:
            rows.append([said, "", _verdict(bool(judged[key].flag))])
    if not rows:
        return None
    return Section(
        "bars",
        "What the sidecar is held to",
        ["Claims that were made before measuring; those that do not hold stay in the table."],
        [table("t-bars", "Claims about the sidecar", ("claim", "measured", "verdict"), rows)],
    )


def _knowledge(report: Node, figures: Sequence[Node]) -> list[str]:
    rows = sum(value or 0 for value in report["num_rows"].numbers)
    found = [
        f"{several(int(rows), 'verified row')}: what each predictor ranks first is held against what the "
        "router then chose. Further to the right it may name, and so read, more. Oracle knows the answer and "
        "reaches all; random shows what naming blindly brings."
    ]
    learned = [one for one in figures if one["name"].text not in ("oracle", "random")]
    quoted = [one for one in learned if one["recall"][AT].number is not None]
    if quoted:
        best = max(quoted, key=lambda one: one["recall"][AT].number or 0.0)
        named = count(report["sizes"][AT].number)
        found.append(f"Best at {named} named: {best['name'].text}, {share(best['recall'][AT].number, 1)}.")
    early = next((one for one in figures if one["name"].text == EARLY), None)
    if early is not None and early["by_row"][0].number is not None:
        recall, named = share(early["by_row"][0].number, 1), count(report["sizes"][AT].number)
        found.append(
            f"{EARLY} is asked before the draft runs, of the anchor's row alone: {recall} of what that row "
            f"chooses is among {named} named."
        )
    counted = report["counted_of"].text
    if counted:
        found.append(f"Frequencies were counted of {counted}.")
    without, told, head = report["draft_ns"][0].number, report["draft_ns"][1].number, report["head_ns"].number
    if without is not None and told is not None and head is not None:
        found.append(
            f"A proposal took {ms(without)} ms, {ms(told)} ms with its routes; the host scored all layers of "
            f"a block in {ms(head)} ms."
        )
    return found


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"
