"""What may go wrong around reading ahead: the drive, the clock, the disk that is written to, the files of a
warm start. The answer is the same or an error that says why; nothing hangs and nothing is substituted.
"""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from expert_store.errors import SourceFailed, StoreError
from expert_store.keys import Prefetch, ReadClass
from expert_store.popularity import FORMAT, VERSION
from expert_store.source import ByteSource
from expert_store.stats import Fate, HintOutcome
from expert_store.store import ExpertStore
from expert_store.testing import CountingSource, FaultySource, ThrottledSource
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, PrefillProgress, Token
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.predictors import NearGate, Oracle
from mlx_flashnext.engine.routes import RecordedRoutes, RouteLog
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.reports.page_cache import prepare
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import prompt_of

GREEDY = SamplingParams(temperature=0.0)
PROMPT, NUM_TOKENS, NUM_LAYERS = prompt_of(14), 8, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("faults") / "model")


def open_engine(
    model: Path,
    wrap: Callable[[ByteSource], ByteSource] = lambda source: source,
    *,
    warm: Path | None = None,
    hints: str = "off",
) -> Engine:
    request = PlanRequest(context_tokens=128, slots_per_layer=9, hints=hints)
    return Engine.open(model, request, wrap_source=wrap, warm_directory=warm)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "warm"


def answer(engine: Engine, hints: Hints | None = None) -> tuple[list[int], Finished]:
    events = list(engine.session(hints=hints).generate(PROMPT, GREEDY, max_tokens=NUM_TOKENS))
    assert isinstance(events[-1], Finished)
    return [event.token_id for event in events if isinstance(event, Token)], events[-1]


@pytest.fixture(scope="module")
def recorded(model: Path) -> tuple[list[int], RecordedRoutes]:
    log = RouteLog()
    with open_engine(model) as engine:
        tokens, _ = answer(engine, Hints(None, NUM_LAYERS, log))
    return tokens, RecordedRoutes(log.passes)


def test_a_drive_that_goes_while_reading_ahead_ends_the_answer_and_comes_back(model, recorded):
    _, routes = recorded
    gone = False

    def fault(_number: int, _file: int, _offset: int, _wanted: int) -> OSError | None:
        return OSError(errno.EIO, "Input/output error") if gone else None

    with open_engine(model, lambda source: FaultySource(source, fault)) as engine:
        session = engine.session(hints=Hints(Oracle(routes), NUM_LAYERS))
        events = session.generate(PROMPT, GREEDY, max_tokens=NUM_TOKENS)
        for event in events:
            gone = gone or isinstance(event, Token)
            if gone:
                break
        with pytest.raises(SourceFailed) as raised:
            list(events)
        assert "Input/output error" in raised.value.message
        gone = False
        tokens, _ = answer(engine)
    assert tokens == recorded[0], "the drive is back, and nothing wrong was left in a slot"


def test_guesses_that_cannot_be_read_do_not_end_an_answer(model, recorded):
    """Each record fails once, and a guess takes the failure: its demand reads the record again."""
    failed: set[tuple[int, int]] = set()
    is_predicting = False

    def fault(_number: int, file: int, offset: int, _wanted: int) -> OSError | None:
        if not is_predicting or (file, offset) in failed:
            return None
        failed.add((file, offset))
        return OSError(errno.EIO, "Input/output error")

    with open_engine(model, lambda source: FaultySource(source, fault)) as engine:
        store = engine.target.store
        is_predicting = True
        for layer in range(NUM_LAYERS):
            named = [Prefetch(layer, expert, ReadClass.SPECULATIVE) for expert in range(5)]
            store.prefetch(named, owner=77, generation=0)
        store.wait_idle()
        is_predicting = False
        tokens, _ = answer(engine, Hints(NearGate(), NUM_LAYERS))
        fates = store.statistics().fates
    assert tokens == recorded[0]
    assert fates[Fate.FAILED].num > 0


