"""Shows what doctor found beside the drive: what is around a run, and whether the model says what it said."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cli.console import Console

if TYPE_CHECKING:
    from mlx_flashnext.engine.golden import GoldenCheck
    from mlx_flashnext.engine.surroundings import Surroundings

SHOWN_CHARACTERS = 100


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
    for line in _golden_lines(check, why_none):
        console.wrapped(line)


def health_document(around: "Surroundings", check: "GoldenCheck | None", why_none: str) -> Mapping[str, Any]:
    """Return it for programs."""
    golden: Mapping[str, Any] = {"outcome": "not checked", "reason": why_none}
    if check is not None:
        golden = {
            "outcome": check.outcome,
            "text": check.golden.text,
            "tokens": list(check.golden.tokens),
            "num_same": check.num_same,
            "is_repeated": check.is_repeated,
            "num_proposed": check.num_proposed,
            "num_accepted": check.num_accepted,
            "file": str(check.path),
        }
    return {
        "surroundings": [
            {"name": fact.name, "value": fact.value, "advice": fact.advice or None} for fact in around.facts
        ],
        "surroundings_unmeasured": list(around.unmeasured),
        "golden": golden,
    }


def _golden_lines(check: "GoldenCheck | None", why_none: str) -> list[str]:
    if check is None:
        return [f"golden: not checked, {why_none}"]
    number = len(check.golden.tokens)
    said = {
        "kept": f"golden: {number} greedy tokens, kept to be compared with next time",
        "same": f"golden: {number} greedy tokens, the same as the first time",
        "new conditions": f"golden: {number} greedy tokens, kept anew: backend, version or slots changed",
        "differs": f"golden: DIFFERS from the first time after {check.num_same} of {number} tokens",
    }
    lines = [said[check.outcome], f"golden: {check.golden.text[:SHOWN_CHARACTERS]!r}"]
    if check.outcome == "differs":
        lines.append(
            "hint: the files are no longer what they were: flashnext verify PACK, or fetch the model again; "
            f"if this is what it should say, delete {check.path}"
        )
    if check.is_repeated:
        lines.append("hint: it says the same over and over: the files may not be what config.json says")
    if check.num_proposed:
        share = check.num_accepted / check.num_proposed
        lines.append(f"next-token module: {check.num_accepted} of {check.num_proposed} proposals were right")
        if share < 0.05:
            lines.append(
                "hint: almost none of its proposals are right, so it may have been converted wrongly; "
                "--draft none or lookup do without it"
            )
    return lines
