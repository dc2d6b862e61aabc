"""The command line on the real engine and a tiny checkpoint: what the scripted engine promises holds here
too.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from tests.cli.conftest import ROOT, environment
from tests.tiny.checkpoints import build_mlx

WORDS = ("--slots", "5", "--ctx-size", "256", "--temp", "1", "--seed", "11")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("real") / "model")


def flashnext(*words: object, input: str | None = None):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services(), input=input)


@pytest.mark.parametrize("thinking", ["--think", "--no-think"])
def test_streamed_bytes_are_the_final_text(model, thinking):
    words = ("run", "--model", model, "the other", thinking, "-m", "24", *WORDS)
    streamed = flashnext(*words)
    assert streamed.exit_code == 0, streamed.output
    document = json.loads(flashnext(*words, "--json").stdout)
    assert document["text"] == streamed.stdout
    assert document["output_tokens"] <= 24
    assert document["plan"]["slots_per_layer"] == 5
    lines = [json.loads(line) for line in flashnext(*words, "--jsonl").stdout.splitlines()]
    assert "".join(line["text"] for line in lines if line["event"] == "token") == document["text"]
    assert "".join(line["reasoning"] for line in lines if line["event"] == "token") == document["reasoning"]


def test_a_seed_repeats_an_answer(model):
    words = ("run", "--model", model, "hello", "-m", "16", "--no-think", *WORDS)
    assert flashnext(*words).stdout == flashnext(*words).stdout


def test_a_context_that_fills_up_ends_with_the_reason(model):
    words = ("run", "--model", model, "hello", "--json", "--ctx-size", "48", "--slots", "5")
    result = flashnext(*words, "--chat-template-config", '{"reasoning_effort": "medium"}', "--seed", "3")
    document = json.loads(result.stdout)
    if document["finish_reason"] != "stop":
        assert document["finish_reason"] == "context"
        assert document["prompt_tokens"] + document["output_tokens"] in (48, 49)


def test_a_prompt_longer_than_the_context_is_refused_with_both_counts(model):
    result = flashnext(
        "run", "--model", model, "-", "--ctx-size", "64", "--slots", "5", input="the " * 250_000
    )
    assert result.exit_code == 4
    assert "64" in result.stderr
    assert "tokens" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("thinking", ["--think", "--no-think"])
def test_every_turn_equals_a_fresh_rendering_answered_from_nothing(model, tmp_path, thinking):
    """Whether the state was continued or rebuilt, the second answer is the one a new process would give."""
    path = tmp_path / "chat.json"
    words = ("chat", "--model", model, thinking, "-m", "12", "-q", *WORDS)
    talk = flashnext(*words, input=f"the\n/save {path}\nother\n")
    assert talk.exit_code == 0, talk.output
    again = flashnext(*words, "--resume", path, input="other\n")
    assert again.exit_code == 0, again.output
    first = flashnext(*words, input="the\n")
    assert talk.stdout == first.stdout + again.stdout


def test_ctrl_c_while_a_real_engine_decodes_ends_with_130(model):
    words = ["run", "--model", str(model), "hello", "--jsonl", "--no-think", "--temp", "0", "--slots", "5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *words, "--ctx-size", "4k"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(6)]
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=120)
    if b'"finish_reason": "stop"' not in rest:
        assert process.returncode == 130, (seen, rest, stderr)
        assert json.loads(rest.splitlines()[-1])["finish_reason"] == "cancelled"
    assert stderr == b""


def test_a_real_answer_leaves_the_descriptors_as_they_were(model):
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(2):
        flashnext("run", "--model", model, "hello", "-m", "2", *WORDS)
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_two_processes_answer_from_one_checkpoint_alike(model):
    words = ["run", "--model", str(model), "hello", "-m", "8", "--no-think", "-q", *WORDS]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "cli", *words],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    outcomes = [(*process.communicate(timeout=120), process.returncode) for process in both]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1:] == (b"", 0)


@pytest.mark.parametrize("draft", ["lookup", "mtp", "auto"])
def test_a_seed_gives_the_same_text_with_every_drafter_and_says_who_drafted(model, draft):
    words = ("run", "--model", model, "hello", "-m", "48", "--no-think", "--json", *WORDS)
    plain, drafted = flashnext(*words), flashnext(*words, "--draft", draft, "--num-draft-tokens", 3)
    assert drafted.exit_code == 0, drafted.output
    document = json.loads(drafted.stdout)
    assert document["text"] == json.loads(plain.stdout)["text"]
    assert document["statistics"]["draft"]["drafter"] == ("mtp" if draft == "auto" else draft)
    assert document["plan"]["draft"] == ("mtp" if draft == "auto" else draft)
    if draft == "auto":
        assert "drafts come from mtp: the best that is there" in drafted.stderr


def test_a_drafter_that_the_checkpoint_lacks_is_refused_with_what_is_missing(tmp_path):
    bare = build_mlx(tmp_path / "bare", mtp=False)
    refused = flashnext("run", "--model", bare, "hello", "-m", "4", "--draft", "mtp", *WORDS)
    assert refused.exit_code == 3
    assert "hint:" in refused.stderr
    fallen = flashnext("run", "--model", bare, "hello", "-m", "4", "--draft", "auto", *WORDS)
    assert fallen.exit_code == 0, fallen.output
    assert "note: drafts come from lookup: " in fallen.stderr


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--draft", "nobody"), 2),
        (("--draft", "lookup", "--num-draft-tokens", "0"), 2),
        (("--draft", "lookup", "--num-draft-tokens", "17"), 2),
        (("--draft", "lookup", "--num-draft-tokens", "-3"), 2),
        (("--draft-rule", "lucky"), 2),
    ],
)
def test_impossible_drafts_are_usage_errors(model, flags, code):
    result = flashnext("run", "--model", model, "hello", "-m", "4", *flags)
    assert result.exit_code == code
    assert "Traceback" not in result.output


@pytest.mark.parametrize("words", [("run", "hello", "--model"), ("plan", "--model"), ("chat", "--model")])
@pytest.mark.parametrize("flag", ["--num-draft-tokens 3", "--draft-rule coupled"])
def test_flags_of_a_drafter_that_is_not_there_are_refused(model, words, flag):
    """P04, P14: no option is parsed and forgotten."""
    result = flashnext(*words, model, *flag.split())
    assert result.exit_code == 2
    assert f"Nothing reads {flag} with --draft none" in result.stderr
    assert f"hint: --draft lookup {flag}" in result.stderr


def test_a_run_leaves_what_it_used_to_the_next_one_unless_told_not_to(model, tmp_path, monkeypatch):
    folder = tmp_path / "popularity"
    monkeypatch.setattr("cli.answer.popularity", lambda: folder)
    words = ("run", "--model", model, "hello", "-m", "4", "--json", "--slots", "5")
    cold = flashnext(*words, "--no-warm")
    assert not folder.exists()
    flashnext(*words)
    (file,) = folder.iterdir()
    left = file.read_bytes()
    again = flashnext(*words, "--no-warm")
    assert file.read_bytes() == left, "neither read nor written"
    warm = flashnext(*words, "--seed", 1)
    assert file.read_bytes() != left
    assert [result.exit_code for result in (cold, again, warm)] == [0, 0, 0]
