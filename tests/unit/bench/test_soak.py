"""The soak in short: what it does comes out whole, and it sees each kind of leak that is planted in it."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.studies import soak as soak_module
from bench.studies.resting import Rest, drift, judge, measure
from bench.studies.soak import Question, Setting, Soak, WentWrongError, answered, run
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.plan import PlanRequest
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import prompt_of
from tests.tiny.own_drafts import write_draft

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks at /proc")

TURNS, BLOCK = 30, 6


def nothing(_soak: Soak) -> None:
    """Leak nothing."""


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    place = tmp_path_factory.mktemp("soak")
    model = build_mlx(place / "model")
    hints = ("off", "near-gate", "previous", "random", "frequency")
    return Setting(model, write_draft(place / "draft", model), (5, 9, 15, 16), hints, hints)


@pytest.fixture(scope="module")
def scripts(setting: Setting) -> list[list[Question]]:
    rng, told = random.Random(1), []
    with Engine.open(setting.model, PlanRequest(context_tokens=384, slots_per_layer=16)) as engine:
        assert engine.plan.is_resident
        for seed in (1, 2):
            first = answered(engine, prompt_of(20, seed), rng)
            told.append([first, answered(engine, [*first.prompt, *first.answer, *prompt_of(9, 7)], rng)])
    return told


@pytest.fixture
def soak_of(setting: Setting, scripts: list[list[Question]], tmp_path: Path) -> Callable[..., Soak]:
    def make(leak: Callable[[Soak], None] = nothing, told: list[list[Question]] = scripts) -> Soak:
        return Soak(setting, told, 5, tmp_path, leak)

    return make


def test_a_short_soak_leaves_nothing_behind(soak_of: Callable[..., Soak]) -> None:
    soak = soak_of()
    rests = run(soak, TURNS, BLOCK)
    # Too short for sizes to settle: what must be exact is looked at, and what may not grow by the turn.
    wrong = [line for line in judge(rests[1:]) if not line.startswith(("rss", "blocks"))]
    assert not wrong
    assert rests[-1].turns == TURNS
    disturbed = {"cancelled", "closed", "left", "reset", "reads that failed"}
    assert len(disturbed & soak.done.keys()) >= 5, soak.done
    assert soak.done["sessions"]
    assert sum(count for what, count in soak.done.items() if what.startswith("opened with")) >= TURNS / BLOCK


def test_leaked_threads_and_descriptors_are_seen(soak_of: Callable[..., Soak]) -> None:
    stop, files, turns = threading.Event(), [], itertools.count()

    def leak(_soak: Soak) -> None:
        if next(turns) == BLOCK:  # in the second block
            threading.Thread(target=stop.wait, daemon=True).start()
            files.append(Path("/dev/null").open("rb"))  # noqa: SIM115 - the planted leak

    try:
        wrong = "; ".join(judge(run(soak_of(leak), 2 * BLOCK, BLOCK)[1:]))
    finally:
        stop.set()
        for file in files:
            file.close()
    assert "threads" in wrong
    assert "tasks" in wrong
    assert "descriptors" in wrong


def test_a_leaked_slot_stops_the_soak(soak_of: Callable[..., Soak]) -> None:
    def leak(soak: Soak) -> None:
        assert soak.engine is not None
        store = soak.engine.target.store
        store.acquire(next(iter(soak.engine.checkpoint.experts)), [3])  # nobody releases it

    with pytest.raises(WentWrongError, match=r"left over: \{'pins': 1\}"):
        run(soak_of(leak), 2, BLOCK)


def test_a_wrong_answer_stops_the_soak(soak_of: Callable[..., Soak], scripts: list[list[Question]]) -> None:
    def spoiled(question: Question) -> Question:
        return replace(question, answer=(*question.answer[:-1], question.answer[-1] ^ 1))

    wrong = [[spoiled(question) for question in script] for script in scripts]
    with pytest.raises(WentWrongError, match="plain decode says"):
        run(soak_of(told=wrong), 2, BLOCK)


@pytest.fixture
def hoard() -> Iterator[list[object]]:
    kept: list[object] = []
    yield kept
    kept.clear()


def test_growing_lists_and_arrays_are_seen(hoard: list[object]) -> None:
    rests = []
    for turns in range(0, 60, 10):
        rests.append(rest := measure(turns))
        # What grows is a share of what is there: a process that ran other tests before has a million blocks.
        hoard.extend([f"kept {turns} {number}" for number in range(rest.blocks // 50)])
        hoard.append(bytearray(rest.rss_bytes // 50))
    wrong = "; ".join(judge(rests))
    assert "blocks: grew" in wrong
    assert "rss_bytes: grew" in wrong


def test_flat_figures_are_let_pass_and_slow_growth_is_not() -> None:
    flat = [Rest(turns, 100_000_000 + turns % 7 * 100_000, 0, 50_000, 1, 3, 6) for turns in range(0, 500, 25)]
    assert not judge(flat)
    slow = [replace(rest, rss_bytes=rest.rss_bytes + rest.turns * 6000) for rest in flat]
    assert drift(slow, "rss_bytes") > 0.02
    assert [line.split(":")[0] for line in judge(slow)] == ["rss_bytes"]
    held = [*flat[:-1], replace(flat[-1], mlx_bytes=4)]
    assert [line.split(":")[0] for line in judge(held)] == ["mlx_bytes"]


def test_blocks_of_a_soak_are_those_asked_for(
    monkeypatch: pytest.MonkeyPatch, soak_of: Callable[..., Soak]
) -> None:
    monkeypatch.setattr(soak_module, "measure", lambda turns: Rest(turns, 1, 0, 1, 1, 1, 1))
    monkeypatch.setattr(Soak, "block", lambda _soak, _turns: None)
    assert [rest.turns for rest in run(soak_of(), 10, 4)] == [0, 4, 8, 10]
