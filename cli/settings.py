"""What people can set without a flag: environment variables, read here and nowhere else.

variable                meaning
FLASHNEXT_MODEL         as --model
FLASHNEXT_MEMORY        as --memory
FLASHNEXT_NO_PROGRESS   as --no-progress
FLASHNEXT_FUSE          the CPU backend fuses kernels, as Metal does: a token takes a fifth less, the first
                        ones a quarter of a minute more, once per machine (read by engine/machine.py)
NO_COLOR                as --no-color
FORCE_COLOR             colour even in a pipe or a file, unless NO_COLOR is set
TERM=dumb               no progress at a terminal; no colour, unless FORCE_COLOR is set
HF_HUB_CACHE, HF_HOME   where the local Hugging Face cache is
HF_ENDPOINT, HF_TOKEN   where the Hub is, and who asks; HF_HUB_OFFLINE forbids asking

A flag goes before its variable. Hub locations are Hugging Face's own variables, so that users' caches
are found where they already are.
"""

import os
from collections.abc import Mapping
from pathlib import Path

MODEL_VARIABLE = "FLASHNEXT_MODEL"
MEMORY_VARIABLE = "FLASHNEXT_MEMORY"
NO_PROGRESS_VARIABLE = "FLASHNEXT_NO_PROGRESS"


def expanded(name: str) -> Path:
    """Return a path with a leading `~` replaced; where nobody has that home, the name as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the local Hugging Face cache, as huggingface_hub finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := environment.get(name):
            return expanded(os.path.expandvars(value))
    if value := environment.get("HF_HOME"):
        return expanded(os.path.expandvars(value)) / "hub"
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(os.path.expandvars(caches)) / "huggingface" / "hub"


def popularity() -> Path:
    """Return the directory in which runs leave what they used most."""
    from platformdirs import user_cache_path

    return user_cache_path("flashnext") / "popularity"


def goldens() -> Path:
    """Return the directory in which doctor keeps what models said the first time."""
    from platformdirs import user_cache_path

    return user_cache_path("flashnext") / "goldens"


def builds() -> Path:
    """Return the directory in which `pack` and `convert` note what they made, for `list`."""
    from platformdirs import user_cache_path

    return user_cache_path("flashnext") / "builds"


def wants_progress(environment: Mapping[str, str] = os.environ, *, is_terminal: bool = True) -> bool:
    """Return whether progress may be shown at all: TERM says nothing about a pipe."""
    is_dumb = is_terminal and environment.get("TERM") == "dumb"
    return not environment.get(NO_PROGRESS_VARIABLE) and not is_dumb


def wants_download_progress(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a download may show progress: Hugging Face's own variable can forbid it."""
    return environment.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() not in ("1", "ON", "YES", "TRUE")


def wants_colour(*, is_terminal: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream gets colour: NO_COLOR and TERM=dumb forbid it, FORCE_COLOR demands it."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return is_terminal and environment.get("TERM") != "dumb"
