"""What a run leaves of its drafting, and the next process makes of it: real processes that share a cache."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT
from tests.tiny.checkpoints import build_mlx

LEAVES = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("kept") / "model")


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A cache in which one process has left its costs, and what that process said."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, run(model, cache, LEAVES)


def run(model: Path, cache: Path, num_tokens: int, *flags: str) -> dict:
    words = [
        "run",
        "--model",
        str(model),
        "--ignore-chat-template",
        "--temp",
        "0",
        "--slots",
        "6",
        "-c",
        "256",
    ]
    words += ["--draft", "mtp", "-m", str(num_tokens), "--json", *flags, "the cat sat on"]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "cli", *words],
        cwd=ROOT, env=settings, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "stderr": done.stderr}


def kept(cache: Path) -> Path:
    [path] = cache.rglob("*.drafting.json")
    return path


def changed(first: tuple[Path, dict], place: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a cache of its own that holds the first one's costs, changed; the key is that of a real run."""
    document = json.loads(kept(first[0]).read_bytes())
    change(document["runs"][0])
    copy = place / kept(first[0]).relative_to(first[0])
    copy.parent.mkdir(parents=True)
    copy.write_text(json.dumps(document))
    return place


def test_a_process_leaves_what_it_measured_beside_the_popularity(first, model):
    cache, said = first
    [entry] = json.loads(kept(cache).read_bytes())["runs"]
    draft = said["statistics"]["draft"]
    assert (entry["draft"], entry["hints"], entry["slots_share"]) == ("mtp", "off", 6 / 16)
    # The first cycle that drafts is not measured.
    assert entry["num_drafting"] == draft["num_cycles"] - 1 > 0
    assert entry["costs"][0] == 1.0
    assert len(entry["costs"]) == len(entry["times"]) >= 2
    names = {path.suffixes[0] for path in kept(cache).parent.iterdir()}
    assert names == {".json", ".drafting"}, "nothing half-written is left"


def test_the_second_process_rests_at_once_where_the_first_found_that_it_does_not_pay(first, model, tmp_path):
    def losing(entry: dict[str, Any]) -> None:
        entry.update(costs=[1.0, 9.0, 9.0], times=[8.0] * 3, reached=[8.0, 4.0], passed=[4.0, 2.0], purse=0.0)

    cache = changed(first, tmp_path, losing)
    second = run(model, cache, 20)
    draft = second["statistics"]["draft"]
    assert (draft["num_cycles"], draft["used"]) == (0, "none")
    assert draft["reason"].startswith(
        "does not pay here, as measured earlier: a cycle with 2 proposals takes 9.00"
    )
    [entry] = json.loads(kept(cache).read_bytes())["runs"]
    assert 0.1 < entry["purse"] < 0.45, "20 plain steps save a fifth of one: the next runs go on saving"
    forgetful = run(model, cache, 20, "--no-warm")["statistics"]["draft"]
    assert forgetful["num_cycles"] > 0, "the control: who knows nothing tries"
    assert second["text"] == first[1]["text"][: len(second["text"])]


def test_the_second_process_drafts_at_once_where_the_first_found_it_pays(first, model, tmp_path):
    def paying(entry: dict[str, Any]) -> None:
        entry.update(costs=[1.0, 1.0, 1.0], times=[8.0] * 3, reached=[8.0, 8.0], passed=[8.0, 8.0], purse=1.0)

    cache = changed(first, tmp_path, paying)
    draft = run(model, cache, 4)["statistics"]["draft"]
    assert draft["proposed_by_slot"][1] > 0, "the first step is plain, the second cycle proposes two"
    new = run(model, cache, 4, "--no-warm")["statistics"]["draft"]
    assert new["proposed_by_slot"] == [new["num_cycles"]], "the control: who knows nothing begins with one"


def test_costs_of_another_machine_are_asked_for_where_to_try_not_believed(first, model, tmp_path):
    def losing_elsewhere(entry: dict[str, Any]) -> None:
        entry.update(costs=[1.0, 9.0, 9.0], times=[8.0] * 3, reached=[8.0], passed=[4.0], purse=0.0)
        entry["machine"] = "another one"

    draft = run(model, changed(first, tmp_path, losing_elsewhere), 20)["statistics"]["draft"]
    assert draft["num_cycles"] > 0


def test_a_file_that_cannot_be_trusted_is_said_and_written_anew(first, model, tmp_path):
    cache = changed(first, tmp_path, lambda entry: entry.update(costs=[1.0, -1.0]))
    said = run(model, cache, 6)
    assert "it has a figure that cannot have been measured; they are measured anew" in said["stderr"]
    assert "Traceback" not in said["stderr"]
    assert json.loads(kept(cache).read_bytes())["runs"][0]["costs"][0] == 1.0
