"""A conversion that is killed, starved or fooled: the target appears whole or not at all, and holds what was
asked for."""

import errno
import json
import os
import random
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from expert_store import staging
from expert_store.errors import NotEnoughSpace, RecordCorrupt, SourceChanged, TargetRefused, WriteFailed
from mlx_flashnext.conversion import values, writing
from mlx_flashnext.conversion.recipe import Recipe, parse_spec
from mlx_flashnext.conversion.writing import convert_checkpoint
from mlx_flashnext.errors import ModelError, WeightMismatch
from tests.faults.test_packing import ROOT, Failing, Meddling, left_over
from tests.tampering import load, save
from tests.tiny.checkpoints import build_hf
from tests.tiny.fp8 import build_fp8
from tests.tiny.packs import contents, flip

NUM_KILLS = 5


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return build_hf(tmp_path_factory.mktemp("source") / "model", dtype="bfloat16")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    return convert_checkpoint(source, tmp_path_factory.mktemp("made") / "whole", Recipe()).directory


def work(source: Path, target: Path, *kill_at: int) -> subprocess.CompletedProcess[str]:
    words = ["-m", "tests.faults.pack_worker", "convert", source, target, *kill_at]
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_conversion_killed_at_any_moment_goes_on_to_the_identical_checkpoint(source, whole, tmp_path):
    through = work(source, tmp_path / "first")
    assert through.returncode == 0, through.stderr
    assert contents(tmp_path / "first") == contents(whole)
    num_acts = int(through.stdout)
    target, drawn = tmp_path / "killed", random.Random(3)
    shares = [drawn.uniform(step, step + 1) / (NUM_KILLS - 1) for step in range(NUM_KILLS - 1)]
    began = 0
    for kill_at in [*(int(share * num_acts) + 1 for share in shares), num_acts]:
        killed = work(source, target, kill_at)
        assert killed.returncode in (-9, 0), killed.stderr
        began += not target.exists() and (tmp_path / "killed.journal").exists()
        if target.exists():
            assert contents(target) == contents(whole)
            break
    assert began >= 2, "it was to be killed more than once while it was writing"
    if not target.exists():
        assert work(source, target).returncode == 0
    assert contents(target) == contents(whole)
    assert left_over(target) == []


@pytest.mark.parametrize("after", [0, 9, 400])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, NotEnoughSpace), (errno.EIO, WriteFailed)])
def test_a_full_or_broken_disk_publishes_nothing_and_another_run_goes_on(
    source, whole, tmp_path, monkeypatch, after, number, kind
):
    target = tmp_path / "out"
    with monkeypatch.context() as patched:
        failing = Failing(after, number)
        patched.setattr(staging, "write_all", failing)
        patched.setattr(writing, "write_all", failing)
        with pytest.raises(kind) as caught:
            convert_checkpoint(source, target, Recipe())
    assert caught.value.hint
    assert not target.exists()
    convert_checkpoint(source, target, Recipe())
    assert contents(target) == contents(whole)
    assert left_over(target) == []


def test_space_is_looked_for_before_anything_is_written(source, whole, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    free = sum(path.stat().st_size for path in whole.iterdir())  # the spare bytes are what is lacking
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**12, 10**12 - free, free))
    with pytest.raises(NotEnoughSpace, match=rf"\d+ bytes are to be written to .*, {free} are free"):
        convert_checkpoint(source, tmp_path / "out", Recipe())
    assert left_over(tmp_path / "out") == []


def test_what_was_begun_by_another_recipe_is_not_mixed(source, tmp_path):
    target = tmp_path / "out"
    assert work(source, target, 300).returncode == -9
    with pytest.raises(TargetRefused, match="other settings"):
        convert_checkpoint(source, target, Recipe(trunk=parse_spec("4")))
    assert not target.exists()


def test_a_target_that_exists_is_left_alone(source, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(TargetRefused, match="exists already"):
        convert_checkpoint(source, tmp_path / "out", Recipe())
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("at", [3, 150, 300])
def test_a_source_that_changes_or_comes_short_stops_it(tmp_path, at):
    """P11."""
    copy = build_hf(tmp_path / "model", dtype="bfloat16")

    def touch(got: int) -> int:
        for path in copy.glob("*.safetensors"):
            os.utime(path, ns=(1, 1))
        return got

    with pytest.raises(RecordCorrupt, match="ended early"):
        convert_checkpoint(
            copy,
            tmp_path / "out",
            Recipe(),
            wrap_source=lambda files: Meddling(files, at, lambda got: got - 1),
        )
    with pytest.raises(SourceChanged):
        convert_checkpoint(
            copy, tmp_path / "other", Recipe(), wrap_source=lambda files: Meddling(files, at, touch)
        )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "other").exists()


