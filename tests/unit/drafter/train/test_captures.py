"""Capture sets: what is written is read, a kill loses nothing that was promised, and lies are refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from drafter.errors import DrafterError
from drafter.train.capture_writer import CaptureWriter
from drafter.train.captures import INDEX, MANIFEST, CaptureSet, document_key, split_of
from tests.unit.drafter.train.sets import document, identity, write


def test_a_set_reads_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "set", 9)
    found = CaptureSet.open(tmp_path / "set")
    assert found.identity == identity()
    assert len({info.shard for info in found.documents}) > 1
    for number, info in enumerate(found.documents):
        wrote, read = document(number), found.read(info)
        for name in ("tokens", "features", "routes"):
            assert getattr(wrote, name).tobytes() == getattr(read, name).tobytes()
        assert (read.num_prompt, read.label) == (wrote.num_prompt, wrote.label)


def test_bfloat16_features_come_back_as_their_values(tmp_path: Path) -> None:
    one = document(0)
    bits = (one.features.view(np.uint32) >> 16).astype("<u2")
    with CaptureWriter(tmp_path / "set", identity(dtype="bfloat16")) as writer:
        writer.add(one, bits.tobytes())
    found = CaptureSet.open(tmp_path / "set")
    features = found.read(found.documents[0]).features
    assert (features == (bits.astype(np.uint32) << 16).view(np.float32)).all()


def test_the_split_follows_from_the_prompt_alone(tmp_path: Path) -> None:
    write(tmp_path / "set", 40)
    found = CaptureSet.open(tmp_path / "set")
    held_out = {info.key for info in found.of_split("held_out")}
    assert 0 < len(held_out) < 40
    assert not held_out & {info.key for info in found.of_split("train")}
    for number, info in enumerate(found.documents):
        key = document_key(document(number).tokens[: info.num_prompt].tolist())
        assert (key, split_of(key, 4)) == (info.key, info.split)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.drafter.train.sets import write
step, left = sys.argv[2], [int(sys.argv[3])]
original = getattr(os, step)
def dying(*args):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)
setattr(os, step, dying)
write(Path(sys.argv[1]), 9)
"""


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


def write_until(directory: Path, monkeypatch: pytest.MonkeyPatch, step: str, calls: int) -> None:
    """Write the set, and stop for good when a step is begun for the last time."""
    left, original = [calls], getattr(os, step)

    def dying(*arguments: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, step, dying)
        with pytest.raises(Killed):
            write_without_end(directory)


def write_without_end(directory: Path) -> None:
    """Write the set; if it raises, nothing more is flushed."""
    writer = CaptureWriter(directory, identity(), 1 << 14)
    for number in range(9):
        one = document(number)
        writer.add(one, one.features.tobytes())
    writer.flush()


@pytest.mark.parametrize(
    ("step", "calls"), [*(("fsync", call) for call in range(9)), ("replace", 0), ("replace", 2)]
)
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, calls: int
) -> None:
    write_until(tmp_path / "set", monkeypatch, step, calls)
    check_goes_on(tmp_path)


@pytest.mark.parametrize(("step", "calls"), [("fsync", "0"), ("fsync", "5"), ("replace", "1")])
def test_a_run_ended_by_the_system_goes_on_too(tmp_path: Path, step: str, calls: str) -> None:
    root = Path(__file__).parents[4]
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "set"), step, calls]
    died = subprocess.run(arguments, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    assert died.returncode == -9
    check_goes_on(tmp_path)


@pytest.mark.parametrize("lasts", [True, False])
@pytest.mark.parametrize("calls", range(9))
def test_a_disk_that_was_full_costs_what_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, lasts: bool
) -> None:
    """Leaving the writer tries once more: half a line of the index must not stand before another."""
    left, original = [calls], os.fsync

    def fsync(number: int) -> None:
        left[0] -= 1
        if left[0] < 0 if lasts else left[0] == -1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="No space left") as caught:
            write(tmp_path / "set", 9)
    assert str(caught.value.filename).startswith(str(tmp_path / "set"))
    assert not list((tmp_path / "set").glob(".partial*"))
    check_goes_on(tmp_path)


