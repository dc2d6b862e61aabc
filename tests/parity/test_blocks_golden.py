"""Every sub-module alone against the reference: a failure here names the place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.layer_state import GdnState, QsaState
from mlx_flashnext.model.gdn import GatedDeltaNet
from mlx_flashnext.model.hyper import HyperConnection, HyperRead
from mlx_flashnext.model.moe import MixtureOfExperts
from mlx_flashnext.model.ple import NgramMemory
from mlx_flashnext.model.qsa import SparseAttention
from mlx_flashnext.model.rope import Rope
from tests.parity.goldens import FULL_NAMES, GOLDEN_DIR, TOLERANCE, golden_case, worst

CLOSE = 2e-5


def stack_of(config: ModelConfig, flat: np.ndarray) -> mx.array:
    return mx.array(flat).reshape(len(flat), config.hc_count, config.hidden_size)


@pytest.mark.parametrize("name", FULL_NAMES)
def test_hyper_connection_reads_and_weighs(name: str) -> None:
    _, golden, tiny = golden_case(name)
    hyper = HyperConnection(tiny.config, tiny.weights, "layers.1.mlp_hyper_connection")
    mixed, inject = hyper.read(stack_of(tiny.config, golden["hyper_in"]))
    assert worst(mixed, golden["hyper_mixed"]) < CLOSE
    assert worst(inject, golden["hyper_inject"]) < CLOSE


@pytest.mark.parametrize("name", FULL_NAMES)
def test_hyper_connection_writes_to_the_unnormalised_stack(name: str) -> None:
    _, golden, tiny = golden_case(name)
    written = HyperConnection.write(
        stack_of(tiny.config, golden["hyper_in"]),
        mx.array(golden["moe_out"][1]),
        mx.array(golden["hyper_inject"]),
    )
    assert worst(written.reshape(len(written), -1), golden["stream_after"][1]) < CLOSE


@pytest.mark.parametrize("name", FULL_NAMES)
def test_terminal_mixer_and_head(name: str) -> None:
    _, golden, tiny = golden_case(name)
    stack = stack_of(tiny.config, golden["stream_after"][-1])
    mixer = HyperRead(tiny.config, tiny.weights, "hyper_connection_mixer")
    assert worst(mixer(stack), golden["final_hidden"]) < CLOSE
    assert worst(tiny.model.head(stack), golden["logits"]) < TOLERANCE


@pytest.mark.parametrize("name", FULL_NAMES)
def test_gated_delta_nets(name: str) -> None:
    _, golden, tiny = golden_case(name)
    state = tiny.model.new_state()
    for layer in tiny.config.gdn_layers:
        gdn = GatedDeltaNet(tiny.config, tiny.weights, f"layers.{layer}.linear_attn")
        layer_state = state.layers[layer]
        assert isinstance(layer_state, GdnState)
        y, _ = gdn(mx.array(golden["attn_mixed"][layer]), layer_state, 0)
        assert worst(y, golden["mixer_out"][layer]) < CLOSE, layer


@pytest.mark.parametrize("name", FULL_NAMES)
def test_sparse_attention(name: str) -> None:
    _, golden, tiny = golden_case(name)
    state = tiny.model.new_state()
    for layer in tiny.config.qsa_layers:
        qsa = SparseAttention(tiny.config, tiny.weights, f"layers.{layer}.self_attn", Rope(tiny.config))
        layer_state = state.layers[layer]
        assert isinstance(layer_state, QsaState)
        y, _ = qsa(mx.array(golden["attn_mixed"][layer]), layer_state, 0)
        assert worst(y, golden["mixer_out"][layer]) < CLOSE, layer


@pytest.mark.parametrize("name", FULL_NAMES)
def test_router_and_experts(name: str) -> None:
    _, golden, tiny = golden_case(name)
    for layer in range(tiny.config.num_hidden_layers):
        moe = MixtureOfExperts(
            tiny.config, tiny.weights, f"layers.{layer}.mlp", layer, tiny.experts, tiny.sync
        )
        x = mx.array(golden["mlp_mixed"][layer])
        ids, weights = moe.route(x)
        order = np.argsort(golden["router_ids"][layer], axis=-1)
        assert np.array_equal(np.array(ids), np.take_along_axis(golden["router_ids"][layer], order, -1))
        assert worst(weights, np.take_along_axis(golden["router_w"][layer], order, -1)) < CLOSE
        assert worst(moe(x), golden["moe_out"][layer]) < CLOSE, layer


@pytest.mark.parametrize("name", FULL_NAMES)
def test_ngram_memory(name: str) -> None:
    case, golden, tiny = golden_case(name)
    ple = NgramMemory(tiny.config, tiny.weights, f"layers.{tiny.config.ple_layer}.ple")
    rows = tiny.rows.issue(golden["ngram_rows"].tolist()).wait()
    stack = stack_of(tiny.config, golden["ple_in"])
    delta, _ = ple(stack, case.tokens, rows, tiny.model.new_state().ple)
    assert worst(delta.reshape(len(stack), -1), golden["ple_delta"]) < CLOSE


def real_rope() -> Rope:
    """Return the rotary table of the real geometry, which only these two fields decide."""

    class Geometry:
        rotary_dim = 64
        rope_theta = 10_000_000.0

    return Rope(Geometry())  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", ["queries", "index_keys"])
def test_rope_equals_the_reference_up_to_the_longest_context(heads: str) -> None:
    with np.load(GOLDEN_DIR / "rope.npz") as golden:
        rope = real_rope()
        for at, position in enumerate(golden["positions"].tolist()):
            rotated = rope(mx.array(golden[heads][0, :, at : at + 1]), position)
            assert worst(rotated, golden[f"{heads}_rotated"][0, :, at : at + 1]) < 5e-7, position


def test_rope_strides_over_block_starts() -> None:
    rope, x = real_rope(), mx.random.normal((1, 5, 128), key=mx.random.key(1))
    strided = rope(x, 50_000, stride=4)
    single = [rope(x[:, i : i + 1], 4 * (50_000 + i)) for i in range(5)]
    assert mx.array_equal(strided, mx.concatenate(single, axis=1)).item()
