"""Predictors say what they are said to say; `Hints` bounds it, dates it, and survives whatever they raise."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from drafter.api import RouteHints
from expert_store.keys import Prefetch, ReadClass
from mlx_flashnext.engine.hint_level import NOTHING
from mlx_flashnext.engine.hints import IDLE_PASSES, MAX_HINTS, REST_PASSES, Hints
from mlx_flashnext.engine.predictors import (
    HINTS,
    Frequency,
    Guess,
    NearGate,
    Oracle,
    Predictor,
    PredictorSetting,
    Previous,
    Random,
    best_by_rank,
    make_predictor,
)
from mlx_flashnext.engine.routes import Pass, RecordedRoutes, RouteLog, demands

LAYERS = {0: 8, 1: 8, 2: 8}


def experts(guesses: Iterable[Guess]) -> list[tuple[int, int]]:
    return [(guess.layer, guess.expert) for guess in guesses]


def play(predictor: Predictor, rows_by_layer: dict[int, list[list[int]]], kept: int) -> None:
    """Run one block past a predictor."""
    list(predictor.begin([0] * len(rows_by_layer[0]), 0))
    for layer, rows in rows_by_layer.items():
        list(predictor.routed(layer, rows))
    predictor.commit(kept)


def test_previous_names_the_last_row_that_stayed():
    predictor = Previous([0, 1])
    assert list(predictor.begin([1], 0)) == []
    play(predictor, {0: [[1, 2], [3, 4]], 1: [[5, 6], [7, 0]]}, kept=1)
    assert experts(predictor.begin([1], 1)) == [(0, 1), (0, 2), (1, 5), (1, 6)]


def test_previous_keeps_what_it_knew_when_no_row_stays():
    predictor = Previous([0])
    play(predictor, {0: [[1, 2]]}, kept=1)
    play(predictor, {0: [[3, 4]]}, kept=0)
    assert experts(predictor.begin([1], 1)) == [(0, 1), (0, 2)]


def test_frequency_counts_rows_that_stay_and_names_the_most_popular_first():
    predictor = Frequency({0: 8}, num_guesses=2)
    assert list(predictor.begin([1], 0)) == []
    play(predictor, {0: [[1, 2], [2, 3], [5, 6]]}, kept=2)
    guesses = list(predictor.begin([1], 2))
    assert experts(guesses) == [(0, 2), (0, 1)]
    assert [guess.confidence for guess in guesses] == [0.5, 0.25]


def test_frequency_starts_from_counts_that_fit_and_ignores_those_that_do_not():
    known = Frequency({0: 4, 1: 4}, 1, {0: [0, 9, 1, 0], 1: [5, 5]})
    assert experts(known.begin([1], 0)) == [(0, 1)]


def test_random_is_repeatable_and_names_what_exists():
    first, second = (Random(LAYERS, 4, seed=3) for _ in range(2))
    assert experts(first.begin([1], 0)) == experts(second.begin([1], 0))
    for layer in (0, 1, 2):
        assert all(one.layer == layer + 1 and one.expert < 8 for one in first.routed(layer, [[0]]))
    assert list(first.routed(2, [[0]])) == []


def test_near_gate_is_as_sure_of_an_expert_as_its_best_rank():
    assert NearGate.look_ahead
    guesses = {guess.expert: guess.confidence for guess in NearGate().expect(1, [[3, 1], [1, 5]])}
    assert guesses == {3: 1.0, 1: 1.0, 5: 0.5}
    assert best_by_rank(1, []) == []


def test_the_oracle_names_the_block_at_its_start_and_the_next_one_layer_by_layer():
    routes = RecordedRoutes(
        [Pass(0, 2, 2, {0: [[1], [2]], 1: [[3], [4]]}), Pass(2, 2, 1, {0: [[5], [6]], 1: [[7], [0]]})]
    )
    oracle = Oracle(routes)
    assert set(experts(oracle.begin([9, 9], 0))) == {(0, 1), (0, 2), (1, 3), (1, 4)}
    # Position 3 was rejected in the recorded run: nothing is known of it.
    assert list(oracle.routed(0, [[1], [2]])) == [Guess(0, 5, passes_ahead=1)]
    assert list(Oracle(routes, looks_beyond=False).routed(0, [[1], [2]])) == []
    assert list(oracle.begin([9], 77)) == []


def test_every_name_makes_its_predictor():
    setting = PredictorSetting(LAYERS, 2, routes=RecordedRoutes([]))
    made = {kind: type(make_predictor(kind, setting)).__name__ for kind in HINTS}
    assert made == {
        "off": "NoneType", "frequency": "Frequency", "previous": "Previous", "random": "Random",
        "near-gate": "NearGate", "near-linear": "NoneType", "sidecar": "NoneType", "both": "NoneType",
        "oracle": "Oracle",
    }  # fmt: skip
    assert make_predictor("oracle", PredictorSetting(LAYERS, 2)) is None


class Scripted(NearGate):
    """Says what it was told to say, at every occasion."""

    def __init__(self, says: object) -> None:
        self.says = says

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        return self._say()

    def routed(self, layer: int, ids_TK: Sequence[Sequence[int]]) -> Iterable[Guess]:
        return self._say()

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> Iterable[Guess]:
        return self._say()

    def _say(self) -> Iterable[Guess]:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says  # type: ignore[return-value]


def test_deadlines_grow_with_layers_and_passes():
    hints = Hints(Scripted([Guess(2, 1), Guess(0, 3, 0.5)]), num_layers=3)
    first = hints.begin([1], 0, is_prefill=False)
    assert first.passes_ahead == 0
    assert [(hint.layer, hint.read_class, hint.deadline) for hint in first.hints] == [
        (2, ReadClass.NEAR, 5),
        (0, ReadClass.NEAR, 3),
    ]
    near = hints.routed(0, [[1]]).hints
    assert {hint.read_class for hint in near} == {ReadClass.NEAR}
    hints.commit(1)
    assert [hint.deadline for hint in hints.begin([1], 1, is_prefill=False).hints] == [8, 6]


class ScriptedEarly(Scripted):
    """Says something of the anchor's row too."""

    def early(self, routes: RouteHints) -> Iterable[Guess]:
        return self._say()


