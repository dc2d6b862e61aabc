"""The cycle: waits for the device are counted, the state holds what was consumed, errors drop it."""

from pathlib import Path

import pytest

from mlx_flashnext.engine.events import Finished, PrefillProgress, Token
from mlx_flashnext.engine.prefill import SNAPSHOT_MARGIN
from mlx_flashnext.engine.sampler import SamplingParams
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import greedy, open_tiny, prompt_of

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("slots", "waits_per_token"), [(4, 5), (9, 5), (15, 5), (16, 1)])
def test_a_decoded_token_waits_once_per_streamed_layer_plus_once(
    tiny_dir: Path, slots: int, waits_per_token: int
) -> None:
    with open_tiny(tiny_dir, slots=slots) as engine:
        assert engine.config.num_hidden_layers == 4
        *_, end = engine.session().generate(prompt_of(24), GREEDY, max_tokens=10)
    assert isinstance(end, Finished)
    assert end.statistics.num_syncs == 10 * waits_per_token


def test_the_state_has_consumed_all_but_the_last_token(tiny_dir: Path) -> None:
    prompt = prompt_of(20)
    with open_tiny(tiny_dir, slots=6) as engine:
        session = engine.session()
        answer = [
            event.token_id
            for event in session.generate(prompt, GREEDY, max_tokens=5)
            if isinstance(event, Token)
        ]
        assert session.tokens == (*prompt, *answer[:-1])


def test_a_continued_prompt_reuses_the_state_and_a_changed_one_does_not(tiny_dir: Path) -> None:
    prompt = prompt_of(20)
    with open_tiny(tiny_dir, slots=6) as engine:
        session = engine.session()
        answer = [
            event.token_id
            for event in session.generate(prompt, GREEDY, max_tokens=5)
            if isinstance(event, Token)
        ]
        longer = [*prompt, *answer, 5, 6, 7]
        events = list(session.generate(longer, GREEDY, max_tokens=6))
        fresh = greedy(engine, longer, 6)
        assert [event.token_id for event in events if isinstance(event, Token)] == fresh
        assert events[-1].statistics.reused_tokens == len(prompt) + 4  # type: ignore[union-attr]

        changed = [prompt[0] + 1, *longer[1:]]
        events = list(session.generate(changed, GREEDY, max_tokens=6))
        assert events[-1].statistics.reused_tokens == 0  # type: ignore[union-attr]
        assert [event.token_id for event in events if isinstance(event, Token)] == greedy(engine, changed, 6)


def test_a_prompt_shorter_than_the_state_starts_from_where_its_turn_began(tiny_dir: Path) -> None:
    """P70: a hybrid state is never trimmed; a snapshot before all that differs is gone back to."""
    prompt = prompt_of(20)
    with open_tiny(tiny_dir, slots=6) as engine:
        session = engine.session()
        list(session.generate(prompt, GREEDY, max_tokens=3))
        events = list(session.generate(prompt[:12], GREEDY, max_tokens=4))
        assert events[-1].statistics.reused_tokens == 20 - SNAPSHOT_MARGIN  # type: ignore[union-attr]
        assert [event.token_id for event in events if isinstance(event, Token)] == greedy(
            engine, prompt[:12], 4
        )


@pytest.mark.parametrize("step", [1, 3, 8, 512])
def test_the_prefill_step_never_changes_the_answer(tiny_dir: Path, step: int) -> None:
    prompt = prompt_of(37)
    with open_tiny(tiny_dir, slots=5, step=512) as engine:
        expected = greedy(engine, prompt, 8)
    with open_tiny(tiny_dir, slots=5, step=step) as engine:
        assert greedy(engine, prompt, 8) == expected


def test_prefill_reports_progress_up_to_the_anchor(tiny_dir: Path) -> None:
    with open_tiny(tiny_dir, slots=6, step=10) as engine:
        events = list(engine.session().generate(prompt_of(31), GREEDY, max_tokens=1))
    # A chunk ends where the next turn may come back to, too.
    assert [event.done for event in events if isinstance(event, PrefillProgress)] == [0, 10, 15, 20, 30]


def test_cancelling_between_cycles_keeps_the_state_usable(tiny_dir: Path) -> None:
    prompt = prompt_of(20)
    with open_tiny(tiny_dir, slots=6) as engine:
        session = engine.session()
        seen: list[int] = []
        for event in session.generate(prompt, GREEDY, max_tokens=50, cancelled=lambda: len(seen) >= 3):
            if isinstance(event, Token):
                seen.append(event.token_id)
        assert event.reason == "cancelled"  # type: ignore[union-attr]
        assert len(seen) == 3
        again = [*prompt, *seen]
        events = list(session.generate(again, GREEDY, max_tokens=4))
        assert events[-1].statistics.reused_tokens == len(prompt) + 2  # type: ignore[union-attr]
        assert [event.token_id for event in events if isinstance(event, Token)] == greedy(engine, again, 4)


def test_an_abandoned_answer_leaves_a_whole_state(tiny_dir: Path) -> None:
    prompt = prompt_of(20)
    with open_tiny(tiny_dir, slots=6) as engine:
        session = engine.session()
        events = session.generate(prompt, GREEDY, max_tokens=50)
        token = next(event.token_id for event in events if isinstance(event, Token))
        events.close()  # type: ignore[attr-defined]
        again = [*prompt, token]
        assert [
            event.token_id
            for event in session.generate(again, GREEDY, max_tokens=4)
            if isinstance(event, Token)
        ] == greedy(engine, again, 4)


def test_two_conversations_do_not_touch_each_other(tiny_dir: Path) -> None:
    """P32: A, B, A again; the third equals the first."""
    first, second = prompt_of(20, seed=1), prompt_of(26, seed=2)
    with open_tiny(tiny_dir, slots=5) as engine:
        expected = greedy(engine, first, 8)
        greedy(engine, second, 8)
        assert greedy(engine, first, 8) == expected
