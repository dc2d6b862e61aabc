"""Losses, gradients and fits of route hints: against MLX's derivatives, and on routes that have a rule."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from drafter.errors import DrafterError
from drafter.sidecar import INPUTS, RouteHead, SidecarSizes, union_confidence
from drafter.train.fit_early import EARLY, EarlyRows, early_codes_of, early_loss, fit_early
from drafter.train.fit_near import NearSettings, fit_near
from drafter.train.fit_sidecar import (
    EmbeddingTable,
    SidecarBatch,
    SidecarRows,
    SidecarSettings,
    codes_of,
    fit_sidecar,
    initial_sidecar,
    joined,
    loss_and_gradients,
)
from drafter.train.fit_state import FitState
from drafter.train.route_losses import (
    OVERFETCH,
    RANKING,
    calibration_error,
    fit_calibration,
    layer_weights,
    loss_and_slope,
    recalls,
    wanted,
)
from tests.tiny.route_hints import reference_scores

SIZES = SidecarSizes(hidden_size=6, rank=5, num_slots=3, layers=(0, 1, 2), num_experts=8, top_k=2)


def reference_loss(scores: mx.array, truth: mx.array, weights: mx.array, top_k: int) -> mx.array:
    """The same sum in MLX, to be differentiated by it."""
    chance = (mx.logaddexp(scores, 0.0) - truth * scores).sum(axis=-1)
    among = mx.logsumexp(scores, axis=-1) - (truth * scores).sum(axis=-1) / top_k
    beyond = mx.maximum(mx.sigmoid(scores).sum(axis=-1) - top_k, 0.0)
    return (weights * (chance + RANKING * among + OVERFETCH * beyond)).sum() / weights.sum()


def a_batch(draws: np.random.Generator, num_rows: int = 7) -> SidecarBatch:
    num_layers, experts = len(SIZES.layers), SIZES.num_experts
    routes = np.stack(
        [[draws.permutation(experts)[: SIZES.top_k] for _ in range(num_layers)] for _ in range(num_rows)]
    )
    truth = wanted(routes, experts)
    is_seen = np.arange(num_layers)[None] < draws.integers(0, num_layers, num_rows)[:, None]
    return SidecarBatch(
        draws.standard_normal((num_rows, len(INPUTS) * SIZES.hidden_size)).astype(np.float32),
        draws.integers(0, SIZES.num_slots, num_rows).astype(np.int32),
        (truth * is_seen[..., None]).reshape(num_rows, -1),
        np.ascontiguousarray(truth.swapaxes(0, 1)),
        (draws.random((num_layers, num_rows)) * ~is_seen.T).astype(np.float32),
    )


def test_gradients_are_those_that_mlx_finds():
    draws = np.random.default_rng(0)
    params = initial_sidecar(SIZES, 1)
    params = {n: (v + 0.3 * draws.standard_normal(v.shape)).astype(np.float32) for n, v in params.items()}
    batch = a_batch(draws)

    def whole(tree: dict[str, mx.array]) -> mx.array:
        scores = reference_scores(tree, mx.array(batch.inputs), mx.array(batch.slots), mx.array(batch.seen))
        return reference_loss(scores, mx.array(batch.wanted), mx.array(batch.weights), SIZES.top_k)

    expected, slopes = mx.value_and_grad(whole)({n: mx.array(v) for n, v in params.items()})
    loss, gradients = loss_and_gradients(params, batch, SIZES.top_k)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert gradients.keys() == {name for name in params if not name.startswith("early.")} - {"calibration"}
    for name, value in gradients.items():
        assert np.abs(value).max() > 0, name
        assert np.allclose(value, np.array(slopes[name]), atol=2e-6), name


@pytest.mark.parametrize("name", ["layer", "seen", "heads"])
def test_the_comparison_sees_a_gradient_that_is_off(name, monkeypatch):
    original = loss_and_gradients

    def wrong(*arguments):
        loss, gradients = original(*arguments)
        return loss, gradients | {name: 1.01 * gradients[name]}

    monkeypatch.setitem(globals(), "loss_and_gradients", wrong)
    with pytest.raises(AssertionError):
        test_gradients_are_those_that_mlx_finds()


def test_gradients_of_the_early_trunk_are_those_that_mlx_finds():
    draws = np.random.default_rng(0)
    params = initial_sidecar(SIZES, 1)
    params = {n: (v + 0.3 * draws.standard_normal(v.shape)).astype(np.float32) for n, v in params.items()}
    inputs = draws.standard_normal((7, len(EARLY) * SIZES.hidden_size)).astype(np.float32)
    truth = a_batch(draws).wanted
    weights = mx.array(np.repeat(layer_weights(SIZES.layers)[:, None], 7, axis=1))

    def whole(tree: dict[str, mx.array]) -> mx.array:
        code = tree["early.slot"][None]
        for name, part in zip(EARLY, mx.split(mx.array(inputs), len(EARLY), axis=1), strict=True):
            code = code + part @ tree[name].T
        z = code[None] + mx.array(params["layer"])[:, None]
        heads = mx.array(params["heads"]).swapaxes(1, 2)
        scores = (z * mx.sigmoid(z)) @ heads + mx.array(params["bias"])[:, None]
        return reference_loss(scores, mx.array(truth), weights, SIZES.top_k)

    early = {name: mx.array(value) for name, value in params.items() if name.startswith("early.")}
    expected, slopes = mx.value_and_grad(whole)(early)
    loss, gradients = early_loss(params, inputs, truth, SIZES)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert gradients.keys() == early.keys()
    for name, value in gradients.items():
        assert np.abs(value).max() > 0, name
        assert np.allclose(value, np.array(slopes[name]), atol=2e-6), name


def test_the_early_comparison_sees_a_gradient_that_is_off(monkeypatch):
    original = early_loss

    def wrong(*arguments):
        loss, gradients = original(*arguments)
        return loss, gradients | {"early.slot": 1.01 * gradients["early.slot"]}

    monkeypatch.setitem(globals(), "early_loss", wrong)
    with pytest.raises(AssertionError):
        test_gradients_of_the_early_trunk_are_those_that_mlx_finds()


def test_the_early_trunk_learns_what_follows_from_tokens_and_leaves_the_rest():
    """Routes that the row's token decides; the trunk behind a draft was trained on nothing."""
    draws = np.random.default_rng(4)
    of_token = np.stack([[draws.permutation(8)[:2] for _ in range(3)] for _ in range(4)])
    ids = draws.integers(0, 4, (600, 3)).astype(np.int32)
    context = draws.standard_normal((600, 6)).astype(np.float16)
    rows = EarlyRows(ids, context, of_token[ids[:, 0]].astype(np.uint16))
    table = EmbeddingTable(ids, lambda some: np.eye(6, dtype=np.float32)[some])
    sizes = replace(SIZES, rank=24)
    before = initial_sidecar(sizes, 0)
    before["heads"] *= 5  # nothing was trained: these are the heads there are
    settings = SidecarSettings(num_steps=200, batch=64, rate=2e-2)
    after = fit_early(before, rows, rows, sizes, table, settings)
    assert {name for name, value in after.items() if not np.array_equal(value, before[name])} == {
        *EARLY, "early.slot", "calibration",
    }  # fmt: skip
    assert np.array_equal(after["calibration"][:2], before["calibration"][:2])
    codes, truth = early_codes_of(after, rows, table), wanted(rows.routes, 8)

    def said(calibration: np.ndarray) -> np.ndarray:
        head = RouteHead(after | {"calibration": calibration}, sizes.layers, sizes.top_k, 0.0)
        return np.ascontiguousarray(head.log_odds_of(codes, slice(None), "early").swapaxes(0, 1))

    def cross_entropy(scores: np.ndarray) -> float:
        return float((np.logaddexp(0, scores) - truth * scores).mean())

    assert recalls(said(after["calibration"]), truth, [2]).mean() > 0.75
    assert cross_entropy(said(after["calibration"])) < 0.9 * cross_entropy(said(before["calibration"]))


