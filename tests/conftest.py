"""Profiles, markers and isolation shared by every test."""

import os
import pathlib
import sys

import pytest
from hypothesis import HealthCheck, settings

# The CPU backend would call a C++ compiler for every fused shape; compiled and plain results are bitwise
# equal.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=_QUIET, print_blob=True
)
settings.register_profile("explore", deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _private_user_directories(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every test away from the real home, caches and settings."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only a Mac or real weights can show, and say so."""
    skip_metal = pytest.mark.skip(reason="needs a Metal device")
    skip_weights = pytest.mark.skip(reason="needs FLASHNEXT_TEST_WEIGHTS")
    for item in items:
        if "metal" in item.keywords and sys.platform != "darwin":
            item.add_marker(skip_metal)
        if "weights" in item.keywords and "FLASHNEXT_TEST_WEIGHTS" not in os.environ:
            item.add_marker(skip_weights)
