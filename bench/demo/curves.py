"""Draw the training curves of `log.csv` as `curves.svg`, readable on light and dark pages.

    python -m bench.demo.curves [--log FILE] [--out FILE] [--table]

Two panels over the tokens seen: the losses of next token and next but one on a logarithmic axis, and the sum
of the indexers' KL losses.  Vertical lines mark where rows or data changed.  Standard library only.
"""

from __future__ import annotations

import argparse
import csv
import math
import pathlib
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
WIDTH, PANEL, GAP, LEFT, RIGHT, TOP = 720, 220, 56, 56, 16, 34
#: Step, and what began there.
MARKS = [(400, "rows of 512"), (1250, "2nd data"), (2400, "3rd"), (2800, "4th"), (3900, "5th")]
TABLE_EVERY, TABLE_FIRST = 250, (50, 100, 400, 670)

STYLE = """
text { font: 12px sans-serif; fill: #333 } .title { font-weight: bold }
.grid { stroke: #ddd } .mark { stroke: #888; stroke-dasharray: 3 3 }
.line { fill: none; stroke-width: 1.6 } .a { stroke: #0b62c4 } .b { stroke: #c2571a } .c { stroke: #2c7d3f }
.ta { fill: #0b62c4 } .tb { fill: #c2571a } .tc { fill: #2c7d3f }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .grid { stroke: #444 } .mark { stroke: #999 }
  .a { stroke: #6cb2ff } .b { stroke: #ffa066 } .c { stroke: #7fd494 }
  .ta { fill: #6cb2ff } .tb { fill: #ffa066 } .tc { fill: #7fd494 }
}
"""

Row = dict[str, float]


def read_log(path: pathlib.Path) -> list[Row]:
    """Return the log's rows with the tokens seen so far in `millions`."""
    with path.open(newline="") as f:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(f)]
    before, seen = 0.0, 0.0
    for row in rows:
        seen += (row["step"] - before) * row["tokens"] / 1e6
        before, row["millions"] = row["step"], seen
    return rows


def smoothed(rows: list[Row], key: str, width: int = 5) -> list[tuple[float, float]]:
    """Return `(millions of tokens, mean of up to `width` rows)`."""
    points = [(r["millions"], r[key]) for r in rows if not math.isnan(r[key])]
    return [
        (x, sum(v for _, v in points[max(0, i + 1 - width) : i + 1]) / min(width, i + 1))
        for i, (x, _) in enumerate(points)
    ]


def path(points: list[tuple[float, float]], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Return the `d` attribute of a line."""
    return "M" + " L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)


def panel(
    rows: list[Row],
    top: float,
    title: str,
    lines: list[tuple[str, str, str]],
    ticks: list[float],
    logarithmic: bool,
) -> list[str]:
    """Return one panel; `lines` are (column, label, class)."""
    end = rows[-1]["millions"]
    scale = math.log if logarithmic else float
    low, high = scale(ticks[0]), scale(ticks[-1])

    def x(value: float) -> float:
        return LEFT + value / end * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        part = (scale(max(value, 1e-9)) - low) / (high - low)
        return top + PANEL * (1 - min(1.0, max(0.0, part)))

    out = [f'<text class="title" x="{LEFT}" y="{top - 12}">{title}</text>']
    for tick in ticks:
        out.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        out.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    out += [
        f'<text x="{x(million):.1f}" y="{top + PANEL + 16}" text-anchor="middle">{million} M</text>'
        for million in range(int(end) + 1)
    ]
    for step, label in MARKS:
        at = next((r["millions"] for r in rows if r["step"] >= step), None)
        if at is not None and step < rows[-1]["step"]:
            out.append(
                f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{top}" y2="{top + PANEL}"/>'
            )
            out.append(f'<text x="{x(at) + 4:.1f}" y="{top + 14}">{label}</text>')
    for i, (column, label, kind) in enumerate(lines):
        out.append(f'<path class="line {kind}" d="{path(smoothed(rows, column), x, y)}"/>')
        at = f'x="{WIDTH - RIGHT}" y="{top + 34 + 16 * i}" text-anchor="end"'
        out.append(f'<text class="t{kind}" {at}>{label}</text>')
    return out


def draw(rows: list[Row]) -> str:
    """Return the picture."""
    height = TOP + 2 * PANEL + GAP + 28
    body = panel(
        rows,
        TOP,
        "Training loss by tokens seen, nats a token (prompts count a tenth), mean of 50 steps",
        [("loss", "next token", "a"), ("mtp", "next but one (MTP)", "b")],
        [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10],
        logarithmic=True,
    )
    body += panel(
        rows,
        TOP + PANEL + GAP,
        "Indexers: KL to the attention's block mass, sum over three layers, nats (first steps: up to 1.9)",
        [("index", "", "c")],
        [0, 0.1, 0.2, 0.3, 0.4, 0.5],
        logarithmic=False,
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>Training curves of the demo model</title>\n<style>{STYLE}</style>\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def table(rows: list[Row]) -> str:
    """Return some rows in Markdown."""
    lines = ["| step | tokens | rate | loss | mtp | index |", "| ---: | ---: | ---: | ---: | ---: | ---: |"]
    steps = {*TABLE_FIRST, rows[-1]["step"]}
    for r in rows:
        if r["step"] in steps or r["step"] % TABLE_EVERY == 0:
            figures = f"{r['rate']:.2f} | {r['loss']:.3f} | {r['mtp']:.3f} | {r['index']:.3f}"
            lines.append(f"| {r['step']:.0f} | {r['millions']:.2f} M | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Write the picture or print the table."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--log", type=pathlib.Path, default=HERE / "log.csv")
    ap.add_argument("--out", type=pathlib.Path, default=HERE / "curves.svg")
    ap.add_argument("--table", action="store_true", help="print some rows of the log as a table instead")
    args = ap.parse_args()
    rows = read_log(args.log)
    if args.table:
        print(table(rows))
    else:
        args.out.write_text(draw(rows))


if __name__ == "__main__":
    main()