def test_a_row_without_weight_and_a_layer_that_was_seen_teach_nothing():
    draws = np.random.default_rng(2)
    scores = draws.standard_normal((2, 3, 8)).astype(np.float32)
    truth = (draws.random((2, 3, 8)) < 0.25).astype(np.float32)
    weights = np.array([[1, 0, 1], [0, 0, 2]], np.float32)
    loss, slope = loss_and_slope(scores, truth, weights, top_k=2)
    assert not slope[weights == 0].any()
    scores[0, 1] += 50
    assert loss_and_slope(scores, truth, weights, top_k=2)[0] == loss
    huge = np.full((1, 1, 8), 500.0, np.float32)
    value, slope = loss_and_slope(huge, np.zeros_like(huge), np.ones((1, 1), np.float32), top_k=2)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()


def test_naming_more_than_a_row_can_choose_costs():
    truth = np.array([[[1.0, 0, 0, 0, 0, 0, 0, 0]]], np.float32)
    weights = np.ones((1, 1), np.float32)
    modest = np.array([[[4.0, *[-4.0] * 7]]], np.float32)
    greedy = np.array([[[4.0, *[1.0] * 7]]], np.float32)
    plain = [loss_and_slope(s, truth, weights, top_k=1, overfetch=0.0)[0] for s in (modest, greedy)]
    charged = [loss_and_slope(s, truth, weights, top_k=1, overfetch=1.0)[0] for s in (modest, greedy)]
    assert charged[0] == pytest.approx(plain[0], abs=0.2)
    assert charged[1] - plain[1] > 4


