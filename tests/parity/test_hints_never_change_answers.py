"""Hints move bytes and nothing else (I1): tokens, text and state are bitwise those of a run without hints.

Every predictor, right, wrong, late, senseless, endless or broken, plain and with drafters, and with the
prefetcher stopped in the middle of an answer. Each case also shows that its hints reached the store: a hint
that is off tests nothing.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from drafter.oracle import OracleDrafter
from expert_store.keys import Prefetch, ReadClass
from expert_store.lease import LeaseRequest
from expert_store.stats import HintOutcome
from expert_store.store import ExpertStore
from mlx_flashnext.engine.engine import Engine, Session
from mlx_flashnext.engine.events import Event, Finished, Token
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.predictors import (
    Frequency,
    Guess,
    NearGate,
    Oracle,
    Predictor,
    Previous,
    Random,
    Rows,
)
from mlx_flashnext.engine.routes import RecordedRoutes, RouteLog
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.experts import StreamedExperts
from mlx_flashnext.model.moe import MixtureOfExperts
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of

NUM_LAYERS, NUM_EXPERTS, TOP_K, VOCAB, NUM_TOKENS = 4, 16, 4, 128, 14
LAYERS = dict.fromkeys(range(NUM_LAYERS), NUM_EXPERTS)
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.9, top_k=40, seed=11)
PROMPT = prompt_of(22)


class Wrong(Oracle):
    """Names every expert of a layer but those it will choose."""

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        true = {(guess.layer, guess.expert) for guess in super().begin(tokens, position)}
        return [
            Guess(*key) for key in itertools.product(range(NUM_LAYERS), range(NUM_EXPERTS)) if key not in true
        ]

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        return [Guess(layer + 1, expert) for expert in range(NUM_EXPERTS)]


class Late(NearGate):
    """Names what has just been demanded, and layers that are over."""

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        return [Guess(past, expert) for past in range(layer + 1) for expert in range(NUM_EXPERTS)]


class Senseless(NearGate):
    """Names layers, experts and confidences that do not exist, a million of them."""

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        some = [
            Guess(99, 0), Guess(-1, 0), Guess(0, 99), Guess(0, -1), Guess(1, 2, float("nan")),
            Guess(1, 2, 7.0), Guess(10**30, 1), Guess(True, 1), Guess(1, 3, passes_ahead=10**9),
            Guess(1, 3, passes_ahead=-5),
        ]  # fmt: skip
        return itertools.islice(itertools.cycle(some), 1_000_000)


class Broken(NearGate):
    """Raises after a while."""

    def __init__(self) -> None:
        self.left = 20

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("lost the thread")
        return [Guess(layer + 1, 0)]


@dataclass
class Answer:
    tokens: list[int]
    text: str
    end: Finished
    state: dict[str, mx.array]


def collect(events: Iterator[Event], session: Session) -> Answer:
    seen = list(events)
    tokens = [event for event in seen if isinstance(event, Token)]
    assert isinstance(seen[-1], Finished)
    assert session._timeline is not None
    state = session._timeline.state.named_arrays()
    return Answer([t.token_id for t in tokens], "".join(t.text for t in tokens), seen[-1], state)


def ask(
    engine: Engine, params: SamplingParams, hints: Hints | None, drafter: OracleDrafter | None = None
) -> Answer:
    session = engine.session(drafter, is_guarded=False, hints=hints)
    return collect(session.generate(PROMPT, params, max_tokens=NUM_TOKENS, rule="coupled"), session)


def assert_same(got: Answer, expected: Answer) -> None:
    assert got.tokens == expected.tokens
    assert got.text == expected.text
    assert got.state.keys() == expected.state.keys()
    for name, array in got.state.items():
        assert mx.array_equal(array, expected.state[name]).item(), name


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("hints"))


@pytest.fixture(scope="module")
def recorded(tiny_dir: Path) -> dict[str, tuple[Answer, RecordedRoutes]]:
    """What a run without hints and drafts says, with its routes, for both samplings."""
    found = {}
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        with open_tiny(tiny_dir, slots=6) as engine:
            log = RouteLog()
            found[name] = ask(engine, params, Hints(None, NUM_LAYERS, log)), RecordedRoutes(log.passes)
    return found


PREDICTORS: dict[str, Callable[[RecordedRoutes], Predictor]] = {
    "frequency": lambda _routes: Frequency(LAYERS, 8),
    "previous": lambda _routes: Previous(range(NUM_LAYERS)),
    "random": lambda _routes: Random(LAYERS, 4, seed=2),
    "near-gate": lambda _routes: NearGate(),
    "oracle": Oracle,
    "wrong": Wrong,
    "late": lambda _routes: Late(),
    "senseless": lambda _routes: Senseless(),
    "broken": lambda _routes: Broken(),
}


@pytest.mark.parametrize("slots", [9, 5])
@pytest.mark.parametrize("kind", PREDICTORS)
def test_every_predictor_leaves_every_bit_as_it_is(tiny_dir, recorded, kind, slots):
    sampling, params = ("greedy", GREEDY) if slots == 9 else ("seeded", SEEDED)
    expected, routes = recorded[sampling]
    with open_tiny(tiny_dir, slots=slots) as engine:
        hints = Hints(PREDICTORS[kind](routes), NUM_LAYERS)
        got = ask(engine, params, hints)
        assert_fates_add_up(engine.target.store)
    assert_same(got, expected)
    assert hints.num_guesses > 0
    assert bool(hints.stopped) == (kind == "broken")


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
def test_every_predictor_leaves_every_bit_of_verified_blocks(tiny_dir, recorded, error_rate):
    """One engine for all: what one predictor leaves in the slots must not matter to the next."""
    expected, routes = recorded["seeded"]
    drafter = OracleDrafter([*PROMPT, *expected.tokens], VOCAB, error_rate=error_rate)
    with open_tiny(tiny_dir, slots=14, draft_tokens=2) as engine:
        for kind, predictor in PREDICTORS.items():
            hints = Hints(predictor(routes), NUM_LAYERS)
            got = ask(engine, SEEDED, hints, drafter)
            assert_same(got, expected)
            assert hints.num_guesses > 0, kind
            assert got.end.statistics.draft.num_proposed > 0
            assert_fates_add_up(engine.target.store)


def assert_fates_add_up(store: ExpertStore) -> None:
    """T6: every ticket has one fate or waits unused in its slot, in records and in bytes."""
    store.wait_idle()
    got = store.statistics()
    assert (got.num_queued, got.num_reading) == (0, 0)
    ended = got.fates.values()
    assert sum(one.num for one in got.classes.values()) == sum(one.num for one in ended) + got.num_unused
    assert got.logical_bytes == sum(one.num_bytes for one in ended) + got.unused_bytes > 0
    exact = got.classes[ReadClass.EXACT]
    assert (exact.num, exact.num_bytes) == (
        exact.num_ended,
        sum(one.num_bytes for one in exact.fates.values()),
    )
    assert (
        sum(got.hints.values())
        >= got.hints[HintOutcome.ACCEPTED]
        == sum(one.num for kind, one in got.classes.items() if kind is not ReadClass.EXACT)
    )


@pytest.mark.parametrize("kind", ["oracle", "near-gate"])
def test_good_hints_bring_records_in_time(tiny_dir, recorded, kind):
    expected, routes = recorded["greedy"]
    with open_tiny(tiny_dir, slots=9) as engine:
        assert_same(ask(engine, GREEDY, Hints(PREDICTORS[kind](routes), NUM_LAYERS)), expected)
        statistics = engine.target.store.statistics()
    # P15: issued, loaded and used are told apart, and a guard that drops everything would show here.
    assert statistics.hints[HintOutcome.ACCEPTED] > 0
    assert statistics.predicted_physical_bytes > 0
    assert statistics.num_prefetched + statistics.num_joined > 0


def test_senseless_hints_are_counted_as_what_they_are(tiny_dir, recorded):
    expected, routes = recorded["greedy"]
    with open_tiny(tiny_dir, slots=9) as engine:
        assert_same(ask(engine, GREEDY, Hints(PREDICTORS["senseless"](routes), NUM_LAYERS)), expected)
        hints = engine.target.store.statistics().hints
    assert hints[HintOutcome.INVALID] > 1000


@pytest.mark.parametrize("after", [0, 9])
def test_a_prefetcher_stopped_in_the_middle_changes_nothing(tiny_dir, recorded, after):
    expected, routes = recorded["greedy"]
    with open_tiny(tiny_dir, slots=9) as engine:
        session = engine.session(hints=Hints(Oracle(routes), NUM_LAYERS))

        def stopping() -> Iterator[Event]:
            for number, event in enumerate(session.generate(PROMPT, GREEDY, max_tokens=NUM_TOKENS)):
                if number == after:
                    engine.target.store.stop_prefetching()
                yield event

        assert_same(collect(stopping(), session), expected)
        assert engine.target.store.statistics().hints[HintOutcome.STOPPED] > 0
        assert_fates_add_up(engine.target.store)


@pytest.mark.parametrize("kind", ["off", "near-gate", "oracle", "broken"])
def test_hints_cost_no_wait_for_the_device(tiny_dir, recorded, kind):
    """The early choice rides on the read-back that is there anyway."""
    expected, routes = recorded["greedy"]
    with open_tiny(tiny_dir, slots=9) as engine:
        hints = None if kind == "off" else Hints(PREDICTORS[kind](routes), NUM_LAYERS)
        got = ask(engine, GREEDY, hints)
    assert got.end.statistics.num_syncs == expected.end.statistics.num_syncs == NUM_TOKENS * (NUM_LAYERS + 1)


@pytest.mark.parametrize("has_to_wait", [True, False])
def test_a_layer_hands_over_once_where_it_costs_nothing(tiny_dir, recorded, monkeypatch, has_to_wait):
    """In its wait if there is one, else once the device has work again: before the next layer's ids."""
    _, routes = recorded["greedy"]
    events: list[tuple[str, int]] = []
    request, prefetch, wait = ExpertStore.request, ExpertStore.prefetch, LeaseRequest.wait
    read_back = MixtureOfExperts._read_back

    def requested(self, layer, *rest, **named):
        events.append(("request", layer))
        return request(self, layer, *rest, **named)

    def handed(self, hints: Sequence[Prefetch], **named):
        events.append(("prefetch", len(hints)))
        return prefetch(self, hints, **named)

    def waited(self, *rest):
        events.append(("wait", 0))
        return wait(self, *rest)

    monkeypatch.setattr(ExpertStore, "request", requested)
    monkeypatch.setattr(ExpertStore, "prefetch", handed)

    def read(self, *rest):
        events.append(("read back", 0))
        return read_back(self, *rest)

    monkeypatch.setattr(LeaseRequest, "wait", waited)
    monkeypatch.setattr(LeaseRequest, "is_ready", property(lambda _: not has_to_wait))
    monkeypatch.setattr(MixtureOfExperts, "_read_back", read)
    with open_tiny(tiny_dir, slots=9) as engine:
        session = engine.session(hints=Hints(Oracle(routes), NUM_LAYERS))
        list(session.generate(PROMPT, GREEDY, max_tokens=0))
        events.clear()
        collect(session.generate(PROMPT, GREEDY, max_tokens=3), session)
    names = [name for name, _ in events]
    in_its_wait = ["read back", "request", "prefetch", "wait"]
    afterwards = ["read back", "request", "wait", "prefetch"]
    block = ["prefetch", *(in_its_wait if has_to_wait else afterwards) * NUM_LAYERS]
    assert names == block * 3


