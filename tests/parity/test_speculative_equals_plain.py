"""Speculation changes nothing but speed: text, tokens and state are those of plain decode, bit for bit.

Guarded drafters switch themselves off where they do not pay, and a test of a drafter that is off tests
nothing (defect 33); so every session here is unguarded and its counts are asserted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from drafter.api import Drafter, DraftSampling, Proposal
from drafter.lookup import LookupDrafter
from drafter.oracle import OracleDrafter
from mlx_flashnext.engine.engine import Engine, Session
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.sampler import SamplingParams
from tests.tiny.checkpoints import SHALLOW, build_mlx
from tests.tiny.engines import open_tiny, prompt_of

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)
PENALISED = SamplingParams(
    temperature=0.7, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, seed=5
)
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}
NUM_TOKENS = 40
VOCAB = 128


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shallow_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests of where blocks and answers end, which is the cycle's business and no layer's."""
    return build_mlx(tmp_path_factory.mktemp("shallow"), overrides=SHALLOW)


@dataclass
class Answered:
    tokens: list[int]
    text: str
    end: Finished


def answer(session: Session, prompt: Sequence[int], params: SamplingParams, **limits: Any) -> Answered:
    limits = {"max_tokens": NUM_TOKENS} | limits
    events = list(session.generate(prompt, params, **limits))
    end = events[-1]
    assert isinstance(end, Finished)
    tokens = [event for event in events if isinstance(event, Token)]
    return Answered([t.token_id for t in tokens], "".join(t.text for t in tokens) + end.text, end)


def state_arrays(session: Session) -> dict[str, mx.array]:
    assert session._timeline is not None
    return session._timeline.state.named_arrays()


def assert_same_state(session: Session, other: Session) -> None:
    mine, theirs = state_arrays(session), state_arrays(other)
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        assert array.shape == theirs[name].shape, name
        assert mx.array_equal(array, theirs[name]).item(), name


def drafters(recorded: Sequence[int]) -> dict[str, Drafter]:
    return {
        "lookup": LookupDrafter(512),
        "oracle 0": OracleDrafter(recorded, VOCAB),
        "oracle 0.3": OracleDrafter(recorded, VOCAB, error_rate=0.3),
        "oracle 1": OracleDrafter(recorded, VOCAB, error_rate=1.0),
    }


def plain(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, **limits: Any
) -> tuple[Answered, Session]:
    session = engine.session()
    return answer(session, prompt, params, **limits), session


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("slots", [5, 16])
def test_every_drafter_gives_the_same_tokens_and_state(tiny_dir: Path, sampling: str, slots: int) -> None:
    """Defects 22, 41; P31, P62: coupled verification, the same text with every drafter and with none."""
    params, prompt = SAMPLINGS[sampling], prompt_of(30)
    with open_tiny(tiny_dir, slots=slots, draft_tokens=4) as engine:
        expected, before = plain(engine, prompt, params)
        for name, drafter in drafters([*prompt, *expected.tokens]).items():
            session = engine.session(drafter, is_guarded=False)
            got = answer(session, prompt, params, rule="coupled")
            assert got.tokens == expected.tokens, name
            assert got.text == expected.text, name
            assert_same_state(session, before)
            draft = got.end.statistics.draft
            assert draft.used == (drafter.kind if draft.num_proposed else "none")
            if name == "oracle 0":
                assert draft.num_accepted == draft.num_proposed == NUM_TOKENS - got.end.statistics.cycles
                assert got.end.statistics.cycles == NUM_TOKENS // 5
            if name == "oracle 1":
                assert draft.num_accepted == 0
                assert draft.num_proposed > NUM_TOKENS
            if name == "oracle 0.3":
                assert 0 < draft.num_accepted < draft.num_proposed


@pytest.mark.parametrize("width", range(1, 9))
def test_every_block_width_and_accepted_length(shallow_dir: Path, width: int) -> None:
    prompt = prompt_of(25)
    with open_tiny(shallow_dir, slots=6, draft_tokens=width) as engine:
        expected, before = plain(engine, prompt, GREEDY)
        recorded = [*prompt, *expected.tokens]
        for accepted in range(width + 1):
            session = engine.session(Partial(recorded, accepted), is_guarded=False)
            got = answer(session, prompt, GREEDY)
            assert got.tokens == expected.tokens
            assert_same_state(session, before)
            slots = got.end.statistics.draft.accepted_by_slot
            assert sum(count > 0 for count in slots) == accepted


