"""The model against the torch-free numpy oracle, under the canonical tie rule.

The reference breaks ties in its own way; the oracle and the model take the smaller index.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parity.goldens import TOLERANCE, observe, worst
from tests.parity.oracle import Ref
from tests.tiny.checkpoints import build_hf
from tests.tiny.weights import TinyModel

TOKENS = [int(t) for t in np.random.default_rng(23).integers(0, 127, 44)]


@pytest.mark.parametrize(
    ("seed", "overrides"),
    [
        (0, {"indexer_n_heads": 1}),  # one index head: half of all scores are exactly zero and tie
        (4, {"indexer_n_heads": 2, "indexer_budget": 8, "num_hidden_layers": 8}),
        (6, {"hc_count": 2, "ple_layer_ids": [3], "num_experts_per_tok": 1, "linear_conv_kernel_dim": 2}),
    ],
    ids=["tied-scores", "eight-layers", "other-geometry"],
)
def test_logits_routes_masks_and_rows_equal_the_oracle(seed: int, overrides: dict, tmp_path: Path) -> None:
    directory = build_hf(tmp_path, seed=seed, overrides=overrides, tokenizer=False)
    tiny, oracle = TinyModel.open(directory), Ref(directory)
    seen = observe(tiny, TOKENS)
    state, mtp_state, previous = oracle.start(), {"first_pos": 0}, None
    num_ties = 0
    for at, token in enumerate(TOKENS):
        logits, stack, notes = oracle.token(token, at, state)
        assert notes["rows"][0] == seen.rows[at]
        for layer, (ids, _) in enumerate(notes["route"]):
            assert sorted(ids.tolist()) == seen.route_ids[layer][at].tolist(), (at, layer)
        for layer in tiny.config.qsa_layers:
            assert np.array_equal(state[layer]["keep"], seen.masks[layer][at, : at + 1]), (at, layer)
            num_ties += not state[layer]["keep"].all()
        assert worst(seen.stacks[-1, at], stack.reshape(-1)) < TOLERANCE, at
        assert worst(seen.logits[at], logits) < TOLERANCE, at
        if previous is not None:
            assert seen.mtp_logits is not None
            mtp_logits, _, _ = oracle.mtp(previous, token, at - 1, mtp_state)
            assert worst(seen.mtp_logits[at - 1], mtp_logits) < TOLERANCE, at
        previous = stack
    assert num_ties > 0
