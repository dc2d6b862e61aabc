"""The demo model that ships with flashnext, a very small `qwen4_exp`; see `CARD.md`."""

import pathlib

# Three eighths of its experts: the demo would fit whole, and then nothing would be streamed to look at.
DEMO_SLOTS = 24


def demo_dir() -> pathlib.Path:
    """Return the folder that holds the demo model's files."""
    return pathlib.Path(__file__).resolve().parent