def test_what_ran_before_anybody_listened_is_told_to_nobody(tiny_dir):
    """As a drafter's layer, between the passes: the next pass must not hear of it."""
    with open_tiny(tiny_dir, slots=9) as engine:
        experts = engine.target.experts
        x = mx.zeros((1, engine.config.hidden_size))
        for _ in range(2):  # the second time nothing is waited for
            mx.eval(experts.run(0, x, [[0, 1]]))
        hints = Hints(None, NUM_LAYERS, log := RouteLog())
        hints.begin([1], 0, is_prefill=False)
        experts.listener = hints
        experts.device_busy()
        assert not log.passes[0].routes
        experts.run(0, x, [[0, 1]])
        experts.device_busy()
        assert log.passes[0].routes == {0: [[0, 1]]}
        experts.end_pass()


def test_guesses_of_an_answer_that_is_over_are_nobodys(tiny_dir, recorded):
    """An answer ends with hints for a token that never comes: they must not hold slots for ever."""
    _, routes = recorded["greedy"]
    with open_tiny(tiny_dir, slots=9) as engine:
        session = engine.session(hints=Hints(Oracle(routes), NUM_LAYERS))
        list(session.generate(PROMPT, GREEDY, max_tokens=NUM_TOKENS // 2))
        engine.target.store.wait_idle()
        assert engine.target.store.statistics().num_unused == 0


def test_no_hints_where_every_expert_is_resident(tiny_dir):
    with open_tiny(tiny_dir, slots=NUM_EXPERTS) as engine:
        hints = Hints(NearGate(), NUM_LAYERS)
        ask(engine, GREEDY, hints)
    assert hints.num_guesses == 0


# Planted faults: each would change an answer, and the comparison above sees it.


def test_the_comparison_sees_a_hint_that_decides(tiny_dir, recorded, monkeypatch):
    """A provider that computes what was expected instead of what was chosen."""
    expected, _ = recorded["greedy"]
    run, heard = StreamedExperts.run, dict[int, Rows]()

    def expecting(self, layer, ids_TN):
        heard[layer] = [sorted(row) for row in ids_TN]

    def swapped(self, layer, x_TD, ids_TK):
        return run(self, layer, x_TD, heard.pop(layer, ids_TK))

    monkeypatch.setattr(StreamedExperts, "expect", expecting)
    monkeypatch.setattr(StreamedExperts, "run", swapped)
    with open_tiny(tiny_dir, slots=9) as engine, pytest.raises(AssertionError):
        assert_same(ask(engine, GREEDY, Hints(NearGate(), NUM_LAYERS)), expected)


def test_the_count_sees_a_hand_over_that_waits(tiny_dir, recorded, monkeypatch):
    expected, _ = recorded["greedy"]
    expect = StreamedExperts.expect

    def waiting(self, layer, ids_TN):
        self._sync.num_syncs += 1
        expect(self, layer, ids_TN)

    monkeypatch.setattr(StreamedExperts, "expect", waiting)
    with open_tiny(tiny_dir, slots=9) as engine:
        got = ask(engine, GREEDY, Hints(NearGate(), NUM_LAYERS))
    assert got.end.statistics.num_syncs > expected.end.statistics.num_syncs
