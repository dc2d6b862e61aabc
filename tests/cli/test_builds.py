"""`flashnext list` and what `pack` and `convert` made: shown while it is there, whatever the notes hold."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.builds import note_build, noted_builds
from cli.engine_factory import Services
from cli.settings import builds
from cli.tree import app
from expert_store import published
from tests.tiny.checkpoints import build_hf, build_mlx


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_mlx(tmp_path / "model")


def test_packs_and_conversions_are_listed_where_they_lie(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = build_hf(tmp_path / "hf", dtype="bfloat16")
    assert flashnext("convert", source, "converted", "--no-agreement", "--no-golden").exit_code == 0
    assert flashnext("pack", "converted", "packed", "--no-golden").exit_code == 0
    monkeypatch.chdir("/")
    listed = json.loads(flashnext("list", "--json").stdout)["builds"]
    assert [(one["directory"], one["kind"], one["source"], one["runs"]) for one in listed] == [
        (str(tmp_path / "converted"), "conversion", str(source), True),
        (str(tmp_path / "packed"), "pack", "converted", True),
    ]
    assert listed[1]["bytes"] == sum(path.stat().st_size for path in (tmp_path / "packed").iterdir())
    shown = flashnext("list").stdout
    assert "pack of converted" in shown.replace("\n", " ")
    assert "no models in" in shown


def test_what_was_deleted_is_forgotten_and_what_is_on_a_drive_that_is_away_is_not(tmp_path, model):
    drive = tmp_path / "drive"
    for place in (tmp_path / "deleted", drive / "pack"):
        shutil.copytree(model, place)
        note_build(place, "pack", "x")
    shutil.rmtree(tmp_path / "deleted")
    drive.rename(tmp_path / "away")
    assert noted_builds() == []
    (tmp_path / "away").rename(drive)
    shutil.copytree(model, tmp_path / "deleted")
    assert [build.directory for build in noted_builds()] == [drive / "pack"]


def test_a_build_that_lost_a_file_is_listed_with_its_trouble(tmp_path, model):
    note_build(model, "conversion", "x")
    (model / "config.json").unlink()
    [build] = noted_builds()
    assert build.trouble == "incomplete: no config.json"
    assert flashnext("list").exit_code == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[" * 10_000,
        b'{"format": "flashnext-build", "version": 2, "kind": "pack", "directory": "/", "source": "x"}',
        b'{"format": "flashnext-build", "version": 1, "kind": "pack", "directory": "tmp", "source": "x"}',
        b'{"format": "flashnext-build", "version": 1, "kind": "pack", "directory": "/\\u0000", "source": ""}',
        b'{"format": "flashnext-build", "version": 1, "kind": "tape", "directory": "/", "source": "x"}',
    ],
)
def test_a_note_that_is_none_is_passed_over(model, data):
    note_build(model, "pack", "x")
    (builds() / "other.json").write_bytes(data)
    assert [build.directory for build in noted_builds()] == [model]
    assert flashnext("list").exit_code == 0


def test_a_cache_that_cannot_be_written_costs_the_note_and_nothing_else(model):
    builds().parent.mkdir(parents=True)
    builds().write_text("a file")
    note_build(model, "pack", "x")
    assert noted_builds() == []


def test_rm_says_how_to_delete_a_directory_of_ones_own(model):
    result = flashnext("rm", model, "--yes")
    assert result.exit_code == 2
    assert f"hint: rm -r {model}" in result.stderr
    assert model.is_dir()


def test_a_full_disk_leaves_no_half_note(tmp_path, model, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(published.os, "fsync", full)
    note_build(model, "pack", "x")
    assert list(builds().iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "endless", "a name that no file has"])
def test_one_bad_index_neither_stops_nor_hides_the_list(tmp_path, model, kind):
    note_build(model, "pack", "good")
    bad = tmp_path / "bad"
    shutil.copytree(model, bad)
    index = bad / "model.safetensors.index.json"
    index.unlink()
    if kind == "pipe":
        os.mkfifo(index)
    elif kind == "endless":
        index.symlink_to("/dev/zero")
    else:
        index.write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    note_build(bad, "pack", "bad")
    listed = {
        Path(one["directory"]).name: one["runs"]
        for one in json.loads(flashnext("list", "--json").stdout)["builds"]
    }
    assert listed == {"model": True, "bad": kind != "a name that no file has"}
