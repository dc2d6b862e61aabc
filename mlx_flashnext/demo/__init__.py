"""The demo model that ships with flashnext, a very small `qwen4_exp`; see `MODEL_CARD.md`."""

import pathlib


def demo_dir() -> pathlib.Path:
    """Return the folder that holds the demo model's files."""
    return pathlib.Path(__file__).resolve().parent
