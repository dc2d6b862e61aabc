"""Makes and shows the golden of a model: its first 32 greedy tokens, kept and compared (FIELD P61).

Entry points: `checked_golden`, `golden_lines`, `golden_document`. `doctor` compares; `pack` and `convert`
keep the first one while the build is known to be what was written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.console import OPENING, Console
from cli.engine_factory import Services
from cli.errors import describe
from cli.settings import goldens

if TYPE_CHECKING:
    from mlx_flashnext.reports.golden import GoldenCheck

SHOWN_CHARACTERS = 100


def checked_golden(
    services: Services, directory: Path, console: Console
) -> "tuple[GoldenCheck | None, Exception | None]":
    """Return the golden, or why there is none: a machine too small for the model is not an error here."""
    from expert_store.errors import StoreError
    from mlx_flashnext.engine.errors import EngineError
    from mlx_flashnext.errors import ModelError

    console.progress(OPENING, 0, 0)
    try:
        return services.check_golden(directory, goldens(), console.progress), None
    except (EngineError, ModelError, StoreError, OSError) as error:
        return None, error
    finally:
        console.end_progress()


def why_not(problem: Exception | None) -> str:
    """Return why there is no golden, in one line."""
    return "left out" if problem is None else describe(problem).message


def golden_document(check: "GoldenCheck | None", why_none: str) -> Mapping[str, Any]:
    """Return it for programs."""
    if check is None:
        return {"outcome": "not checked", "reason": why_none}
    return {
        "outcome": check.outcome,
        "text": check.golden.text,
        "tokens": list(check.golden.tokens),
        "num_same": check.num_same,
        "is_repeated": check.is_repeated,
        "num_proposed": check.num_proposed,
        "num_accepted": check.num_accepted,
        "file": str(check.path),
    }


def golden_lines(check: "GoldenCheck | None", why_none: str) -> list[str]:
    """Return it for people, line by line."""
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
