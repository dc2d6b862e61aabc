"""P69: QSA at the border of its real budget: 2,047 to 2,052 tokens, budget 2,048, blocks of 4."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.layer_state import QsaState, empty_qsa
from mlx_flashnext.model.qsa import SparseAttention
from mlx_flashnext.model.rope import Rope
from tests.tiny.checkpoints import build_hf
from tests.tiny.weights import TinyModel

REAL_BUDGET = {
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "hidden_size": 32,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "indexer_head_dim": 16,
    "indexer_n_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 262144,
}
LAYER = "layers.3.self_attn"
EDGES = (2047, 2048, 2049, 2051, 2052)
LAST = 2060


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    directory: Path = tmp_path_factory.mktemp("real-budget")
    return TinyModel.open(build_hf(directory, seed=9, overrides=REAL_BUDGET, tokenizer=False))


@pytest.fixture(scope="module")
def qsa(tiny: TinyModel) -> SparseAttention:
    return SparseAttention(tiny.config, tiny.weights, LAYER, Rope(tiny.config))


@pytest.fixture(scope="module")
def inputs(tiny: TinyModel) -> mx.array:
    return mx.random.normal((LAST, tiny.config.hidden_size), key=mx.random.key(69))


def run(tiny: TinyModel, qsa: SparseAttention, x: mx.array, sizes: list[int]) -> tuple[mx.array, QsaState]:
    """Attend in blocks of the given sizes, then row by row."""
    state, at, parts = empty_qsa(tiny.config, mx.float32, None), 0, []
    for size in itertools.chain(sizes, itertools.repeat(1)):
        if at >= len(x):
            break
        y, staged = qsa(x[at : at + size], state, at)
        state = staged.final
        mx.eval(y, state.keys.array, state.values.array, state.pooled.array, state.open_keys)
        parts.append(y)
        at += size
    return mx.concatenate(parts), state


@pytest.fixture(scope="module")
def whole(tiny: TinyModel, qsa: SparseAttention, inputs: mx.array) -> tuple[mx.array, QsaState]:
    return run(tiny, qsa, inputs, [LAST])


@pytest.mark.parametrize("num_tokens", EDGES)
def test_a_block_ending_at_the_edge_then_single_steps_equal_one_block(
    num_tokens: int, tiny: TinyModel, qsa: SparseAttention, inputs: mx.array, whole: tuple[mx.array, QsaState]
) -> None:
    y, state = run(tiny, qsa, inputs, [num_tokens])
    assert mx.array_equal(y, whole[0]).item()
    for name in ("keys", "values", "pooled"):
        count = LAST // 4 if name == "pooled" else LAST
        assert mx.array_equal(getattr(state, name).first(count), getattr(whole[1], name).first(count)).item()
    assert mx.array_equal(state.open_keys, whole[1].open_keys).item()


@pytest.mark.parametrize("num_tokens", EDGES)
def test_a_block_ending_before_the_edge_and_crossing_it_equals_one_block(
    num_tokens: int, tiny: TinyModel, qsa: SparseAttention, inputs: mx.array, whole: tuple[mx.array, QsaState]
) -> None:
    y, _ = run(tiny, qsa, inputs, [num_tokens - 5, 9])
    assert mx.array_equal(y, whole[0]).item()


@pytest.mark.parametrize("num_tokens", [*EDGES, 2055, 2060])
def test_each_edge_row_attends_as_the_equations_say(
    num_tokens: int, tiny: TinyModel, inputs: mx.array, whole: tuple[mx.array, QsaState]
) -> None:
    """An independent float64 computation of one row over all earlier tokens."""
    config, x = tiny.config, np.array(inputs, np.float64)[:num_tokens]
    get = lambda name: np.array(tiny.weights.array_or_matrix(f"{LAYER}.{name}"), np.float64)  # noqa: E731
    position, d, c, heads = (
        num_tokens - 1,
        config.head_dim,
        config.indexer_head_dim,
        config.num_attention_heads,
    )
    inverse = config.rope_theta ** (-np.arange(0, config.rotary_dim, 2) / config.rotary_dim)

    def norm(a: np.ndarray, w: np.ndarray) -> np.ndarray:
        return a / np.sqrt((a * a).mean(-1, keepdims=True) + config.rms_norm_eps) * (1 + w)

    def rotate(a: np.ndarray, at: np.ndarray) -> np.ndarray:
        angle, half = at[:, None] * inverse, len(inverse)
        left, right = a[:, :half], a[:, half : 2 * half]
        turned = [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)]
        return np.concatenate([*turned, a[:, 2 * half :]], axis=1)

    every, here = np.arange(num_tokens), np.array([position])
    index = x @ get("indexer.index_qk_proj").T
    num_blocks = num_tokens // 4
    pooled = norm(index[: 4 * num_blocks, -c:].reshape(num_blocks, 4, c).mean(1), get("indexer.k_layernorm"))
    pooled = rotate(pooled, 4 * np.arange(num_blocks))
    queries = norm(index[position, :-c].reshape(-1, c), get("indexer.q_layernorm"))
    queries = rotate(queries, np.repeat(here, len(queries)))
    scores = np.maximum(pooled @ queries.T, 0).sum(1)
    blocks = np.sort(np.argsort(-scores, kind="stable")[: config.num_select_blocks])
    seen = np.concatenate(
        [(4 * blocks[:, None] + np.arange(4)).ravel(), np.arange(4 * num_blocks, num_tokens)]
    )
    assert len(seen) == (num_tokens if num_tokens <= 2051 else 2048 + num_tokens % 4)

    keys = rotate(norm(x @ get("k_proj").T, get("k_norm")), every)[seen]
    values = (x @ get("v_proj").T)[seen]
    q_gate = (get("q_proj") @ x[position]).reshape(heads, 2, d)
    q = rotate(norm(q_gate[:, 0], get("q_norm")), np.repeat(here, heads))
    weights = np.exp(q @ keys.T / np.sqrt(d))
    attended = (weights / weights.sum(1, keepdims=True)) @ values / (1 + np.exp(-q_gate[:, 1]))
    wanted = get("o_proj") @ attended.reshape(-1)
    assert np.abs(np.array(whole[0][position]) - wanted).max() < 2e-5


def test_above_the_budget_a_step_gathers_a_width_that_does_not_grow_with_the_context(
    tiny: TinyModel, qsa: SparseAttention
) -> None:
    widths: dict[int, int] = {}
    attend = mx.fast.scaled_dot_product_attention

    def spy(q, k, v, **options):
        widths[position + 1] = k.shape[2]
        assert k.shape[2] == v.shape[2]
        return attend(q, k, v, **options)

    x = mx.random.normal((6000, tiny.config.hidden_size), key=mx.random.key(1))
    with mock.patch.object(mx.fast, "scaled_dot_product_attention", spy):
        for context in (2050, 2051, 2052, 2500, 5999):
            state, position = empty_qsa(tiny.config, mx.float32, None), 0
            _, staged = qsa(x[: context - 1], state, 0)
            position = context - 1
            qsa(x[position:context], staged.final, position)
    # Dense up to 2,051; then budget + block length, always.
    assert widths == {2050: 2050, 2051: 2051, 2052: 2052, 2500: 2052, 5999: 2052} | {1: widths[1]}


def test_above_the_budget_a_step_reads_only_selected_keys(tiny: TinyModel, qsa: SparseAttention) -> None:
    """Rows that were not selected may hold anything, even NaN, and not a bit of the result changes."""
    x = mx.random.normal((2400, tiny.config.hidden_size), key=mx.random.key(2))
    state = empty_qsa(tiny.config, mx.float32, None)
    state = qsa(x[:2399], state, 0)[1].final
    chosen: list[mx.array] = []
    choose = SparseAttention._choose

    def spy(self, index_q, pooled, position):
        tokens, is_seen = choose(self, index_q, pooled, position)
        chosen.append(tokens)
        return tokens, is_seen

    with mock.patch.object(SparseAttention, "_choose", spy):
        clean, _ = qsa(x[2399:], state, 2399)
        unread = np.setdiff1d(np.arange(2399), np.array(chosen[0]))
        assert len(unread) > 300
        poison = np.zeros((1, state.keys.array.shape[1], 1), np.float32)
        poison[:, unread] = np.nan
        state.keys.array = state.keys.array + mx.array(poison)
        state.values.array = state.values.array + mx.array(poison)
        poisoned, _ = qsa(x[2399:], state, 2399)
    assert mx.array_equal(clean, poisoned).item()
