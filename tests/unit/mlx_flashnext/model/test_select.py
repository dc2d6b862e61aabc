"""The choice of the k largest: score descending, index ascending, whatever the scores."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_flashnext.model.select import select_top


def sorted_choice(scores: np.ndarray, k: int) -> np.ndarray:
    """Choose by a stable sort: the definition of the rule."""
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :k], axis=-1)


@given(st.data())
def test_equals_a_stable_sort_on_scores_full_of_ties(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 70))
    k = data.draw(st.integers(1, columns))
    levels = data.draw(st.integers(1, 6))
    rows = data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 2**32 - 1))
    scores = (np.random.default_rng(seed).integers(0, levels, (rows, columns)) / 4).astype(np.float32)
    assert np.array_equal(np.array(select_top(mx.array(scores), k)), sorted_choice(scores, k))


def test_a_tie_at_the_cut_goes_to_the_smaller_index() -> None:
    scores = mx.array([[0.5, 2.0, 0.5, 2.0, 0.5, 0.0]])
    assert select_top(scores, 3).tolist() == [[0, 1, 3]]
    assert select_top(scores, 4).tolist() == [[0, 1, 2, 3]]


def test_all_equal_scores_choose_the_first() -> None:
    assert select_top(mx.zeros((2, 9)), 4).tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("k", [1, 10, 512])
def test_real_expert_counts(k: int) -> None:
    # Logits rounded to bfloat16, as the router's are: exact ties at the cut in about one row of eight.
    logits = mx.random.normal((64, 512), key=mx.random.key(3)).astype(mx.bfloat16).astype(mx.float32)
    scores = mx.softmax(logits, axis=-1)
    assert np.array_equal(np.array(select_top(scores, k)), sorted_choice(np.array(scores), k))


def test_blocks_not_yet_complete_are_never_chosen() -> None:
    scores = mx.array([[0.0, 0.0, -mx.inf, -mx.inf], [0.0, 3.0, 1.0, -mx.inf]])
    assert select_top(scores, 2).tolist() == [[0, 1], [1, 2]]