def test_layers_that_are_due_later_count_more():
    weights = layer_weights([0, 1, 7])
    assert weights.tolist() == pytest.approx([1 / 2, 2 / 3, 8 / 9])


def test_calibration_makes_confidence_honest():
    draws = np.random.default_rng(0)
    true = draws.normal(-2, 1.5, 200_000)
    chosen = draws.random(true.shape) < 1 / (1 + np.exp(-true))
    said = (2.5 * true + 1.0).astype(np.float32)
    scale, shift = fit_calibration(said, chosen)
    assert scale == pytest.approx(0.4, rel=0.03)
    assert shift == pytest.approx(-0.4, abs=0.05)
    before = calibration_error(1 / (1 + np.exp(-said)), chosen)
    after = calibration_error(1 / (1 + np.exp(-(scale * said + shift))), chosen)
    assert before > 0.05
    assert after < 0.005


def test_recall_counts_what_was_named_among_what_was_chosen():
    scores = np.array([[[0.9, 0.8, 0.1, 0.7]]], np.float32)
    truth = np.array([[[1.0, 0, 0, 1.0]]], np.float32)
    assert recalls(scores, truth, (1, 2, 3)).reshape(-1).tolist() == [0.5, 0.5, 1.0]


def test_the_chance_of_a_block_is_that_of_any_row():
    log_odds = np.log(np.array([[0.5, 0.1], [0.5, 0.2]]) / np.array([[0.5, 0.9], [0.5, 0.8]]))
    assert union_confidence(log_odds.astype(np.float32)).tolist() == pytest.approx([0.75, 0.28])
    assert union_confidence(np.full((2, 1), -np.inf, np.float32)).tolist() == [0.0]


# Routes with a rule: layer 0 follows the token, layer 1 the token before, layer 2 what layer 0 chose and a
# bit that nothing but layer 1 shows.

NUM_TOKENS = 12
RULE = np.random.default_rng(5).permutation(np.repeat(np.arange(8), 3))


