"""Packing that is killed, starved, fooled or run twice: the target appears whole or not at all."""

import errno
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from expert_store import pack_writer, staging
from expert_store.errors import (
    CheckpointCorrupt,
    NotEnoughSpace,
    RecordCorrupt,
    SourceChanged,
    StoreError,
    TargetRefused,
    WriteFailed,
)
from expert_store.pack import VERSION, read_manifest, record_name, record_tensors
from expert_store.safetensors_index import INDEX_NAME, read_tensor_table
from expert_store.source import ByteSource, FileSource
from mlx_flashnext.checkpoint import inspect_checkpoint, open_checkpoint
from mlx_flashnext.errors import DocumentCorrupt, ModelError
from mlx_flashnext.packing import pack_checkpoint, verify_pack
from tests.tiny.checkpoints import build_mlx
from tests.tiny.packs import contents, edit_manifest, flip

NUM_KILLS = 10
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    return pack_checkpoint(source, tmp_path_factory.mktemp("pack") / "whole").directory


def work(source: Path, target: Path, *kill_at: object) -> subprocess.CompletedProcess[str]:
    words = ["-m", "tests.faults.pack_worker", "pack", source, target, *kill_at]
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def left_over(target: Path) -> list[str]:
    beside = (path.name for path in target.parent.iterdir() if path != target)
    return [name for name in beside if name.startswith(target.name + ".")]


def test_a_pack_killed_at_any_moment_goes_on_to_the_identical_pack(source, whole, tmp_path):
    through = work(source, tmp_path / "first")
    assert through.returncode == 0, through.stderr
    assert contents(tmp_path / "first") == contents(whole)
    num_acts = int(through.stdout)
    drawn = random.Random(9).sample(range(1, num_acts - 4), NUM_KILLS - 4)
    for kill_at in [*drawn, *range(num_acts - 3, num_acts + 1)]:  # the last few are the publishing
        target = tmp_path / f"killed-{kill_at}"
        killed = work(source, target, kill_at)
        assert killed.returncode == -9, (kill_at, killed.stdout, killed.stderr)
        if target.exists():  # killed after the rename: all there is to do is to say so
            assert contents(target) == contents(whole)
            assert work(source, target).returncode == 1
        else:
            resumed = work(source, target)
            assert resumed.returncode == 0, (kill_at, resumed.stderr)
            assert contents(target) == contents(whole), kill_at
        assert left_over(target) == [], kill_at


def test_a_pack_killed_again_and_again_still_ends(source, whole, tmp_path):
    target, kills = tmp_path / "pack", 0
    while not target.exists():
        done = work(source, target, 380)  # acts of this run: the longest shard takes 345
        kills += done.returncode == -9
        assert done.returncode in (0, -9), done.stderr
    assert kills >= 2
    assert contents(target) == contents(whole)


def test_a_line_of_the_journal_that_was_cut_short_counts_for_nothing(source, whole, tmp_path):
    target = tmp_path / "pack"
    assert work(source, target, 60).returncode == -9
    journal = tmp_path / "pack.journal"
    text = journal.read_bytes()
    lines = text.splitlines(keepends=True)
    assert len(lines) > 1
    journal.write_bytes(text[:-5])
    pack_checkpoint(source, target)
    assert contents(target) == contents(whole)
    assert not journal.exists()


def test_a_finished_shard_is_not_written_again_and_a_shortened_one_is(source, whole, tmp_path):
    target = tmp_path / "pack"
    assert work(source, target, 200).returncode == -9
    shard = tmp_path / "pack.partial/experts-000.safetensors"
    inode, stamp = shard.stat().st_ino, shard.stat().st_mtime_ns
    os.truncate(tmp_path / "pack.partial/experts-001.safetensors", 100)
    pack_checkpoint(source, target)
    kept = (target / shard.name).stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (inode, stamp)
    assert contents(target) == contents(whole)


