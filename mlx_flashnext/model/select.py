"""The k largest scores of each row, ties to the smaller index: one rule for QSA blocks and for experts.

Invariant: the result depends on the scores alone. `argpartition` and `topk` break ties by their own order,
which differs between backends and block sizes; with bfloat16 router logits a tie at the cut occurs in one of
eight token-layers, so the rule is part of the model's identity.

Source: qwen4exp.md 2.5 and 2.7, statements 16 and 17.
"""

# Shapes: R rows, N candidates, k chosen.

from __future__ import annotations

import mlx.core as mx


def select_top(scores_RN: mx.array, k: int) -> mx.array:
    """Return the indices of the k largest scores of each row, in ascending index order.

    Args:
        scores_RN: float32; at least k finite scores in each row.
        k: How many to choose, at most N.

    Returns:
        indices_Rk, int32.
    """
    R, N = scores_RN.shape
    cut_R1 = mx.partition(scores_RN, N - k, axis=-1)[:, N - k : N - k + 1]
    above_RN = scores_RN > cut_R1
    equal_RN = scores_RN == cut_R1
    need_R1 = k - above_RN.sum(axis=-1, keepdims=True)
    chosen_RN = above_RN | (equal_RN & (mx.cumsum(equal_RN.astype(mx.int32), axis=-1) <= need_R1))
    # Scatter each chosen index to its rank; what is not chosen lands in a spare last column.
    rank_RN = mx.where(chosen_RN, mx.cumsum(chosen_RN.astype(mx.int32), axis=-1) - 1, k)
    index_RN = mx.broadcast_to(mx.arange(N, dtype=mx.int32), (R, N))
    return mx.put_along_axis(mx.zeros((R, k + 1), mx.int32), rank_RN, index_RN, axis=-1)[:, :k]
