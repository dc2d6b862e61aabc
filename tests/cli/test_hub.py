"""`pull`, `list`, `rm` against a Hub on the loopback interface that interrupts, lies, refuses and is busy."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import hub, hub_fetch
from cli.engine_factory import Services
from cli.model_path import find_model
from cli.settings import hub_cache
from cli.tree import app
from tests.cli.conftest import ROOT, environment
from tests.cli.fake_hub import FakeHub, Fault
from tests.tiny.checkpoints import build_mlx
from tests.tiny.tokenizer import write_tokenizer

REPO = "org/tiny"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small checkpoint of several shards as a repository holds it, and things nobody needs."""
    directory = build_mlx(tmp_path_factory.mktemp("hub") / "model")
    write_tokenizer(directory, vocab_size=128)
    found = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    assert sum(name.endswith(".safetensors") for name in found) > 1
    return {**found, "model-q4.gguf": b"x" * 99, "consolidated.safetensors": b"y" * 99, "run.py": b"raise"}


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A Hub, and this process told that it is the only one; waiting costs no time."""
    from huggingface_hub import constants

    with FakeHub() as fake:
        monkeypatch.setattr(constants, "ENDPOINT", fake.endpoint)
        template = fake.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _s: None)
        monkeypatch.setattr(hub_fetch, "_POLL_S", 0.01)
        monkeypatch.setattr(hub_fetch, "RETRY_S", 0.0)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield fake
    from huggingface_hub.utils import close_session

    close_session()


def flashnext(*words: str, **rest: object):
    return CliRunner().invoke(app, list(words), obj=Services(), **rest)


def shards(files: dict[str, bytes]) -> list[str]:
    return [name for name in files if name.startswith("model") and name.endswith(".safetensors")]


def on_data(name: str, fault: Fault, *, first: int = 1 << 30):
    """Let requests for a file's bytes go wrong, the first few or all."""

    def choose(path: str, number: int) -> Fault | None:
        return fault if path.startswith("/cdn/") and path.endswith(name) and number <= first else None

    return choose


