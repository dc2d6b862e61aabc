"""A second copy on another drive: split by rate, compared before it is believed, dropped when it fails."""

import heapq
import shutil
from pathlib import Path

import pytest

from expert_store.errors import CheckpointNotFound, SourceFailed, StoreError
from expert_store.layout import ReadOp
from expert_store.mirrored import (
    FIRST,
    MIRROR,
    NUM_PROBES,
    PROBE_EVERY,
    MirroredSource,
    Splitter,
    find_mirror,
)
from expert_store.safetensors_index import read_tensor_table
from expert_store.testing import CountingSource, FaultySource, MemorySource
from tests.tiny.checkpoints import build_mlx

RECORD = 1000
DATA = bytes(range(256)) * 40


def run_of(number: int) -> tuple[ReadOp, ...]:
    half = RECORD // 2
    return (ReadOp(0, number * RECORD, half, 0, 1), ReadOp(0, number * RECORD + half, half, 1, 2))


def views() -> list[memoryview]:
    return [memoryview(bytearray(RECORD // 2)) for _ in range(2)]


def read(source: MirroredSource, number: int) -> bytes:
    into = views()
    assert source.read_runs(run_of(number), into) == RECORD
    return b"".join(bytes(view) for view in into)


def expected(number: int) -> bytes:
    return DATA[number * RECORD : (number + 1) * RECORD]


def pair(mirror: bytes = DATA, **rest: object) -> tuple[MirroredSource, CountingSource, CountingSource]:
    first, second = CountingSource(MemorySource([DATA])), CountingSource(MemorySource([b"", mirror]))
    return MirroredSource(first, second, {0: 1}, **rest), first, second  # type: ignore[arg-type]


def only_the_mirror(source: MirroredSource) -> None:
    source._splitter._choose = lambda _num_bytes: MIRROR  # type: ignore[method-assign]


def simulate(rates: tuple[float, float], num_reads: int, depth: int, size: int = 2_764_800) -> Splitter:
    """Keep `depth` reads on the wire of two drives that serve them one after the other at their rates."""
    splitter, now, free_at = Splitter(), 0, [0.0, 0.0]
    wire: list[tuple[int, int, int]] = []
    for number in range(num_reads):
        if len(wire) == depth:
            now, _, side = heapq.heappop(wire)
            splitter.end(side, size, now)  # type: ignore[arg-type]
        side = splitter.start(size, now)
        free_at[side] = max(free_at[side], now) + size / rates[side]
        heapq.heappush(wire, (int(free_at[side]), number, side))
    return splitter


@pytest.mark.parametrize("rates", [(6.5, 5.7), (1.81, 3.18), (17.3, 1.0), (2.0, 2.0)])
def test_two_drives_share_by_what_they_give(rates):
    """Bytes a nanosecond of public pairs (FIELD B.1): together they are as fast as their sum."""
    splitter = simulate(rates, 4000, depth=8)
    first, mirror = (drive.total_bytes for drive in splitter.drives)
    share = mirror / (first + mirror)
    assert share == pytest.approx(rates[1] / sum(rates), abs=0.04)


def test_p21_a_drive_that_looks_infinitely_fast_or_slow_is_tried_again():
    splitter = Splitter()
    for side in (FIRST, MIRROR):
        for number in range(NUM_PROBES):
            splitter.begin(side, 10, 1000 * number)
            splitter.end(side, 10, 1000 * number + (1 if side == FIRST else 900))
    chosen = []
    for number in range(4 * PROBE_EVERY):
        at = 100_000 + 2000 * number
        side = splitter.start(10, at)
        splitter.end(side, 10, at + 5)
        chosen.append(side)
    assert chosen.count(MIRROR) >= 3, "the choice must not seal itself"


def test_p21_time_that_stands_still_or_runs_backwards_is_no_rate():
    splitter = Splitter()
    for number in range(20):
        side = splitter.start(10, 1000 - number)
        splitter.end(side, 10, 1000 - number)
    assert all(drive.bytes_per_ns is None for drive in splitter.drives)
    assert {splitter.start(10, 5), splitter.start(10, 5)} == {FIRST, MIRROR}


def test_every_record_is_what_the_first_copy_holds_and_both_drives_are_used():
    source, first, second = pair()
    for _ in range(3):
        for number in range(10):
            assert read(source, number) == expected(number)
    assert min(first.num_bytes, second.num_bytes) >= NUM_PROBES * RECORD
    assert source.read_bytes == (first.num_bytes, second.num_bytes)
    assert source.dropped == ""
    assert first.num_bytes + second.num_bytes > 30 * RECORD, "first reads of the mirror are compared"


def test_what_was_compared_once_is_not_compared_again():
    source, first, second = pair()
    only_the_mirror(source)
    for _ in range(20):
        for number in range(2):
            assert read(source, number) == expected(number)
    assert (first.num_bytes, second.num_bytes) == (2 * RECORD, 40 * RECORD)


@pytest.mark.parametrize("at", [0, RECORD // 2 - 1, RECORD // 2, RECORD - 1])
def test_a_mirror_that_disagrees_in_one_bit_is_dropped_and_nothing_of_it_is_used(at):
    for number in range(10):
        wrong = bytearray(DATA)
        wrong[number * RECORD + at] ^= 1
        source, *_ = pair(bytes(wrong))
        only_the_mirror(source)
        for one in range(10):
            assert read(source, one) == expected(one)
        assert "differs from the first copy" in source.dropped


@pytest.mark.parametrize(
    "fault", ["short", SourceFailed("broken", hint=""), OSError(5, "Input/output error"), OSError()]
)
@pytest.mark.parametrize("when", [0, 3])
def test_a_mirror_that_fails_is_dropped_and_the_read_is_done_again(fault, when):
    second = FaultySource(MemorySource([DATA]), lambda number, *_: fault if number >= when else None)
    source = MirroredSource(MemorySource([DATA]), second, {0: 0})
    for _ in range(3):
        for number in range(10):
            assert read(source, number) == expected(number)
    assert source.dropped.startswith("the mirror is not used any more: ")
    before = source.read_bytes
    read(source, 1)
    assert source.read_bytes == before, "dropped for good"


def test_an_error_of_the_first_copy_is_an_error():
    first = FaultySource(MemorySource([DATA]), lambda *_: SourceFailed("broken", hint=""))
    source = MirroredSource(first, MemorySource([DATA]), {0: 0})
    with pytest.raises(StoreError, match="broken"):
        read(source, 0)


def test_files_without_a_copy_come_from_the_first():
    source, _, second = pair()
    source._numbers.clear()
    assert read(source, 3) == expected(3)
    assert second.num_bytes == 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_mlx(tmp_path / "model")


def find(model: Path, mirror: Path):
    files = read_tensor_table(model).files
    return find_mirror(files, range(len(files)), mirror)


def test_copies_are_known_by_name_size_and_header(model, tmp_path):
    mirror = tmp_path / "mirror"
    shutil.copytree(model, mirror)
    found = find(model, mirror)
    assert found.numbers == {number: number for number in range(len(found.files))}
    assert [note for note in found.notes if "same drive" in note]
    one, *others = sorted(mirror.glob("*.safetensors"))
    raw = bytearray(one.read_bytes())
    raw[9] ^= 1
    one.write_bytes(raw)
    found = find(model, mirror)
    assert 0 not in found.numbers
    assert any(f"{one.name} is not used" in note for note in found.notes)
    for other in others:
        other.unlink()
    with pytest.raises(CheckpointNotFound, match="holds no copy"):
        find(model, mirror)


def test_a_mirror_that_is_not_there_is_refused(model, tmp_path):
    with pytest.raises(CheckpointNotFound, match="No mirror there"):
        find(model, tmp_path / "nowhere")