class Failing:
    """Stands in for `write_all`: refuses from the n-th call on."""

    def __init__(self, after: int, number: int) -> None:
        self.left, self.number, self.honest = after, number, staging.write_all

    def __call__(self, stream, data):
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        self.honest(stream, data)


@pytest.mark.parametrize("after", [0, 1, 7, 30])
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, NotEnoughSpace), (errno.EDQUOT, NotEnoughSpace), (errno.EIO, WriteFailed)],
)
def test_a_full_or_broken_disk_publishes_nothing_and_another_run_goes_on(
    source, whole, tmp_path, monkeypatch, after, number, kind
):
    target = tmp_path / "pack"
    with monkeypatch.context() as patched:
        failing = Failing(after, number)
        patched.setattr(staging, "write_all", failing)
        patched.setattr(pack_writer, "write_all", failing)
        with pytest.raises(kind) as caught:
            pack_checkpoint(source, target)
    assert caught.value.hint
    assert not target.exists()
    pack_checkpoint(source, target)
    assert contents(target) == contents(whole)
    assert left_over(target) == []


def test_space_is_looked_for_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**12, 10**12 - 10**6, 10**6))
    with pytest.raises(NotEnoughSpace, match=r"\d+ bytes are to be written to .*, 1000000 are free"):
        pack_checkpoint(source, tmp_path / "pack")
    assert left_over(tmp_path / "pack") == []


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_a_target_that_exists_is_left_alone(source, tmp_path, kind):
    target = tmp_path / "pack"
    if kind == "directory":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(TargetRefused, match="exists already"):
        pack_checkpoint(source, target)
    assert left_over(target) == []
    if kind == "file":
        assert target.read_text() == "mine"


def test_a_folder_that_is_not_there_is_refused(source, tmp_path):
    with pytest.raises(TargetRefused, match="no such folder"):
        pack_checkpoint(source, tmp_path / "a/b")


def test_a_folder_of_somebody_else_is_not_written_into(source, tmp_path):
    (tmp_path / "pack.partial").mkdir()
    (tmp_path / "pack.partial/holiday.jpg").write_text("mine")
    with pytest.raises(TargetRefused, match=r"holiday\.jpg"):
        pack_checkpoint(source, tmp_path / "pack")
    assert (tmp_path / "pack.partial/holiday.jpg").read_text() == "mine"


def test_a_journal_that_is_a_link_is_not_followed(source, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "pack.journal").symlink_to(tmp_path / "precious")
    with pytest.raises(WriteFailed):
        pack_checkpoint(source, tmp_path / "pack")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_journal_that_is_a_pipe_is_not_waited_for(source, tmp_path):
    os.mkfifo(tmp_path / "pack.journal")
    with pytest.raises(TargetRefused, match="Not a regular file"):
        pack_checkpoint(source, tmp_path / "pack")


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_what_lies_where_a_file_is_to_be_is_replaced_and_not_written_to(source, whole, tmp_path, kind):
    target, precious = tmp_path / "pack", tmp_path / "precious"
    assert work(source, target, 200).returncode == -9
    precious.write_text("mine")
    for name in ("other-001.safetensors", "tokenizer.json"):
        place = tmp_path / "pack.partial" / name
        place.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to(precious if kind == "link" else tmp_path / "nowhere")
    pack_checkpoint(source, target)
    assert contents(target) == contents(whole)
    assert precious.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def _worse(line: dict, change: str) -> dict:
    digests = list(line["digests"])
    if change == "another digest":
        digests[0] = ("0" if digests[0][0] != "0" else "1") + digests[0][1:]
    return {**line, "digests": {"no digests": [], "fewer digests": digests[:-1]}.get(change, digests)}


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("change", ["another digest", "no digests", "fewer digests"])
def test_a_damaged_line_of_the_journal_is_not_believed(source, whole, tmp_path, change, is_sealed):
    """Its digests would go into the manifest. A forger's seal is right; what it vouches for is not."""
    target, journal = tmp_path / "pack", tmp_path / "pack.journal"
    assert work(source, target, 200).returncode == -9
    lines = journal.read_bytes().splitlines()
    assert len(lines) > 1
    finished = msgspec.convert(_worse(msgspec.json.decode(lines[1]), change), staging._Finished)
    lines[1] = msgspec.json.encode(finished.sealed() if is_sealed else finished)
    journal.write_bytes(b"\n".join(lines) + b"\n")
    if is_sealed and change == "another digest":
        with pytest.raises(RecordCorrupt):
            pack_checkpoint(source, target)
        assert not target.exists()  # and the next run begins anew
    pack_checkpoint(source, target)
    assert contents(target) == contents(whole)


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_target_without_a_name_is_refused(source, name):
    with pytest.raises(TargetRefused, match="has no name"):
        pack_checkpoint(source, Path(name))