def test_a_clock_that_steps_back_changes_no_answer_and_makes_no_negative_time(model, recorded, monkeypatch):
    """P21."""
    ticks = iter(range(10**9, 0, -997))
    honest = ExpertStore.__init__

    def backwards(self, *rest, **named):
        honest(self, *rest, **named, clock=lambda: next(ticks))

    monkeypatch.setattr(ExpertStore, "__init__", backwards)
    with open_engine(model) as engine:
        tokens, end = answer(engine, Hints(NearGate(), NUM_LAYERS))
        now = engine.target.store.statistics()
    assert tokens == recorded[0]
    assert end.statistics.exposed_wait_ns >= 0
    assert now.exact_io_ns >= 0
    assert now.issue_to_ready.total_ns >= 0
    assert all(wait.queue_ns >= 0 and wait.read_ns >= 0 for wait in now.waits.values())


def test_a_drive_without_bandwidth_is_an_error_not_a_hang(model):
    with pytest.raises(StoreError), open_engine(model, lambda source: ThrottledSource(source, bytes_per_s=0)):
        pass
    result = CliRunner().invoke(app, ["bench", "--model", str(model), "--throttle", "0GB/s"], obj=Services())
    assert result.exit_code == 2
    assert "must be positive" in result.stderr


def test_a_budget_changed_between_turns_changes_no_answer(model, recorded):
    tokens, routes = recorded
    with open_engine(model) as engine:
        store = engine.target.store
        for budget in (None, 0, 1, 1 << 40):
            store.set_prefetch_budget(budget)
            before = store.statistics().hints[HintOutcome.OVER_BUDGET]
            assert answer(engine, Hints(Oracle(routes), NUM_LAYERS))[0] == tokens
            over = store.statistics().hints[HintOutcome.OVER_BUDGET] - before
            assert (over > 0) == (budget in (0, 1))


def test_a_full_disk_at_the_end_is_a_note_and_leaves_the_old_file(model, folder, monkeypatch):
    with open_engine(model, warm=folder) as engine:
        answer(engine)
    (file,) = folder.iterdir()
    kept = file.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    engine = open_engine(model, warm=folder)
    answer(engine)
    engine.close()
    assert "No space left on device" in engine.warm.note
    assert [path.read_bytes() for path in folder.iterdir()] == [kept]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"{}",
        b"[" * 100_000,
        f'{{"format": "{FORMAT}", "version": {VERSION}, "model_digest": "other", "layers": []}}'.encode(),
        b"null",
        b'{"format": "flashnext-popularity", "version": 1, "layers": [{"layer": 99}]}',
    ],
)
def test_a_hostile_popularity_file_is_noted_ignored_and_replaced(model, folder, recorded, content):
    with open_engine(model, warm=folder) as engine:
        tokens, _ = answer(engine)
    (file,) = folder.iterdir()
    file.write_bytes(content)
    with open_engine(model, warm=folder) as engine:
        assert "No warm start" in engine.warm.note
        assert engine.warm.num_hints == 0
        assert answer(engine)[0] == tokens == recorded[0]
    with open_engine(model, warm=folder) as engine:
        assert engine.warm.note == ""
        assert engine.warm.num_hints > 0


def test_a_warm_start_brings_what_the_last_run_used_and_ends_with_the_first_answer(model, folder, recorded):
    with open_engine(model, warm=folder) as engine:
        answer(engine)
        assert engine.warm.num_hints == 0, "there was no run before this one"
    with open_engine(model, warm=folder) as engine:
        store = engine.target.store
        store.wait_idle()
        warmed = store.statistics()
        tokens, _ = answer(engine)
        after = store.statistics()
    assert tokens == recorded[0]
    assert warmed.predicted_physical_bytes > 0
    assert after.num_prefetched > 0
    assert after.num_unused == 0
    assert after.num_queued == 0


