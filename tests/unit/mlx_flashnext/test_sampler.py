"""The sampler equals mlx-lm's filters and penalties, repeats under a seed, and never waits for the device."""

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.sampler import Sampler, SamplingParams, filtered, penalised, processed
from mlx_flashnext.engine.streams import draw_seed

VOCAB = 37


def logits(seed: int, *, scale: float = 3.0) -> mx.array:
    return scale * mx.random.normal((VOCAB,), key=mx.random.key(seed))


@pytest.fixture(scope="module")
def mlx_lm_utils():
    mx.disable_compile()
    return pytest.importorskip("mlx_lm.sample_utils")


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 36]),
)
def test_filters_keep_the_same_distribution_as_mlx_lm(mlx_lm_utils, seed, top_p, min_p, top_k):
    logprobs = logits(seed) - mx.logsumexp(logits(seed))
    theirs = logprobs[None]
    if 0 < top_p < 1:
        theirs = mlx_lm_utils.apply_top_p(theirs, top_p)
    if min_p != 0:
        theirs = mlx_lm_utils.apply_min_p(theirs, min_p)
    if top_k > 0:
        theirs = mlx_lm_utils.apply_top_k(theirs, top_k)
    ours = filtered(logprobs[None], SamplingParams(top_p=top_p, min_p=min_p, top_k=top_k))
    assert np.array_equal(np.array(ours), np.array(theirs))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    presence=st.sampled_from([0.0, 1.5, -0.5]),
    frequency=st.sampled_from([0.0, 0.7]),
    bias=st.sampled_from([{}, {3: 2.5, 11: -math.inf}]),
)
def test_penalties_equal_those_of_mlx_lm(mlx_lm_utils, seed, tokens, repetition, presence, frequency, bias):
    processors = mlx_lm_utils.make_logits_processors(
        logit_bias=bias or None,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    theirs = logits(seed)[None]
    for process in processors:
        theirs = process(mx.array(tokens), theirs)
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    counts = Counter(tokens[-params.penalty_context :])
    ours = penalised(logits(seed)[None], [counts], params)
    # A count of n subtracts n * penalty here and n times the penalty there: equal up to rounding.
    assert np.allclose(np.array(ours), np.array(theirs), rtol=1e-6, atol=1e-6)


def test_the_drawn_frequencies_follow_the_filtered_distribution():
    params = SamplingParams(temperature=0.7, top_k=6, seed=5)
    row = logits(2)
    kept = filtered((row - mx.logsumexp(row))[None], params)
    expected = np.array(mx.softmax(kept / 0.7)[0])
    draws = mx.stack([Sampler(params, [0] * position).sample(row) for position in range(4000)])
    counts = np.bincount(np.array(draws), minlength=VOCAB) / 4000
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))
    assert np.abs(counts - expected).max() < 0.03


def test_greedy_takes_the_lowest_id_among_equal_logits():
    row = mx.array([0.0, 2.0, 1.0, 2.0, 2.0])
    assert Sampler(SamplingParams(temperature=0)).sample(row).item() == 1


def test_draws_depend_on_seed_and_position_alone():
    params = SamplingParams(seed=9)
    history = [4, 8, 15]
    observed = Sampler(params, history[:1])
    for token in history[1:]:
        observed.sample(logits(77))
        observed.observe(token)
    direct = Sampler(params, history)
    for other in range(5):
        direct.sample(logits(other))
    assert observed.sample(logits(3)).item() == direct.sample(logits(3)).item()


def test_a_seed_repeats_and_other_seeds_and_positions_differ():
    row = mx.zeros((512,))

    def answer(seed: int) -> list[int]:
        params = SamplingParams(seed=seed)
        return [Sampler(params, [0] * position).sample(row).item() for position in range(8)]

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)
    assert len(set(answer(1))) > 1
    assert len({draw_seed(seed, position) for seed in range(40) for position in range(40)}) == 1600


def test_without_a_seed_two_answers_are_drawn_apart():
    assert Sampler(SamplingParams()).seed != Sampler(SamplingParams()).seed


def test_sampling_builds_a_graph_and_waits_for_nothing(monkeypatch):
    def forbidden(*_):
        raise AssertionError("waited for the device")

    params = SamplingParams(top_k=3, top_p=0.9, min_p=0.1, presence_penalty=1, repetition_penalty=1.1, seed=1)
    row = logits(1)
    monkeypatch.setattr(mx, "eval", forbidden)
    token = Sampler(params, [1, 2, 2]).sample(row)
    assert token.shape == ()


def test_top_k_of_the_whole_vocabulary_or_more_changes_nothing():
    row = logits(4)[None]
    for top_k in (VOCAB, VOCAB + 1, 10**6):
        assert mx.array_equal(filtered(row, SamplingParams(top_k=top_k)), row)


def test_penalties_look_at_the_last_twenty_tokens_only():
    params = SamplingParams(temperature=0, presence_penalty=100.0)
    row = mx.array([3.0, 2.0, 1.0])
    assert Sampler(params, [0] + [1] * 19).sample(row).item() == 2
    assert Sampler(params, [0] + [1] * 20).sample(row).item() == 0


def test_half_precision_logits_are_sampled_in_float32():
    row = mx.array([1.0, 1.0 + 2**-7, 0.5], dtype=mx.bfloat16)
    assert Sampler(SamplingParams(temperature=0)).sample(row).item() == 1
    params = SamplingParams(repetition_penalty=1.001)
    assert processed(row[None, None], [Sampler(params, [1])], [()]).dtype == mx.float32


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 1.5},
        {"top_p": -0.5},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"seed": -1},
        {"seed": 1 << 64},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {1: math.nan}},
        {"penalty_context": 0},
    ],
)
def test_values_out_of_range_are_refused_with_the_value(values):
    (name, value), *_ = values.items()
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**values)
    assert str(value) in caught.value.message


@pytest.mark.parametrize(
    "extreme", [{"temperature": 1e-320}, {"temperature": 1e-40}, {"top_p": 1e-320}, {"top_p": 1e-40}]
)
def test_what_vanishes_in_float32_still_leaves_the_likeliest_token(extreme):
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 5, **extreme}))
    for seed in range(20):
        values = logits(seed)
        assert int(sampler.sample(values)) == int(mx.argmax(values))


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -1e300},
        {"frequency_penalty": 1e300},
        {"logit_bias": {3: math.inf}},
        {"logit_bias": {3: math.nan}},
    ],
)
def test_what_would_leave_the_range_of_float32_is_refused(extreme):
    with pytest.raises(InvalidRequest, match=next(iter(extreme))):
        SamplingParams(**extreme)
