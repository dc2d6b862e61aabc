"""Finding models: directories, Hub ids in the local cache, the demo; never the network."""

import json
import os
from pathlib import Path

import pytest

from cli.errors import CommandError
from cli.hub import parse_name
from cli.model_path import cached_models, complete_model, find_model
from cli.settings import hub_cache

COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add(hub: Path, name: str, commit: str = COMMIT, *, main: str | None = COMMIT) -> Path:
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    if main is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(main)
    return snapshot


def test_a_directory_is_itself(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)).directory == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~").directory == tmp_path


def test_a_hub_id_is_the_snapshot_that_main_points_to(hub):
    wanted = add(hub, "org/name")
    add(hub, "org/name", OLDER)
    found = find_model("org/name")
    assert (found.directory, found.label, found.is_demo) == (wanted, "org/name", False)


def test_a_revision_may_be_named_by_its_beginning(hub):
    add(hub, "org/name")
    older = add(hub, "org/name", OLDER)
    assert find_model("org/name@bbbb").directory == older


def test_without_a_reference_the_newest_snapshot_is_taken(hub):
    first, second = add(hub, "org/name", OLDER, main=None), add(hub, "org/name", COMMIT, main=None)
    os.utime(first, (2, 2))
    os.utime(second, (1, 1))
    assert find_model("org/name").directory == first


def test_an_alias_names_the_one_model_this_is_for(hub):
    wanted = add(hub, "Qwen/Qwen3.8-Flash-Next")
    assert find_model("flash-next").directory == wanted


def test_a_directory_wins_over_a_hub_id(hub, tmp_path, monkeypatch):
    add(hub, "org/name")
    local = tmp_path / "org" / "name"
    local.mkdir(parents=True)
    (local / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_model("org/name").directory == Path("org/name")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("org/names", "No such model on this machine: org/names", "did you mean org/name?"),
        ("other/thing", "No such model", "flashnext pull other/thing"),
        ("./missing", "No such model", "directory"),
        ("/missing/too", "No such model", "directory"),
        ("nonsense", "No such model", "directory"),
        ("~nobody-of-this-name/model", "No such model.*~nobody", "directory"),
        ("n" * 5000, "File name too long", "directory"),
    ],
)
def test_what_is_not_here_is_refused_with_the_next_step(hub, name, message, hint):
    add(hub, "org/name")
    with pytest.raises(CommandError, match=message) as caught:
        find_model(name)
    assert hint in caught.value.hint


def test_a_directory_without_a_config_and_a_file_are_refused(tmp_path):
    with pytest.raises(CommandError, match=r"no config\.json"):
        find_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CommandError, match="this is a file"):
        find_model(str(tmp_path / "model.safetensors"))


def test_a_reference_that_names_no_snapshot_finds_nothing(hub):
    add(hub, "org/name")
    (hub / "models--org--name" / "refs" / "main").write_bytes(b"\xff\0../..")
    with pytest.raises(CommandError, match="No such model"):
        find_model("org/name")


@pytest.mark.parametrize("text", ["../../../elsewhere", "a\0b", "x" * 5000, "", "..", "nobody"])
def test_a_reference_that_is_no_commit_is_mended_by_pulling(hub, text):
    add(hub, "org/model", main=text)
    (hub.parent / "elsewhere").mkdir()
    (hub.parent / "elsewhere/config.json").write_text("{}")
    with pytest.raises(CommandError, match="No such model on this machine: org/model") as refused:
        find_model("org/model")
    assert refused.value.hint == "what the cache has of it names no commit; flashnext pull org/model mends it"


@pytest.mark.parametrize("kind", ["pipe", "a name that no file has"])
def test_an_index_that_is_none_stops_nobody(hub, kind):
    snapshot = add(hub, "org/model")
    index = snapshot / "model.safetensors.index.json"
    if kind == "pipe":
        os.mkfifo(index)
        assert find_model("org/model").directory == snapshot
        return
    index.write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(CommandError, match="not complete: 1 of 1 data files") as refused:
        find_model("org/model")
    assert len(refused.value.message) < 300


def test_a_half_downloaded_model_is_not_found(hub):
    (add(hub, "org/name") / "config.json").unlink()
    with pytest.raises(CommandError, match="No such model"):
        find_model("org/name")


def test_no_name_is_the_demo_model():
    from mlx_flashnext.demo import demo_dir

    if (demo_dir() / "config.json").is_file():
        assert find_model(None).is_demo
        assert find_model("demo") == find_model(None)


def test_completion_offers_what_is_here(hub):
    add(hub, "org/name")
    add(hub, "org/other")
    assert cached_models() == ["org/name", "org/other"]
    assert complete_model("org/o") == ["org/other"]
    assert complete_model("d") == ["demo"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, "~/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_hugging_face_puts_it(environment, expected):
    assert hub_cache(environment) == Path(expected).expanduser()


@pytest.mark.parametrize("look", [find_model, parse_name])
def test_an_at_without_a_revision_is_not_taken_for_main(look):
    with pytest.raises(CommandError, match="No revision after the @: org/name@") as caught:
        look("org/name@")
    assert caught.value.code == 2
    assert "org/name" in caught.value.hint
