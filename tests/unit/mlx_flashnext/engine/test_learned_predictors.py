"""Trained guesses as predictors: what is named, when, how sure, and never more than rows can choose."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from drafter.api import RouteHints
from drafter.near import CODE_STEPS, NearMap, decoded
from drafter.sidecar import RouteHead, SidecarSizes, union_confidence
from expert_store.keys import ReadClass
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.learned_predictors import (
    EARLY_TIMES,
    REFRESHED_LAYERS,
    Learned,
    averaged,
    learned,
    near_log_odds,
)

NUM_LAYERS, NUM_EXPERTS, TOP_K, RANK = 7, 8, 2, 4
LAYERS = dict.fromkeys(range(NUM_LAYERS), NUM_EXPERTS)


def a_head(*, cut: float = 0.2) -> RouteHead:
    """Of every layer: a code's first value counts for expert 1, what layer 0 chose for expert 2."""
    sizes = SidecarSizes(4, RANK, 4, tuple(range(NUM_LAYERS)), NUM_EXPERTS, TOP_K)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in sizes.shapes().items()}
    arrays["heads"][:, 1, 0] = 1
    arrays["heads"][:, 2, 1] = 1
    arrays["bias"] -= 4
    arrays["calibration"][..., 0] = 1
    arrays["seen"][0, :, 1] = 6
    return RouteHead(arrays, range(NUM_LAYERS), TOP_K, cut)


def codes(*rows: float) -> RouteHints:
    found = np.zeros((len(rows), RANK), np.float32)
    found[:, 0] = rows
    return RouteHints(found)


def named(guesses: object) -> list[tuple[int, int]]:
    return [(guess.layer, guess.expert) for guess in guesses]  # type: ignore[attr-defined]


def test_the_sidecar_names_every_layer_when_a_block_begins_and_the_next_ones_once_a_layer_has_shown():
    predictor = Learned(LAYERS, TOP_K, None, a_head())
    predictor.drafted(codes(8.0, -8.0))
    begun = list(predictor.begin([5, 6], 9))
    assert named(begun) == [(layer, 1) for layer in range(NUM_LAYERS)]
    assert all(guess.confidence == pytest.approx(0.98, abs=0.01) for guess in begun)
    after = named(predictor.routed(0, [[3, 4], [5, 6]]))
    assert after == [(layer, e) for layer in range(1, 1 + REFRESHED_LAYERS) for e in (1, 2)]
    assert named(predictor.routed(NUM_LAYERS - 1, [[3, 4], [5, 6]])) == []


def test_all_hints_of_the_coming_block_are_near_in_the_order_of_its_layers():
    hints = Hints(Learned(LAYERS, TOP_K, None, a_head()), NUM_LAYERS)
    assert {hint.read_class for hint in hints.early(codes(8.0)).hints} == {ReadClass.NEAR}
    begun = hints.begin([5, 6], 0, is_prefill=False, routes=codes(8.0, 8.0))
    assert {hint.read_class for hint in begun.hints} == {ReadClass.NEAR}
    assert [hint.deadline for hint in begun.hints] == sorted(hint.deadline for hint in begun.hints)
    assert {hint.read_class for hint in hints.routed(0, [[3, 4], [3, 4]]).hints} == {ReadClass.NEAR}


def test_without_a_draft_or_with_another_blocks_codes_the_sidecar_is_silent():
    predictor = Learned(LAYERS, TOP_K, None, a_head())
    for routes in (None, codes(8.0)):
        predictor.drafted(routes)
        assert list(predictor.begin([5, 6], 0)) == []
        assert list(predictor.routed(0, [[1, 2], [1, 2]])) == []
    predictor.drafted(codes(8.0, 8.0))
    predictor.begin([5, 6], 0)
    predictor.commit(1)
    assert list(predictor.routed(0, [[1, 2], [1, 2]])) == []


def test_no_more_is_named_than_the_rows_can_choose():
    predictor = Learned(LAYERS, TOP_K, None, a_head(cut=0.0))
    predictor.drafted(codes(0.0))
    guesses = named(predictor.begin([5], 0))
    assert len(guesses) == NUM_LAYERS * TOP_K
    predictor.drafted(codes(0.0, 0.0, 0.0))
    assert len(named(predictor.begin([5, 6, 7], 0))) == NUM_LAYERS * 3 * TOP_K


def near_map() -> NearMap:
    weights = {layer: mx.eye(NUM_EXPERTS) for layer in range(2, NUM_LAYERS)}
    biases = {layer: mx.zeros(NUM_EXPERTS) for layer in range(2, NUM_LAYERS)}
    calibration = dict.fromkeys(range(2, NUM_LAYERS), (2.0, -1.0))
    return NearMap(weights, biases, calibration, num_guesses=3, cut=0.3)


