"""Says once what the demo model is, and of each model that has a vision tower that it is not read.

The notes that it was said are disposable.
"""

import contextlib

from cli.console import Console, counted
from cli.engine_factory import HasDigest
from cli.model_path import FoundModel

NOTICE = (
    "note: no --model given, so this is the demo model: the real architecture, but tiny. It writes short "
    "stories, small Python functions and sums, and shows how flashnext works, not what Qwen3.8-Flash-Next "
    "can do. For real weights: --model DIRECTORY or --model ORG/NAME. This note appears once."
)


def show_demo_notice(model: FoundModel, console: Console) -> None:
    """Tell people once that they are talking to the demo model."""
    if model.is_demo:
        _once(console, "demo-notice-shown", NOTICE)


def show_vision_notice(checkpoint: HasDigest, console: Console) -> None:
    """Tell people once, of each checkpoint, that its vision tensors are left out."""
    from mlx_flashnext.names import VISION_PREFIXES

    count = sum(name.startswith(VISION_PREFIXES) for name in checkpoint.skipped)
    if count:
        text = (
            f"note: {counted(count, 'vision tensor')} of this checkpoint are not read: flashnext reads text "
            "only, and refuses pictures. This note appears once."
        )
        _once(console, f"vision-notices/{checkpoint.digest[:32]}", text)


def _once(console: Console, name: str, text: str) -> None:
    from platformdirs import user_cache_path

    marker = user_cache_path("flashnext") / name
    if console.is_quiet or marker.exists():
        return
    console.note(text)
    # Without a place for the marker, the note appears again: better than an error.
    with contextlib.suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
