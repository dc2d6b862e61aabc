"""What a plan is told of a draft, held against what MLX really took."""

from __future__ import annotations

import mlx.core as mx
import pytest

from drafter.api import DraftSampling
from drafter.config import DraftConfig
from drafter.dflash2 import Dflash2Drafter, Dflash2Options
from drafter.sizes import DraftSizes
from mlx_flashnext.engine.streams import draw_draft
from tests.tiny.drafts import TableTarget, draft_config, random_parameters

CONTEXT, CHUNK = 1500, 64
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "dflash_config.selector_rank": 32,
    "dflash_config.selector_top_k": 16,
}
# Each makes another part the largest: keys and values, logits, rows of a chunk, layers that keep everything.
DRAFTS = {
    "window": {"sliding_window": 1024, "vocab_size": 2048},
    "vocabulary": {"sliding_window": 64, "vocab_size": 32768},
    "layers": {
        "sliding_window": 128,
        "vocab_size": 2048,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 5,
        "num_key_value_heads": 4,
    },
    "full": {"layer_types": ["sliding_attention", "full_attention"], "vocab_size": 2048},
}


class Measured:
    """A drafter of some size, shown rows chunk by chunk, and the peaks of its calls over what it holds."""

    def __init__(self, config: DraftConfig) -> None:
        self.config, self.position = config, 0
        params = random_parameters(config)
        mx.eval(params)
        target = TableTarget(config.vocab_size, config.hidden_size)
        mx.eval(target.embed(mx.array([0])), target.head(mx.zeros((1, config.hidden_size))))
        self.drafter = Dflash2Drafter(
            params,
            config,
            target,
            draw_draft,
            dtype=mx.float32,
            contraction="mean",
            options=Dflash2Options(num_ids=config.vocab_size - 4, capacity_tokens=CONTEXT),
        )

    def observe(self, num_rows: int) -> int:
        features = mx.random.normal((num_rows, self.config.feature_width))
        mx.eval(features)
        before = self._begin()
        self.drafter.observe([1] * num_rows, 2, None, features_RF=features)
        mx.synchronize()
        self.position += num_rows
        return mx.get_peak_memory() - before

    def propose(self, temperature: float) -> int:
        before = self._begin()
        proposal = self.drafter.propose(99, DraftSampling(temperature, 1, self.position + 1))
        mx.eval([] if proposal.row_probs is None else proposal.row_probs)
        return mx.get_peak_memory() - before

    def _begin(self) -> int:
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        return mx.get_active_memory()


@pytest.mark.parametrize("draft", DRAFTS)
def test_calls_stay_within_what_is_planned_and_use_most_of_it(draft: str) -> None:
    changes = WIDE | DRAFTS[draft]
    config = draft_config(changes | {"dflash_config.mask_token_id": changes["vocab_size"] - 1})
    sizes, measured = DraftSizes(config, 4), Measured(config)
    measured.observe(CHUNK)  # makes the rings
    held = [(measured.drafter.num_bytes(), measured.observe(CHUNK)) for _ in range(CONTEXT // CHUNK - 1)]
    rows = CHUNK * sizes.chunk_row()
    planned = sizes.context(CONTEXT) + sizes.growth(CONTEXT) + rows
    assert 0.7 * planned < max(map(sum, held)) <= planned
    assert min(taken for _, taken in held) > rows / 3
    proposals = [measured.propose(temperature) for temperature in (0.0, 1.0)]
    planned = sizes.candidates + sizes.block(measured.position)
    assert planned / 3 < max(proposals) <= planned
    assert measured.drafter.num_bytes() <= sizes.context(CONTEXT)
    snapshot = measured.drafter.snapshot().context.num_bytes()
    assert 0.8 * sizes.snapshot(CONTEXT) < snapshot <= sizes.snapshot(CONTEXT)


def test_only_layers_that_keep_everything_cost_more_with_a_longer_context() -> None:
    """P44, defects 25 and 26: the memory of a draft that slides does not know how long the text is."""
    sliding = DraftSizes(draft_config(), 2)
    for size in (sliding.context, sliding.snapshot, sliding.block, sliding.growth):
        assert size(64) == size(262_144)
    full = DraftSizes(draft_config({"layer_types": ["sliding_attention", "full_attention"]}), 2)
    for size in (full.context, full.snapshot, full.block, full.growth):
        assert size(262_144) > 1000 * size(64) > 0 or size == full.context or size == full.block
    assert full.context(262_144) > full.context(64)
