"""Fixtures of the command line's tests: a checkpoint directory without weights, an in-process runner, a
subprocess.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.tree import app
from tests.cli.scripted import Rig, Script
from tests.tiny.tokenizer import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with all that a scripted engine needs: tokenizer, template, config, generation defaults."""
    directory = write_tokenizer(tmp_path / "tiny", vocab_size=400)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen4_exp", "eos_token_id": 126}))
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [126, 120]}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    return directory


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "FLASHNEXT_MODEL", "FLASHNEXT_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    # In a pipe progress is lines on stderr, which a slow machine would add to what tests expect there.
    monkeypatch.setenv("FLASHNEXT_NO_PROGRESS", "1")


class Runner:
    """Runs the command line in this process against a scripted engine."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.rig = Rig()

    def __call__(
        self, *arguments: str, input: str | bytes | None = None, script: Script | None = None, **rest: Any
    ) -> Any:
        self.rig = Rig(script)
        return CliRunner().invoke(app, list(arguments), input=input, obj=self.rig.services, **rest)

    def run(self, *arguments: str, **rest: Any) -> Any:
        return self("run", "--model", str(self.checkpoint), *arguments, **rest)

    def chat(self, *arguments: str, **rest: Any) -> Any:
        return self("chat", "--model", str(self.checkpoint), *arguments, **rest)

    @property
    def call(self) -> Any:
        """The last request the engine got."""
        assert self.rig.engine is not None
        return self.rig.engine.calls[-1]

    def prompt_text(self, index: int = -1) -> str:
        """The rendered prompt of a call."""
        assert self.rig.engine is not None
        return self.rig.engine.tokenizer.decode(self.rig.engine.calls[index].prompt, special=True)


@pytest.fixture
def cli(checkpoint: Path) -> Runner:
    return Runner(checkpoint)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}


@pytest.fixture
def spawn(checkpoint: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the scripted command line in a process of its own; `command` is run or chat."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: Script, command: str, *arguments: str, **rest: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **rest}
        words = [command, "--model", str(checkpoint), *arguments]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.scripted", json.dumps(asdict(script)), *words],
            cwd=ROOT,
            env={**environment(), **pipes.pop("env", {})},
            **pipes,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        with contextlib.suppress(OSError):
            process.__exit__(None, None, None)
