"""Says once, on first use, what the demo model is. The note that it was said is disposable."""

import contextlib
from pathlib import Path

from cli.console import Console
from cli.model_path import FoundModel

NOTICE = (
    "note: no --model given, so this is the demo model: the real architecture, but tiny. It writes short "
    "stories, small Python functions and sums, and shows how flashnext works, not what Qwen3.8-Flash-Next "
    "can do. For real weights: --model DIRECTORY or --model ORG/NAME. This note appears once."
)


def show_demo_notice(model: FoundModel, console: Console) -> None:
    """Tell people once that they are talking to the demo model."""
    if not model.is_demo or console.is_quiet:
        return
    marker = _marker()
    if marker.exists():
        return
    console.note(NOTICE)
    # Without a place for the marker, the note appears again: better than an error.
    with contextlib.suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _marker() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("flashnext") / "demo-notice-shown"