def wait_for_a_mebibyte() -> int:
    """Return the size of the largest part, once it is one MiB."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in parts():
            with contextlib.suppress(FileNotFoundError):  # it has become a blob meanwhile
                if (size := path.stat().st_size) >= 1 << 20:
                    return size
        time.sleep(0.02)
    raise AssertionError("nothing came")


def parts() -> list[Path]:
    return list(hub_cache().rglob("*.incomplete"))


def test_what_is_pulled_is_what_the_index_names_and_runs_without_network(web, files):
    commit = web.add(REPO, files)
    result = flashnext("pull", REPO)
    assert result.exit_code == 0, result.output
    assert f"ready    flashnext run --model {REPO}" in result.stdout
    found = find_model(REPO).directory
    assert found.name == commit
    assert (found.parents[1] / "refs" / "main").read_text() == commit
    here = {path.name: path.read_bytes() for path in found.iterdir()}
    unread = {"model-q4.gguf", "consolidated.safetensors", "run.py"}
    assert here == {name: data for name, data in files.items() if name not in unread}
    before = len(web.requests)
    plan = flashnext("plan", REPO, "--json")
    assert plan.exit_code == 0, plan.output
    said = flashnext(
        "run", "--model", REPO, "--ignore-chat-template", "-m", "2", "--no-warm", "--json", "abc"
    )
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["model"]["name"] == REPO
    assert len(web.requests) == before, "a model in the cache needs no network"


def test_nothing_is_there_twice_and_other_programs_find_it(web, files):
    web.add(REPO, files)
    assert flashnext("pull", REPO).exit_code == 0
    stored = [path for path in hub_cache().rglob("*") if path.is_file() and not path.is_symlink()]
    needed = sum(len(data) for name, data in files.items() if (find_model(REPO).directory / name).exists())
    assert sum(path.stat().st_size for path in stored if path.parent.name == "blobs") == needed
    from huggingface_hub import scan_cache_dir, snapshot_download

    [seen] = scan_cache_dir(hub_cache()).repos
    assert (seen.repo_id, seen.size_on_disk) == (REPO, needed)
    patterns = ["*.safetensors", "*.json"]
    path = snapshot_download(REPO, cache_dir=hub_cache(), local_files_only=True, allow_patterns=patterns)
    assert Path(path) == find_model(REPO).directory


def test_pulling_again_fetches_nothing(web, files):
    web.add(REPO, files)
    flashnext("pull", REPO)
    web.requests.clear()
    result = flashnext("pull", REPO)
    assert result.exit_code == 0
    assert "all of it was here" in result.stdout
    assert not [request for request in web.requests if "/resolve/" in request.path]


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(web, files):
    web.add(REPO, files)
    assert flashnext("pull", REPO).exit_code == 0
    to_hub = [request for request in web.requests if request.host.startswith("127.0.0.1")]
    to_others = [request for request in web.requests if request.host.startswith("localhost")]
    assert {request.token for request in to_hub} == {"Bearer hf_secret"}
    assert to_others
    assert {request.token for request in to_others} == {None}


def test_a_dry_run_tells_files_and_bytes_and_writes_nothing(web, files):
    web.add(REPO, files)
    result = flashnext("pull", REPO, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    names = {entry["name"]: entry["bytes"] for entry in document["files"]}
    assert set(shards(files)) < names.keys()
    assert "consolidated.safetensors" not in names
    assert document["missing_bytes"] == document["total_bytes"] == sum(names.values())
    assert all(names[name] == len(files[name]) for name in names)
    assert not hub_cache().exists()
    text = flashnext("pull", REPO, "--dry-run")
    assert "fits     yes" in text.stdout
    assert all(name in text.stdout for name in names)


def test_a_pinned_revision_stays_while_main_moves_on(web, files):
    first = web.add(REPO, files)
    second = web.add(REPO, {**files, "README.md": b"second"})
    assert flashnext("pull", f"{REPO}@{first}").exit_code == 0
    assert find_model(f"{REPO}@{first}").directory.name == first
    assert not (hub_cache() / "models--org--tiny" / "refs" / "main").exists()
    assert flashnext("pull", REPO).exit_code == 0
    assert find_model(REPO).directory.name == second
    assert find_model(f"{REPO}@{first[:8]}").directory.name == first
    data = [request for request in web.requests if request.path.startswith("/cdn/")]
    assert len(data) == len(shards(files)), "blobs that two revisions share come once"


def test_an_update_that_is_cut_short_does_not_hide_what_worked(web, files):
    first = web.add(REPO, files)
    assert flashnext("pull", REPO).exit_code == 0
    web.add(REPO, {**files, "tokenizer.json": b"{}"})
    web.fault = lambda path, _n: Fault(status=404) if path.endswith("/tokenizer.json") else None
    assert flashnext("pull", REPO).exit_code == 1
    assert find_model(REPO).directory.name == first


def test_a_broken_connection_goes_on_where_it_broke(web, files):
    web.add(REPO, files)
    name = shards(files)[0]
    cut = len(files[name]) // 2
    web.fault = on_data(name, Fault(cut_after=cut), first=1)
    result = flashnext("pull", REPO)
    assert result.exit_code == 0, result.output
    assert f"{name} broke off" in result.stderr
    ranges = [request.range for request in web.asked_for(name) if request.path.startswith("/cdn/")]
    assert ranges == [None, f"bytes={cut}-"]


def test_a_connection_that_gives_nothing_ends_with_what_to_do_and_keeps_the_rest(web, files):
    web.add(REPO, files)
    name = shards(files)[-1]
    web.fault = on_data(name, Fault(cut_after=0))
    result = flashnext("pull", REPO)
    assert result.exit_code == 1
    assert "Cannot reach the Hub" in result.stderr
    assert "run the same line again" in result.stderr
    assert len([request for request in web.asked_for(name) if request.path.startswith("/cdn/")]) == (
        hub_fetch.NUM_TRIES
    )
    web.fault = lambda _path, _n: None
    web.requests.clear()
    assert flashnext("pull", REPO).exit_code == 0
    assert len(web.asked_for(name)) == 2  # the redirect and the bytes


def test_a_server_that_ignores_ranges_does_not_spoil_the_file(web, files):
    web.add(REPO, files)
    name = shards(files)[0]

    def fault(path: str, number: int) -> Fault | None:
        if path.startswith("/cdn/") and path.endswith(name):
            return Fault(cut_after=1000) if number == 1 else Fault(ignores_range=True)
        return None

    web.fault = fault
    assert flashnext("pull", REPO).exit_code == 0
    assert (find_model(REPO).directory / name).read_bytes() == files[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-7], "another size"),
        (lambda data: data + b"more", "another size"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "not what the Hub lists"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "not what the Hub lists"),
    ],
    ids=["short", "long", "first-bit", "last-bit"],
)
def test_wrong_size_and_wrong_bytes_are_refused_and_thrown_away(web, files, change, message):
    web.add(REPO, files)
    name = shards(files)[0]
    web.fault = on_data(name, Fault(change=change))
    result = flashnext("pull", REPO)
    assert result.exit_code == 5, result.output
    assert message in result.stderr
    assert name in result.stderr
    assert not (hub_cache() / "models--org--tiny" / "refs").exists()
    digest = hashlib.sha256(files[name]).hexdigest()
    assert not any(path.name.startswith(digest) and path.stat().st_size for path in parts())
    web.fault = lambda _path, _n: None
    assert flashnext("pull", REPO).exit_code == 0, "the next run starts from nothing, not from the damage"


def test_a_small_file_is_compared_too(web, files):
    web.add(REPO, files)
    web.fault = lambda path, n: (
        Fault(change=lambda data: data[::-1]) if path.endswith("tokenizer.json") else None
    )
    result = flashnext("pull", REPO)
    assert result.exit_code == 5
    assert "tokenizer.json" in result.stderr


@pytest.mark.parametrize(
    ("status", "headers", "message", "hint"),
    [
        (401, {}, "The Hub refuses (401)", "HF_TOKEN"),
        (403, {"X-Error-Code": "GatedRepo"}, "accepted its terms", "hf auth login"),
        (404, {"X-Error-Code": "RepoNotFound"}, "no such repository", "check the name"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "no such revision", "leave out @REVISION"),
        (429, {}, "fewer requests (429)", "wait some minutes"),
        (500, {}, "has a fault (500)", "run the same line again"),
        (502, {}, "has a fault (502)", "run the same line again"),
        (503, {}, "has a fault (503)", "run the same line again"),
    ],
)
def test_what_the_hub_refuses_is_said_with_a_next_step(web, files, status, headers, message, hint):
    """At the first request, and where the Hub refuses in the middle, at a file's bytes."""
    web.add(REPO, files)
    where = "/cdn/" if status in (401, 429, 503) else "/api/models/org/tiny/revision/main"
    web.fault = lambda path, _n: Fault(status=status, headers=headers) if path.startswith(where) else None
    result = flashnext("pull", REPO)
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert f"hint: {hint}" in result.stderr or hint in result.stderr.split("hint: ")[1]
    assert "Traceback" not in result.output
    assert not (hub_cache() / "models--org--tiny" / "refs").exists()


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_waited_for_and_says_so(web, files, status):
    web.add(REPO, files)
    web.fault = lambda path, n: Fault(status=status) if path.startswith("/cdn/") and n < 4 else None
    result = flashnext("pull", REPO)
    assert result.exit_code == 0, result.output
    assert f"HTTP Error {status}" in result.stderr


