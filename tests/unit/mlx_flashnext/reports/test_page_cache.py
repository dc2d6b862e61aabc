"""A cache that is said to be cold is cold."""

import os
import sys
from pathlib import Path

import pytest

from mlx_flashnext.reports import page_cache
from mlx_flashnext.reports.page_cache import MOST_CACHED, cached_share, prepare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops pages without privileges")


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """A file that is on the drive, where the file system lets go of such pages at all."""
    path = tmp_path / "clean"
    with path.open("wb") as stream:
        stream.write(os.urandom(1 << 20))
        stream.flush()
        os.fsync(stream.fileno())
    share = prepare([path], "cold").cached_share
    if share is None or share > MOST_CACHED:
        pytest.skip("this file system keeps its pages")
    return path


def test_a_file_is_cold_or_warm_as_asked(clean: Path) -> None:
    assert prepare([clean], "warm").cached_share == 1
    assert prepare([clean], "as-is").cached_share == 1
    cold = prepare([clean], "cold")
    assert cold.cached_share == 0
    assert "posix_fadvise" in cold.how


def test_a_file_that_was_written_a_moment_ago_is_cold_too(clean: Path) -> None:
    """Pages that are not on the drive yet cannot be dropped: a new checkpoint was measured from memory."""
    fresh = clean.with_name("fresh")
    fresh.write_bytes(os.urandom(1 << 20))
    assert cached_share([fresh]) == 1
    assert prepare([fresh], "cold").cached_share == 0


def test_a_look_does_not_find_what_it_fetched_itself(clean: Path) -> None:
    """A small file was looked at more often than it has pages, and a cold one seemed to be half in memory."""
    small = clean.with_name("small")
    small.write_bytes(os.urandom(16 << 12))
    assert prepare([small], "cold").cached_share == 0
    assert prepare([small], "warm").cached_share == 1


def test_pages_that_stayed_are_dropped_again(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice may be refused for a moment, for all of a small file; where it always is, that is said."""
    honest, asked = page_cache.drop, []

    def busy(path: Path) -> None:
        asked.append(path)
        if len(asked) > 2:
            honest(path)

    monkeypatch.setattr(page_cache, "drop", busy)
    prepare([clean], "warm")
    assert prepare([clean], "cold").cached_share == 0
    assert len(asked) == 3
    monkeypatch.setattr(page_cache, "drop", lambda _: None)
    prepare([clean], "warm")
    assert prepare([clean], "cold").cached_share == 1
