"""Shows plans for machines that are not here: a line a machine, build and context, drafters in columns."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cli.console import Console, as_json_value

if TYPE_CHECKING:
    from mlx_flashnext.reports.expectation import Expectation, Span
    from mlx_flashnext.reports.plan_table import Cell

GIB = 1 << 30


def show_table(
    console: Console, cells: Sequence["Cell"], drafters: Sequence[str], about: Sequence[str]
) -> None:
    """Show the cells; those of one machine, build and context in one line.

    Args:
        console: where.
        cells: in the order of `plan_table`.
        drafters: of each line.
        about: lines that say what the columns mean and what they rest on.
    """
    rows: list[tuple[str, ...]] = []
    for (memory, build, context), group in groupby(
        cells, key=lambda cell: (cell.memory_bytes, cell.build, cell.context_tokens)
    ):
        line = {cell.draft: cell for cell in group}
        first = line[drafters[0]]
        slots = [_slots(line[draft]) for draft in drafters]
        rows.append((f"{memory // GIB} GB", build, f"{context // 1024}k", *slots, *_figures(first)))
    headings = ("memory", "build", "context", *(f"slots, {draft}" for draft in drafters))
    figures = ("hits", "GB a token", "storage bound", "tokens a second")
    console.table((*headings, *figures), rows, right=range(len(headings) + len(figures)))
    console.line()
    for line in about:
        console.line(line)


def table_document(cells: Sequence["Cell"]) -> list[Mapping[str, Any]]:
    """Return the cells for programs."""
    return [
        {
            "memory_bytes": cell.memory_bytes,
            "build": cell.build,
            "context_tokens": cell.context_tokens,
            "draft": cell.draft,
            "fits": cell.plan is not None,
            "refusal": cell.refusal or None,
            "smallest_budget_bytes": cell.smallest_bytes,
            "slots_per_layer": cell.plan and cell.plan.slots_per_layer,
            "budget_bytes": cell.plan and cell.plan.budget_bytes,
            "total_bytes": cell.plan and cell.plan.total_bytes,
            "expected": cell.expected and expectation_document(cell.expected),
        }
        for cell in cells
    ]


def expectation_document(expected: "Expectation") -> Mapping[str, Any]:
    """Return an expectation for programs; ranges as worse and better."""
    from dataclasses import asdict

    return as_json_value(asdict(expected))


def _slots(cell: "Cell") -> str:
    if cell.plan is not None:
        return "all" if cell.plan.is_resident else str(cell.plan.slots_per_layer)
    if cell.smallest_bytes is None:
        return "-"
    return f"needs {cell.smallest_bytes / GIB:.1f} GiB"


def _figures(cell: "Cell") -> tuple[str, str, str, str]:
    expected = cell.expected
    if expected is None:
        return "", "", "", ""
    storage = expected.storage_s
    return (
        _range(expected.hit_rate, 100, "%", digits=0),
        _range(expected.token_bytes, 1e-9, ""),
        "" if storage is None else _range(storage, 1e3, " ms", digits=0),
        speed_range(expected),
    )


def speed_range(expected: "Expectation") -> str:
    """Return the tokens a second: `3.9 to 23`; the better end is left open where computing sets it."""
    speed = expected.tokens_per_s
    if speed is None:
        return ""
    if expected.share >= 1 and not expected.counts_computing:
        return "as fast as it computes"
    return f"{_short(speed.worse)} to {_short(speed.better)}"


def _range(span: "Span", scale: float, unit: str, *, digits: int = 2) -> str:
    low, high = sorted((span.worse * scale, span.better * scale))
    shown = (f"{low:.{digits}f}", f"{high:.{digits}f}")
    return f"{shown[0]}{unit}" if shown[0] == shown[1] else f"{shown[0]} to {shown[1]}{unit}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"