class Partial(OracleDrafter):
    """Right in its first `accepted` proposals and wrong in the next: every acceptance length at will."""

    def __init__(self, recorded: Sequence[int], accepted: int) -> None:
        super().__init__(recorded, VOCAB)
        self._accepted = accepted

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        tokens = list(super().propose(k, sampling).tokens)
        for slot in range(self._accepted, len(tokens)):
            tokens[slot] = (tokens[slot] + 1) % VOCAB
        return Proposal(tuple(tokens))


@pytest.mark.parametrize("offset", range(6))
def test_a_stop_id_ends_the_answer_at_every_offset_inside_a_block(shallow_dir: Path, offset: int) -> None:
    """Defect 20: nothing after a stop id is shown, counted or kept."""
    prompt = prompt_of(30)
    with open_tiny(shallow_dir, slots=6, draft_tokens=5) as engine:
        free, _ = plain(engine, prompt, SEEDED)
        place = next(at for at in range(12 + offset, NUM_TOKENS) if free.tokens[at] not in free.tokens[:at])
        stop = free.tokens[place]
        expected, before = plain(engine, prompt, SEEDED, stop_ids=[stop])
        assert len(expected.tokens) == place + 1
        # A shorter first block moves the stop id through every slot of a later one.
        drafter = OracleDrafter([*prompt, *free.tokens], VOCAB)
        session = engine.session(ShortFirst(drafter, offset), is_guarded=False)
        got = answer(session, prompt, SEEDED, stop_ids=[stop], rule="coupled")
        assert (got.tokens, got.text) == (expected.tokens, expected.text)
        assert got.end.statistics.output_tokens == place + 1
        assert session.tokens == (*prompt, *expected.tokens[:-1])
        assert_same_state(session, before)


class ShortFirst:
    """Makes the first proposal shorter."""

    kind = "oracle"
    needs_stack = False

    def __init__(self, inner: OracleDrafter, first: int) -> None:
        self._inner = inner
        self._first = first
        self._is_first = True

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        if self._is_first:
            self._is_first, k = False, min(k, self._first)
        return self._inner.propose(k, sampling)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_the_budget_ends_the_answer_at_every_offset_inside_a_block(
    shallow_dir: Path, max_tokens: int
) -> None:
    prompt = prompt_of(30)
    with open_tiny(shallow_dir, slots=6, draft_tokens=5) as engine:
        expected, before = plain(engine, prompt, GREEDY, max_tokens=max_tokens)
        recorded = [*prompt, *plain(engine, prompt, GREEDY)[0].tokens]
        session = engine.session(OracleDrafter(recorded, VOCAB), is_guarded=False)
        got = answer(session, prompt, GREEDY, max_tokens=max_tokens)
        assert got.tokens == expected.tokens
        assert len(got.tokens) == got.end.statistics.output_tokens == max_tokens
        assert got.end.reason == "length"
        assert_same_state(session, before)


@pytest.mark.parametrize("context", range(31, 42))
def test_the_context_ends_the_answer_inside_a_block(shallow_dir: Path, context: int) -> None:
    prompt = prompt_of(30)
    with open_tiny(shallow_dir, slots=6, draft_tokens=5) as engine:
        recorded = [*prompt, *plain(engine, prompt, GREEDY)[0].tokens]
    with open_tiny(shallow_dir, slots=6, context=context, draft_tokens=5) as engine:
        expected, before = plain(engine, prompt, GREEDY)
        session = engine.session(OracleDrafter(recorded, VOCAB), is_guarded=False)
        got = answer(session, prompt, GREEDY)
        assert got.tokens == expected.tokens
        assert got.end.reason == expected.end.reason
        assert_same_state(session, before)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_the_answer_inside_a_block(shallow_dir: Path, length: int) -> None:
    prompt = prompt_of(30)
    with open_tiny(shallow_dir, slots=6, draft_tokens=5) as engine:
        free, _ = plain(engine, prompt, GREEDY)
        stop = free.text[9 : 9 + length]
        assert len(set(free.tokens)) > NUM_TOKENS // 4, "the control: no loop, in which every end looks alike"
        expected, before = plain(engine, prompt, GREEDY, stop_strings=[stop])
        assert stop not in expected.text
        assert len(expected.tokens) % 6, "the control: it does not end where a block of six does"
        session = engine.session(OracleDrafter([*prompt, *free.tokens], VOCAB), is_guarded=False)
        got = answer(session, prompt, GREEDY, stop_strings=[stop])
        assert (got.tokens, got.text, got.end.reason) == (expected.tokens, expected.text, "stop")
        assert_same_state(session, before)


