"""Shows what doctor found beside the drive: what is around a run, and whether the model says what it said."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cli.console import Console
from cli.golden import golden_document, golden_lines

if TYPE_CHECKING:
    from mlx_flashnext.reports.golden import GoldenCheck
    from mlx_flashnext.reports.surroundings import Surroundings


def show_health(console: Console, around: "Surroundings", check: "GoldenCheck | None", why_none: str) -> None:
    """Show it, each advice under the fact that it follows from."""
    for what in around.unmeasured:
        console.wrapped(f"not measured: {what}")
    console.line()
    width = max(len(fact.name) for fact in around.facts)
    for fact in around.facts:
        console.wrapped(f"{fact.name:<{width}}  {fact.value}")
        if fact.advice:
            console.wrapped(f"{'':<{width}}  hint: {fact.advice}")
    console.line()
    for line in golden_lines(check, why_none):
        console.wrapped(line)


def health_document(around: "Surroundings", check: "GoldenCheck | None", why_none: str) -> Mapping[str, Any]:
    """Return it for programs."""
    return {
        "surroundings": [
            {"name": fact.name, "value": fact.value, "advice": fact.advice or None} for fact in around.facts
        ],
        "surroundings_unmeasured": list(around.unmeasured),
        "golden": golden_document(check, why_none),
    }
