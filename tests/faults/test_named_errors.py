"""A drive that fails: whichever file it is and whichever command meets it, the message names the file.

Each command is run once undisturbed, to learn which files it reads and writes, then once for each of them
with a drive that refuses that file alone. So a place that is written tomorrow is tested too.
"""

import builtins
import errno
import io
import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from drafter.files import PARTIAL
from tests.cli.test_draft import prompts
from tests.golden.traces import generate
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.own_drafts import write_draft

SAID = os.strerror(errno.EIO)
WRITES = ("w", "a", "x", "+")


class Drive:
    """Everything that is read and written through Python's files and `preadv`, below one directory.

    Attributes:
        seen: what was used, as (how, path).
        broken: the one of these that fails.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.seen: dict[tuple[str, str], None] = {}
        self.broken: tuple[str, str] | None = None

    def use(self, how: str, path: str) -> None:
        """Note a use of a file, or fail it as the system does: without a name."""
        if path.startswith(self.root):
            self.seen[how, path] = None
            if self.broken == (how, path):
                raise OSError(errno.EIO, SAID)

    @contextmanager
    def mounted(self) -> Generator[None]:
        """Within: files come from here."""
        real_open, real_preadv, drive = io.open, os.preadv, self

        def opened(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            stream = real_open(file, mode, *arguments, **named)
            path = path_of(file) if isinstance(file, int) else str(Path(file).absolute())
            how = "write" if any(letter in mode for letter in WRITES) else "read"
            return _Watched(stream, lambda: drive.use(how, path))

        def preadv(number: int, *arguments: Any) -> int:
            drive.use("preadv", path_of(number))
            return real_preadv(number, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io, "open", opened)  # pathlib's and os.fdopen's
            patch.setattr(builtins, "open", opened)
            patch.setattr(os, "preadv", preadv)
            yield


class _Watched:
    """A stream whose reads and writes are asked for first."""

    def __init__(self, stream: Any, use: Callable[[], None]) -> None:
        self._stream, self._use = stream, use

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        if name not in ("read", "readinto", "readline", "readlines", "write", "writelines"):
            return value

        def used(*arguments: Any) -> Any:
            self._use()
            return value(*arguments)

        return used

    def __enter__(self) -> Any:
        self._stream.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stream.__exit__(*raised)

    def __iter__(self) -> Any:
        self._use()
        return iter(self._stream)


def path_of(number: int) -> str:
    return str(Path(f"/proc/self/fd/{number}").readlink())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("drive")
    model = build_mlx(place / "model")
    build_hf(place / "source", dtype="bfloat16", shards=1)
    write_draft(place / "draft", model, contraction="mean")
    shutil.copy(Path(generate.__file__).parent / "tickets.jsonl", place / "a.trace")
    prompts(place, 4)
    assert run("pack", model, place / "pack", "--no-golden").exit_code == 0
    captured = run(*CAPTURE, place / "prompts.jsonl", place / "set", "--model", model)
    assert captured.exit_code == 0, captured.output
    trained = run(*TRAIN, place / "set", place / "run", "--model", model)
    assert trained.exit_code == 0, trained.output
    return place


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


SHORT = ("-m", "1", "--slots", "6", "-c", "256", "--no-warm", "hi")
CAPTURE = ("draft", "capture", "--taps", "0,1,2", "--temp", 0, "--max-tokens", 16, "--slots", 8, "-c", 256,
           "--held-out", 2)  # fmt: skip
TRAIN = ("draft", "train", "--steps", 1, "--documents", 1, "--anchors", 2)
COMMANDS: dict[str, tuple[object, ...]] = {
    "show": ("show", "@model"),
    "verify": ("verify", "@pack"),
    "run": ("run", "--model", "@model", *SHORT),
    "run of a pack with a draft": ("run", "--model", "@pack", "--draft", "dflash2", "--draft-model", "@draft",
                                   *SHORT),
    "pack": ("pack", "@model", "@new", "--no-golden"),
    "convert": ("convert", "@source", "@new", "--no-golden", "--no-agreement"),
    "trace verify": ("trace", "verify", "@a.trace"),
    "trace record": ("trace", "record", "-o", "@new", "--model", "@model", *SHORT[:-2], "hi"),
    "draft inspect": ("draft", "inspect", "@draft", "--model", "@model"),
    "draft capture": (*CAPTURE, "@prompts.jsonl", "@new", "--model", "@model"),
    "draft train": (*TRAIN, "@set", "@new", "--model", "@model"),
    "draft train on": (*TRAIN, "@set", "@run", "--model", "@model"),
    "draft export": ("draft", "export", "@run", "@new", "--model", "@model", "--licence", "mit"),
    "draft evaluate": ("draft", "evaluate", "@draft", "--captures", "@set", "--model", "@model"),
}  # fmt: skip


CODES = {"show": (0, 1), "verify": (1, 5)}  # which list what they could not read


@pytest.mark.parametrize("command", COMMANDS)
def test_a_drive_that_fails_is_told_with_the_file(place, tmp_path, command):
    root = tmp_path / "drive"
    drive = Drive(root)

    def ended() -> Any:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(place, root)
        with drive.mounted():
            return run(*(str(word).replace("@", f"{root}/") for word in COMMANDS[command]))

    whole = ended()
    assert whole.exit_code == 0, whole.output
    assert drive.seen
    silent: list[str] = []
    for how, path in list(drive.seen):
        if re.search(r"experts-00[1-9]", path):
            continue  # one layer is as another
        if command.startswith("draft ") and Path(path).parent.name in ("model", "draft"):
            continue  # the commands above read those
        drive.broken = how, path
        result = ended()
        name = Path(path).name.removeprefix(PARTIAL)
        name = "new" if name.startswith(".flashnext-") else name  # beside its name, which is told
        told = [line for line in result.output.splitlines() if SAID in line and name in line]
        if not told or result.exit_code not in CODES.get(command, (1,)):
            silent.append(f"{how} {name}: exit code {result.exit_code}: {result.output}")
    assert not silent, "\n".join(silent)
