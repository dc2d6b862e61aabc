"""Faults below a running answer: it stops and names the place, nothing is substituted, the next is right."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from expert_store.errors import RecordCorrupt, SourceChanged, SourceFailed, StoreError, WorkerDied
from expert_store.source import ByteSource
from expert_store.testing import CountingSource, FaultySource, ThrottledSource
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import BudgetTooSmall
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import greedy, prompt_of

GREEDY = SamplingParams(temperature=0.0)
REQUEST = PlanRequest(context_tokens=256, slots_per_layer=5)
Fault = str | BaseException | None


class Switch:
    """A fault that begins when it is thrown, and hits reads of one size or larger."""

    def __init__(self, fault: Callable[[], Fault], at_least: int = 0) -> None:
        self.is_on = False
        self._fault = fault
        self._at_least = at_least

    def __call__(self, number: int, file: int, offset: int, wanted: int) -> Fault:
        return self._fault() if self.is_on and wanted >= self._at_least else None


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def answer(tiny_dir: Path) -> list[int]:
    with Engine.open(tiny_dir, REQUEST) as engine:
        return greedy(engine, prompt_of(16), 12)


@pytest.mark.parametrize(
    ("fault", "error", "named"),
    [
        (lambda: "short", RecordCorrupt, "wanted"),
        (lambda: OSError(5, "Input/output error"), SourceFailed, "Input/output error"),
    ],
    ids=["short read", "read error"],
)
@pytest.mark.parametrize("during", ["prefill", "decode"])
def test_a_read_that_fails_stops_the_answer_and_the_next_one_is_right(
    tiny_dir: Path,
    answer: list[int],
    fault: Callable[[], Fault],
    error: type[StoreError],
    named: str,
    during: str,
) -> None:
    """P26: no token comes from a record that was not read."""
    switch = Switch(fault)
    with Engine.open(tiny_dir, REQUEST, wrap_source=lambda source: FaultySource(source, switch)) as engine:
        session, seen = engine.session(), []
        switch.is_on = during == "prefill"
        with pytest.raises(error, match=named) as failure:  # noqa: PT012 - the fault begins on the way
            for event in session.generate(prompt_of(16), GREEDY, max_tokens=12):
                if isinstance(event, Token):
                    seen.append(event.token_id)
                    switch.is_on = True
        assert failure.value.hint
        assert seen == answer[: len(seen)]
        assert session.tokens == ()
        switch.is_on = False
        events = session.generate(prompt_of(16), GREEDY, max_tokens=12)
        assert [event.token_id for event in events if isinstance(event, Token)] == answer


def test_an_error_names_layer_expert_file_and_offset(tiny_dir: Path) -> None:
    switch = Switch(lambda: "short", at_least=512)
    with Engine.open(tiny_dir, REQUEST, wrap_source=lambda source: FaultySource(source, switch)) as engine:
        switch.is_on = True
        with pytest.raises(RecordCorrupt) as failure:
            greedy(engine, prompt_of(16), 2)
    assert {"layer", "expert", "file", "offset", "wanted", "got"} <= failure.value.context.keys()
    assert str(failure.value.context["file"]) in failure.value.message


def test_a_dead_reader_stops_the_answer_instead_of_hanging(tiny_dir: Path) -> None:
    switch = Switch(lambda: "die")
    with Engine.open(tiny_dir, REQUEST, wrap_source=lambda source: FaultySource(source, switch)) as engine:
        switch.is_on = True
        with pytest.raises(WorkerDied):
            greedy(engine, prompt_of(16), 2)


@pytest.mark.parametrize("edit", ["touch", "overwrite", "truncate", "replace"])
def test_a_file_changed_while_it_is_open_stops_the_answer(tmp_path: Path, edit: str) -> None:
    """P11: stale or foreign weights are never computed with."""
    directory = build_mlx(tmp_path / "tiny", shards=1)
    shard = directory / "model.safetensors"
    with Engine.open(directory, REQUEST) as engine:
        session = engine.session()
        events = session.generate(prompt_of(16), GREEDY, max_tokens=60)
        next(event for event in events if isinstance(event, Token))
        size = shard.stat().st_size
        if edit == "touch":
            os.utime(shard, ns=(1, 1))
        elif edit == "overwrite":
            with shard.open("r+b") as file:
                file.seek(size // 2)
                file.write(b"\xff" * 64)
        elif edit == "truncate":
            os.truncate(shard, size // 2)
        else:
            other = tmp_path / "other"
            other.write_bytes(shard.read_bytes())
            other.replace(shard)
        with pytest.raises(SourceChanged) as failure:
            list(events)
    assert shard.name in failure.value.message
    assert failure.value.hint


def test_an_edited_checkpoint_is_read_anew_at_the_next_start(tmp_path: Path, answer: list[int]) -> None:
    """P11: nothing derived from the old bytes survives a restart."""
    directory = build_mlx(tmp_path / "tiny")
    with Engine.open(directory, REQUEST) as engine:
        assert greedy(engine, prompt_of(16), 12) == answer
        digest = engine.checkpoint.digest
    build_mlx(directory, seed=3)
    with Engine.open(directory, REQUEST) as engine:
        assert greedy(engine, prompt_of(16), 12) != answer
    build_mlx(directory)
    with Engine.open(directory, REQUEST) as engine:
        assert engine.checkpoint.digest == digest
        assert greedy(engine, prompt_of(16), 12) == answer


def test_a_slow_drive_changes_nothing_but_time(tiny_dir: Path, answer: list[int]) -> None:
    slept: list[float] = []

    def throttled(source: ByteSource) -> ByteSource:
        return ThrottledSource(source, latency_s=5.0, sleep=slept.append)

    with Engine.open(tiny_dir, REQUEST, wrap_source=throttled) as engine:
        assert greedy(engine, prompt_of(16), 12) == answer
    assert slept


def test_the_thread_that_computes_never_reads(tiny_dir: Path) -> None:
    """P06: after loading, every read is on a reader thread."""
    counting: list[CountingSource] = []

    def counted(source: ByteSource) -> ByteSource:
        counting.append(CountingSource(source))
        return counting[0]

    with Engine.open(tiny_dir, REQUEST, wrap_source=counted) as engine:
        loaded = len(counting[0].reads)
        greedy(engine, prompt_of(16), 12)
        after = counting[0].reads[loaded:]
    assert after
    assert threading.get_ident() not in {read.thread for read in after}


def test_two_engines_on_one_checkpoint_answer_alike(tiny_dir: Path, answer: list[int]) -> None:
    with Engine.open(tiny_dir, REQUEST) as first, Engine.open(tiny_dir, REQUEST) as second:
        assert greedy(first, prompt_of(16), 12) == greedy(second, prompt_of(16), 12) == answer


def test_closing_joins_every_thread_and_twice_is_once(tiny_dir: Path) -> None:
    before = threading.active_count()
    engine = Engine.open(tiny_dir, REQUEST)
    greedy(engine, prompt_of(16), 2)
    assert threading.active_count() > before
    engine.close()
    engine.close()
    assert threading.active_count() == before


def test_a_failure_while_opening_leaves_no_thread_behind(tiny_dir: Path) -> None:
    before = threading.active_count()
    calls: list[int] = []

    def fault(number: int, file: int, offset: int, wanted: int) -> Fault:
        calls.append(number)
        return SourceFailed("Input/output error", hint="check the drive") if number == 40 else None

    with pytest.raises(StoreError, match="Input/output error"):
        Engine.open(tiny_dir, REQUEST, wrap_source=lambda source: FaultySource(source, fault))
    assert threading.active_count() == before


def test_a_store_that_cannot_read_is_an_error_not_a_resident_model(tmp_path: Path) -> None:
    """P12: when the backing files fail, nothing falls back to holding all experts in memory."""
    directory = build_mlx(tmp_path / "tiny")

    def refuse(number: int, file: int, offset: int, wanted: int) -> Fault:
        return SourceFailed("Permission denied", hint="check the drive")

    with pytest.raises(SourceFailed, match="Permission denied"):
        Engine.open(directory, REQUEST, wrap_source=lambda source: FaultySource(source, refuse))

    switch = Switch(lambda: OSError(13, "Permission denied"))
    with Engine.open(directory, REQUEST, wrap_source=lambda source: FaultySource(source, switch)) as engine:
        switch.is_on = True
        before = mx.get_active_memory()
        with pytest.raises(SourceFailed, match="Permission denied"):
            greedy(engine, prompt_of(16), 2)
        assert mx.get_active_memory() - before < 1 << 20
        assert sum(layer.num_resident for layer in engine.target.store.statistics().layers) == 0


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated_or_read(tiny_dir: Path) -> None:
    def untouchable(source: ByteSource) -> ByteSource:
        raise AssertionError("a source was made for a plan that does not fit")

    before, threads = mx.get_active_memory(), threading.active_count()
    with pytest.raises(BudgetTooSmall):
        Engine.open(tiny_dir, PlanRequest(memory_bytes=1 << 20), wrap_source=untouchable)
    assert mx.get_active_memory() == before
    assert threading.active_count() == threads


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs the kernel's own counters")
def test_decoding_writes_not_one_byte(tiny_dir: Path) -> None:
    def written() -> int:
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counters["wchar"])

    with Engine.open(tiny_dir, REQUEST) as engine:
        events = engine.session().generate(prompt_of(16), GREEDY, max_tokens=40)
        next(event for event in events if isinstance(event, Token))
        before = written()
        num_tokens = sum(isinstance(event, Token) for event in events)
        assert written() == before
    assert num_tokens == 39
