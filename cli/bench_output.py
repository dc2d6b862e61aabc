"""Rows of `flashnext bench` as Markdown, JSON, JSON lines or CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cli.console import Console, as_json_value, counted, size

if TYPE_CHECKING:
    from mlx_flashnext.reports.measure import Row


def write_rows(console: Console, rows: "Sequence[Row]", form: str) -> None:
    """Write rows to stdout.

    Args:
        console: where to.
        rows: at least one.
        form: `md`, `json`, `jsonl` or `csv`.
    """
    documents: list[dict[str, Any]] = [as_json_value(row.to_dict()) for row in rows]
    if form == "json":
        console.document(documents)
    elif form == "jsonl":
        for document in documents:
            console.document(document, in_one_line=True)
    elif form == "csv":
        console.answer(csv_text(documents))
    else:
        _markdown(console, rows)


def csv_text(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return one header row and one row a case; single repetitions are left out."""
    flat = [{name: value for name, value in one.items() if name != "samples"} for one in documents]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Return a Markdown table whose columns also line up as plain text."""
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width + 1) + ":" if index in right else "-" * (width + 2) for index, width in enumerate(widths)
    ]
    return "\n".join((line(headings), f"|{'|'.join(rule)}|", *(line(row) for row in rows))) + "\n"


def _markdown(console: Console, rows: "Sequence[Row]") -> None:
    headings = (
        "model",
        "memory",
        "experts",
        "page cache",
        "hints",
        "draft",
        "test",
        "t/s",
        "from, to",
        "reads/tok",
        "hit",
    )
    cells: list[tuple[str, ...]] = []
    for row in rows:
        facts, (low, high) = row.conditions, row.spread
        hits = [sample.hit_rate for sample in row.samples if sample.hit_rate is not None]
        cells.append(
            (
                facts.model,
                size(facts.planned_bytes),
                f"{facts.slots_per_layer} of {facts.num_experts}",
                facts.page_cache if facts.disk == "real" else f"{facts.page_cache}, simulated disk",
                facts.hints,
                facts.draft if not facts.num_draft_tokens else f"{facts.draft} {facts.num_draft_tokens}",
                row.case.name,
                f"{row.tokens_per_s:.2f}",
                f"{low:.2f}, {high:.2f}",
                size(row.read_bytes_per_token),
                f"{100 * sum(hits) / len(hits):.0f}%" if hits else "",
            )
        )
    console.answer(markdown_table(headings, cells, right=(1, 2, 7, 8, 9, 10)))
    console.line()
    for line in condition_lines(rows[0].conditions.to_dict(), len(rows[0].samples)):
        console.line(line)


def condition_lines(facts: Mapping[str, Any], repetitions: int) -> list[str]:
    """Return what all rows have in common, as lines for people."""
    experts = f"{size(facts['expert_budget_bytes'])} of experts, records of {size(facts['record_bytes'])}"
    cpus = counted(facts["num_cpus"], "processor")
    return [
        f"model: {facts['model']} {facts['model_digest'][:16]}, {facts['layout']} layout",
        f"quantisation: {facts['quantisation']}",
        f"budget: {size(facts['budget_bytes'])}, planned {size(facts['planned_bytes'])}, {experts}",
        f"machine: {facts['machine']}, {facts['backend']}, {facts['kernels']} kernels, {cpus}, "
        f"{size(facts['memory_bytes'])}",
        f"versions: flashnext {facts['flashnext']}, mlx {facts['mlx']}, Python {facts['python']}",
        f"page cache: {facts['page_cache']}, {facts['page_cache_how']}; disk: {facts['disk']}",
        f"prompts: {facts['prompt_set']}; {facts['sampling']}; median of {repetitions} after one not counted",
    ]