def test_a_near_code_holds_expert_and_calibrated_chance():
    x = mx.array([[0.0, 3.0, 1.0, -2.0, 0.5, -9.0, -9.0, -9.0]])
    (row,) = near_map().codes(2, x).tolist()
    found = decoded(row)
    assert [expert for expert, _ in found] == [1, 2, 4]
    for (_, chance), logit in zip(found, (3.0, 1.0, 0.5), strict=True):
        assert chance == pytest.approx(1 / (1 + np.exp(1 - 2 * logit)), abs=1 / CODE_STEPS)
    assert near_map().num_bytes() > 0


def test_the_near_map_names_what_any_row_may_want():
    predictor = Learned(LAYERS, TOP_K, near_map(), None)
    assert not predictor.wants_routes
    (ahead,) = predictor.look_ahead
    assert ahead.layers_ahead == 2
    predictor.begin([5, 6], 0)
    sure, unsure = 3 * CODE_STEPS + 900, 4 * CODE_STEPS + 100
    assert named(predictor.expect(2, [[sure, unsure], [unsure, sure]])) == [(2, 3)]


def test_both_average_what_they_know_and_the_sidecar_speaks_for_the_rest():
    near = near_log_odds([[3 * CODE_STEPS + 512]], NUM_EXPERTS)
    assert near[0, 3] == pytest.approx(0.0, abs=0.01)
    assert np.isneginf(np.delete(near[0], 3)).all()
    far = np.full((1, NUM_EXPERTS), -2.0, np.float32)
    assert averaged(near, far)[0, 3] == pytest.approx(-1.0, abs=0.01)
    assert averaged(near, far)[0, 0] == -2.0
    predictor = Learned(LAYERS, TOP_K, near_map(), a_head())
    predictor.drafted(codes(8.0))
    predictor.begin([5], 0)
    assert named(predictor.expect(2, [[3 * CODE_STEPS + 1023]])) == []  # said with the sidecar's, once
    assert named(predictor.routed(1, [[0, 4]])) == [(2, 1), (2, 3), (3, 1)]


def test_both_in_service_are_as_sure_as_the_mean_of_their_log_odds():
    head, near_codes = a_head(cut=0.0), [[3 * CODE_STEPS + 900], [1 * CODE_STEPS + 40]]
    predictor = Learned(LAYERS, TOP_K, near_map(), head)
    begun = codes(8.0, -3.0)
    predictor.drafted(begun)
    predictor.begin([5, 6], 0)
    predictor.expect(3, near_codes)
    predictor.routed(1, [[0, 4], [1, 2]])
    now = head.after(begun.codes, 1, [[0, 4], [1, 2]])
    far = head.log_odds(now, 3, 4, is_refreshed=True)[0]
    for layer, expected in ((2, head.log_odds(now, 2, 3, is_refreshed=True)[0]), (3, far)):
        if layer == 3:
            expected = averaged(near_log_odds(near_codes, NUM_EXPERTS), far)
        assert np.allclose(predictor._said[layer], union_confidence(expected), atol=1e-6)


def test_the_outlook_tells_the_chance_of_every_expert_of_what_was_spoken_of_once():
    predictor = Learned(LAYERS, TOP_K, near_map(), a_head())
    predictor.drafted(codes(8.0))
    begun = {guess[:2]: guess.confidence for guess in predictor.begin([5], 0)}
    outlook = predictor.outlook()
    assert set(outlook) == set(LAYERS)
    for layer, chances in outlook.items():
        assert (chances.format, chances.shape) == ("f", (NUM_EXPERTS,))
        assert chances[1] == begun[layer, 1]
        assert chances[3] == pytest.approx(1 / (1 + np.exp(4)), rel=1e-4)  # below the cut, and told
    assert predictor.outlook() == {}
    predictor.expect(2, [[3 * CODE_STEPS + 1023]])
    predictor.routed(1, [[0, 4]])
    again = predictor.outlook()
    assert set(again) == {2, 3}
    assert again[2][3] > 0.9


def test_of_the_anchors_row_the_sidecar_speaks_before_there_is_a_proposal():
    predictor = Learned(LAYERS, TOP_K, None, a_head(cut=0.0))
    guesses = list(predictor.early(codes(8.0)))
    assert [guess for guess in named(guesses) if guess[1] == 1] == [(layer, 1) for layer in range(NUM_LAYERS)]
    assert set(predictor.outlook()) == set(LAYERS)
    assert len(guesses) == NUM_LAYERS * EARLY_TIMES * TOP_K
    # What it said early is not what it says of the block: those codes come with the proposal.
    predictor.drafted(None)
    assert list(predictor.begin([5], 0)) == []
    assert list(Learned(LAYERS, TOP_K, near_map(), None).early(codes(8.0))) == []


def test_there_is_no_predictor_of_nothing():
    assert learned(LAYERS, TOP_K, None, None) is None