CODES = RouteHints(np.zeros((1, 3), np.float32))


def test_early_hints_are_of_the_block_that_begins_next():
    log = RouteLog()
    hints = Hints(ScriptedEarly([Guess(2, 1), Guess(0, 3)]), 3, log)
    for number in (1, 2):
        early = hints.early(CODES)
        begun = hints.begin([1], number, is_prefill=False)
        assert early.passes_ahead == 0
        assert [hint.deadline for hint in early.hints] == [hint.deadline for hint in begun.hints]
        assert [hint.deadline for hint in early.hints] == [3 * number + 2, 3 * number]
        assert {hint.read_class for hint in early.hints} == {ReadClass.NEAR}
        assert not hints.early(CODES).hints  # the block runs
        hints.routed(0, [[3]])
        hints.commit(1)
    assert [len(one.guesses) for one in log.passes] == [3, 3]


def test_what_early_hints_were_worth_is_learned():
    hints = Hints(ScriptedEarly([Guess(0, 3)]), 3)
    for number in range(20):
        hints.accepted(hints.early(CODES).hints)
        hints.begin([1], number, is_prefill=False)
        hints.routed(0, [[5]])
        hints.commit(1)
    assert hints.num_withheld > 0


def test_early_hints_that_no_block_followed_are_forgotten_by_a_prompt():
    hints = Hints(ScriptedEarly([Guess(0, 3)]), 3)
    assert hints.early(CODES).hints
    assert not hints.begin([1, 2], 0, is_prefill=True).hints
    hints.commit(2)
    assert [hint.deadline for hint in hints.early(CODES).hints] == [9]


def test_an_early_guess_that_fails_ends_prediction_alone():
    hints = Hints(ScriptedEarly(RuntimeError("no")), 3)
    assert not hints.early(CODES).hints
    assert hints.stopped == "RuntimeError: no"
    assert not hints.begin([1], 0, is_prefill=False).hints
    resting = Hints(ScriptedEarly([Guess(0, 3)]), 3)
    resting.set_level(NOTHING)
    assert not resting.early(CODES).hints


def test_a_guess_beyond_the_block_is_speculative_and_outlives_it():
    hints = Hints(Scripted([Guess(1, 1, passes_ahead=1)]), num_layers=3)
    hints.begin([1], 0, is_prefill=False)
    ahead = hints.routed(0, [[1]])
    assert ahead.passes_ahead == 1
    assert (ahead.hints[0].read_class, ahead.hints[0].deadline) == (ReadClass.SPECULATIVE, 7)


