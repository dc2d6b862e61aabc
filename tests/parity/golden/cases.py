"""The tiny configurations whose reference outputs are committed beside this file.

`CASES` is read by `generate.py` (which makes the goldens) and by the parity tests (which rebuild the
checkpoints).
All are float32 and were chosen free of tied QSA scores, so that the reference's own tie order never matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

EOS = 120


@dataclass(frozen=True)
class Case:
    """One golden run: config overrides, weight seed, prompt, and how much of the run is committed."""

    seed: int
    tokens: tuple[int, ...]
    overrides: dict[str, Any] = field(default_factory=dict)
    full: bool = False  # also commit the inputs and outputs of every sub-module
    stack_rows: int | None = None  # commit the stacks of the last rows only; None commits all


def random_tokens(seed: int, count: int, eos_at: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Draw ordinary token ids, with the n-gram separator at the given positions."""
    tokens = [int(t) for t in np.random.default_rng(seed).integers(0, 118, count)]
    for position in eos_at:
        tokens[position] = EOS
    return tuple(tokens)


# The spec's own 61-token prompt: separators at p and p-1, and one alone.
DEFAULT_TOKENS = random_tokens(7, 61, (20, 21, 40))

# Separator first, last, doubled, and one token apart; also the turn end 126, which must NOT cut the context.
SEPARATORS = list(random_tokens(11, 40, (0, 5, 7, 12, 13, 14, 23, 31, 39)))
SEPARATORS[9] = SEPARATORS[18] = SEPARATORS[19] = SEPARATORS[26] = 126

CASES: dict[str, Case] = {
    "default": Case(seed=2, tokens=DEFAULT_TOKENS, full=True),
    "second": Case(seed=3, tokens=DEFAULT_TOKENS),
    # 127 tokens are 31 blocks of 4, of which 4 may be selected; its rows have tails of 0, 1, 2 and 3 tokens.
    "long": Case(seed=3, tokens=random_tokens(13, 127, (64,)), stack_rows=40),
    "separators": Case(seed=3, tokens=tuple(SEPARATORS)),
    # Every head count odd, top-k weights not renormalised, other widths and kernels than the real model's
    # ratios.
    "odd": Case(
        seed=5,
        tokens=random_tokens(17, 47, (11, 12, 30)),
        overrides={
            "norm_topk_prob": False,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 48,
            "partial_rotary_factor": 0.5,
            "indexer_n_heads": 5,
            "indexer_head_dim": 40,
            "indexer_compress_ratio": 3,
            "indexer_budget": 12,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 9,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 3,
            "hc_count": 3,
            "hc_lowrank": 20,
            "heads_per_ngram": 3,
            "ple_embed_dim": 192,
            "ple_conv_kernel_size": 3,
            "num_experts": 13,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 24,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [4, 4, 4],
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
        },
        full=True,
    ),
}
