"""Prefix reuse across turns: what a turn shares with the last one is not read again, and nothing changes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafter.lookup import LookupDrafter
from mlx_flashnext.engine.engine import Session
from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.prefill import SNAPSHOT_MARGIN
from mlx_flashnext.engine.sampler import SamplingParams
from tests.parity.test_speculative_equals_plain import answer, assert_same_state
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of

GREEDY = SamplingParams(temperature=0.0)
MARGIN = SNAPSHOT_MARGIN


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("tiny"))


def reused(session: Session, prompt: Sequence[int], **limits: Any) -> tuple[list[int], int]:
    got = answer(session, prompt, GREEDY, max_tokens=8, **limits)
    return got.tokens, got.end.statistics.reused_tokens


@pytest.mark.parametrize("length", range(40, 48))
@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_a_turn_whose_history_was_rendered_anew_reads_only_what_is_new(
    tiny_dir: Path, length: int, drafter: str | None
) -> None:
    """P33, defect 15: the template drops old reasoning, so the second prompt is no continuation."""
    prompt = prompt_of(length)
    with open_tiny(tiny_dir, slots=6, draft_tokens=3) as engine:
        session = engine.session(LookupDrafter(512) if drafter else None, is_guarded=False)
        first, _ = reused(session, prompt)
        second = [*prompt[: length - 5], *first[3:], *prompt_of(21, seed=9)]
        tokens, num_reused = reused(session, second)
        assert num_reused == length - MARGIN
        fresh = engine.session()
        assert tokens == reused(fresh, second)[0]
        assert_same_state(session, fresh)


def test_the_same_prompt_again_and_one_token_less_do_not_replay_the_conversation(tiny_dir: Path) -> None:
    prompt = prompt_of(300)
    with open_tiny(tiny_dir, slots=6) as engine:
        session = engine.session()
        first, _ = reused(session, prompt)
        again, num_reused = reused(session, prompt)
        assert (again, num_reused) == (first, 300 - MARGIN)
        shorter = [*prompt, *first][:-2]
        tokens, num_reused = reused(session, shorter)
        assert num_reused >= 300 - MARGIN
        fresh = engine.session()
        assert tokens == reused(fresh, shorter)[0]
        assert_same_state(session, fresh)


def test_going_back_several_turns_uses_the_snapshot_of_that_turn(tiny_dir: Path) -> None:
    with open_tiny(tiny_dir, slots=6) as engine:
        session, prompts = engine.session(), [prompt_of(40)]
        for turn in range(3):
            answered, _ = reused(session, prompts[-1])
            prompts.append([*prompts[-1], *answered, *prompt_of(20, seed=turn)])
        for turn in (2, 1, 0):
            edited = [*prompts[turn][:-3], 7, 8, 9]
            tokens, num_reused = reused(session, edited)
            assert num_reused == len(prompts[turn]) - MARGIN
            assert tokens == reused(engine.session(), edited)[0]


def test_snapshots_are_bounded_by_the_plan(tiny_dir: Path) -> None:
    with open_tiny(tiny_dir, slots=6) as engine:
        session, prompt = engine.session(), prompt_of(40)
        for turn in range(engine.plan.num_snapshots + 3):
            prompt = [*prompt, *prompt_of(20, seed=turn)]
            reused(session, prompt)
        assert session._timeline is not None
        assert len(session._timeline.turns) == engine.plan.num_snapshots
        first = [*prompt_of(40), 3, 4]
        tokens, num_reused = reused(session, first)
        assert num_reused == 0
        assert tokens == reused(engine.session(), first)[0]


def test_without_room_for_snapshots_a_changed_prompt_is_read_again(tiny_dir: Path) -> None:
    with open_tiny(tiny_dir, slots=6, snapshots=0) as engine:
        session, prompt = engine.session(), prompt_of(60)
        reused(session, prompt)
        tokens, num_reused = reused(session, prompt)
        assert num_reused == 0
        assert tokens == reused(engine.session(), prompt)[0]


def test_an_error_forgets_the_snapshots_too(tiny_dir: Path) -> None:
    with open_tiny(tiny_dir, slots=6) as engine:
        session, prompt = engine.session(), prompt_of(60)
        events = session.generate(prompt, GREEDY, max_tokens=8)
        next(events)
        with pytest.raises(RuntimeError, match="from outside"):
            events.throw(RuntimeError("from outside"))  # type: ignore[attr-defined]
        tokens, num_reused = reused(session, prompt)
        assert num_reused == 0
        assert tokens == reused(engine.session(), prompt)[0]


@pytest.mark.parametrize(
    ("pauses", "expected"),
    # Chunks end at 16, 24 (the snapshot), 32 and 39. What was consumed is a prefix of the edited prompt, but
    # for the last: there the snapshot is gone back to.
    [(1, 0), (2, 16), (3, 40 - MARGIN), (4, 32), (5, 40 - MARGIN)],
)
def test_two_answers_of_one_session_keep_their_snapshots_apart(
    tiny_dir: Path, pauses: int, expected: int
) -> None:
    """Whichever ends last is continued, from its own tokens or its own snapshot and from nowhere else."""
    with open_tiny(tiny_dir, slots=6, step=16) as engine:
        session, prompt = engine.session(), prompt_of(40)
        left = session.generate(prompt, GREEDY, max_tokens=8)
        for _ in range(pauses):
            next(left)
        reused(session, prompt_of(40, seed=3))
        left.close()  # type: ignore[attr-defined]
        edited = [*prompt[:-2], 5]
        tokens, num_reused = reused(session, edited)
        assert num_reused == expected
        fresh = engine.session()
        assert tokens == reused(fresh, edited)[0]
        assert_same_state(session, fresh)


def test_a_refused_rule_leaves_the_conversation_as_it_was(tiny_dir: Path) -> None:
    with open_tiny(tiny_dir, slots=6) as engine:
        session, prompt = engine.session(), prompt_of(40)
        first, _ = reused(session, prompt)
        before = session.tokens
        with pytest.raises(InvalidRequest):
            next(session.generate([*prompt, *first], GREEDY, rule="lucky"))  # type: ignore[arg-type]
        assert session.tokens == before
