"""A recorded cycle says what happened, all of it, and what the books say."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from expert_store.keys import ExpertKey, ReadClass, WaitCause
from expert_store.source import ByteSource
from expert_store.stats import Fate
from expert_store.testing import ThrottledSource
from expert_store.ticket import Ticket
from mlx_flashnext.engine.deltas import since
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.predictors import PredictorSetting, make_predictor
from mlx_flashnext.reports.measure import answer
from mlx_flashnext.reports.waterfall import NGRAM, CycleRecorder, RecordedCycle
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of

NUM_TOKENS = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("waterfall") / "model")


def record(engine: Engine, *, hints: str = "off") -> CycleRecorder:
    """Return what was recorded of an answer whose prompt was there before."""
    layers = {layer: layout.record.num_experts for layer, layout in engine.checkpoint.experts.items()}
    setting = PredictorSetting(layers, engine.config.num_experts_per_tok)
    recorder = CycleRecorder()
    heard = Hints(make_predictor(hints, setting), engine.config.num_hidden_layers, recorder.routes)
    session = engine.session(hints=heard, laps=recorder)
    prompt = prompt_of(24)
    answer(session, prompt, 0)
    engine.target.store.wait_idle()
    with recorder.watching(engine.target):
        answer(session, prompt, NUM_TOKENS)
    return recorder


def all_of(recorder: CycleRecorder) -> list[RecordedCycle]:
    found = [recorder.recorded(0)]
    return [found[0], *(recorder.recorded(number) for number in range(1, len(found[0].cycles_ns)))]


def test_waits_and_reads_are_those_of_the_books(model):
    with open_tiny(model, slots=7) as engine:
        target = engine.target
        session = engine.session()
        answer(session, prompt_of(24), 0)
        target.store.wait_idle()
        before, rows_before = target.store.statistics(), target.rows.statistics()
        recorder = CycleRecorder()
        with recorder.watching(target):
            answer(session, prompt_of(24, seed=8), NUM_TOKENS)
        store = since(target.store.statistics(), before)
        rows = since(target.rows.statistics(), rows_before)
        for layer in store.layers:
            for cause in WaitCause:
                name = cause.name.lower()
                heard = [wait for wait in recorder._waits if (wait.layer, wait.cause) == (layer.layer, name)]
                assert sum(w.ended_ns - w.began_ns for w in heard) == layer.waits[cause].total_ns
                assert sum(w.queue_ns or 0 for w in heard) == layer.waits[cause].queue_ns
        assert store.exposed_wait_ns > 0, "nothing was waited for: the test says nothing"
        assert len(recorder._tickets) == store.queue.num_reads
        ngram = [wait for wait in recorder._waits if wait.cause == NGRAM]
        assert sum(wait.ended_ns - wait.began_ns for wait in ngram) == rows.exposed_wait_ns
        assert sum(span.num_rows for span in recorder._rows) == rows.num_unique
        assert sum(span.num_bytes for span in recorder._rows) == rows.physical_bytes


@pytest.mark.parametrize("hints", ["off", "near-gate"])
def test_layers_follow_each_other_without_gap_and_hold_their_waits(model, hints):
    with open_tiny(model, slots=7) as engine:
        recorder = record(engine, hints=hints)
        num_layers = engine.config.num_hidden_layers
    cycles = all_of(recorder)
    assert len(cycles) == NUM_TOKENS
    for one in cycles:
        assert [span.phase for span in one.phases] == ["draft", "verify", "commit", "observe"]
        assert (one.phases[0].began_ns, one.phases[-1].ended_ns) == (0, one.took_ns)
        assert one.took_ns == one.cycles_ns[one.number]
        assert all(before.ended_ns <= after.began_ns for before, after in pairwise(one.phases))
        verify = one.phases[1]
        assert [span.layer for span in one.layers] == list(range(num_layers))
        assert one.layers[0].began_ns == verify.began_ns
        assert one.layers[-1].ended_ns <= verify.ended_ns
        assert all(before.ended_ns == after.began_ns for before, after in pairwise(one.layers))
        spans = {span.layer: span for span in one.layers}
        for wait in one.waits:
            if wait.layer is not None:
                span = spans[wait.layer]
                assert span.began_ns < wait.began_ns <= wait.ended_ns <= span.ended_ns
        for read in one.reads:
            assert read.issued_ns <= read.began_ns < read.ready_ns
            assert read.ready_ns > 0
            if read.read_class == "exact":
                assert spans[read.layer].began_ns <= read.issued_ns <= spans[read.layer].routed_ns
                assert read.ready_ns <= spans[read.layer].ended_ns
    classes = {read.read_class for one in cycles for read in one.reads}
    assert classes == ({"exact"} if hints == "off" else {"exact", "near"})
    assert {read.fate for one in cycles for read in one.reads} <= {
        "unused", *(fate.name.lower() for fate in Fate)
    }  # fmt: skip


def test_a_block_wider_than_the_slots_waits_more_than_once_in_a_layer(model):
    def slow(source: ByteSource) -> ByteSource:  # or a group's records are there before it waits
        return ThrottledSource(source, latency_s=0.002)

    with open_tiny(model, slots=5, draft_tokens=3, wrap_source=slow) as engine:
        from drafter.oracle import OracleDrafter

        plain = engine.session()
        told = [
            event.token_id
            for event in plain.generate(prompt_of(24), _greedy(), max_tokens=NUM_TOKENS)
            if hasattr(event, "token_id")
        ]
        recorder = CycleRecorder()
        drafter = OracleDrafter([*prompt_of(24), *told], engine.config.vocab_size)
        hints = Hints(None, engine.config.num_hidden_layers, recorder.routes)
        session = engine.session(drafter, is_guarded=False, hints=hints, laps=recorder)
        answer(session, prompt_of(24), 0)
        with recorder.watching(engine.target):
            answer(session, prompt_of(24), NUM_TOKENS)
    wide = [one for one in all_of(recorder) if one.num_rows > 1]
    assert wide
    assert all(one.num_kept == one.num_rows for one in wide)
    waits = [[wait.layer for wait in one.waits].count(span.layer) for one in wide for span in one.layers]
    assert max(waits) > 1


def test_the_typical_cycle_is_the_middle_one_and_never_the_first_of_several(model):
    with open_tiny(model, slots=7) as engine:
        recorder = record(engine)
    one = recorder.typical()
    assert one is not None
    later = sorted(one.cycles_ns[1:])
    assert one.number > 0
    assert one.took_ns == later[(len(later) - 1) // 2]


def test_nobody_watches_after_the_block_and_nothing_recorded_is_nothing(model):
    with open_tiny(model, slots=7) as engine:
        recorder = record(engine)
        heard = len(recorder._waits), len(recorder._tickets), len(recorder._rows)
        answer(engine.session(), prompt_of(24, seed=9), 4)
        assert (len(recorder._waits), len(recorder._tickets), len(recorder._rows)) == heard
    assert CycleRecorder().typical() is None


def test_where_everything_is_resident_there_are_no_layers_to_show(model):
    with open_tiny(model, slots=16) as engine:
        one = record(engine).typical()
    assert one is not None
    assert one.layers == one.reads == ()
    assert {wait.cause for wait in one.waits} <= {NGRAM}


def test_a_guess_whose_fate_is_open_is_unused():
    recorder = CycleRecorder(clock=iter(range(100, 200, 10)).__next__)
    recorder.begin()
    recorder.end("draft")
    recorder.end("verify")
    ticket = Ticket(ExpertKey(3, 5), slot=0, num_bytes=64, read_class=ReadClass.SPECULATIVE, issued_ns=90)
    ticket.started_ns, ticket.ready_ns = 105, 115
    recorder.read_ready(ticket)
    recorder.cycle(1, 1)
    (read,) = recorder.recorded(0).reads
    assert (read.layer, read.expert, read.read_class, read.fate) == (3, 5, "speculative", "unused")
    assert (read.issued_ns, read.began_ns, read.ready_ns) == (-10, 5, 15)


def _greedy():
    from mlx_flashnext.reports.measure import GREEDY

    return GREEDY