def test_frequency_hints_start_from_the_popularity_file(model, folder, recorded):
    """The first block is guessed from what the run before used; without the file nothing is known."""

    def first_guesses(warm: Path | None) -> int:
        with open_engine(model, warm=warm, hints="frequency") as engine:
            hints = engine.new_hints("frequency")
            assert hints is not None
            return len(hints.begin([1], 0, is_prefill=False).hints)

    with open_engine(model, warm=folder) as engine:
        answer(engine)
    assert first_guesses(folder) > 0
    assert first_guesses(None) == 0
    with open_engine(model, warm=folder, hints="frequency") as engine:
        tokens, _ = answer(engine)
    assert tokens == recorded[0]


def test_one_of_two_drives_that_goes_ends_the_answer_by_name_and_leaves_what_is_in_memory(
    model, recorded, monkeypatch
):
    """Shards may lie on two drives without a mirror. A mirror that goes: tests/parity/test_mirror.py."""
    lost: set[int] = set()
    preadv = os.preadv

    def failing(descriptor: int, *rest: object) -> int:
        if os.fstat(descriptor).st_ino in lost:
            raise OSError(errno.ENXIO, "No such device or address")
        return preadv(descriptor, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    with open_engine(model) as engine:
        assert answer(engine)[0] == recorded[0]
        store, files = engine.target.store, engine.checkpoint.table.files
        used = {read.file for one in engine.checkpoint.experts.values() for read in one.record.reads(0)}
        assert len(used) == 2
        drive = files[max(used)]
        lost.add(drive.inode)
        with pytest.raises(SourceFailed, match=drive.path.name):
            answer(engine, Hints(NearGate(), NUM_LAYERS))
        resident = [expert for expert in range(16) if store.is_resident(0, expert)]
        store.acquire(0, resident[:4]).release()
        lost.clear()
        assert answer(engine)[0] == recorded[0]


def test_no_warm_start_reads_and_writes_nothing(model, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with open_engine(model) as engine:
        answer(engine)
        assert engine.warm.num_hints == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_the_inference_thread_reads_no_expert_ahead_or_otherwise(model, recorded):
    """P06: no storage call on the model's thread, whoever asks for the bytes."""
    counted: list[CountingSource] = []

    def counting(source: ByteSource) -> ByteSource:
        counted.append(CountingSource(source))
        return counted[0]

    with open_engine(model, counting) as engine:
        loaded = len(counted[0].reads)
        assert answer(engine, Hints(NearGate(), NUM_LAYERS))[0] == recorded[0]
        threads = {read.thread for read in counted[0].reads[loaded:]}
    assert len(counted[0].reads) > loaded
    assert threading.get_ident() not in threads


def test_a_page_cache_dropped_in_the_middle_of_a_prompt_is_read_in_parallel(model):
    """P20: what was in memory and is not any more comes back through several readers at once."""
    counted: list[CountingSource] = []

    def counting(source: ByteSource) -> ByteSource:
        # A drive that takes a while: reads that could overlap do.
        counted.append(CountingSource(ThrottledSource(source, latency_s=0.002)))
        return counted[0]

    request = PlanRequest(context_tokens=128, slots_per_layer=9, prefill_step=4)
    with Engine.open(model, request, wrap_source=counting) as engine:
        files = [info.path for info in engine.checkpoint.table.files]
        events = engine.session().generate(prompt_of(24), GREEDY, max_tokens=2)
        tokens: list[int] = []
        for event in events:
            if isinstance(event, PrefillProgress) and event.done == 12:
                prepare(files, "cold")
                counted[0].num_reads_max = 0
            elif isinstance(event, Token):
                tokens.append(event.token_id)
        at_once = counted[0].num_reads_max
    with Engine.open(model, request) as engine:
        events = engine.session().generate(prompt_of(24), GREEDY, max_tokens=2)
        assert [event.token_id for event in events if isinstance(event, Token)] == tokens
    assert at_once > 1