def test_documents_that_are_links_out_of_the_model_are_not_published(tmp_path):
    source = build_mlx(tmp_path / "model")
    (tmp_path / "secret").write_text("a key")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointCorrupt, match=r"leaves the model folder: notes\.txt"):
        pack_checkpoint(source, tmp_path / "pack")
    assert left_over(tmp_path / "pack") == []
    (source / "notes.txt").unlink()
    (source / "notes.txt").symlink_to("config.json")  # one that stays is what a cache is made of
    pack = pack_checkpoint(source, tmp_path / "pack").directory
    assert (pack / "notes.txt").read_bytes() == (source / "config.json").read_bytes()


def test_a_document_too_large_to_be_one_is_called_so(tmp_path):
    source = build_mlx(tmp_path / "model")
    with (source / "big.txt").open("wb") as stream:
        stream.truncate(200 << 20)
    with pytest.raises(DocumentCorrupt, match=r"big\.txt is no document: Larger than") as refused:
        pack_checkpoint(source, tmp_path / "pack")
    assert refused.value.hint == "move it out of the folder"


def test_two_processes_do_not_write_one_pack(source, tmp_path):
    """P73."""
    with (tmp_path / "pack.journal").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TargetRefused, match="Another process"):
            pack_checkpoint(source, tmp_path / "pack")


