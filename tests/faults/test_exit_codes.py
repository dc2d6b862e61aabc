"""One rule for exit codes, whichever file is wrong and whichever command meets it.

1   nothing is there by that name, or the system refuses
3   what is there is whole, and of another kind or version
5   what is there is no plain file, not its format, cut short, or contradicts its digest or another file
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from tests.golden.traces import generate
from tests.tiny.checkpoints import build_mlx
from tests.tiny.own_drafts import write_draft

Change = Callable[[Path], None]
SHORT = ("-m", "1", "--slots", "6", "-c", "256", "--no-warm", "hi")
SHARD = "model-00001-of-00002.safetensors"


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 0x20
    path.write_bytes(data)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {"pipe": pipe, "loop": loop, "folder": folder, "flip": flip, "halve": halve}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("codes")
    model = build_mlx(place / "model")
    write_draft(place / "draft", model, contraction="mean")
    assert code("pack", model, place / "pack", "--no-golden") == 0
    return place


def code(*words: object) -> int:
    result = CliRunner().invoke(app, [str(word) for word in words], obj=Services())
    assert result.exit_code in (0, 1, 3, 5), result.output
    if result.exit_code and "inspect" not in words and "verify" not in words:
        assert "hint:" in result.stderr, result.output
    return result.exit_code


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


CASES = [
    *(("config.json", how) for how in DAMAGE),
    *((SHARD, how) for how in ("pipe", "loop", "flip")),
    # A byte more or less may leave an index that still makes sense.
    *(("model.safetensors.index.json", how) for how in ("pipe", "loop", "halve")),
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_damaged_file_of_a_model_is_5_for_every_command(place, tmp_path, name, how):
    model = copy(place / "model", tmp_path / "model")
    DAMAGE[how](model / name)
    commands = (
        ("show", model),
        ("plan", model),
        ("run", "--model", model, *SHORT),
        ("pack", model, tmp_path / "out"),
    )
    assert {words[0]: code(*words) for words in commands} == {words[0]: 5 for words in commands}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("tokenizer.json", how) for how in DAMAGE),
        *(("chat_template.jinja", how) for how in ("pipe", "loop", "folder")),
        *(("generation_config.json", how) for how in ("pipe", "loop", "halve")),
        *(("tokenizer_config.json", how) for how in ("folder", "flip")),
    ],
)
def test_a_damaged_file_of_the_text_side_is_5(place, tmp_path, name, how):
    model = copy(place / "model", tmp_path / "model")
    DAMAGE[how](model / name)
    assert code("run", "--model", model, *SHORT) == 5


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("config.json", 1), ("tokenizer.json", 3), ("chat_template.jinja", 3), (SHARD, 5)],
)
def test_what_is_not_there(place, tmp_path, name, wanted):
    """Without its config a directory is no model; without a tokenizer it is one of another kind; a shard that
    the index names contradicts the index."""
    model = copy(place / "model", tmp_path / "model")
    (model / name).unlink()
    assert code("run", "--model", model, *SHORT) == wanted


@pytest.mark.parametrize("how", ["pipe", "loop", "flip"])
@pytest.mark.parametrize("name", ["config.json", "flashnext-contract.json", "model.safetensors"])
def test_a_damaged_file_of_a_draft_is_5(place, tmp_path, name, how):
    draft = copy(place / "draft", tmp_path / "draft")
    change: Change = DAMAGE[how]
    if how == "flip" and name == "config.json":
        (draft / name).write_bytes(b"!" + (draft / name).read_bytes())
    else:
        change(draft / name)
    model = place / "model"
    assert code("draft", "inspect", draft, "--model", model) == 5
    words = ("--draft", "dflash2", "--draft-model", draft, *SHORT)
    assert code("run", "--model", model, *words) == 5


def test_a_draft_that_is_not_there_is_called_a_draft(place, tmp_path):
    words = ("draft", "inspect", tmp_path / "none", "--model", place / "model")
    result = CliRunner().invoke(app, [str(word) for word in words], obj=Services())
    assert result.exit_code == 1
    assert "There is no such draft" in result.stderr
    assert "heckpoint" not in result.stderr


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_trace_is_5(tmp_path, how):
    trace = tmp_path / "a.trace"
    shutil.copy(Path(generate.__file__).parent / "tickets.jsonl", trace)
    DAMAGE[how](trace)
    assert {word: code("trace", word, trace) for word in ("show", "verify", "replay")} == {
        "show": 5,
        "verify": 5,
        "replay": 5,
    }


@pytest.mark.parametrize("how", ["loop", "flip"])
@pytest.mark.parametrize("name", ["manifest.json", "experts-000.safetensors", "config.json"])
def test_a_damaged_pack_is_5(place, tmp_path, name, how):
    pack = copy(place / "pack", tmp_path / "pack")
    DAMAGE[how](pack / name)
    commands = (("verify", pack), ("show", pack), ("run", "--model", pack, *SHORT))
    assert [code(*words) for words in commands] == [5, 5, 5]


def test_what_the_system_refuses_is_1_whoever_asks(place, monkeypatch):
    def refuse(path: object, *_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("drafter.files.os.open", refuse)
    assert code("plan", place / "model") == 1
    assert code("run", "--model", place / "model", *SHORT) == 1