def test_the_early_choice_goes_with_the_layers_one_hand_over():
    hints = Hints(NearGate(), num_layers=3)
    hints.begin([1], 0, is_prefill=False)
    assert hints.looks_ahead(1)
    hints.expect(1, [[4, 6]])
    assert [(hint.layer, hint.expert) for hint in hints.routed(0, [[1, 2]]).hints] == [(1, 4), (1, 6)]
    assert hints.routed(1, [[1, 2]]).hints == ()


def test_a_router_whose_early_choice_is_always_there_is_asked_now_and_then():
    hints = Hints(NearGate(), num_layers=3)

    def asked(num_tickets: int) -> bool:
        hints.begin([1], 0, is_prefill=False)
        wants = bool(hints.looks_ahead(1))
        hints.accepted([Prefetch(1, 4)] * num_tickets if wants else [])
        hints.commit(1)
        return wants

    assert [asked(1) for _ in range(40)] == [True] * 40
    idle = [asked(0) for _ in range(IDLE_PASSES + 3 * REST_PASSES)]
    assert idle[:IDLE_PASSES] == [True] * IDLE_PASSES
    assert sum(idle[IDLE_PASSES:]) == 3
    while not asked(1):
        pass
    assert [asked(1) for _ in range(5)] == [True] * 5, "one read, and it is asked again in every pass"


def test_a_drafter_is_asked_for_routes_in_the_passes_in_which_layers_are_guessed():
    predictor = Scripted([])
    predictor.wants_routes, predictor.look_ahead = True, NearGate.look_ahead
    hints = Hints(predictor, num_layers=3)
    told, looked = [], []
    for number in range(IDLE_PASSES + 2 * REST_PASSES):
        told.append(hints.wants_routes)
        hints.begin([1], number, is_prefill=False)
        looked.append(bool(hints.looks_ahead(0)))
        hints.commit(1)
    assert told == looked
    assert sum(told) == IDLE_PASSES + 2


def test_prefill_and_foreign_layers_get_no_hints():
    hints = Hints(Scripted([Guess(0, 1)]), num_layers=3, log=RouteLog())
    assert hints.begin([1, 2], 0, is_prefill=True).hints == ()
    assert not hints.looks_ahead(1)
    assert hints.routed(0, [[1], [2]]).hints == ()
    hints.commit(2)
    hints.begin([1], 2, is_prefill=False)
    assert hints.routed(3, [[1]]).hints == (), "the MTP module's layer is part of no block"
    hints.commit(1)
    assert hints.routed(0, [[1]]).hints == (), "no block is open"


@pytest.mark.parametrize(
    "says",
    [
        RuntimeError("lost"),
        None,
        7,
        [None],
        [(1, 2)],
        ["ab"],
        [Guess("one", 2)],
        [Guess(1, 2, 1.0, "x")],
    ],
)
def test_whatever_a_predictor_says_ends_prediction_at_worst(says):
    hints = Hints(Scripted(says), num_layers=3)
    assert hints.begin([1], 0, is_prefill=False).hints == ()
    assert hints.stopped
    assert not hints.looks_ahead(1)
    assert hints.routed(0, [[1]]).hints == ()
    hints.commit(1)
    assert hints.begin([1], 1, is_prefill=False).hints == ()


def test_a_million_guesses_are_cut_before_they_are_looked_at():
    taken = 0

    def endless() -> Iterable[Guess]:
        nonlocal taken
        while True:
            taken += 1
            yield Guess(0, 1)

    hints = Hints(Scripted(endless()), num_layers=3)
    assert len(hints.begin([1], 0, is_prefill=False).hints) == MAX_HINTS
    assert taken == MAX_HINTS


def test_the_log_has_every_pass_with_the_rows_that_stayed():
    log = RouteLog()
    hints = Hints(None, num_layers=2, log=log)
    hints.begin([1, 2], 0, is_prefill=True)
    hints.routed(0, [[1, 2], [2, 3]])
    hints.routed(1, [[4, 5], [4, 6]])
    hints.commit(2)
    hints.begin([3, 4], 2, is_prefill=False)
    hints.routed(0, [[7, 1], [0, 2]])
    hints.commit(1)
    assert RecordedRoutes(log.passes).by_position == {
        0: {0: (1, 2), 1: (4, 5)},
        1: {0: (2, 3), 1: (4, 6)},
        2: {0: (7, 1)},
    }
    assert demands(log.passes) == {0: [[1, 2, 3], [0, 1, 2, 7]], 1: [[4, 5, 6]]}
