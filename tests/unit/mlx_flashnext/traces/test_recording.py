"""Recording a real model: the answer is the same, the trace replays without it, a full disk stops only it."""

import io
from dataclasses import replace

import mlx.core as mx
import pytest

from drafter.lookup import LookupDrafter
from drafter.oracle import OracleDrafter
from drafter.record import Cycle, Header
from drafter.record_check import read_trace
from drafter.replay import ReplayDrafter, recorded_proposals
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.traces.recording import BATCH, Recorder, TraceSettings
from mlx_flashnext.traces.replay import replay_trace
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import greedy, open_tiny, prompt_of

PROMPT = prompt_of(20)
PARAMS = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_k=20, seed=3)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    with open_tiny(build_mlx(tmp_path_factory.mktemp("tiny")), slots=6, draft_tokens=3) as opened:
        yield opened


def settings(engine: Engine) -> TraceSettings:
    return TraceSettings("target", "tokenizer", engine.config.vocab_size, 4, keeps_logits=True)


def answer(
    engine: Engine, params: SamplingParams, recorder: Recorder | None = None, drafter=None
) -> list[int]:
    recorded = [*PROMPT, *greedy(engine, PROMPT, 12)]
    drafter = drafter or OracleDrafter(recorded, engine.config.vocab_size, error_rate=0.3)
    session = engine.session(drafter, is_guarded=False, recorder=recorder)
    events = session.generate(PROMPT, params, max_tokens=10)
    return [event.token_id for event in events if isinstance(event, Token)]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "drawn"])
def test_a_recorded_answer_is_the_same_and_replays_without_the_model(engine, params):
    stream = io.BytesIO()
    recorder = Recorder(stream, settings(engine))
    said = answer(engine, params, recorder)
    assert said == answer(engine, params)
    assert recorder.failure == ""
    stream.seek(0)
    lines = read_trace(stream)
    assert isinstance(lines[0], Header)
    assert [token for line in lines if isinstance(line, Cycle) for token in line.committed] == said
    assert all(len(line.routes) == 4 for line in lines if isinstance(line, Cycle))
    stream.seek(0)
    assert replay_trace(stream).num_committed == len(said)
    again = ReplayDrafter(recorded_proposals(lines))
    assert answer(engine, params, drafter=again) == said
    assert again.num_missing == 0


def test_a_stream_that_fails_stops_the_recording_and_not_the_answer(engine):
    class Full(io.BytesIO):
        def write(self, data) -> int:
            if self.tell() > 2000:
                raise OSError(28, "No space left on device")
            return super().write(data)

    recorder = Recorder(Full(), settings(engine))
    assert answer(engine, PARAMS[0], recorder) == answer(engine, PARAMS[0])
    assert "No space left" in recorder.failure


def test_recording_waits_for_the_device_no_more_often(engine):
    def syncs(recorder: Recorder | None) -> int:
        before = engine.target.sync.num_syncs
        answer(engine, PARAMS[1], recorder, drafter=LookupDrafter(512))
        return engine.target.sync.num_syncs - before

    assert syncs(Recorder(io.BytesIO(), settings(engine))) == syncs(None)


def test_what_a_recorder_reads_was_submitted_a_cycle_ago(engine, monkeypatch):
    """It reads a cycle's arrays when the next one has ended: nothing is left to wait for by then."""
    events: list[str] = []
    for name in ("_keep", "_read_pending"):
        monkeypatch.setattr(Recorder, name, noted(getattr(Recorder, name), events))
    answer(engine, PARAMS[0], Recorder(io.BytesIO(), settings(engine)))
    assert events == ["_read_pending", *["_keep", "_read_pending"] * (len(events) // 2)]


def noted(method, events: list[str]):
    def call(*arguments):
        events.append(method.__name__)
        return method(*arguments)

    return call


def test_lines_are_made_of_many_cycles_at_once_and_all_of_them_by_the_end(engine):
    class Counted(io.BytesIO):
        num_writes = 0

        def write(self, data) -> int:
            self.num_writes += 1
            return super().write(data)

    stream = Counted()
    session = engine.session(recorder=Recorder(stream, settings(engine)))
    events = session.generate(PROMPT, PARAMS[0], max_tokens=BATCH + 4)
    writes = [stream.num_writes for event in events if isinstance(event, Token)]
    head = writes[0]  # header, request and prompt, with the first cycle
    assert writes == [head] * BATCH + [head + BATCH] * 4
    stream.seek(0)
    assert sum(isinstance(line, Cycle) for line in read_trace(stream)) == BATCH + 4


def test_a_target_that_gives_no_numbers_stops_the_recording(engine, monkeypatch):
    keep = Recorder._keep

    def spoilt(self, facts):
        scores = mx.where(mx.arange(facts.logits.shape[-1]) == 5, mx.nan, facts.verdict.scores)
        return keep(self, replace(facts, verdict=replace(facts.verdict, scores=scores)))

    monkeypatch.setattr(Recorder, "_keep", spoilt)
    recorder = Recorder(io.BytesIO(), settings(engine))
    assert answer(engine, PARAMS[0], recorder) == answer(engine, PARAMS[0])
    assert "probabilities that are none" in recorder.failure


def test_an_answer_given_up_has_its_end(engine):
    stream = io.BytesIO()
    session = engine.session(recorder=Recorder(stream, settings(engine)))
    events = session.generate(PROMPT, PARAMS[0], max_tokens=10)
    while not isinstance(next(events), Token):
        pass
    events.close()
    stream.seek(0)
    assert sum(isinstance(line, Cycle) for line in read_trace(stream)) == 1