class Faulty(OracleDrafter):
    """Goes wrong at its n-th call of one method."""

    def __init__(self, recorded: Sequence[int], method: str, call: int, fault: object) -> None:
        super().__init__(recorded, VOCAB)
        self._method, self._calls_left, self._fault = method, call, fault

    def _maybe_fail(self, method: str) -> object | None:
        if method == self._method:
            self._calls_left -= 1
            if self._calls_left == 0:
                if isinstance(self._fault, Exception):
                    raise self._fault
                return self._fault
        return None

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        wrong = self._maybe_fail("propose")
        return wrong if isinstance(wrong, Proposal) else super().propose(k, sampling)

    def observe(self, tokens: Sequence[int], next_token: int, stack_TGD: mx.array | None = None) -> None:
        self._maybe_fail("observe")
        super().observe(tokens, next_token, stack_TGD)


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("propose", RuntimeError("no luck")),
        ("propose", KeyError("x")),
        ("propose", Proposal((VOCAB,))),
        ("propose", Proposal((-1,))),
        ("propose", Proposal(tuple(range(9)))),
        ("propose", Proposal(("a",))),  # type: ignore[arg-type]
        ("observe", MemoryError("none left")),
    ],
)
def test_a_drafter_that_goes_wrong_is_dropped_counted_and_named(
    shallow_dir: Path, method: str, call: int, fault: object
) -> None:
    prompt = prompt_of(30)
    with open_tiny(shallow_dir, slots=6, draft_tokens=4) as engine:
        expected, before = plain(engine, prompt, GREEDY)
        faulty = Faulty([*prompt, *expected.tokens], method, call, fault)
        session = engine.session(faulty, is_guarded=False)
        got = answer(session, prompt, GREEDY)
        assert got.tokens == expected.tokens
        assert_same_state(session, before)
        draft = got.end.statistics.draft
        assert draft.num_failures == 1
        assert draft.reason is not None
        assert draft.reason.startswith("failed: ")
        # The next answer of the session may use it again: it has been told everything from the start.
        longer = [*prompt, *expected.tokens]
        again = answer(session, longer, GREEDY, max_tokens=10)
        assert again.tokens == plain(engine, longer, GREEDY, max_tokens=10)[0].tokens
        assert again.end.statistics.draft.num_failures == 0


class Refusing(OracleDrafter):
    """Cannot do one of the things that are asked of it beside proposing."""

    def __init__(self, recorded: Sequence[int], method: str) -> None:
        super().__init__(recorded, VOCAB)
        self._method = method

    def max_proposals(self) -> int:
        return self._answer("max_proposals", super().max_proposals())

    def snapshot(self) -> int:
        return self._answer("snapshot", super().snapshot())

    def _answer(self, method: str, answer: int) -> int:
        if method == self._method:
            raise RuntimeError("not this")
        return answer


@pytest.mark.parametrize("method", ["max_proposals", "snapshot"])
def test_whatever_a_drafter_cannot_do_costs_nothing_but_the_drafter(shallow_dir: Path, method: str) -> None:
    prompt = prompt_of(30)
    with open_tiny(shallow_dir, slots=6, draft_tokens=4) as engine:
        expected, before = plain(engine, prompt, GREEDY)
        session = engine.session(Refusing([*prompt, *expected.tokens], method), is_guarded=False)
        got = answer(session, prompt, GREEDY)
        assert got.tokens == expected.tokens
        assert_same_state(session, before)
        assert got.end.statistics.draft.num_failures == 1
        assert got.end.statistics.draft.reason == "failed: RuntimeError: not this"


