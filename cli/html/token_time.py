"""Where the time of a token goes: compute and exposed wait of every row, beside the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from cli.html.drawing import Picture, legend, swatch, tick_text, ticks
from cli.html.figures import Cell, ms, plain, ratio_of, share
from cli.html.markup import Html
from cli.html.section import Section, figure
from cli.html.tables import Value, table
from cli.html.variants import Variant

CAUSES = (
    ("cold", "never read before"),
    ("evicted", "evicted"),
    ("late_hint", "late hint"),
    ("other", "other"),
    ("ngram", "n-gram rows"),
    ("queueing", "queueing"),
)
_ROW, _BAR, _GROUP = 40, 14, 22


def token_time(variants: Sequence[Variant]) -> Section | None:
    """Return the section; None without a row whose time is known."""
    timed = [one for one in variants if one.node["token_ns"].number]
    if not timed:
        return None
    headings = ("row", "time, ms", "from", "to", "p95", "p99", "waited", "share", "compute bound",
                "storage bound", "attained", "over first")  # fmt: skip
    causes = ("row", *(text for _, text in CAUSES), "all", "hidden")
    legends = legend(
        [
            (swatch("f-compute"), "compute, and everything else but waiting"),
            (swatch("f-wait"), "exposed wait: compute stands still for records"),
            (swatch("f-bound"), "compute bound: the same with every expert in memory"),
            (swatch("f-storage"), "storage bound: what the drive needs for the required bytes"),
        ]
    )
    return Section(
        "token-time",
        "Where the time of a token goes",
        _sentences(timed),
        [
            figure(
                legends,
                _picture(timed),
                caption="Each bar is the time of a committed token: the median over repetitions, the wait in "
                "it the mean. No row can be faster than the later of its two bounds.",
            ),
            table("t-token-time", "Time of a committed token and its bounds, ms", headings,
                  [_times(one) for one in timed]),
            table("t-causes", "Exposed wait of a token by cause, ms: the cause is that of the record that "
                  "ended the wait; queueing is what passed before its read began", causes,
                  [_causes(one) for one in timed]),
        ],
    )  # fmt: skip


def _sentences(variants: Sequence[Variant]) -> list[str]:
    def waited(one: Variant) -> float:
        return one.node["exposed_wait_ns"].number or 0.0

    most = max(variants, key=waited)
    least = min(variants, key=waited)
    found = [_waits(most)]
    if any((one.node["attainment"].number or 0.0) > 1 for one in variants):
        found.append(
            "Attained above 100%: the bound was measured slower than the run it bounds, which more -r and -n "
            "or a quieter machine put right."
        )
    if least is not most:
        found.append(f"The least wait is that of {least.name}: {ms(waited(least))} ms a token.")
    return [*found, *_longer_than_reading(variants)]


def _longer_than_reading(variants: Sequence[Variant]) -> list[str]:
    """Say which row waited longest beside its reading, if any waited longer than it read."""
    worst = min(variants, key=lambda one: one.node["hidden_fraction"].number or 0.0)
    hidden = worst.node["hidden_fraction"].number or 0.0
    if hidden >= 0:
        return []
    return [
        f"With {worst.name} nothing is hidden: compute waited {1 - hidden:.1f} times as long as the records "
        "that it needed were being read. Waking up and queueing are the rest."
    ]


def _waits(one: Variant) -> str:
    took, waits = one.node["token_ns"].number, one.node["exposed_wait_ns"].number
    if not waits:
        return f"With {one.name} compute never stood still for the drive."
    told = f"With {one.name} a token takes {ms(took)} ms, and for {ms(waits)} ms of them "
    told += f"({share(ratio_of(waits, took))}) compute stands still for records."
    causes = {text: one.node["waits"][key].number or 0.0 for key, text in CAUSES}
    largest = max(causes, key=lambda text: causes[text])
    part = "Most of it" if causes[largest] > waits / 2 else "The largest part of it"
    return f"{told} {part}, {ms(causes[largest])} ms, is put down to: {largest}."


def _times(one: Variant) -> list[Value]:
    node = one.node
    took, waits, ratios = node["token_ns"].number, node["exposed_wait_ns"].number, node["ratios"].numbers
    known = [ratio for ratio in ratios if ratio is not None]
    return [
        one.name,
        ms(took),
        *(ms(node["token_ns_range"][place].number) for place in (0, 1)),
        *(ms(node["token_ns_quantiles"][place].number) for place in (1, 2)),
        ms(waits),
        Cell(ratio_of(waits, took), str(share(ratio_of(waits, took)))),
        ms(node["bounds"]["compute_ns"].number),
        ms(node["storage_ns"].number),
        share(node["attainment"].number),
        plain(median(known) if known else None),
    ]


def _causes(one: Variant) -> list[Value]:
    waits = one.node["waits"]
    return [
        one.name,
        *(ms(waits[key].number) for key, _ in CAUSES),
        ms(one.node["exposed_wait_ns"].number),
        _hidden(one),
    ]


def _hidden(one: Variant) -> Cell:
    """Return the hidden fraction; where waits were longer than reading, how much longer."""
    value = one.node["hidden_fraction"].number
    if value is None or value >= 0:
        return share(value)
    return Cell(1 - value, f"{1 - value:.1f} times the reading: none")


def _picture(variants: Sequence[Variant]) -> Html:
    def most_of(one: Variant) -> float:
        node = one.node
        values = (node["token_ns"], node["bounds"]["compute_ns"], node["storage_ns"])
        return max(value.number or 0.0 for value in values) / 1e6

    across = ticks(max(map(most_of, variants)))
    picture = Picture(
        "p-token-time",
        "Time of a token by row, in milliseconds",
        "A bar for every row, divided into compute and exposed wait, with a line at each of its two bounds.",
        "t-token-time",
    )
    y = 4.0
    for group, rows in groupby(variants, key=lambda one: f"{one.budget}, {one.draft}"):
        picture.text(0, y + 13, group, kind="group")
        y += _GROUP
        for one in rows:
            _bar(picture, one, y, across[-1])
            y += _ROW
        y += 6
    for value in across:
        picture.line("grid", value / across[-1], 4, value / across[-1], y)
        picture.text(value / across[-1], y + 15, tick_text(value), kind="tick", anchor="middle")
    picture.text(1, y + 33, "ms a token", kind="axis", anchor="end")
    return picture.html(y + 40, kind="bars")


def _bar(picture: Picture, one: Variant, y: float, most_ms: float) -> None:
    node, scale = one.node, 1e6 * most_ms
    took, waits = node["token_ns"].number or 0.0, node["exposed_wait_ns"].number or 0.0
    computed = max(0.0, took - waits)
    picture.text(0, y + 12, f"hints {one.hints}: {ms(took)} ms, waited {ms(waits)}", kind="label")
    top = y + 18
    picture.bar("f-compute", 0, computed / scale, top, _BAR, f"{one.name}: compute {ms(computed)} ms")
    picture.bar("f-wait", computed / scale, took / scale, top, _BAR, f"{one.name}: waited {ms(waits)} ms")
    for kind, value in (("bound", node["bounds"]["compute_ns"]), ("storage", node["storage_ns"])):
        at_ns = value.number
        if at_ns is not None:
            picture.upright(kind, at_ns / scale, top - 3, top + _BAR + 3)