def test_no_hub_at_all_is_an_error_and_what_is_here_still_runs(web, files, monkeypatch):
    web.add(REPO, files)
    flashnext("pull", REPO)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = flashnext("pull", REPO)
    assert result.exit_code == 1
    assert "Cannot reach the Hub" in result.stderr
    assert flashnext("plan", REPO).exit_code == 0


def test_a_page_to_log_in_to_the_network_is_no_answer(web, files):
    web.add(REPO, files)
    web.fault = lambda _path, _n: Fault(body=b"<html>Welcome to the airport</html>")
    result = flashnext("pull", REPO)
    assert result.exit_code == 1
    assert "The Hub's answer cannot be read" in result.stderr
    assert "HF_ENDPOINT" in result.stderr


@pytest.mark.parametrize(
    "name", ["../../outside.safetensors", "/tmp/outside.safetensors", "a//b.safetensors", "\x1b.md"]
)
def test_a_listing_cannot_lead_out_of_the_cache(web, files, name, tmp_path):
    web.add(REPO, {**files, name: b"x"})
    result = flashnext("pull", REPO)
    assert result.exit_code == 5
    assert "listing makes no sense" in result.stderr
    assert not hub_cache().exists()
    assert not list(tmp_path.rglob("outside*"))


def test_a_digest_cannot_lead_out_of_the_cache(web, files):
    web.add(REPO, files)
    web.listed = lambda _name, data: (len(data), "../../../outside")
    result = flashnext("pull", REPO)
    assert result.exit_code == 5
    assert "listing makes no sense" in result.stderr
    assert not hub_cache().exists()


def test_offline_is_honoured(web, files, monkeypatch):
    web.add(REPO, files)
    flashnext("pull", REPO)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    web.requests.clear()
    result = flashnext("pull", REPO)
    assert result.exit_code == 1
    assert "HF_HUB_OFFLINE is set" in result.stderr
    assert web.requests == []
    assert flashnext("plan", REPO).exit_code == 0


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(web, files, monkeypatch):
    web.add(REPO, files)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 9, hub.SPARE_BYTES + 10))
    result = flashnext("pull", REPO)
    assert result.exit_code == 4
    assert "HF_HUB_CACHE" in result.stderr
    assert not hub_cache().exists()
    dry = flashnext("pull", REPO, "--dry-run")
    assert dry.exit_code == 4
    assert "fits     no: " in dry.stdout
    assert json.loads(flashnext("pull", REPO, "--dry-run", "--json").stdout)["fits"] is False


