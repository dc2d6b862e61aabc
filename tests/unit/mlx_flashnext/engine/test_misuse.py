"""An engine used otherwise than meant: answers stay right or are refused, memory is never written beyond."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import EngineClosed, InvalidRequest, WrongThread
from mlx_flashnext.engine.events import Event, Finished, Token
from mlx_flashnext.engine.sampler import SamplingParams
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import greedy, open_tiny, prompt_of

GREEDY = SamplingParams(temperature=0.0)
PROMPT = prompt_of(16)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with open_tiny(build_mlx(tmp_path_factory.mktemp("tiny")), slots=5, step=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def answer(engine: Engine) -> list[int]:
    return greedy(engine, PROMPT, 10)


def token_ids(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token)]


def test_two_answers_of_one_session_in_turns_do_not_mix(engine: Engine, answer: list[int]) -> None:
    session = engine.session()
    list(session.generate(PROMPT[:5], GREEDY, max_tokens=1))
    answers = [session.generate(PROMPT, GREEDY, max_tokens=10) for _ in range(2)]
    seen: list[list[Event]] = [[], []]
    for _ in range(20):
        for events, one in zip(seen, answers, strict=True):
            events.extend(event for event in [next(one, None)] if event is not None)
    assert [token_ids(events) for events in seen] == [answer, answer]


def test_an_answer_inside_another_of_the_same_session_is_right(engine: Engine, answer: list[int]) -> None:
    session, outer = engine.session(), []
    for event in session.generate(PROMPT, GREEDY, max_tokens=10):
        outer.append(event)
        assert token_ids(list(session.generate(PROMPT, GREEDY, max_tokens=10))) == answer
    assert token_ids(outer) == answer


def test_an_abandoned_answer_that_is_closed_later_ends_nobodys_lease(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may close it in the middle of another answer's forward pass."""
    abandoned = engine.session().generate(PROMPT, GREEDY, max_tokens=10)
    next(abandoned)
    ended: list[int] = []
    monkeypatch.setattr(engine.target.experts, "device_idle", lambda: ended.append(1))
    abandoned.close()
    assert ended == []


def test_an_abandoned_answer_is_ended_while_the_store_is_busy(engine: Engine, answer: list[int]) -> None:
    """The garbage collector may close it on any thread, while the store is in the middle of something."""
    session, store = engine.session(), engine.target.store
    abandoned = session.generate(PROMPT, GREEDY, max_tokens=10)
    next(abandoned)
    timeline = abandoned.gi_frame.f_locals["timeline"]  # type: ignore[attr-defined]
    ender = threading.Thread(target=abandoned.close, daemon=True)  # type: ignore[attr-defined]
    with store._lock:
        ender.start()
        ender.join(10)
        assert not ender.is_alive()
    assert store._prefetcher.generation(timeline.owner) < timeline.generation
    assert token_ids(list(engine.session().generate(PROMPT, GREEDY, max_tokens=10))) == answer
    assert store._prefetcher.generation(timeline.owner) == timeline.generation


def test_an_error_thrown_into_an_answer_drops_the_state(engine: Engine, answer: list[int]) -> None:
    session = engine.session()
    events = session.generate(PROMPT, GREEDY, max_tokens=10)
    next(events)
    with pytest.raises(ValueError, match="from outside"):
        events.throw(ValueError("from outside"))
    assert session.tokens == ()
    assert token_ids(list(session.generate(PROMPT, GREEDY, max_tokens=10))) == answer


@pytest.mark.parametrize("pressed_at", [0, 1, 3])
def test_a_wish_to_stop_the_prefill_that_is_taken_back_still_stops_it(
    engine: Engine, answer: list[int], pressed_at: int
) -> None:
    """Nothing is decoded from a prompt that was not read to its end."""
    asked = iter(range(100))
    session = engine.session()
    *_, end = session.generate(PROMPT, GREEDY, max_tokens=10, cancelled=lambda: next(asked) == pressed_at)
    assert isinstance(end, Finished)
    assert (end.reason, end.statistics.output_tokens) == ("cancelled", 0)
    assert session.tokens == tuple(PROMPT[: 4 * pressed_at])
    assert token_ids(list(session.generate(PROMPT, GREEDY, max_tokens=10))) == answer


def test_a_bias_of_a_token_that_the_model_lacks_is_refused(engine: Engine) -> None:
    vocab_size = engine.config.vocab_size
    params = SamplingParams(logit_bias={0: 1.0, vocab_size: 1.0})
    with pytest.raises(InvalidRequest, match=f"below {vocab_size}: {vocab_size}"):
        list(engine.session().generate(PROMPT, params, max_tokens=1))


def test_a_session_of_a_closed_engine_says_so(tmp_path: Path) -> None:
    with open_tiny(build_mlx(tmp_path), slots=5) as engine:
        session = engine.session()
    with pytest.raises(EngineClosed):
        list(session.generate(PROMPT, GREEDY, max_tokens=1))
    with pytest.raises(EngineClosed):
        engine.session()


def test_another_thread_is_refused_before_it_touches_the_device(engine: Engine) -> None:
    session, refused = engine.session(), list[BaseException]()

    def ask() -> None:
        for use in (engine.session, lambda: next(session.generate(PROMPT, GREEDY, max_tokens=1))):
            with pytest.raises(WrongThread) as found:
                use()
            refused.append(found.value)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(refused) == 2