def ruled_rows(num_rows: int, seed: int) -> SidecarRows:
    draws = np.random.default_rng(seed)
    ids = draws.integers(0, NUM_TOKENS, (num_rows, 3)).astype(np.int32)
    hidden_bit = draws.integers(0, 2, num_rows)
    first = RULE[ids[:, 0]]
    second = np.where(hidden_bit, (RULE[ids[:, 1]] // 2) * 2 + 1, (RULE[ids[:, 1]] // 2) * 2)
    third = (first + 3 * hidden_bit) % 8
    columns = [np.stack([first, (first + 4) % 8], 1), np.stack([second, (second + 4) % 8], 1),
               np.stack([third, (third + 4) % 8], 1)]  # fmt: skip
    half = np.float16
    return SidecarRows(
        hidden=draws.standard_normal((num_rows, SIZES.hidden_size)).astype(half),
        ids=ids,
        context=draws.standard_normal((num_rows, SIZES.hidden_size)).astype(half),
        anchor=np.arange(num_rows, dtype=np.int32),
        slot=draws.integers(0, 3, num_rows).astype(np.int32),
        routes=np.stack(columns, axis=1).astype(np.uint16),
        is_kept=np.ones(num_rows, bool),
        is_candidate=np.zeros(num_rows, bool),
        document=np.zeros(num_rows, np.int32),
    )


def test_a_sidecar_learns_the_rule_and_sees_more_once_layers_have_shown():
    sizes = SidecarSizes(SIZES.hidden_size, 24, 3, SIZES.layers, 8, 2)
    vectors = np.random.default_rng(1).standard_normal((NUM_TOKENS, SIZES.hidden_size)).astype(np.float32)
    rows, aside, new = ruled_rows(3000, 1), ruled_rows(500, 2), ruled_rows(500, 3)
    table = EmbeddingTable(np.arange(NUM_TOKENS, dtype=np.int32), lambda ids: vectors[ids])
    settings = SidecarSettings(rank=24, num_steps=700, batch=128, rate=2e-2)
    values = fit_sidecar(rows, aside, np.ones(3, np.float32), sizes, table, settings)
    head, codes = RouteHead(values, sizes.layers, 2, 0.0), codes_of(values, new, table)
    truth = wanted(new.routes, 8).swapaxes(0, 1)
    fresh = head.log_odds(codes, is_refreshed=False)
    blind = recalls(fresh, truth, (2,))[0].mean(axis=1)
    assert blind[0] > 0.95
    assert 0.3 < blind[2] < 0.7
    for place in range(2):
        codes = head.after(codes, place, new.routes[:, place])
    seeing = head.log_odds(codes, 2, 3, is_refreshed=True)
    assert recalls(seeing, truth[2:], (2,))[0].mean() > blind[2] + 0.25
    chance = 1 / (1 + np.exp(-np.clip(fresh, -30, 30)))
    assert calibration_error(chance, truth.astype(bool)) < 0.05
    again = fit_sidecar(
        rows, aside, np.ones(3, np.float32), sizes, table, SidecarSettings(rank=24, num_steps=3)
    )
    twice = fit_sidecar(
        rows, aside, np.ones(3, np.float32), sizes, table, SidecarSettings(rank=24, num_steps=3)
    )
    assert all((again[name] == twice[name]).all() for name in again)


def test_a_near_map_learns_what_is_linear_and_is_calibrated_on_rows_put_aside():
    draws = np.random.default_rng(0)
    reads = draws.standard_normal((2, 1500, 6)).astype(np.float16)
    maps = draws.standard_normal((2, 8, 6))
    noise = 0.3 * draws.standard_normal((2, 1500, 8))
    routes = np.argsort(-(np.einsum("lnd,led->lne", reads.astype(float), maps) + noise), axis=-1)[..., :2]
    routes = np.sort(routes, axis=-1).swapaxes(0, 1).astype(np.uint16)
    aside = np.arange(1500) % 10 == 0
    found = fit_near(reads, routes, aside, (2, 3), 8, NearSettings(num_steps=300, batch=256))
    scores = np.stack(
        [
            reads[at, aside].astype(np.float32) @ found[f"layers.{n}.weight"].T + found[f"layers.{n}.bias"]
            for at, n in enumerate((2, 3))
        ]
    )
    truth = wanted(routes[aside], 8).swapaxes(0, 1)
    assert recalls(scores, truth, (2,))[0].mean() > 0.8
    scale, shift = np.moveaxis(np.stack([found[f"layers.{n}.calibration"] for n in (2, 3)]), 1, 0)
    chance = 1 / (1 + np.exp(-(scores * scale[:, None, None] + shift[:, None, None])))
    assert calibration_error(chance, truth.astype(bool)) < 0.03
    with pytest.raises(DrafterError, match="Too few documents"):
        fit_near(reads, routes, np.zeros(1500, bool), (2, 3), 8, NearSettings(num_steps=1))


def test_rows_of_parts_keep_their_own_context():
    whole = joined([ruled_rows(3, 1), ruled_rows(2, 2)])
    assert (whole.context[whole.anchor[3:]] == ruled_rows(2, 2).context).all()
    with pytest.raises(DrafterError, match="No row"):
        joined([])


def near_problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draws = np.random.default_rng(3)
    reads = draws.standard_normal((2, 300, 6)).astype(np.float16)
    routes = draws.integers(0, 8, (300, 2, 2)).astype(np.uint16)
    return reads, routes, np.arange(300) % 10 == 0


class Killed(Exception):
    pass


def kill_at(step: int):
    def progress(done: int, _total: int, _loss: float) -> None:
        if done == step:
            raise Killed

    return progress


def fit_one(kind: str, num_steps: int, progress=lambda *_: None, state: FitState | None = None):
    if kind == "near":
        reads, routes, aside = near_problem()
        settings = NearSettings(num_steps=num_steps, batch=64)
        return fit_near(reads, routes, aside, (2, 3), 8, settings, progress, state)
    sizes = SidecarSizes(SIZES.hidden_size, 8, 3, SIZES.layers, 8, 2)
    vectors = np.random.default_rng(1).standard_normal((NUM_TOKENS, SIZES.hidden_size)).astype(np.float32)
    table = EmbeddingTable(np.arange(NUM_TOKENS, dtype=np.int32), lambda ids: vectors[ids])
    rows, aside = ruled_rows(200, 1), ruled_rows(60, 2)
    settings = SidecarSettings(rank=8, num_steps=num_steps, batch=32)
    return fit_sidecar(rows, aside, np.ones(3, np.float32), sizes, table, settings, progress, state)


@pytest.mark.parametrize("kind", ["near", "sidecar"])
def test_a_killed_fit_goes_on_to_the_same_bits(kind, tmp_path):
    whole, other = fit_one(kind, 350), fit_one(kind, 300)
    state = FitState(tmp_path / "state", {"what": kind})
    with pytest.raises(Killed):
        fit_one(kind, 350, kill_at(300), state)
    seen: list[int] = []
    found = fit_one(kind, 350, lambda done, _total, _loss: seen.append(done), state)
    assert seen == [300, 350], "what the kill lost is done again, and no more: it was saved at 200"
    assert all(found[name].tobytes() == whole[name].tobytes() for name in whole)
    assert any(found[name].tobytes() != other[name].tobytes() for name in whole), "the control"


@pytest.mark.parametrize("part", ["moments", "generator", "step"])
def test_a_state_that_lacks_a_part_ends_elsewhere(part, tmp_path, monkeypatch):
    """The faults planted: what goes on without its moments, draws or count is another fit."""
    whole, state = fit_one("near", 350), FitState(tmp_path / "state", {})
    with pytest.raises(Killed):
        fit_one("near", 350, kill_at(300), state)
    resume = FitState.resume

    def faulty(self, adam, generator):
        step = resume(self, adam, generator)
        if part == "moments":
            adam.first["bias"][...] = 0
        elif part == "generator":
            generator.random(1)
        else:
            adam.count = 0
        return step

    monkeypatch.setattr(FitState, "resume", faulty)
    found = fit_one("near", 350, state=state)
    assert any(found[name].tobytes() != whole[name].tobytes() for name in whole)


def test_a_fit_of_something_else_is_not_continued(tmp_path):
    with pytest.raises(Killed):
        fit_one("near", 350, kill_at(300), FitState(tmp_path, {"seed": 0, "rows": 5}))
    with pytest.raises(DrafterError, match="another seed") as refused:
        fit_one("near", 350, state=FitState(tmp_path, {"seed": 1, "rows": 5}))
    assert str(tmp_path) in refused.value.hint
    with pytest.raises(DrafterError, match="is no state of this fit: it holds other arrays"):
        fit_one("sidecar", 350, state=FitState(tmp_path, {"seed": 0, "rows": 5}))


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"x" * 100, "cut", "flipped"])
def test_a_damaged_state_is_refused_by_name(damage, tmp_path):
    state = FitState(tmp_path, {"seed": 0})
    with pytest.raises(Killed):
        fit_one("near", 350, kill_at(300), state)
    place = tmp_path / "state.npz"
    whole = place.read_bytes()
    if damage == "cut":
        place.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        place.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    else:
        place.write_bytes(damage)
    with pytest.raises(DrafterError, match=r"state.npz is no state of this fit"):
        fit_one("near", 350, state=state)