def test_a_disk_that_fills_up_keeps_what_came(web, files, monkeypatch):
    web.add(REPO, files)
    name = shards(files)[0]
    original = hub_fetch._Fetching._append

    def full(self, file, stream):
        if file.name == name:
            raise OSError(28, "No space left on device")
        original(self, file, stream)

    monkeypatch.setattr(hub_fetch._Fetching, "_append", full)
    result = flashnext("pull", REPO)
    assert result.exit_code == 4
    assert "The disk is full" in result.stderr


def test_p84_a_repository_without_the_ngram_table_is_refused_before_its_data_is_fetched(web, files):
    lost = shards(files)[-1]
    web.add(REPO, {name: data for name, data in files.items() if name != lost})
    result = flashnext("pull", REPO)
    assert result.exit_code == 3
    assert f"lacks what its index names: {lost}" in result.stderr
    assert not [request for request in web.requests if request.path.startswith("/cdn/")]


def test_p84_a_download_that_is_not_whole_is_not_called_ready(web, files):
    """The index itself lacks the table: every file it names is there, the model is not."""
    index = json.loads(files["model.safetensors.index.json"])
    table = next(name for name in index["weight_map"] if "ngram_embedding" in name)
    lost = index["weight_map"][table]
    kept = {name: shard for name, shard in index["weight_map"].items() if shard != lost}
    web.add(REPO, {**files, "model.safetensors.index.json": json.dumps({"weight_map": kept}).encode()})
    result = flashnext("pull", REPO)
    assert result.exit_code == 3, result.output
    assert "does not open" in result.stderr
    assert "ready" not in result.stdout
    document = json.loads(flashnext("pull", REPO, "--json").stdout)
    assert document["is_ready"] is False
    assert document["problem"]["message"]


def test_p84_a_model_whose_download_was_cut_short_says_so_when_it_is_used(web, files):
    web.add(REPO, files)
    flashnext("pull", REPO)
    lost = find_model(REPO).directory / shards(files)[0]
    lost.unlink()
    result = flashnext("plan", REPO)
    assert result.exit_code == 1
    assert "not complete: 1 of" in result.stderr
    assert f"hint: flashnext pull {REPO}" in result.stderr
    assert "incomplete: 1 of" in flashnext("list").stdout


@pytest.mark.parametrize("text", ["nobody", "../../elsewhere", ""])
def test_a_reference_that_names_no_commit_is_mended_as_the_hint_says(web, files, text):
    web.add(REPO, files)
    flashnext("pull", REPO)
    found = find_model(REPO).directory
    (found.parents[1] / "refs/main").write_text(text)
    refused = flashnext("plan", REPO)
    assert refused.exit_code == 1
    assert f"flashnext pull {REPO} mends it" in refused.stderr
    assert flashnext("pull", REPO).exit_code == 0
    assert find_model(REPO).directory == found


def test_another_model_is_refused_before_its_data_is_fetched(web, files):
    web.add(REPO, {**files, "config.json": b'{"model_type": "llama"}'})
    result = flashnext("pull", REPO)
    assert result.exit_code == 3
    assert "llama" in result.stderr
    assert not hub_cache().exists()
    web.add("org/draft", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"z" * 9})
    forced = flashnext("pull", "org/draft", "--force")
    assert "is here but does not open" in forced.stderr
    assert len(list((hub_cache() / "models--org--draft" / "blobs").iterdir())) == 2


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "org/", "../x", "org/tiny@../..", "org/ti ny", "o--r/x"])
def test_what_is_no_name_is_refused(web, name):
    result = flashnext("pull", name)
    assert result.exit_code == 2
    assert "Not the name of a repository" in result.stderr
    assert web.requests == []


