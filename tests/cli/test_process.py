"""The command line as a process: pipes that close, disks that are full, Ctrl-C at every stage, what is
imported.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, environment
from tests.cli.scripted import Script

LONG = Script(["word "], repeat=1 << 30, context_tokens=1 << 40)
TIMEOUT_S = 60


def wait_for(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """Read stderr up to a line that holds `text`."""
    assert process.stderr is not None
    seen = b""
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came: {seen!r}")


def finish(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    return process.communicate(timeout=TIMEOUT_S)


def test_a_reader_that_leaves_ends_the_command_quietly(spawn):
    process = spawn(LONG, "run", "hello", "--no-think")
    assert process.stdout.read(20) == b"word word word word "
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(TIMEOUT_S) == 0
    assert stderr == b""
    process.stdin.close()
    process.stderr.close()


@pytest.mark.parametrize("flag", ["--json", "--jsonl"])
def test_a_reader_that_leaves_at_once_ends_documents_quietly_too(spawn, flag):
    reader, writer = os.pipe()
    os.close(reader)
    process = spawn(Script(), "run", "hello", flag, stdout=writer)
    os.close(writer)
    _, stderr = finish(process)
    assert (process.returncode, stderr) == (0, b"")


def test_a_closed_stdout_ends_quietly_and_no_file_takes_its_place(spawn):
    process = spawn(
        Script(["</think>Hi<|im_end|>"]), "run", "hello", preexec_fn=lambda: os.close(1), stdout=None
    )
    _, stderr = finish(process)
    assert (process.returncode, stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_of_one_line(spawn):
    with Path("/dev/full").open("wb") as full:
        process = spawn(Script(["</think>Hi<|im_end|>"]), "run", "hello", stdout=full)
        _, stderr = finish(process)
    assert process.returncode == 4
    assert stderr.startswith(b"error: Cannot write: No space left on device\n")
    assert b"Traceback" not in stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
def test_a_help_page_on_a_full_disk_is_an_error_of_one_line(words):
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "cli", *words],
            cwd=ROOT, env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    assert result.returncode == 4
    assert result.stderr.startswith(b"error: No space left on device\n")
    assert b"Traceback" not in result.stderr


def test_a_closed_stdin_is_an_empty_prompt(spawn):
    process = spawn(Script(), "run", "-", preexec_fn=lambda: os.close(0), stdin=None)
    _, stderr = finish(process)
    assert (process.returncode, stderr.splitlines()[0]) == (2, b"error: The prompt is empty")


@pytest.mark.parametrize("stage", ["load", "prefill", "decode"])
def test_ctrl_c_ends_a_run_with_130_and_without_a_traceback(spawn, stage):
    process = spawn(Script(["abc<|im_end|>"], hang_in=stage), "run", "hello", "--no-think", "--stats")
    wait_for(process, f"HANGING {stage}".encode())
    process.send_signal(signal.SIGINT)
    stdout, stderr = finish(process)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    if stage == "load":
        assert stderr == b"interrupted\n"
    else:
        assert b"prefill " in stderr, "the figures of what was done are shown"
    assert stdout == (b"a" if stage == "decode" else b"")


def test_ctrl_c_with_a_document_still_prints_the_document(spawn):
    process = spawn(Script(["abc<|im_end|>"], hang_in="decode"), "run", "hello", "--no-think", "--json")
    wait_for(process, b"HANGING decode")
    process.send_signal(signal.SIGINT)
    stdout, _ = finish(process)
    document = json.loads(stdout)
    assert process.returncode == 130
    assert (document["finish_reason"], document["text"]) == ("cancelled", "a")
    process = spawn(Script(hang_in="load"), "run", "hello", "--json")
    wait_for(process, b"HANGING load")
    process.send_signal(signal.SIGINT)
    stdout, _ = finish(process)
    assert process.returncode == 130
    assert json.loads(stdout)["error"]["type"] == "Cancelled"


def test_a_second_ctrl_c_ends_a_process_that_does_not_react(spawn):
    process = spawn(Script(["</think>abc"], hang_in="stuck"), "run", "hello")
    wait_for(process, b"HANGING stuck")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGINT)
    finish(process)
    # Ended by the signal itself: a shell shows this as 130.
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_in_a_piped_chat_stops_the_answer_and_the_next_line_is_answered(spawn):
    process = spawn(Script(["abc<|im_end|>"], hang_in="decode"), "chat", "--no-think")
    process.stdin.write(b"one\n")
    process.stdin.flush()
    wait_for(process, b"HANGING decode")
    process.send_signal(signal.SIGINT)
    wait_for(process, b"stopped")
    process.stdin.write(b"two\n")
    process.stdin.flush()
    wait_for(process, b"HANGING decode")
    process.send_signal(signal.SIGINT)
    wait_for(process, b"stopped")
    stdout, _ = finish(process)
    assert (process.returncode, stdout) == (0, b"a\na\n")


def test_no_rendering_process_survives_the_command(spawn, tmp_path):
    # Whoever inherits this end keeps it open; that it closes shows that all processes have gone.
    reader, writer = os.pipe()
    process = spawn(Script(["</think>Hi<|im_end|>"]), "chat", pass_fds=(writer,))
    os.close(writer)
    process.stdin.write(b"one\n")
    finish(process)
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert process.returncode == 0


def test_output_is_utf8_whatever_the_locale(spawn):
    process = spawn(
        Script(["</think>\u20ac \U0001f600<|im_end|>"]),
        "run",
        "\u00e9t\u00e9",
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    )
    stdout, stderr = finish(process)
    assert process.returncode == 0, stderr
    assert stdout.decode() == "\u20ac \U0001f600"


def test_piped_text_that_nobody_asked_for_is_mentioned(spawn):
    process = spawn(Script(["</think>Hi<|im_end|>"]), "run", "hello", stdin=subprocess.PIPE)
    process.stdin.write(b"unread")
    _, stderr = finish(process)
    assert b"note: stdin was not read; add - to the prompt" in stderr


# Imports -----------------------------------------------------------------------------------

HEAVY = ("mlx", "mlx_lm", "transformers", "torch", "numpy", "tokenizers", "jinja2", "rich", "huggingface_hub")


def modules_after(code: str) -> set[str]:
    script = (
        f"import sys\n{code}\nprint('\\n' + ' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["run", "--help"], ["plan", "-h"], ["--version"], []]
)
def test_help_imports_nothing_heavy(arguments):
    code = f"""
from cli.app import main
try:
    main({arguments!r})
except SystemExit as end:
    assert end.code == 0
"""
    assert not modules_after(code) & set(HEAVY)


@pytest.mark.parametrize("command", ["run", "chat"])
def test_answering_imports_neither_transformers_nor_mlx_lm(command, checkpoint):
    code = f"""
import io
sys.stdin = io.TextIOWrapper(io.BytesIO(b"hello\\n"))
from cli.app import main
from tests.cli.scripted import Rig
try:
    main([{command!r}, "--model", {str(checkpoint)!r}], services=Rig().services)
except SystemExit as end:
    assert end.code == 0
"""
    loaded = modules_after(code)
    assert "mlx" in loaded
    assert not loaded & {"transformers", "mlx_lm", "torch", "huggingface_hub", "jinja2"}


def test_text_below_the_command_line_needs_no_mlx():
    code = "sys.modules['mlx'] = None\nimport mlx_flashnext.tokenizer, mlx_flashnext.text.template"
    assert "tokenizers" in modules_after(code)
