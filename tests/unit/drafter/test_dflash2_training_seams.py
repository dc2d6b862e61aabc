"""What a trainer needs of the network: many blocks in one pass, gradients, scores of true predecessors."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from drafter import selector
from drafter.block import LayerContext, hidden_states, visible
from drafter.config import DraftConfig
from drafter.fuse import context_keys_values, fuse
from drafter.layers import Params, rotary_frequencies
from tests.tiny.drafts import draft_config, random_parameters

ROWS, STARTS, SLOTS = 40, (3, 9, 10, 31), 8


def contexts(params: Params, config: DraftConfig, features_SF: mx.array) -> list[LayerContext]:
    """The context of a whole sequence: what a trainer computes once for all blocks of it."""
    freqs = rotary_frequencies(config.rope_theta, config.head_dim)
    fused = fuse(params, config, features_SF)
    positions = np.arange(features_SF.shape[0], dtype=np.int32)
    return [
        LayerContext(*context_keys_values(params, config, layer, fused, 0, freqs), positions)
        for layer in range(config.num_layers)
    ]


@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("kinds", [["sliding_attention"] * 2, ["full_attention", "sliding_attention"]])
def test_many_blocks_at_once_equal_each_alone_over_the_rows_before_it(
    kinds: list[str], is_causal: bool | None
) -> None:
    config = draft_config({"layer_types": kinds, "is_causal": is_causal})
    params = random_parameters(config)
    freqs = rotary_frequencies(config.rope_theta, config.head_dim)
    features = mx.random.normal((ROWS, config.feature_width), key=mx.random.key(2))
    embeddings = mx.random.normal((len(STARTS), SLOTS, 32), key=mx.random.key(3))
    together = hidden_states(params, config, embeddings, STARTS, contexts(params, config, features), freqs)
    for block, start in enumerate(STARTS):
        alone = hidden_states(
            params,
            config,
            embeddings[block : block + 1],
            (start,),
            contexts(params, config, features[:start]),
            freqs,
        )
        assert np.abs(np.array(together[block]) - np.array(alone[0])).max() < 2e-5


def test_no_block_sees_another_nor_its_own_anchors_row_nor_what_comes_after() -> None:
    config = draft_config({"layer_types": ["full_attention", "sliding_attention"]})
    positions = np.arange(ROWS, dtype=np.int32)
    for layer in range(2):
        seen = visible(config, layer, STARTS, SLOTS, positions).reshape(len(STARTS), SLOTS, -1)
        for block, start in enumerate(STARTS):
            assert not seen[block, :, start:ROWS].any()
            assert seen[block, 0, start - 1]
            own = np.zeros(len(STARTS) * SLOTS, bool)
            own[block * SLOTS : (block + 1) * SLOTS] = True
            assert (seen[block, :, ROWS:] == own[None]).all()


def test_a_loss_over_blocks_has_a_gradient_for_every_parameter() -> None:
    config = draft_config()
    params = random_parameters(config)
    freqs = rotary_frequencies(config.rope_theta, config.head_dim)
    features = mx.random.normal((ROWS, config.feature_width), key=mx.random.key(2))
    embeddings = mx.random.normal((len(STARTS), SLOTS, 32), key=mx.random.key(3))
    head = mx.random.normal((128, 32), key=mx.random.key(4))
    targets = mx.random.randint(0, 124, (len(STARTS), SLOTS), key=mx.random.key(5))

    ids: list[mx.array] = []

    def loss(tree: dict[str, mx.array]) -> mx.array:
        hidden = hidden_states(tree, config, embeddings, STARTS, contexts(tree, config, features), freqs)
        rows = hidden[:, 1:].reshape(-1, 32)
        logits = selector.unary_logits(config, lambda x: x @ head.T, rows)
        # The same candidates always: which they are is no smooth function of anything.
        chosen = ids or [selector.candidates(mx.stop_gradient(logits), config.top_k).ids]
        ids[:] = chosen
        true = targets[:, :-1].reshape(-1)
        scores = selector.slot_scores(
            tree,
            true,
            selector.project(tree, rows),
            chosen[0],
            mx.take_along_axis(logits, chosen[0], axis=-1),
        )
        wanted = targets[:, 1:].reshape(-1, 1)
        base = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, wanted, axis=-1).squeeze(-1)
        return base.mean() + (mx.logsumexp(scores, axis=-1) - scores[:, 0]).mean()

    mx.eval(loss(params), *ids)
    value, gradients = mx.value_and_grad(loss)(params)
    assert gradients.keys() == params.keys()
    idle = [name for name, gradient in gradients.items() if not float(mx.abs(gradient).max()) > 0]
    assert idle == []
    name = "layers.0.attention_conv.base_kernel"  # one check by differences
    step = 1e-3 * mx.random.normal(params[name].shape, key=mx.random.key(6))
    ahead, behind = (loss(params | {name: params[name] + sign * step}) for sign in (1, -1))
    slope = float((gradients[name] * step).sum())
    assert abs(float(ahead - behind) / 2 - slope) < 0.05 * abs(slope) + 1e-5
    assert np.isfinite(float(value))
