"""A drafter that rests is told later what it missed: its cache is that of one that never rested."""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import pytest

from drafter.mtp import MtpDrafter
from mlx_flashnext.engine import drafting, rested
from mlx_flashnext.engine.engine import Engine, Session
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.state import MtpState
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of

GREEDY = SamplingParams(temperature=0.0)
PROMPT, NUM_TOKENS, WIDTH = prompt_of(30), 20, 2


@dataclass
class Answered:
    tokens: list[int]
    num_proposed: int
    num_accepted: int
    cache: dict[str, mx.array]


class Resting(Governor):
    """Rests while so many cycles run, and proposes in all others."""

    def __init__(self, rest: range) -> None:
        super().__init__(WIDTH)
        self._rest, self._num_cycles = rest, 0

    def begin_answer(self) -> None:
        """Keep to the script."""

    @property
    def is_resting(self) -> bool:
        return self._num_cycles in self._rest

    def width(self, room: int) -> int:
        return 0 if self.is_resting else min(room, WIDTH)

    def count(self, num_proposed: int, num_accepted: int, num_tokens: int, cycle_ns: int) -> None:
        self._num_cycles += 1


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = build_mlx(tmp_path_factory.mktemp("rested"))
    with open_tiny(directory, slots=6, draft="mtp", draft_tokens=WIDTH) as engine:
        yield engine


@pytest.fixture(scope="module")
def awake(engine: Engine) -> "Answered":
    """What a drafter says and remembers that never rests."""
    return answered(engine.session(), range(0))


def answered(session: Session, rest: range, prompt: list[int] = PROMPT, num: int = NUM_TOKENS) -> Answered:
    session._governor = Resting(rest)
    if session._timeline is not None:
        session._timeline.drafting._governor = session._governor
    events = list(session.generate(prompt, GREEDY, max_tokens=num, rule="coupled"))
    end = events[-1]
    assert isinstance(end, Finished)
    assert session._timeline is not None
    work = session._timeline.drafting
    assert isinstance(work._drafter, MtpDrafter)
    work.snapshot()  # tells it what it may have missed at the very end
    cache = work._drafter._cache
    assert isinstance(cache, MtpState)
    draft = end.statistics.draft
    tokens = [event.token_id for event in events if isinstance(event, Token)]
    return Answered(tokens, draft.num_proposed, draft.num_accepted, cache.named_arrays())


def are_same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    return one.keys() == other.keys() and all(
        array.shape == other[name].shape and mx.array_equal(array, other[name]).item()
        for name, array in one.items()
    )


@pytest.mark.parametrize("rest", [range(2, 9), range(0, 5), range(6, 10_000)], ids=str)
def test_after_a_rest_the_cache_is_that_of_a_drafter_that_never_rested(
    engine: Engine, awake: Answered, rest: range
) -> None:
    tired = answered(engine.session(), rest)
    assert tired.tokens == awake.tokens
    assert 0 < tired.num_proposed < awake.num_proposed
    assert are_same(tired.cache, awake.cache)


def test_a_turn_that_goes_back_over_a_rest_finds_the_cache_of_its_place(engine: Engine) -> None:
    second = [*PROMPT[:-2], 5, 6, 7]
    fresh = answered(engine.session(), range(0), second)
    session = engine.session()
    answered(session, range(2, 10_000))
    again = answered(session, range(0), second)
    assert again.tokens == fresh.tokens
    assert (again.num_proposed, again.num_accepted) == (fresh.num_proposed, fresh.num_accepted)
    assert are_same(again.cache, fresh.cache)


def test_a_rest_that_lasts_too_long_leaves_a_gap_and_no_rows(
    engine: Engine, awake: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rested, "MOST_ROWS", 6)
    session = engine.session()
    tired = answered(session, range(2, 12))
    assert session._timeline is not None
    assert len(session._timeline.drafting._rested) == 0
    assert tired.tokens == awake.tokens
    assert tired.num_proposed > 0
    assert not are_same(tired.cache, awake.cache)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is woken without what it missed."""

    def lose(self: rested.RestedRows, tokens: object, stack: object) -> bool:
        return True

    monkeypatch.setattr(rested.RestedRows, "keep", lose)
    monkeypatch.setattr(drafting.RestedRows, "__len__", lambda _self: 0)


@pytest.mark.usefixtures("forgetful")
def test_the_comparison_sees_a_drafter_that_forgets(engine: Engine, awake: Answered) -> None:
    assert not are_same(answered(engine.session(), range(2, 9)).cache, awake.cache)
