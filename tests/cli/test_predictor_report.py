"""`flashnext bench --report predictors` and the trainers of route hints, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from tests.tiny.checkpoints import build_mlx
from tests.tiny.route_hints import write_near


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = build_mlx(tmp_path_factory.mktemp("predictors") / "model")
    write_near(directory)
    return directory


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


def test_the_page_and_the_document_say_the_same(model):
    words = ("bench", "--model", model, "--report", "predictors", "--drafts", "none",
             "--hints", "near-linear", "--prompts", 1, "-n", 3, "-r", 1, "--budgets", "7,9")  # fmt: skip
    page, document = flashnext(*words), flashnext(*words, "--json")
    assert (page.exit_code, document.exit_code) == (0, 0), page.stderr
    found = json.loads(document.stdout)
    assert [(one["slots"], one["hints"]) for one in found["served"]] == [
        (slots, hints) for slots in (7, 9) for hints in ("off", "near-linear")
    ]
    rows = [line.split() for line in page.stdout.splitlines()]
    assert [row[:2] for row in rows if row[1:2] in (["off"], ["near-linear"])] == [
        ["7", "off"], ["7", "near-linear"], ["9", "off"], ["9", "near-linear"],
    ]  # fmt: skip
    by_name = {one["name"]: one for one in found["figures"]}
    assert by_name["oracle"]["recall"] == [1.0, 1.0, 1.0, 1.0]
    recall = " ".join(f"{value:.3f}" for value in by_name["near-linear"]["recall"])
    assert recall in " ".join(page.stdout.split())
    assert "no such draft proposes" in page.stdout
    assert found["bars"]["gap_closed"] is None


def test_several_drafters_are_refused_rather_than_left_out(model):
    refused = flashnext("bench", "--model", model, "--report", "predictors", "--drafts", "none,lookup:2")
    assert refused.exit_code == 2
    assert "takes one drafter: --drafts none,lookup:2" in refused.stderr


def test_captures_that_nobody_reads_are_refused(model, tmp_path):
    refused = flashnext("bench", "--model", model, "--captures", tmp_path)
    assert refused.exit_code == 2
    assert "Nothing reads --captures" in refused.stderr


def test_training_on_what_is_no_capture_set_says_so_and_writes_nothing(model, tmp_path):
    refused = flashnext(
        "draft", "train-near", "--model", model, "--captures", tmp_path, "--out", tmp_path / "near"
    )
    assert refused.exit_code != 0
    assert "No capture set" in refused.stderr
    assert not (tmp_path / "near").exists()
