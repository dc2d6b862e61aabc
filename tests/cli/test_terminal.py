"""The command line at a terminal, through a pseudo-terminal: editing, colour, Ctrl-C, control characters."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, environment
from tests.cli.scripted import Script

DEADLINE_S = 30
PLAIN = Script(["One.<|im_end|>", "Two.<|im_end|>"])
HANGING = Script(["abc<|im_end|>"], hang_in="decode")


class Terminal:
    """A process whose streams are a terminal, except those given."""

    def __init__(self, words: list[str], *, columns: int = 80, env: dict[str, str], **streams: Any) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.shown = b""
        self._seen = 0

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        pipes = {"stdin": slave, "stdout": slave, "stderr": slave, **streams}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**environment(), "TERM": "xterm", **env},
            preexec_fn=take_terminal,
            **pipes,
        )
        os.close(slave)

    def wait_for(self, text: str) -> None:
        """Read until the text has been shown after what was waited for last."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := self.shown.find(text.encode(), self._seen)) < 0:
            assert time.monotonic() < deadline, f"{text!r} never came: {self.shown!r}"
            assert self._read(), f"{text!r} never came: {self.shown!r}"
        self._seen = found + len(text)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt_until(self, text: str | None) -> None:
        """Press Ctrl-C until the text is shown, or (None) until the process has ended.

        Python's line editor misses a signal that comes after it shows the prompt and before it waits; a
        person presses the key again, and so does this.
        """
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return
            self.type("\x03")
            while select.select([self.master], [], [], 2)[0] and self._read():
                if text is not None and text.encode() in self.shown[self._seen :]:
                    self.wait_for(text)
                    return
        raise AssertionError(f"{text!r} never came: {self.shown!r}")

    def finish(self) -> int:
        while self._read():
            pass
        return self.process.wait(DEADLINE_S)

    def _read(self) -> bool:
        if not select.select([self.master], [], [], DEADLINE_S)[0]:
            return False
        try:
            data = os.read(self.master, 4096)
        except OSError:
            return False
        self.shown += data
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


Start = Callable[..., Terminal]


@pytest.fixture
def terminal(checkpoint: Path) -> Iterator[Start]:
    started: list[Terminal] = []

    def start(
        script: Script, command: str, *arguments: str, env: dict[str, str] | None = None, **rest: Any
    ) -> Terminal:
        words = [
            "tests.cli.scripted",
            json.dumps(asdict(script)),
            command,
            "--model",
            str(checkpoint),
            *arguments,
        ]
        started.append(Terminal(words, env=env or {}, **rest))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_conversation_at_a_terminal(terminal):
    screen = terminal(PLAIN, "chat", "--no-think")
    screen.wait_for("4096")  # one word: where the banner breaks depends on the length of the model's path
    screen.wait_for("/help")
    screen.wait_for("> ")
    screen.type("first\n")
    screen.wait_for("One.\r\n")
    screen.wait_for("prefill ")
    screen.wait_for("> ")
    screen.type("\x04")
    assert screen.finish() == 0


def test_typed_lines_can_be_edited(terminal, tmp_path):
    screen = terminal(PLAIN, "chat", "--no-think")
    screen.wait_for("> ")
    screen.type("ello\x01h\x05 there\n")
    screen.wait_for("One.")
    screen.wait_for("> ")
    screen.type(f"/save {tmp_path}/chat.json\n")
    screen.wait_for("saved 1 turn")
    screen.type("/exit\n")
    assert screen.finish() == 0
    assert json.loads((tmp_path / "chat.json").read_text())["messages"][0]["content"] == "hello there"


def test_ctrl_c_stops_an_answer_and_returns_to_the_prompt(terminal):
    screen = terminal(HANGING, "chat", "--no-think")
    screen.wait_for("> ")
    screen.type("first\n")
    screen.wait_for("HANGING decode")
    screen.type("\x03")
    screen.wait_for("stopped")
    screen.wait_for("> ")
    screen.type("/exit\n")
    assert screen.finish() == 0
    assert b"Traceback" not in screen.shown


def test_ctrl_c_twice_at_the_prompt_leaves_with_130(terminal):
    screen = terminal(PLAIN, "chat", "--no-think")
    screen.wait_for("> ")
    screen.interrupt_until("press Ctrl-C again to leave")
    screen.wait_for("> ")
    screen.interrupt_until(None)
    assert screen.finish() == 130
    assert b"Traceback" not in screen.shown


def test_an_error_in_a_turn_is_shown_and_the_conversation_goes_on(terminal):
    script = Script(["abc"], fail_in_decode=("SourceFailed", "Input/output error: shard 3"))
    screen = terminal(script, "chat", "--no-think")
    for _ in range(2):
        screen.wait_for("> ")
        screen.type("first\n")
        screen.wait_for("error: Input/output error: shard 3")
    screen.wait_for("> ")
    screen.type("/stats\n")
    screen.wait_for("0 turns")
    screen.type("/exit\n")
    assert screen.finish() == 0


def test_a_redirected_stdout_holds_answers_and_no_prompt(terminal, tmp_path):
    with (tmp_path / "out.txt").open("wb") as out:
        screen = terminal(PLAIN, "chat", "--no-think", stdout=out)
    screen.wait_for("> ")
    screen.type("first\n")
    screen.wait_for("> ")
    screen.type("/exit\n")
    assert screen.finish() == 0
    assert (tmp_path / "out.txt").read_bytes() == b"One.\n"


@pytest.mark.parametrize(
    ("flags", "env", "dimmed"),
    [
        ([], {}, True),
        (["--no-color"], {}, False),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"TERM": "dumb"}, False),
        (["--no-color"], {"FORCE_COLOR": "1"}, False),
    ],
)
def test_reasoning_is_dimmed_only_where_colour_is_wanted(terminal, flags, env, dimmed):
    screen = terminal(Script(["hm</think>Yes<|im_end|>"]), "run", "hello", *flags, env=env)
    assert screen.finish() == 0
    assert (b"\x1b[2m" in screen.shown) is dimmed
    assert re.sub(rb"\x1b\[\d*m", b"", screen.shown).startswith(b"hm\r\n\r\nYes\r\n")
    if not dimmed:
        assert b"\x1b" not in screen.shown


def test_an_answer_cannot_move_the_cursor_of_a_terminal_but_a_file_gets_it_as_it_is(terminal, tmp_path):
    script = Script(["a\x1b[2J\x07b\tc\n<|im_end|>"])
    screen = terminal(script, "run", "hello", "--no-think")
    assert screen.finish() == 0
    assert b"a\\x1b[2J\\x07b" in screen.shown
    with (tmp_path / "out.txt").open("wb") as out:
        terminal(script, "run", "hello", "--no-think", stdout=out).finish()
    assert (tmp_path / "out.txt").read_bytes() == b"a\x1b[2J\x07b\tc\n"


def test_figures_appear_at_a_terminal_unless_unwanted(terminal):
    shown = terminal(PLAIN, "run", "hello", "--no-think")
    assert shown.finish() == 0
    assert b"One.\r\nprefill " in shown.shown
    unwanted = terminal(PLAIN, "run", "hello", "--no-think", "--no-stats")
    assert unwanted.finish() == 0
    assert unwanted.shown == b"One.\r\n"


def test_without_words_a_terminal_is_not_waited_for(terminal):
    screen = terminal(PLAIN, "run")
    assert screen.finish() == 2
    assert b"There is no prompt" in screen.shown
