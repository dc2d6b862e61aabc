"""Write the measured figures into the demo's card, between its two markers.

    python -m bench.demo.card [--write]

Reads `bench/demo/results/score.json` and `evaluate.json`, which `bench.demo.score` and `bench.demo.evaluate`
wrote with `--json`; without `--write` it only prints the tables.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
CARD = HERE.parents[1] / "mlx_flashnext" / "demo" / "CARD.md"
BEGIN, END = "<!-- figures: python -m bench.demo.card --write -->", "<!-- end of figures -->"
#: Least share right, by the beginning of the part's name.
BARS = {
    "sums of 1 step, greedy": 0.95,
    "sums of 2 steps, greedy": 0.8,
    "sums of 3 steps, greedy": 0.8,
    "sums of 1 step, sampled": 0.85,
    "functions": 0.8,
}


def verdict(holds: bool) -> str:
    """Return a word for the last column."""
    return "holds" if holds else "**missed**"


def score_table(report: dict[str, Any]) -> list[str]:
    """Return the table of what is right."""
    lines = [
        "| held out, by `bench.demo.score` | right | to the letter | bar | |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for name, part in report["parts"].items():
        bar = next(share for start, share in BARS.items() if name.startswith(start))
        share = part["right"] / part["asked"]
        right = f"{part['right']} of {part['asked']} | {part['as taught']}"
        lines.append(f"| {name} | {right} | {bar:.0%} | {verdict(share >= bar)} |")
    return lines


def loss_table(report: dict[str, Any]) -> list[str]:
    """Return the table of losses by genre."""
    shipped, full = report["variants"]["quantised"], report["variants"]["float32"]
    lines = [
        "| held-out documents | loss, shipped | loss, float32 | next token right | MTP agrees |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for part, r in shipped.items():
        shares = f"{r['accuracy']:.3f} | {r['mtp agreement']:.3f}"
        lines.append(f"| {part} | {r['loss']:.4f} | {full[part]['loss']:.4f} | {shares} |")
    return lines


def other_table(report: dict[str, Any]) -> list[str]:
    """Return the table of what the format and the sparsity cost."""
    fewest = min(report["effective experts"])
    over_float, over_dense = report["quantised over float32"], report["sparse over dense"]
    return [
        "| by `bench.demo.evaluate` | measured | bar | |",
        "| --- | ---: | ---: | --- |",
        f"| loss, shipped 4-bit over float32 | {over_float:+.2%} | 3% | {verdict(over_float <= 0.03)} |",
        f"| loss at {report['length']} tokens (4x the QSA budget), sparse over dense attention "
        f"| {over_dense:+.2%} | 2% | {verdict(over_dense <= 0.02)} |",
        f"| effective experts of 64, fewest of any layer | {fewest:.1f} | 32 | {verdict(fewest >= 32)} |",
    ]


def figures() -> str:
    """Return the tables in Markdown."""
    score, evaluate = (
        json.loads((HERE / "results" / f"{n}.json").read_text()) for n in ("score", "evaluate")
    )
    tables = score_table(score), other_table(evaluate), loss_table(evaluate)
    return "\n\n".join("\n".join(table) for table in tables)


def filled(card: str) -> str:
    """Return the card with today's figures between the markers."""
    head, _, rest = card.partition(BEGIN)
    return f"{head}{BEGIN}\n{figures()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print the tables or write them into the card."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--write", action="store_true", help="write the card; without it, print")
    args = ap.parse_args()
    if args.write:
        CARD.write_text(filled(CARD.read_text()))
    else:
        print(figures())


if __name__ == "__main__":
    main()
