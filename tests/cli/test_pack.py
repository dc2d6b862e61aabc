"""`flashnext pack` and `flashnext verify`: what they print, where, and with which exit code."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from expert_store.errors import NotEnoughSpace, PackVersionUnsupported
from tests.tiny.checkpoints import build_mlx
from tests.tiny.packs import edit_manifest, flip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("mlx") / "model")


def flashnext(*words: object, services: Services | None = None):
    return CliRunner().invoke(app, [str(word) for word in words], obj=services or Services())


def test_a_pack_is_made_shown_verified_and_runs(source, tmp_path):
    made = flashnext("pack", source, tmp_path / "pack")
    assert made.exit_code == 0, made.output
    assert "80 records" in made.stdout
    assert "one read; 9 reads from" in made.stdout
    assert f"flashnext run --model {tmp_path / 'pack'}" in made.stdout
    assert made.stderr == ""
    assert "golden: 32 greedy tokens, kept to be compared with next time" in made.stdout
    shown = json.loads(flashnext("show", tmp_path / "pack", "--json").stdout)
    assert (shown["model"]["layout"], shown["unknown"], shown["missing"]) == ("pack", [], [])
    assert (
        sum(line["count"] for line in shown["tensors"].values()) == 335 + 80 - 2 * 8
    )  # the three tensors of a part of the table are one
    checked = flashnext("verify", tmp_path / "pack")
    assert (checked.exit_code, checked.stderr) == (0, "")
    assert "damaged   nothing" in checked.stdout


def test_documents_for_programs(source, tmp_path):
    made = json.loads(flashnext("pack", source, tmp_path / "pack", "--json").stdout)
    assert (made["golden"]["outcome"], len(made["golden"]["tokens"])) == ("kept", 32)
    checked = json.loads(flashnext("doctor", tmp_path / "pack", "--json").stdout)["golden"]
    assert (checked["outcome"], checked["tokens"]) == ("same", made["golden"]["tokens"])
    assert made["reads_per_record"] == {"before": 9, "now": 1}
    checked = json.loads(flashnext("verify", tmp_path / "pack", "--json").stdout)
    assert (checked["identity"], checked["num_records"], checked["damaged"]) == (made["identity"], 80, [])


def test_folders_that_are_not_copied_are_named(source, tmp_path):
    model = tmp_path / "a model"
    shutil.copytree(source, model)
    (model / "near").mkdir()
    (model / "draft").mkdir()
    made = flashnext("pack", model, tmp_path / "pack", "--no-golden")
    line = next(line for line in made.stdout.splitlines() if line.startswith("left "))
    names, command = line.removeprefix("left").strip().split(": ")
    assert "cp -R -- " in command
    assert (names, made.exit_code) == ("draft, near", 0)
    subprocess.run(shlex.split(command), check=True)
    assert {path.name for path in (tmp_path / "pack").iterdir() if path.is_dir()} == {"draft", "near"}
    again = json.loads(flashnext("pack", source, tmp_path / "other", "--no-golden", "--json").stdout)
    assert again["left"] == []


def test_lines_to_copy_are_words_of_a_shell_whatever_folders_are_called(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(source, "-model")
    for name in ("it's $HOME", "new\nnext       rm -rf x", "\xe4", ".cache", "-draft"):
        (Path("-model") / name).mkdir()
    out = "a\npack"
    made = flashnext("pack", "--no-golden", "--", "-model", out)
    assert made.exit_code == 0, made.output
    assert len(made.stdout.splitlines()) == 7, made.stdout
    lines = dict(line.split(maxsplit=1) for line in made.stdout.splitlines())
    assert lines["next"] == "flashnext run --model $'a\\x0apack'"
    copy = lines["left"].split(": ", 1)[1]
    subprocess.run(["bash", "-c", copy], check=True)
    kept = {path.name for path in Path(out).iterdir() if path.is_dir()}
    assert kept == {"it's $HOME", "new\nnext       rm -rf x", "\xe4", "-draft"}


def test_a_pack_inside_its_model_is_not_among_what_was_left(source, tmp_path):
    shutil.copytree(source, tmp_path / "model")
    made = flashnext("pack", tmp_path / "model", tmp_path / "model/pack", "--no-golden", "--json")
    assert json.loads(made.stdout)["left"] == []


def test_damage_is_listed_with_exit_code_5(source, tmp_path):
    flashnext("pack", source, tmp_path / "pack", "--no-golden")
    for expert in range(12):
        flip(tmp_path / "pack/experts-001.safetensors", 16384 * (expert + 1))
    flip(tmp_path / "pack/tokenizer.json", -1)
    result = flashnext("verify", tmp_path / "pack")
    assert result.exit_code == 5
    assert "File is damaged: tokenizer.json" in result.stdout
    assert "expert 0 of layer 1" in result.stdout
    assert "and 3 more; --json lists them" in result.stdout
    listed = json.loads(flashnext("verify", tmp_path / "pack", "--json").stdout)["damaged"]
    assert [error["type"] for error in listed] == ["CheckpointCorrupt"] + ["RecordCorrupt"] * 12


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_config_is_damage_though_nothing_opens(source, tmp_path, damage):
    flashnext("pack", source, tmp_path / "pack", "--no-golden")
    if damage == "changed":
        flip(tmp_path / "pack/config.json", -1)
    else:
        (tmp_path / "pack/generation_config.json").unlink()
    result = flashnext("verify", tmp_path / "pack")
    assert result.exit_code == 5
    assert "config.json" in result.stdout


def test_refusals_have_their_exit_codes_and_hints(source, tmp_path):
    taken = flashnext("pack", source, source)
    assert (taken.exit_code, taken.stdout) == (1, "")
    assert "exists already" in taken.stderr
    assert "hint:" in taken.stderr
    assert flashnext("verify", source).exit_code == 3
    assert flashnext("pack", tmp_path / "nothing", tmp_path / "pack").exit_code == 1
    assert flashnext("pack", source).exit_code == 2

    def full(*_: object):
        raise NotEnoughSpace("no room", hint="make some")

    document = flashnext("pack", source, tmp_path / "x", "--json", services=Services(pack_checkpoint=full))
    assert document.exit_code == 4
    assert json.loads(document.stdout)["error"]["type"] == "NotEnoughSpace"


def test_a_pack_of_a_later_version_is_incompatible(source, tmp_path):
    flashnext("pack", source, tmp_path / "pack", "--no-golden")
    edit_manifest(tmp_path / "pack", lambda manifest: manifest.update(version=7))
    for command in ("verify", "show", "plan"):
        result = flashnext(command, tmp_path / "pack")
        assert result.exit_code == 3, (command, result.output)
        assert "version 7" in result.stderr
    with pytest.raises(PackVersionUnsupported):
        Services().inspect_checkpoint(tmp_path / "pack")


@pytest.mark.parametrize("verify", ["first", "every"])
def test_when_records_are_compared_shows_in_the_plan(source, tmp_path, verify):
    flashnext("pack", source, tmp_path / "pack", "--no-golden")
    result = flashnext("plan", tmp_path / "pack", "--json", "--verify-reads", verify)
    assert json.loads(result.stdout)["plan"]["verify_reads"] == verify


def gained(ratio: float | None, low: float = 0.0, high: float = 0.0, cache: str = "cold", why: str = ""):
    from mlx_flashnext.reports.pack_gain import PackGain

    rates = (1 << 30, round((ratio or 0) * (1 << 30)))
    return lambda *_: PackGain(ratio, low, high, *rates, cache, why)


@pytest.mark.parametrize(
    ("gain", "line"),
    [
        (
            gained(1.31, 1.26, 1.4),
            "1.31 [1.26 to 1.40] times the rate of the checkpoint as it is: 1.3 GiB/s against",
        ),
        (gained(1.02, 0.97, 1.1), "none to be seen on this disk: 1.02 [0.97 to 1.10] times"),
        (gained(0.9, 0.8, 0.95, "unknown"), "none to be seen on this disk: 0.90 [0.80 to 0.95] times"),
        (gained(None, why="too few"), "not measured: too few"),
    ],
)
def test_what_a_pack_gains_is_said_and_so_is_that_it_gains_nothing(source, tmp_path, gain, line):
    services = Services(measure_pack_gain=gain)
    made = flashnext("pack", source, tmp_path / "pack", "--no-golden", services=services)
    (found,) = [text for text in made.stdout.splitlines() if text.startswith("gain")]
    assert found.startswith(f"gain       {line}"), found
    assert ("page cache unknown" in found) == ("0.90" in found)
