"""`flashnext trace` and `bench --report verify` on a tiny checkpoint, and on files from strangers."""

import errno
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from drafter.record import Answer, Cycle, Header
from drafter.record_check import read_trace
from mlx_flashnext.engine.draft_files import open_draft
from mlx_flashnext.reports import verify_report
from tests.cli.conftest import environment
from tests.golden.traces import generate
from tests.tiny.checkpoints import build_mlx
from tests.tiny.own_drafts import write_draft

GOLDEN = Path(generate.__file__).parent
WORDS = ("--slots", "5", "--ctx-size", "256", "--temp", "1", "--seed", "11", "-m", "8", "--no-think")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("trace") / "model")


@pytest.fixture(scope="module")
def traces(model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trace with logits and drafts, and one without either."""
    place = tmp_path_factory.mktemp("traces")
    made = {"whole": place / "whole.trace", "plain": place / "plain.trace"}
    drafting = ("--draft", "lookup", "--num-draft-tokens", "2", "--hints", "previous")
    for name, more in (("whole", ("--logits", *drafting)), ("plain", ())):
        words = ("trace", "record", "--model", model, "-o", made[name], "the the the", *more, *WORDS)
        result = flashnext(*words)
        assert result.exit_code == 0, result.output
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with nothing in it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


def document(*words: object):
    result = flashnext(*words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("hints", ["near-linear", "sidecar", "both"])
def test_trained_hints_are_recorded_and_replayed(place, hints):
    """With the demo, which ships its files; at few slots, so that a guess can be of use."""
    path = place / "demo.trace"
    drafting = ("--draft", "dflash2", "--hints", hints, "--logits")
    words = ("Tell me a story.", "--slots", "16", "-c", "256", "--temp", "0", "-m", "10", "--no-think")
    made = flashnext("trace", "record", "-o", path, *words, *drafting)
    assert made.exit_code == 0, made.output
    with path.open("rb") as stream:
        cycles = [line for line in read_trace(stream) if isinstance(line, Cycle)]
    assert any(layer.predicted_expert_ids for cycle in cycles for layer in cycle.routes)
    assert flashnext("trace", "replay", path).exit_code == 0


def test_the_help_says_how_private_a_trace_is():
    for command in ("record", "show"):
        assert "as private as the" in " ".join(flashnext("trace", command, "--help").stdout.split())


def test_a_recorded_answer_is_the_plain_one_and_the_file_is_private(model, traces, place):
    words = ("--model", model, "the the the", *WORDS)
    plain = flashnext("run", *words)
    recorded = flashnext("trace", "record", "-o", place / "t", *words)
    assert recorded.stdout == plain.stdout
    assert stat.S_IMODE((place / "t").stat().st_mode) == 0o600
    assert [each.name for each in place.iterdir()] == ["t"]
    assert "without logits: no replay" in recorded.stderr
    lines = read_trace(io.BytesIO(traces["whole"].read_bytes()))
    header = lines[0]
    assert isinstance(header, Header)
    assert header.draft_kind == "lookup"
    assert sum(line.num_committed for line in lines if isinstance(line, Cycle)) == 8


def test_the_digest_of_a_drafts_files_stands_in_every_head(model, place):
    draft = write_draft(place / "draft", model)
    drafting = ("--draft", "dflash2", "--draft-model", draft, "--num-draft-tokens", "2", "--logits")
    words = ("trace", "record", "--model", model, "-o", place / "t", "the the the", *drafting, *WORDS)
    result = flashnext(*words)
    assert result.exit_code == 0, result.output
    header, request, *lines = read_trace(io.BytesIO((place / "t").read_bytes()))
    with open_draft(draft) as files:
        wanted = files.listing.digest
    assert isinstance(header, Header)
    assert isinstance(request, Answer)
    assert (header.draft_kind, header.draft_digest, request.draft_digest) == ("dflash2", wanted, wanted)
    assert (header.captured_stage, header.captured_layer_ids) == ("layer_output", (0, 1, 2))
    assert any(line.candidate_token_ids for line in lines if isinstance(line, Cycle))
    assert flashnext("trace", "replay", place / "t").exit_code == 0


def test_show_verify_and_replay_say_the_same_in_words_and_as_json(traces):
    lines = document("trace", "show", traces["whole"], "--json")
    cycles = [line for line in lines if line["kind"] == "cycle"]
    assert [line["kind"] for line in lines[:2]] == ["header", "answer"]
    assert "prompt" not in {line["kind"] for line in lines}
    shown = flashnext("trace", "show", traces["whole"])
    assert shown.exit_code == 0
    assert lines[0]["target_model_revision"] in shown.stdout
    assert f"8 tokens in {len(cycles)} cycle" in shown.stdout
    assert document("trace", "verify", traces["whole"], "--json") == {
        "num_answers": 1, "num_cycles": len(cycles),
    }  # fmt: skip
    verified = flashnext("trace", "verify", traces["whole"])
    assert verified.stdout.startswith("consistent: 1 answer, ")
    outcome = document("trace", "replay", traces["whole"], "--json")
    assert (outcome["num_cycles"], outcome["num_committed"]) == (len(cycles), 8)
    assert (
        f"{outcome['num_accepted']} of {outcome['num_proposed']} accepted"
        in flashnext("trace", "replay", traces["whole"]).stdout
    )


def test_a_trace_is_held_against_a_model_and_one_of_another_is_incompatible(model, traces, tmp_path):
    assert flashnext("trace", "verify", traces["plain"], "--model", model).exit_code == 0
    other = build_mlx(tmp_path / "other", mtp=False)
    for command in ("verify", "replay"):
        result = flashnext("trace", command, traces["whole"], "--model", other)
        assert result.exit_code == 3
        assert "target_model_revision is '" in result.stderr
        assert "hint:" in result.stderr


def test_a_trace_without_logits_is_sound_and_cannot_be_replayed(traces):
    assert flashnext("trace", "verify", traces["plain"]).exit_code == 0
    result = flashnext("trace", "replay", traces["plain"])
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "there are no target_logits in it" in result.stderr
    assert "--logits" in result.stderr


@pytest.mark.parametrize("name", [case.name for case in generate.CASES])
def test_a_golden_trace_is_replayed(name):
    assert flashnext("trace", "replay", GOLDEN / f"{name}.jsonl", "-q").exit_code == 0


@pytest.mark.parametrize("name", sorted(generate.LIES))
def test_a_golden_lie_is_refused_as_damaged_with_its_line(name):
    result = flashnext("trace", "replay", GOLDEN / f"refused-{name}.jsonl", "--json")
    assert result.exit_code == (3 if name == "later-version" else 5)
    assert "line " in json.loads(result.stdout)["error"]["message"]


def swapped(data: bytes) -> bytes:
    first, *middle, last = data.splitlines(keepends=True)
    return b"".join((first, *middle[:-2], middle[-1], middle[-2], last))


def saying(name: str, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: re.sub(f'"{name}":[0-9.e-]+'.encode(), f'"{name}":'.encode() + value, data)


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in a line": (lambda data: data[:-40], "cut short"),
    "cut behind a line": (lambda data: data[: data.rstrip().rfind(b"\n") + 1], "has no end"),
    "lines swapped": (swapped, "digest"),
    "a line twice": (lambda data: data + data.splitlines(keepends=True)[-1], "digest"),
    "a count of 400 digits": (saying("num_cycles", b"9" * 400), "not a line"),
    "a seed beyond all": (saying("seed", b"9" * 5000), "not a line"),
    "a number that is none": (saying("top_p", b"NaN"), "not a line"),
    "a chat": (lambda _: b'{"format":"flashnext-chat","version":1,"messages":[]}\n', "not a line"),
    "two traces in one": (lambda data: data + data, "digest"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_trace_is_refused_in_a_short_line_and_not_replayed(traces, tmp_path, name):
    change, said = HOSTILE[name]
    whole = traces["whole"].read_bytes()
    (tmp_path / "t").write_bytes(change(whole))
    assert (tmp_path / "t").read_bytes() != whole
    result = flashnext("trace", "replay", tmp_path / "t")
    assert (result.exit_code, result.stdout) == (5, "")
    error, _, hint = result.stderr.splitlines()
    assert re.match(rf"error: {tmp_path / 't'}: (after )?line [0-9]+: ", error)
    assert said in error
    assert max(map(len, error.split())) < 200
    assert hint.startswith("hint: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_trace_that_may_not_be_read_is_named(traces, tmp_path):
    path = tmp_path / "t"
    path.write_bytes(traces["whole"].read_bytes())
    path.chmod(0)
    result = flashnext("trace", "replay", path)
    assert result.exit_code == 1
    assert f"Permission denied: {path}" in result.stderr


@pytest.mark.parametrize("command", ["show", "verify", "replay"])
@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b"", 5, "no line at all"),
        (b"\x00" * 100, 5, "line 1: cut short"),
        (b"[" * 100_000 + b"\n", 5, "line 1: not a line of a trace"),
        (b"x" * (2 << 20), 5, "line 1: longer than"),
        (b'{"kind":"header"}\n', 5, "line 1: not a line of a trace"),
        ("fifo", 5, "not a regular file"),
        ("folder", 5, "not a regular file"),
        ("missing", 1, "No such file or directory"),
    ],
    ids=["empty", "noughts", "nested", "long", "short", "fifo", "folder", "missing"],
)
def test_what_is_no_trace_is_refused_in_one_line(command, data, code, message, tmp_path):
    path = tmp_path / "file.trace"
    if data == "fifo":
        os.mkfifo(path)
    elif data == "folder":
        path.mkdir()
    elif data != "missing":
        path.write_bytes(data)
    result = flashnext("trace", command, path)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert "hint:" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_is_there_is_never_written_over(model, tmp_path):
    path = tmp_path / "there"
    path.write_text("mine")
    result = flashnext("trace", "record", "--model", model, "-o", path, "hello", *WORDS)
    assert result.exit_code == 1
    assert "There is a file already" in result.stderr
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["none/t", "x" * 300, "nul\0"])
def test_a_place_where_no_file_can_be_is_refused_before_the_model_is_loaded(model, tmp_path, name):
    result = flashnext("trace", "record", "--model", model, "-o", f"{tmp_path}/{name}", "hello", *WORDS)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Cannot write " in result.stderr


def test_logits_that_no_block_could_keep_are_refused(model, place, monkeypatch):
    monkeypatch.setattr("mlx_flashnext.traces.recording.MOST_LOGITS", 100)
    words = ("trace", "record", "--model", model, "-o", place / "t", "--logits", "hello", *WORDS)
    result = flashnext(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "at most 100 logits" in result.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 4), (errno.EDQUOT, 4), (errno.EIO, 1)])
@pytest.mark.parametrize("at_once", [True, False], ids=["while recording", "with the last flush"])
def test_a_disk_that_fills_up_stops_the_trace_and_not_the_answer(
    model, place, monkeypatch, number, code, at_once
):
    real = tempfile.NamedTemporaryFile

    def full(*arguments, **named):
        file = real(*arguments, **named)

        def refuse(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        if at_once:
            file.write = refuse
        else:
            monkeypatch.setattr("cli.commands.trace.os.fsync", refuse)
        return file

    words = ("--model", model, "the the the", *WORDS)
    plain = flashnext("run", *words)
    monkeypatch.setattr("cli.commands.trace.tempfile.NamedTemporaryFile", full)
    result = flashnext("trace", "record", "-o", place / "t", *words)
    assert result.stdout == plain.stdout
    assert result.exit_code == code
    what = "No trace was written:" if at_once else "Cannot write"
    assert f"error: {what} {place / 't'}: {os.strerror(number)}" in result.stderr.splitlines()
    assert "hint:" in result.stderr
    assert list(place.iterdir()) == []


def test_ctrl_c_ends_a_recorded_answer_with_130_and_a_trace_that_is_whole_or_absent(model, place):
    words = ["trace", "record", "--model", str(model), "-o", "t", "hello", "--temp", "0", "--slots", "5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *words, "--no-think", "--ctx-size", "4k"],
        cwd=place, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert b"Traceback" not in stderr
    assert [each.name for each in place.iterdir()] == ["t"]
    assert flashnext("trace", "verify", place / "t").exit_code == 0
    lines = read_trace(io.BytesIO((place / "t").read_bytes()))
    if sum(line.num_committed for line in lines if isinstance(line, Cycle)) < 3000:
        assert process.returncode == 130


@pytest.mark.parametrize("form", ["words", "json"])
def test_the_verification_report_prints_every_criterion_and_passes(model, form):
    words = ("bench", "--report", "verify", "--model", model, "--slots", "6")
    if form == "json":
        said = document(*words, "--json")
        assert said["is_passed"]
        assert len(said["criteria"]) == 7
        assert len(said["blocks"]) == 9
        return
    result = flashnext(*words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == verify_report.TITLE
    assert "logits of a row in a block and alone: bit for bit the same; tolerance 0" in lines
    assert sum(line.startswith("pass  ") for line in lines) == 7
    assert "FAIL" not in result.stdout


def test_a_criterion_that_is_not_met_fails_the_command(model, monkeypatch):
    monkeypatch.setattr(verify_report, "LARGEST_TOLERANCE", -1.0)
    monkeypatch.setattr(verify_report, "PROMPTS", ("one short prompt",))
    result = flashnext("bench", "--report", "verify", "--model", model, "--slots", "6")
    assert result.exit_code == 1
    assert "FAIL  a row of a block chooses what it chooses alone: tolerance 0" in result.stdout