def test_killed_at_any_moment_it_goes_on_where_it_stopped(web, files, tmp_path):
    """A process of its own is killed in the middle of a file; the next one asks for the rest of it alone."""
    name = shards(files)[0]
    blown = files[name] + bytes(8 << 20)  # a shard that takes a while; no checkpoint any more, but a file
    web.add(REPO, {**files, name: blown})
    gate = threading.Event()
    web.fault = on_data(name, Fault(hold=gate), first=1)
    settings = {
        **environment(),
        "HF_ENDPOINT": web.endpoint,
        "HF_HUB_CACHE": str(hub_cache()),
        "HF_TOKEN": "x",
    }
    words = [sys.executable, "-c", "from cli.app import main; main()", "pull", REPO]
    first = subprocess.Popen(words, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        begun = wait_for_a_mebibyte()
        first.send_signal(signal.SIGKILL)
    finally:
        first.kill()
        first.communicate()
        gate.set()
    web.requests.clear()
    result = flashnext("pull", REPO)
    assert "does not open" in result.stderr  # the blown-up shard
    ranges = [request.range for request in web.asked_for(name) if request.path.startswith("/cdn/")]
    assert ranges == [f"bytes={begun}-"]
    assert (hub_cache() / "models--org--tiny" / "blobs").is_dir()
    assert parts() == []


def test_ctrl_c_ends_at_once_and_says_what_is_left(web, files):
    web.add(REPO, {**files, shards(files)[0]: files[shards(files)[0]] + bytes(4 << 20)})
    gate = threading.Event()
    web.fault = on_data("", Fault(hold=gate))
    settings = {**environment(), "HF_ENDPOINT": web.endpoint, "HF_HUB_CACHE": str(hub_cache())}
    words = [sys.executable, "-c", "from cli.app import main; main()", "pull", REPO]
    process = subprocess.Popen(words, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for_a_mebibyte()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        gate.set()
        with contextlib.suppress(OSError):
            process.kill()
    assert process.returncode == 130
    assert b"interrupted; " in said
    assert b"goes on from here" in said
    assert b"Traceback" not in said


def test_the_list_says_what_runs_and_why_not(web, files):
    web.add(REPO, files)
    flashnext("pull", REPO)
    web.add("org/other", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"z" * 9})
    flashnext("pull", "org/other", "--force")
    table = flashnext("list").stdout
    assert [line.split()[-1] for line in table.splitlines() if line.startswith(REPO)] == ["yes"]
    assert "llama" in table
    models = {one["model"]: one for one in json.loads(flashnext("ls", "--json").stdout)["models"]}
    assert models[REPO]["runs"] is True
    assert models[REPO]["refs"] == ["main"]
    assert models["org/other"]["runs"] is False
    needed = sum(len(data) for name, data in files.items() if (find_model(REPO).directory / name).exists())
    assert models[REPO]["bytes"] == needed


def test_an_empty_list_says_what_to_do(web):
    assert "flashnext pull" in flashnext("list").stdout


def test_removing_asks_names_what_goes_and_frees_it(web, files):
    web.add(REPO, files)
    flashnext("pull", REPO)
    refused = flashnext("rm", REPO)
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert find_model(REPO)
    result = flashnext("rm", REPO, "--yes")
    assert result.exit_code == 0
    assert f"deleted {REPO}, all of it" in result.stdout
    assert not (hub_cache() / "models--org--tiny").exists()
    assert flashnext("rm", REPO, "--yes").exit_code == 1


def test_removing_a_revision_leaves_what_another_shares(web, files):
    first = web.add(REPO, files)
    second = web.add(REPO, {**files, "README.md": b"second"})
    flashnext("pull", f"{REPO}@{first}")
    flashnext("pull", REPO)
    result = flashnext("rm", f"{REPO}@{first[:8]}", "--yes", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["commit"] == first
    assert find_model(REPO).directory.name == second
    assert flashnext("plan", REPO).exit_code == 0
    assert flashnext("rm", f"{REPO}@{first[:8]}", "--yes").exit_code == 1


def test_the_cache_is_where_the_library_has_it(tmp_path):
    """Under every combination of its variables; asked in a process, since it reads them at import."""
    program = (
        "import importlib, json, os, sys\n"
        "from huggingface_hub import constants\n"
        "from cli.settings import hub_cache\n"
        "for one in json.loads(sys.argv[1]):\n"
        "    for name in ('HF_HUB_CACHE', 'HUGGINGFACE_HUB_CACHE', 'HF_HOME', 'XDG_CACHE_HOME'):\n"
        "        os.environ.pop(name, None)\n"
        "    os.environ.update(one)\n"
        "    importlib.reload(constants)\n"
        "    ours, theirs = str(hub_cache()), constants.HF_HUB_CACHE\n"
        "    assert ours == theirs, (one, ours, theirs)\n"
    )
    cases = [
        {},
        {"HF_HUB_CACHE": "~/a"},
        {"HF_HUB_CACHE": "$HOME/a"},
        {"HUGGINGFACE_HUB_CACHE": "/b"},
        {"HF_HOME": "~/c"},
        {"HF_HOME": "$HOME/c"},
        {"XDG_CACHE_HOME": "/d"},
        {"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"},
    ]
    words = [sys.executable, "-c", program, json.dumps(cases)]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-400:]
