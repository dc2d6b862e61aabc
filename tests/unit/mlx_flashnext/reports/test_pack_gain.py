"""The gain of a pack: nine reads a record against one show where a read costs time."""

import shutil
from pathlib import Path

import pytest

from expert_store.errors import RecordCorrupt
from expert_store.source import ByteSource
from expert_store.testing import ThrottledSource
from mlx_flashnext.packing import pack_checkpoint
from mlx_flashnext.reports import pack_gain
from mlx_flashnext.reports.pack_gain import PackGain, measure_gain
from tests.tiny.checkpoints import build_mlx
from tests.tiny.packs import flip


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gain")
    source = build_mlx(folder / "model")
    return source, pack_checkpoint(source, folder / "pack").directory


def slow(files: ByteSource) -> ByteSource:
    return ThrottledSource(files, latency_s=0.004)


def test_a_latency_a_read_is_what_a_pack_gains(builds: tuple[Path, Path], monkeypatch) -> None:
    """Nine reads of 4 ms against one; the rest of a tiny record's time is the store's own."""
    monkeypatch.setattr(pack_gain, "ROUNDS", 1)
    found = measure_gain(*builds, wrap_source=slow)
    assert found.is_gain
    assert found.ratio is not None
    assert 2 < found.ratio < 9.5
    assert found.low <= found.ratio <= found.high
    assert found.pack_bytes_per_s > found.source_bytes_per_s


def test_two_copies_of_one_pack_gain_nothing_from_each_other(
    builds: tuple[Path, Path], tmp_path: Path
) -> None:
    """The negative control: the same thing twice, and no round may decide alone."""
    twin = shutil.copytree(builds[1], tmp_path / "twin")
    found = measure_gain(builds[1], twin, wrap_source=slow)
    assert found.ratio == pytest.approx(1, abs=0.35)


def test_too_few_records_say_nothing(builds: tuple[Path, Path]) -> None:
    found = measure_gain(*builds, few=65)
    assert (found.ratio, found.is_gain) == (None, False)
    assert found.why == "64 records are too few to say anything"


def test_records_of_the_pack_are_compared_while_it_is_measured(
    builds: tuple[Path, Path], tmp_path: Path
) -> None:
    damaged = shutil.copytree(builds[1], tmp_path / "damaged")
    flip(damaged / "experts-002.safetensors", 16384 + 3)
    with pytest.raises(RecordCorrupt):
        measure_gain(builds[0], damaged)


@pytest.mark.parametrize(("low", "expected"), [(1.01, True), (1.0, False), (0.9, False)])
def test_only_a_gain_in_every_round_is_one(low: float, expected: bool) -> None:
    assert PackGain(1.3, low, 1.4).is_gain is expected