def test_a_drafter_that_was_reset_since_a_snapshot_has_not_failed(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that rested begins anew; going back beyond that is its everyday life."""
    prompt = prompt_of(40)
    with open_tiny(tiny_dir, slots=6, draft="mtp", draft_tokens=2) as engine:
        session = engine.session(is_guarded=False)
        answer(session, prompt, GREEDY, max_tokens=4)
        assert session._timeline is not None
        session._timeline.drafting._wake(0)
        again = answer(session, [*prompt[:-2], 5], GREEDY, max_tokens=8).end.statistics
        assert again.reused_tokens > 0
        assert again.draft.num_proposed > 0
        assert not caplog.records


def test_a_block_waits_as_often_as_one_token(tiny_dir: Path) -> None:
    """One wait per streamed layer and one to verify, whatever the width."""
    prompt = prompt_of(30)
    with open_tiny(tiny_dir, slots=15, draft_tokens=3) as engine:
        expected, _ = plain(engine, prompt, GREEDY)
        session = engine.session(OracleDrafter([*prompt, *expected.tokens], VOCAB), is_guarded=False)
        statistics = answer(session, prompt, GREEDY).end.statistics
        assert statistics.cycles == NUM_TOKENS // 4
        assert statistics.num_syncs == statistics.cycles * (engine.config.num_hidden_layers + 1)


class Watching(OracleDrafter):
    """Remembers what it was shown."""

    def __init__(self, recorded: Sequence[int], error_rate: float) -> None:
        super().__init__(recorded, VOCAB, error_rate=error_rate)
        self.rows: list[int] = []
        self.anchor = -1

    def reset(self) -> None:
        super().reset()
        self.rows, self.anchor = [], -1

    def observe(self, tokens: Sequence[int], next_token: int, stack_TGD: mx.array | None = None) -> None:
        assert not self.rows or tokens[0] == self.anchor
        self.rows.extend(tokens)
        self.anchor = next_token
        super().observe(tokens, next_token, stack_TGD)


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
def test_a_drafter_sees_every_kept_row_once_and_no_other(shallow_dir: Path, error_rate: float) -> None:
    """C2, C3; defect 19."""
    prompt = prompt_of(30)
    with open_tiny(shallow_dir, slots=6, step=7, draft_tokens=4) as engine:
        expected, _ = plain(engine, prompt, GREEDY)
        drafter = Watching([*prompt, *expected.tokens], error_rate)
        answer(engine.session(drafter, is_guarded=False), prompt, GREEDY)
        assert drafter.rows == [*prompt, *expected.tokens[:-1]]
        assert drafter.anchor == expected.tokens[-1]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("slots", [5, 16])
@pytest.mark.parametrize("width", [1, 3])
def test_the_checkpoints_own_module_gives_the_same_tokens_and_state(
    tiny_dir: Path, sampling: str, slots: int, width: int
) -> None:
    params, prompt = SAMPLINGS[sampling], prompt_of(30)
    with open_tiny(tiny_dir, slots=slots, step=7) as engine:
        expected, before = plain(engine, prompt, params)
        with open_tiny(tiny_dir, slots=slots, step=7, draft="mtp", draft_tokens=width) as drafting:
            session = drafting.session(is_guarded=False)
            got = answer(session, prompt, params, rule="coupled")
            assert (got.tokens, got.text) == (expected.tokens, expected.text)
            assert_same_state(session, before)
            draft = got.end.statistics.draft
            assert (draft.drafter, draft.used, draft.reason) == ("mtp", "mtp", None)
            assert draft.num_proposed >= NUM_TOKENS // (width + 1) * width


@pytest.mark.parametrize("length", range(40, 48))
def test_the_module_goes_on_after_a_prefix_hit_as_if_it_had_seen_all(shallow_dir: Path, length: int) -> None:
    """P33, defects 12 and 16: its proposals after a reused prefix are those after a fresh run."""
    prompt = prompt_of(length)
    with open_tiny(shallow_dir, slots=6, draft="mtp", draft_tokens=3) as engine:
        session = engine.session(is_guarded=False)
        first = answer(session, prompt, GREEDY, max_tokens=8)
        second = [*prompt[: length - 5], *first.tokens[3:], *prompt_of(21, seed=9)]
        fresh = engine.session(is_guarded=False)
        expected = answer(fresh, second, GREEDY)
        again = answer(session, second, GREEDY)
        assert again.end.statistics.reused_tokens > 0
        assert again.tokens == expected.tokens
        assert again.end.statistics.draft == expected.end.statistics.draft
