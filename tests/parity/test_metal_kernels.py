"""The kernels a decoded token of the real model meets on Metal, each against the CPU backend.

Skipped without a Metal device. Every case is a shape or a layout that this model uses and that MLX has a path
of its own for: one token, heads as rows, grouped queries, masks, places known on the host.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.model.select import select_top
from mlx_flashnext.stored_numbers import array_memory

pytestmark = pytest.mark.metal

GPU, CPU = mx.Device(mx.gpu), mx.Device(mx.cpu)


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return the same numbers on either backend."""
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def on(device: mx.Device, build: Callable[[], list[mx.array]]) -> list[mx.array]:
    """Return what a graph gives on a device."""
    with mx.stream(device):
        arrays = build()
        mx.eval(arrays)
    return arrays


def worst(ours: Callable[[], list[mx.array]], theirs: Callable[[], list[mx.array]] | None = None) -> float:
    """Return the largest difference between Metal and the CPU backend, relative to the largest value.

    Args:
        ours: Runs on Metal.
        theirs: Runs on the CPU, which accumulates badly in bfloat16; the same when left out.
    """
    pairs = zip(on(GPU, ours), on(CPU, theirs or ours), strict=True)
    wide = [[np.array(each.astype(mx.float32)) for each in pair] for pair in pairs]
    return max(float(np.abs(found - right).max() / np.abs(right).max()) for found, right in wide)


@pytest.mark.parametrize("position", [5, 2_000, 200_000])
@pytest.mark.parametrize(("heads", "tokens", "width"), [(24, 1, 256), (2, 1, 256), (24, 7, 256), (1, 5, 128)])
def test_rope_turns_every_head_at_every_position(heads: int, tokens: int, width: int, position: int) -> None:
    x_hTd = normal(1, tokens, heads, width).swapaxes(0, 1)
    freqs = mx.power(mx.array(1e7), mx.arange(0, 64, 2, dtype=mx.float32) / 64)

    def turned() -> list[mx.array]:
        return [
            mx.fast.rope(
                x_hTd[None], 64, traditional=False, base=None, scale=1.0, offset=position, freqs=freqs
            )
        ]

    assert worst(turned) < 1e-4


@pytest.mark.parametrize(("rows", "candidates", "k"), [(1, 512, 10), (33, 512, 10), (1, 16_384, 512)])
def test_the_k_largest_are_the_same_experts_and_blocks(rows: int, candidates: int, k: int) -> None:
    # Rounded to bfloat16: full of ties.
    logits = normal(2, rows, candidates, dtype=mx.bfloat16).astype(mx.float32)
    scores = on(CPU, lambda: [mx.softmax(logits, axis=-1)])[0]
    (ours,), (theirs,) = (on(device, lambda: [select_top(scores, k)]) for device in (GPU, CPU))
    assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("tokens", [1, 8, 9, 32])
def test_the_recurrence_steps_and_chunks_alike(tokens: int) -> None:
    q, k = (normal(seed, 1, tokens, 16, 128) * 128**-0.5 for seed in (3, 4))
    v, state = normal(5, 1, tokens, 48, 128), normal(6, 1, 48, 128, 128)
    decay, beta = (mx.sigmoid(normal(seed, 1, tokens, 48)) for seed in (7, 8))
    assert worst(lambda: list(mx.fast.gated_delta_update(q, k, v, decay, beta, initial_state=state))) < 1e-4


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 900), (1, 2_051), (2, 2_051), (5, 900), (128, 2_051)])
def test_dense_attention_of_a_buffer_longer_than_its_keys(tokens: int, keys: int, dtype: mx.Dtype) -> None:
    q = normal(9, 1, 24, tokens, 256, dtype=mx.bfloat16)
    k, v = (normal(seed, 1, 2, 2_304, 256, dtype=mx.bfloat16) for seed in (10, 11))

    def attended(dtype: mx.Dtype) -> list[mx.array]:
        queries, held, values = (each.astype(dtype) for each in (q, k, v))
        mask = "causal" if tokens > 1 else None
        return [
            mx.fast.scaled_dot_product_attention(
                queries, held[:, :, :keys], values[:, :, :keys], scale=1 / 16, mask=mask
            )
        ]

    limit = 1e-4 if dtype == mx.float32 else 2e-2
    assert worst(lambda: attended(dtype), lambda: attended(mx.float32)) < limit


@pytest.mark.parametrize("rows", [1, 16])
def test_sparse_attention_of_gathered_keys_under_a_mask(rows: int) -> None:
    q, keys = normal(12, rows, 24, 1, 256), normal(13, 2, 4_096, 256)
    chosen = mx.array(np.sort(np.random.default_rng(14).integers(0, 4_096, (rows, 2_052)), axis=1))
    is_seen = mx.array(np.random.default_rng(15).random((rows, 2_052)) < 0.999)

    def attended() -> list[mx.array]:
        taken = mx.take(keys, chosen.reshape(-1), axis=1).reshape(2, rows, 2_052, 256).swapaxes(0, 1)
        return [
            mx.fast.scaled_dot_product_attention(q, taken, taken, scale=1 / 16, mask=is_seen[:, None, None])
        ]

    assert worst(attended) < 1e-4


@pytest.mark.parametrize("pairs", [10, 160])
def test_bytes_written_by_the_host_are_what_the_next_graph_reads(pairs: int) -> None:
    bank = on(GPU, lambda: [mx.zeros((16, 64, 256), mx.bfloat16)])[0]
    memory = array_memory(bank)
    slots = mx.array(np.sort(np.random.default_rng(16).integers(0, 16, pairs)), mx.uint32)
    x = normal(17, pairs, 1, 256, dtype=mx.bfloat16)
    for seed in range(18, 22):
        stored = normal(seed, 16, 64, 256, dtype=mx.bfloat16)
        memory[:] = array_memory(on(CPU, lambda stored=stored: [stored])[0])
        (ours,) = on(
            GPU,
            lambda: [mx.gather_mm(x, bank.swapaxes(-1, -2), rhs_indices=slots, sorted_indices=pairs >= 64)],
        )
        wide, rows = np.array(stored.astype(mx.float32)), np.array(x.astype(mx.float32))
        theirs = np.einsum("pki,poi->pko", rows, wide[np.array(slots)])
        assert np.abs(np.array(ours.astype(mx.float32)) - theirs).max() < 2e-2 * np.abs(theirs).max()