def check_goes_on(tmp_path: Path) -> None:
    """Continue what a dead run left, and compare it with an undisturbed one."""
    write(tmp_path / "whole", 9)
    done: set[str] = set()
    if (tmp_path / "set" / MANIFEST).exists():
        before = CaptureSet.open(tmp_path / "set")
        done = {info.key for info in before.documents}
        for info in before.documents:
            before.read(info)
    with CaptureWriter(tmp_path / "set", identity(), 1 << 14) as writer:
        assert writer.keys == done
        for number in range(9):
            one = document(number)
            if document_key(one.tokens[: one.num_prompt].tolist()) not in writer.keys:
                writer.add(one, one.features.tobytes())
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {path.name for path in (tmp_path / "set").iterdir()}
    for name in names:
        assert (tmp_path / "set" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_index_line_that_was_being_written_counts_for_nothing(tmp_path: Path) -> None:
    write(tmp_path / "set", 9)
    index = tmp_path / "set" / INDEX
    whole = index.read_bytes()
    num_documents = len(CaptureSet.open(tmp_path / "set").documents)
    index.write_bytes(whole[:-20])
    assert 0 < len(CaptureSet.open(tmp_path / "set").documents) < num_documents
    CaptureWriter(tmp_path / "set", identity())
    assert index.read_bytes() == whole[: whole.rfind(b"\n", 0, -1) + 1]


def test_another_identity_is_not_joined(tmp_path: Path) -> None:
    write(tmp_path / "set", 2)
    with pytest.raises(DrafterError, match="another target_digest"):
        CaptureWriter(tmp_path / "set", identity(target_digest="u" * 64))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(DrafterError, match="not empty"):
        CaptureWriter(tmp_path / "other", identity())


def test_a_damaged_shard_is_named_and_nothing_of_it_is_used(tmp_path: Path) -> None:
    write(tmp_path / "set", 3)
    shard = tmp_path / "set" / "shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    found = CaptureSet.open(tmp_path / "set")
    with pytest.raises(DrafterError, match=r"shard-00000\.bin is damaged"):
        found.read(found.documents[0])
    shard.write_bytes(data[:-1])
    with pytest.raises(DrafterError, match="its index says"):
        CaptureSet.open(tmp_path / "set")


MANIFEST_LIES = {
    "format": "other",
    "version": 2,
    "dtype": "float64",
    "taps": [3, 1, 6],
    "hidden_size": 1 << 40,
    "vocab_size": -1,
    "num_target_layers": 1 << 60,
    "route_layers": [0, 0],
    "target_digest": 7,
    "sampling": {"temperature": "hot"},
    "max_tokens": True,
    "held_out_every": -1,
    "extra": 1,
    "top_k": 3,
}


@pytest.mark.parametrize("field", MANIFEST_LIES)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, field: str) -> None:
    write(tmp_path / "set", 2)
    place = tmp_path / "set" / MANIFEST
    place.write_text(json.dumps(json.loads(place.read_text()) | {field: MANIFEST_LIES[field]}))
    with pytest.raises(DrafterError, match="No sound capture set"):
        CaptureSet.open(tmp_path / "set")


INDEX_LIES = [
    ("file", "../shard-00000.bin"),
    ("file", "shard-00001.bin"),
    ("size", 7),
    ("digest", "x"),
    ("documents", []),
    ("documents.num_tokens", 1 << 50),
    ("documents.num_tokens", -1),
    ("documents.num_prompt", 1000),
    ("documents.num_prompt", True),
    ("documents.key", "../../etc/passwd"),
    ("documents.split", "other"),
    ("documents.label", "x" * 1000),
    ("documents.label", None),
]


@pytest.mark.parametrize(("field", "value"), INDEX_LIES)
def test_an_index_that_lies_is_refused(tmp_path: Path, field: str, value: object) -> None:
    write(tmp_path / "set", 2)
    place = tmp_path / "set" / INDEX
    row = json.loads(place.read_text().splitlines()[0])
    (row["documents"][0] if "." in field else row)[field.removeprefix("documents.")] = value
    place.write_text(json.dumps(row) + "\n")
    with pytest.raises(DrafterError, match="No sound capture set"):
        CaptureSet.open(tmp_path / "set")


def test_a_document_that_comes_twice_or_does_not_add_up_is_refused(tmp_path: Path) -> None:
    one = document(0)
    with CaptureWriter(tmp_path / "set", identity()) as writer:
        writer.add(one, one.features.tobytes())
        with pytest.raises(DrafterError, match="twice"):
            writer.add(one, one.features.tobytes())
        with pytest.raises(DrafterError, match="bytes of features"):
            writer.add(document(1), one.features[:-1].tobytes())
    index = tmp_path / "set" / INDEX
    line = json.loads(index.read_text())
    line["documents"] *= 2
    line["size"] *= 2
    index.write_text(json.dumps(line) + "\n")
    with pytest.raises(DrafterError, match="twice"):
        CaptureSet.open(tmp_path / "set")