def test_a_source_that_was_edited_between_two_runs_is_not_mixed(source, tmp_path):
    """P11."""
    copy = build_mlx(tmp_path / "model")
    assert work(copy, tmp_path / "pack", 60).returncode == -9
    shard = next(copy.glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    with pytest.raises(TargetRefused, match="another source"):
        pack_checkpoint(copy, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


class Meddling(ByteSource):
    """Reads honestly, and does something at the n-th read."""

    def __init__(self, source: ByteSource, at: int, deed) -> None:
        self._source, self._left, self._deed = source, at, deed

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        self._left -= 1
        got = self._source.read_into(file, offset, views)
        return got if self._left else self._deed(got)

    def name(self, file: int) -> str:
        return self._source.name(file)

    def close(self) -> None:
        self._source.close()


@pytest.mark.parametrize("at", [3, 500, 720])
def test_a_source_that_changes_while_it_is_packed_stops_the_pack(tmp_path, at):
    copy = build_mlx(tmp_path / "model")

    def touch(got: int) -> int:
        for path in copy.glob("*.safetensors"):
            os.utime(path, ns=(1, 1))
        return got

    with pytest.raises(SourceChanged):
        pack_checkpoint(copy, tmp_path / "pack", wrap_source=lambda files: Meddling(files, at, touch))
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("at", [3, 500, 720])
def test_a_read_that_comes_short_stops_the_pack(source, whole, tmp_path, at):
    with pytest.raises(RecordCorrupt, match="ended early"):
        pack_checkpoint(
            source, tmp_path / "pack", wrap_source=lambda files: Meddling(files, at, lambda got: got - 1)
        )
    assert not (tmp_path / "pack").exists()
    pack_checkpoint(source, tmp_path / "pack")
    assert contents(tmp_path / "pack") == contents(whole)


def test_what_was_written_wrongly_is_not_published(source, tmp_path, monkeypatch):
    """P85: the output is opened and compared before it gets its name."""
    honest = staging.StagedDirectory.write

    def lying(self, name, size, fill):
        digests = honest(self, name, size, fill)
        if name == "experts-004.safetensors":
            flip(self.partial / name, 16384 + 5)
        return digests

    monkeypatch.setattr(staging.StagedDirectory, "write", lying)
    with pytest.raises(RecordCorrupt, match="expert 0 of layer 4"):
        pack_checkpoint(source, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


# ------------------------------------------------------------------ packs that are not what they were
@pytest.fixture
def pack(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "pack")


def test_a_whole_pack_is_verified_byte_for_byte(pack):
    found = verify_pack(pack)
    assert (found.damaged, found.num_records) == ((), 5 * 16)
    sizes = {path.name: path.stat().st_size for path in pack.iterdir() if path.name != "manifest.json"}
    assert found.num_files == len(sizes) - 5
    assert found.num_bytes == sum(sizes.values()) - 5 * 16384  # all but the headers of the experts' shards


@pytest.mark.parametrize(
    ("name", "offset", "words"),
    [
        ("experts-000.safetensors", 16384, "expert 0 of layer 0"),
        ("experts-002.safetensors", 16384 * 5 + 100, "expert 4 of layer 2"),
        ("experts-004.safetensors", 16384 * 2 - 1, "followed by something: expert 0 of layer 4"),
        ("other-001.safetensors", -3, "other-001.safetensors"),
        ("rows-001.safetensors", -1, "rows-001.safetensors"),
        ("tokenizer_config.json", -2, "tokenizer_config.json"),
    ],
)
def test_one_changed_byte_is_found(pack, name, offset, words):
    flip(pack / name, offset)
    (error,) = verify_pack(pack).damaged
    assert words in error.message
    assert error.hint


@pytest.mark.parametrize("name", ["experts-001.safetensors", "other-001.safetensors", "chat_template.jinja"])
def test_a_file_that_is_missing_is_named(pack, name):
    """P84."""
    (pack / name).unlink()
    with pytest.raises(StoreError, match=name.replace(".", r"\.")):
        open_checkpoint(pack)


def _shift_a_byte(components):
    """Take a byte from one component and give it to the next: rows stay as long as they were."""
    components[0]["length"] -= 1
    components[1]["length"] += 1


def _withhold(manifest, name):
    """Leave out a file, so that nothing compares it with a digest."""
    manifest["files"] = [file for file in manifest["files"] if file["name"] != name]


FORGERIES = {
    "another format": (lambda m: m.update(format="other"), "other"),
    "no format": (lambda m: m.pop("format"), "None"),
    "a later version": (lambda m: m.update(version=VERSION + 1), f"version {VERSION + 1}"),
    "a build that is none": (lambda m: m.update(build="the one of Tuesday"), "the one of Tuesday"),
    "a build of a megabyte": (lambda m: m.update(build="a" * (1 << 20)), "aaa"),
    "a number for a build": (lambda m: m.update(build=64), "build"),
    "version nought": (lambda m: m.update(version=0), "0"),
    "version by name": (lambda m: m.update(version="1"), "'1'"),
    "true for a version": (lambda m: m.update(version=True), "True"),
    "layers by name": (lambda m: m.update(layers="all"), "layers"),
    "a layer twice": (lambda m: m["layers"].append(m["layers"][0]), "layer 0 twice"),
    "a layer too few": (
        lambda m: m["layers"].pop(1),
        "no digest for 'flashnext.layers.1.experts.0' of experts-001.safetensors",
    ),
    "a layer below nought": (lambda m: m["layers"][0].update(layer=-1), "layer -1"),
    "a layer beyond": (lambda m: m["layers"][0].update(layer=9), "flashnext.layers.9.experts.0"),
    "no records": (lambda m: m["layers"][0].update(digests=[]), "no records"),
    "a record too few": (
        lambda m: m["layers"][0]["digests"].pop(),
        "no digest for 'flashnext.layers.0.experts.15'",
    ),
    "a record too many": (lambda m: m["layers"][0]["digests"].append("0" * 32), "experts.16"),
    "a digest that is none": (lambda m: m["layers"][0]["digests"].__setitem__(0, "z" * 32), "zzz"),
    "a short digest": (lambda m: m["layers"][0]["digests"].__setitem__(0, "00"), "'00'"),
    "another file": (lambda m: m["layers"][0].update(file="experts-001.safetensors"), "experts-000"),
    "stride nought": (lambda m: m["layers"][0].update(stride=0), "0 bytes apart"),
    "a wide stride": (lambda m: m["layers"][0].update(stride=1 << 80), "bytes apart"),
    "no components": (lambda m: m["layers"][0].update(components=[]), "layer 0 0 parts"),
    "a negative shape": (lambda m: m["layers"][0]["components"][0].update(shape=[-64, -8]), "-64"),
    "an empty shape": (lambda m: m["layers"][0]["components"][0].update(shape=[]), "bytes for U32 []"),
    "another shape": (lambda m: m["layers"][0]["components"][0].update(shape=[8, 64]), "expert width is 8"),
    "another dtype": (lambda m: m["layers"][0]["components"][0].update(dtype="F32"), "dimension 1 is 8"),
    "a dtype that is none": (lambda m: m["layers"][0]["components"][0].update(dtype="Q4"), "Q4"),
    "a component by another name": (lambda m: m["layers"][0]["components"][0].update(name="a.b"), "a.b"),
    "a component twice": (lambda m: m["layers"][0]["components"][3].update(name="gate_proj.weight"), "twice"),
    "a length that lies": (lambda m: m["layers"][0]["components"][0].update(length=2047), "2047"),
    "rows without parts": (lambda m: m["rows"].update(parts=[]), "rows without parts"),
    "rows by name": (lambda m: m.update(rows="all"), "rows"),
    "rows of nothing": (lambda m: m["rows"].update(components=[]), "the rows 0 parts"),
    "rows withheld": (lambda m: m.pop("rows"), "the n-gram table"),
    "a part of the rows too few": (lambda m: m["rows"]["parts"].pop(), "part 7"),
    "a part of the rows too many": (
        lambda m: m["rows"]["parts"].append({"number": 8, "num_rows": 9}),
        "parts.8",
    ),
    "a part of the rows twice": (
        lambda m: m["rows"]["parts"][1].update(number=0),
        "part 0 of its table twice",
    ),
    "parts out of order": (lambda m: m["rows"]["parts"].reverse(), "out of order"),
    "a part without a number": (lambda m: m["rows"]["parts"][3].update(number=None), "out of order"),
    "more rows than there are": (
        lambda m: m["rows"]["parts"][2].update(num_rows=1 << 70),
        "not what the manifest",
    ),
    "rows of other components": (lambda m: m["rows"]["components"].reverse(), "hold biases, scales, weight"),
    "a component of a row that lies": (lambda m: _shift_a_byte(m["rows"]["components"]), "bytes for U32"),
    "rows of another dtype": (lambda m: m["rows"]["components"][1].update(dtype="I16"), "I16"),
    "tensors withheld": (
        lambda m: _withhold(m, "other-001.safetensors"),
        "of other-001.safetensors",
    ),
    "rows without a digest": (
        lambda m: _withhold(m, "rows-001.safetensors"),
        "no digest for 'flashnext.rows.parts.",
    ),
    "a path": (lambda m: m["files"][0].update(name="../../etc/passwd"), "etc/passwd"),
    "an absolute path": (lambda m: m["files"][0].update(name="/etc/passwd"), "/etc/passwd"),
    "a hidden file": (lambda m: m["files"][0].update(name=".."), "'..'"),
    "a nul": (lambda m: m["files"][0].update(name="a\0b"), r"a\x00b"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused_by_what_is_wrong_with_it(pack, name):
    change, words = FORGERIES[name]
    edit_manifest(pack, change)
    with pytest.raises((StoreError, ModelError)) as caught:
        open_checkpoint(pack)
    assert words in caught.value.message, caught.value.message
    assert caught.value.hint
    assert "fetch" not in caught.value.hint, "nobody fetched a pack"
    assert "\n" not in caught.value.message


def test_a_pack_of_fewer_experts_than_its_config_has_is_refused(pack):
    config = json.loads((pack / "config.json").read_text())
    config["text_config"]["num_experts"] = 17
    (pack / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        open_checkpoint(pack)
    problems = [problem.message for problem in inspect_checkpoint(pack).problems]
    assert caught.value.message == problems[0]
    assert any("number of records is 16" in problem for problem in problems), problems


def test_a_namesake_in_a_folder_of_the_pack_is_not_the_file_that_has_the_digest(pack):
    name = "other-001.safetensors"
    (pack / "sub").mkdir()
    shutil.copy(pack / name, pack / "sub" / name)
    index = json.loads((pack / INDEX_NAME).read_text())
    index["weight_map"] = {
        tensor: f"sub/{file}" if file == name else file for tensor, file in index["weight_map"].items()
    }
    (pack / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointCorrupt, match=f"no digest for .* of sub/{name}"):
        open_checkpoint(pack)


def test_a_tensor_among_the_records_that_is_none_has_no_digest(pack):
    manifest, table = read_manifest(pack), read_tensor_table(pack)
    record = table.tensors[record_name(0, 0)]
    assert record_tensors(manifest, table)[0][0] == record, "the control"
    norm = msgspec.structs.replace(record, name="model.norm.weight")
    stray = replace(table, tensors={**table.tensors, norm.name: norm})
    with pytest.raises(CheckpointCorrupt, match=r"no digest for 'model\.norm\.weight' of experts-000"):
        record_tensors(manifest, stray)


def test_a_forged_name_is_refused_before_the_file_is_looked_at(pack, tmp_path):
    (tmp_path / "secret").write_text("mine")
    edit_manifest(pack, lambda m: m["files"][0].update(name="../secret"))
    with pytest.raises(CheckpointCorrupt, match="not a plain name"):
        verify_pack(pack)


def test_a_manifest_that_was_altered_is_refused_by_its_identity(pack):
    edit_manifest(pack, lambda m: m["layers"][0]["digests"].__setitem__(0, "0" * 32), reseal=False)
    with pytest.raises(CheckpointCorrupt, match="altered"):
        open_checkpoint(pack)


def test_fields_of_the_future_are_ignored(pack):
    layers = set(open_checkpoint(pack).expert_layouts(mtp=False))
    edit_manifest(pack, lambda m: m.update(made_on="Tuesday"))
    assert set(open_checkpoint(pack).expert_layouts(mtp=False)) == layers != set()


@pytest.mark.parametrize("share", range(0, 100, 7))
def test_a_manifest_cut_anywhere_is_refused(pack, share):
    path = pack / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * share // 100])
    with pytest.raises(StoreError):
        open_checkpoint(pack)


@pytest.mark.parametrize("kind", ["pipe", "directory", "dangling link", "deep nesting"])
def test_a_manifest_that_is_no_file_is_refused_and_not_waited_for(pack, kind):
    path = pack / "manifest.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to(pack / "nowhere")
    else:
        path.write_text("[" * 100_000)
    with pytest.raises(StoreError):
        open_checkpoint(pack)


def test_a_pack_is_not_packed_again_and_a_checkpoint_not_verified(pack, source, tmp_path):
    with pytest.raises(ModelError, match="a pack already"):
        pack_checkpoint(pack, tmp_path / "again")
    with pytest.raises(ModelError, match="not a pack"):
        verify_pack(source)


def test_the_scan_for_damage_would_see_any_byte(pack):
    """The negative control: `FileSource` alone hands the damaged record out."""
    flip(pack / "experts-000.safetensors", 16384)
    checkpoint = open_checkpoint(pack)
    run = checkpoint.experts[0].record.reads(0)[0]
    with FileSource(checkpoint.table.files) as files:
        assert files.read_into(run.file, run.offset, [memoryview(bytearray(run.length))]) == run.length
