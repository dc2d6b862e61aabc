"""`flashnext draft`: what its commands print, where, and with which exit code."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from tests.tiny.checkpoints import build_mlx
from tests.tiny.own_drafts import write_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("mlx") / "model")


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


def prompts(directory: Path, count: int) -> Path:
    place = directory / "prompts.jsonl"
    rows = [{"prompt": f"say {number} {'word ' * (number % 3)}", "label": "talk"} for number in range(count)]
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_a_draft_that_fits_and_one_that_does_not(target: Path, tmp_path: Path) -> None:
    write_draft(tmp_path / "good", target)
    shown = flashnext("draft", "inspect", tmp_path / "good", "--model", target)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "fits: 7 proposals a cycle, contraction next_attn_mix" in shown.stdout
    write_draft(tmp_path / "bad", target, changes={"num_target_layers": 47})
    shown = flashnext("draft", "inspect", tmp_path / "bad", "--model", target)
    assert shown.exit_code == 3
    assert "G03" in shown.stdout
    assert "refused for" in shown.stdout
    said = json.loads(flashnext("draft", "inspect", tmp_path / "bad", "--model", target, "--json").stdout)
    assert {"G03"} <= {row["code"] for row in said["reasons"] if row["consequence"] == "refuse"}


def test_from_prompts_to_a_draft(target: Path, tmp_path: Path) -> None:
    words = ("--model", target, "--temp", 0, "--max-tokens", 16, "--slots", 8, "-c", 256, "--held-out", 3)
    captured = flashnext(
        "draft", "capture", prompts(tmp_path, 6), tmp_path / "set", "--taps", "0,1,2", *words, "--json"
    )
    assert captured.exit_code == 0, captured.output
    said = json.loads(captured.stdout)
    assert (said["num_new"], said["largest_difference"], said["num_route_differences"]) == (6, 0, 0)
    again = flashnext(
        "draft", "capture", tmp_path / "prompts.jsonl", tmp_path / "set", "--taps", "0,1,2", *words
    )
    assert "captured  0 documents, 0 tokens; 6 documents in all" in again.stdout
    other = flashnext(
        "draft", "capture", tmp_path / "prompts.jsonl", tmp_path / "set", "--taps", "0,1", *words
    )
    assert other.exit_code == 1
    assert "has another taps" in other.stderr
    trained = flashnext(
        "draft",
        "train",
        tmp_path / "set",
        tmp_path / "run",
        "--model",
        target,
        "--steps",
        2,
        "--documents",
        2,
    )
    assert trained.exit_code == 0, trained.output
    assert "2 of 2 steps" in trained.stdout
    made = flashnext(
        "draft", "export", tmp_path / "run", tmp_path / "draft", "--model", target, "--licence", "mit"
    )
    assert made.exit_code == 0, made.output
    assert f"--draft-model {tmp_path / 'draft'}" in made.stdout
    judged = flashnext(
        "draft", "evaluate", tmp_path / "draft", "--captures", tmp_path / "set", "--model", target
    )
    assert judged.exit_code == 0, judged.output
    assert "tokens a cycle" in judged.stdout
    assert "without its selector" in judged.stdout
    held_to = ("--captures", tmp_path / "set", "--model", target)
    short = flashnext("draft", "calibrate", tmp_path / "draft", *held_to)
    assert short.exit_code == 1
    assert "4000 are needed" in short.stderr
    climbed = flashnext(
        "draft",
        "promote",
        tmp_path / "draft",
        *held_to,
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--samples",
        0,
    )
    assert climbed.exit_code == 1, climbed.output
    outcomes = [line.split("  ")[0] for line in climbed.stdout.splitlines() if "not reached" in line]
    assert outcomes[:1] == ["held-out acceptance"], climbed.output
    assert not json.loads((tmp_path / "draft" / "flashnext-promotion.json").read_text())["is_promoted"]


def test_what_cannot_be_done_is_said_in_one_line(target: Path, tmp_path: Path) -> None:
    missing = flashnext("draft", "train", tmp_path / "none", tmp_path / "run", "--model", target)
    assert missing.exit_code == 1
    assert "No capture set" in missing.stderr
    words = ("draft", "capture", prompts(tmp_path, 1), tmp_path / "set", "--model", target, "--taps")
    assert flashnext(*words, "one,two").exit_code == 2
    (tmp_path / "prompts.jsonl").write_text('{"prompt": 7}\n')
    broken = flashnext(*words, "0,1")
    assert broken.exit_code == 2
    assert "Line 1 of prompts.jsonl is no prompt" in broken.stderr