NAN = {"BF16": b"\xc0\x7f", "F8_E4M3": b"\x7f"}


@pytest.mark.parametrize(
    "name",
    ["model.language_model.layers.1.mlp.experts.down_proj", "lm_head.weight"],
)
def test_a_value_that_is_not_a_number_is_refused_by_name(tmp_path, name):
    directory = build_hf(tmp_path / "model", dtype="bfloat16")
    tensors, config = load(directory)
    stored = tensors[name]
    middle = len(stored.data) // 4 * 2
    tensors[name] = stored._replace(data=stored.data[:middle] + NAN["BF16"] + stored.data[middle + 2 :])
    save(directory, tensors, config)
    with pytest.raises(WeightMismatch, match=r"1 of \d+ values .* not finite") as caught:
        convert_checkpoint(directory, tmp_path / "out", Recipe())
    assert name.rpartition(".")[2].replace("weight", "lm_head") in caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_code_of_fp8_that_is_not_a_number_is_refused(tmp_path):
    directory = build_fp8(tmp_path / "model", tmp_path / "twin")
    tensors, config = load(directory)
    name = "model.language_model.layers.0.mlp.experts.3.up_proj.weight"
    stored = tensors[name]
    tensors[name] = stored._replace(data=NAN["F8_E4M3"] + stored.data[1:])
    save(directory, tensors, config)
    with pytest.raises(WeightMismatch, match=r"layers\.0\..*up_proj: 1 of"):
        convert_checkpoint(directory, tmp_path / "out", Recipe())


@pytest.mark.parametrize(
    "tensor", ["layers.2.mlp.switch_mlp.up_proj.scales", "lm_head.weight", "layers.0.linear_attn.A_log"]
)
def test_what_was_written_wrongly_is_not_published(source, tmp_path, monkeypatch, tensor):
    """P85: the output is opened and compared with the source before it gets its name."""
    honest = staging.StagedDirectory.write

    def lying(self, name, size, fill):
        digests = honest(self, name, size, fill)
        path = self.partial / name
        if name.endswith(".safetensors"):
            raw = path.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + length])
            for key, entry in header.items():
                if key.endswith(tensor):
                    flip(path, 8 + length + entry["data_offsets"][0])
        return digests

    monkeypatch.setattr(staging.StagedDirectory, "write", lying)
    with pytest.raises(RecordCorrupt, match="not what was written") as caught:
        convert_checkpoint(source, tmp_path / "out", Recipe())
    assert tensor in caught.value.message
    assert not (tmp_path / "out").exists()


def test_an_index_that_was_not_written_is_noticed(source, tmp_path, monkeypatch):
    """P85, as it happened: a conversion that wrote no index and said nothing."""
    honest = staging.StagedDirectory.write

    def forgetful(self, name, size, fill):
        digests = honest(self, name, size, fill)
        if name == "config.json":
            (self.partial / name).unlink()
        return digests

    monkeypatch.setattr(staging.StagedDirectory, "write", forgetful)
    with pytest.raises(Exception, match=r"config\.json"):
        convert_checkpoint(source, tmp_path / "out", Recipe())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", [0, 7])
def test_a_source_without_its_table_is_not_called_whole(tmp_path, kept):
    """P84: a download without the n-gram table, or with some of its parts, converts to nothing."""
    directory = build_hf(tmp_path / "model", dtype="bfloat16")
    tensors, config = load(directory)
    parts = [name for name in tensors if ".ngram_embedding." in name]
    save(directory, {name: value for name, value in tensors.items() if name not in parts[kept:]}, config)
    with pytest.raises(WeightMismatch, match="ngram_embedding") as caught:
        convert_checkpoint(directory, tmp_path / "out", Recipe())
    assert caught.value.hint
    assert not list(tmp_path.glob("out*"))


def test_a_machine_without_memory_is_told_which_tensor_and_goes_on_later(
    source, whole, tmp_path, monkeypatch
):
    """P25."""
    honest, calls = values.mx.quantize, []

    def starved(*arguments, **how):
        calls.append(1)
        if len(calls) == 40:
            raise RuntimeError("[malloc] Unable to allocate 9830400 bytes")
        return honest(*arguments, **how)

    with monkeypatch.context() as patched:
        patched.setattr(values.mx, "quantize", starved)
        with pytest.raises(
            ModelError, match=r"Cannot convert piece \d+ of \S+: .*Unable to allocate"
        ) as caught:
            convert_checkpoint(source, tmp_path / "out", Recipe())
    assert "same command" in caught.value.hint
    assert not (tmp_path / "out").exists()
    assert contents(convert_checkpoint(source, tmp_path / "out", Recipe()).directory) == contents(whole)
