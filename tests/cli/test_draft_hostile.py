"""Files that come with a draft, or that a killed run left: refused in one line with the right code."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.errors import describe
from cli.tree import app
from drafter.errors import DrafterError
from drafter.train.runs import RUN, STATE
from drafter.train.trained import FILE as TRAINING
from mlx_flashnext.training import draft_promote
from tests.cli.test_draft import prompts
from tests.tiny.checkpoints import build_mlx
from tests.tiny.own_drafts import write_draft
from tests.unit.drafter.train import sets

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("mlx") / "model")


def flashnext(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


def refused(result: Any, code: int, *said: str) -> None:
    """Hold a command to an error of one short line and a hint."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    error, _, hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert len(error) < 700
    assert max(map(len, error.split())) < 200
    assert all(part in error for part in said), error


def training() -> dict[str, Any]:
    log = [{"base": 3.0, "norm": 1.0}, {"base": 1.0, "norm": 0.5}]
    return {
        "format": "flashnext-draft-training",
        "version": 1,
        "target_digest": "t",
        "steps_done": 5,
        "log": log,
    }


LONG = 10**400
TRAININGS: dict[str, tuple[Change | bytes, int]] = {
    "nested": (b"[" * 100_000, 5),
    "empty": (b"", 5),
    "a list": (b"[]", 5),
    "no number": (b'{"format": NaN}', 5),
    "bytes": (b"\xff\xfe\x00", 5),
    "huge": (b'{"a": "' + b"x" * (2 << 20) + b'"}', 5),
    "a name of a megabyte": (lambda d: d.update({"x" * (1 << 19): 1}) or d.pop("log"), 5),
    "another version": (lambda d: d.update(version=2), 3),
    "a version of 400 digits": (lambda d: d.update(version=LONG), 3),
    "another format": (lambda d: d.update(format="y" * 5000), 3),
    "no log": (lambda d: d.pop("log"), 5),
    "a log that is a number": (lambda d: d.update(log=7), 5),
    "a log without its loss": (lambda d: d["log"][1].pop("base"), 5),
    "a long log": (lambda d: d.update(log=d["log"] * 1000), 5),
    "a loss of 400 digits": (lambda d: d["log"][0].update(base=LONG), 5),
    "a loss that is a text": (lambda d: d["log"][0].update(base="z" * 5000), 5),
    "steps of 400 digits": (lambda d: d.update(steps_done=LONG), 5),
    "steps below nought": (lambda d: d.update(steps_done=-1), 5),
    "no digest": (lambda d: d.update(target_digest=None), 5),
    "a long digest": (lambda d: d.update(target_digest="d" * 5000), 5),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_hostile_record_of_a_training_is_refused_in_a_short_line(tmp_path, name):
    change, code = TRAININGS[name]
    document = training()
    if not isinstance(change, bytes):
        change(document)
    (tmp_path / TRAINING).write_bytes(change if isinstance(change, bytes) else json.dumps(document).encode())
    with pytest.raises(DrafterError, match="No record of a training in") as caught:
        draft_promote._training_of(tmp_path)
    failure = describe(caught.value)
    assert failure.code == code
    assert failure.hint
    assert "\n" not in failure.message
    assert len(failure.message) < 700
    assert max(map(len, failure.message.split())) < 200


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_no_record_and_holds_nobody_up(tmp_path, kind):
    os.mkfifo(tmp_path / TRAINING) if kind == "pipe" else (tmp_path / TRAINING).mkdir()
    with pytest.raises(DrafterError, match=TRAINING) as caught:
        draft_promote._training_of(tmp_path)
    assert describe(caught.value).code == 5


def test_a_sound_record_is_read_and_none_is_none(tmp_path):
    assert draft_promote._training_of(tmp_path) is None
    (tmp_path / TRAINING).write_text(json.dumps(training()))
    found = draft_promote._training_of(tmp_path)
    assert found is not None
    assert (found.base_losses, found.steps_done, found.log) == ((3.0, 1.0), 5, training()["log"])


@pytest.fixture(scope="module")
def captured(target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("captured")
    words = ("--taps", "0,1,2", "--temp", 0, "--max-tokens", 16, "--slots", 8, "-c", 256, "--held-out", 2)
    made = flashnext("draft", "capture", prompts(place, 4), place / "set", "--model", target, *words)
    assert made.exit_code == 0, made.output
    return place


def test_promote_ends_with_5_at_a_hostile_record_and_publishes_nothing(target, captured, tmp_path):
    draft = write_draft(tmp_path / "draft", target, contraction="mean")
    (draft / TRAINING).write_bytes(b"[" * 100_000)
    before = {path.name for path in draft.iterdir()}
    result = flashnext(
        "draft", "promote", draft, "--model", target, "--captures", captured / "set",
        "--prompts", captured / "prompts.jsonl", "--samples", 0, "-q",
    )  # fmt: skip
    refused(result, 5, "No record of a training in", TRAINING)
    assert {path.name for path in draft.iterdir()} == before


PROMPTS = {
    "nested": b'{"messages": ' + b"[" * 100_000,
    "no text": b'{"prompt": 7}',
    "a label that no set takes": json.dumps({"prompt": "x", "label": "l" * 257}).encode(),
    "half a pair": b'{"prompt": "\\ud800"}',
    "bytes": b'{"prompt": "\xff"}',
    "a number of 400 digits": b'{"thinking": ' + b"9" * 400 + b"}",
    "no number": b'{"prompt": NaN}',
    "roles of nobody": b'{"messages": [{"role": 1}]}',
}


@pytest.mark.parametrize("name", PROMPTS)
def test_hostile_prompts_are_refused_with_their_line_before_anything_is_written(target, tmp_path, name):
    place = tmp_path / "prompts.jsonl"
    place.write_bytes(b'{"prompt": "hello"}\n\n' + PROMPTS[name] + b"\n")
    result = flashnext("draft", "capture", place, tmp_path / "set", "--model", target, "--taps", "0,1")
    refused(result, 2, "Line 3 of prompts.jsonl is no prompt")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_prompts_in_what_is_no_file_are_5(target, tmp_path, kind):
    place = tmp_path / "prompts.jsonl"
    os.mkfifo(place) if kind == "pipe" else place.mkdir()
    result = flashnext("draft", "capture", place, tmp_path / "set", "--model", target, "--taps", "0,1")
    refused(result, 5, "No prompts in", str(place))


def test_a_line_feed_of_unicode_inside_a_prompt_ends_no_line(target, tmp_path):
    place = tmp_path / "prompts.jsonl"
    place.write_text('{"prompt": "a\u2028b"}\r\n', encoding="utf-8")
    words = ("--model", target, "--taps", "0,1", "--temp", 0, "--max-tokens", 4, "--slots", 8, "-c", 128)
    result = flashnext("draft", "capture", place, tmp_path / "set", *words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("manifest.json", b"{}", 5),
        ("manifest.json", b"[" * 100_000, 5),
        ("manifest.json", json.dumps({"format": "flashnext-draft-capture", "version": LONG}).encode(), 3),
        ("index.jsonl", b'{"file": "' + b"f" * 5000 + b'"}\n', 5),
        ("shard-00000.bin", b"", 5),
    ],
)
def test_a_damaged_set_is_damaged_and_one_of_another_version_incompatible(target, tmp_path, name, data, code):
    sets.write(tmp_path / "set", 2)
    (tmp_path / "set" / name).write_bytes(data)
    result = flashnext("draft", "train", tmp_path / "set", tmp_path / "run", "--model", target)
    refused(result, code, name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        (RUN, b"{", 5),
        (RUN, json.dumps({"format": "flashnext-draft-run", "version": LONG}).encode(), 3),
        (STATE, b"x" * 5, 5),
        (STATE, (1 << 62).to_bytes(8, "little") + b"{}", 5),
        (STATE, b"\x02\x00\x00\x00\x00\x00\x00\x00{}", 5),
        ("log.csv", b"step\n1,2,3\nx,y\n" + b"9" * 5000, 0),
    ],
)
def test_a_damaged_run_is_refused_and_a_damaged_log_is_not_read(target, captured, tmp_path, name, data, code):
    words = ("draft", "train", captured / "set", tmp_path / "run", "--model", target, "--steps", 1,
             "--documents", 1, "--anchors", 2, "-q")  # fmt: skip
    assert flashnext(*words).exit_code == 0
    (tmp_path / "run" / name).write_bytes(data)
    result = flashnext(*words)
    if code:
        refused(result, code, name if name == STATE else "No training run in")
    else:
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("data", "code"), [(b"[" * 100_000, 5), (b'{"hidden_size": NaN}', 5), (b"\x00" * 3000, 5)]
)
def test_a_hostile_config_is_refused(target, captured, tmp_path, data, code):
    (tmp_path / "config.json").write_bytes(data)
    result = flashnext(
        "draft", "train", captured / "set", tmp_path / "run", "--model", target,
        "--config", tmp_path / "config.json", "-q",
    )  # fmt: skip
    refused(result, code, "No config of a draft")
    assert not (tmp_path / "run").exists()
