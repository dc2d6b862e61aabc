"""The k largest scores of each row, ties to the smaller index: one rule for QSA blocks and for experts.

Invariant: the result depends on the scores alone. `argpartition` and `topk` break ties by their own order,
which differs between backends and block sizes; with bfloat16 router logits a tie at the cut occurs in one of
eight token-layers, so the rule is part of the model's identity. Here no two candidates are equal: score and
index are one integer, so any sort of any backend gives the same.

Source: qwen4exp.md 2.5 and 2.7, statements 16 and 17.
"""

# Shapes: R rows, N candidates, k chosen.

from __future__ import annotations

import mlx.core as mx


def select_top(scores_RN: mx.array, k: int) -> mx.array:
    """Return the indices of the k largest scores of each row, in ascending index order.

    Args:
        scores_RN: float32, none below zero but minus infinity; at least k finite scores in each row.
        k: How many to choose, at most N.

    Returns:
        indices_Rk, int32.
    """
    # The bits of floats that are not negative ascend with their value. Minus infinity reads as a negative
    # integer: last. The best candidate has the smallest rank, its index is the low half.
    bits_RN = scores_RN.view(mx.int32).astype(mx.int64)
    rank_RN = mx.arange(scores_RN.shape[-1], dtype=mx.int64) - mx.left_shift(bits_RN, 32)
    return mx.sort(mx.partition(rank_RN, k - 1, axis=-1)[:, :k].astype(mx.int32), axis=-1)
