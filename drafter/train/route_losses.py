"""What route predictors are trained for, and how their confidence is made honest.

Entry points: `route_loss`, `fit_calibration`, `calibration_error`, `recalls`. Three things are asked of the
scores of a row and a layer, all of the same logits:

    chance       cross entropy of every expert's probability: what a ticket's confidence must mean
    ranking      listwise cross entropy of the chosen among all: who comes first when bytes are few
    overfetch    expected number of experts beyond those a row can choose: bytes read for nothing

Rows count by the chance that the answer keeps them, layers by how long before their turn they are named: a
hint for the first layer has next to no time to be read in.

Source: the issue of route hints; DESIGN 6; metrics.md, "Prediction".
"""

# Shapes: N rows, L layers, E experts, K experts of a row.

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

RANKING, OVERFETCH = 0.3, 0.05
BINS = 15
_NEWTON_STEPS = 20
_RIDGE = 1e-3


def layer_weights(layers: Sequence[int]) -> NDArray[np.float32]:
    """Return what a hint for each layer is worth by its deadline: half for the first, near one for the last.

    A ticket for layer l that is issued with the proposal has the time of l layers to be read in.
    """
    return np.asarray([(layer + 1) / (layer + 2) for layer in layers], np.float32)


def route_loss(
    scores_NLE: mx.array,
    wanted_NLE: mx.array,
    weights_NL: mx.array,
    *,
    top_k: int,
    ranking: float = RANKING,
    overfetch: float = OVERFETCH,
) -> mx.array:
    """Return the weighted mean over rows and layers of what is minimised; a lazy scalar.

    Args:
        scores_NLE: log-odds.
        wanted_NLE: 1 for the experts that the native router chose, else 0.
        weights_NL: of every row and layer; 0 leaves it out.
        top_k: experts that a row chooses.
        ranking: weight of the listwise part.
        overfetch: weight of the expected number of experts beyond `top_k`.
    """
    chance = (mx.logaddexp(scores_NLE, 0.0) - wanted_NLE * scores_NLE).sum(axis=-1)
    among = mx.logsumexp(scores_NLE, axis=-1) - (wanted_NLE * scores_NLE).sum(axis=-1) / top_k
    beyond = mx.maximum(mx.sigmoid(scores_NLE).sum(axis=-1) - top_k, 0.0)
    whole = chance + ranking * among + overfetch * beyond
    return (weights_NL * whole).sum() / mx.maximum(weights_NL.sum(), 1e-6)


def wanted(routes_NLK: NDArray[np.integer], num_experts: int) -> NDArray[np.float32]:
    """Return [N, L, E] with 1 for every expert that was chosen."""
    found = np.zeros((*routes_NLK.shape[:-1], num_experts), np.float32)
    np.put_along_axis(found, routes_NLK.astype(np.int64), 1.0, axis=-1)
    return found


def fit_calibration(scores: NDArray[np.float32], is_chosen: NDArray[np.bool_]) -> tuple[float, float]:
    """Return scale and shift of log-odds under which they mean what they say: Platt's, by Newton's method.

    Args:
        scores: log-odds of any shape, of rows that training has not seen.
        is_chosen: of the same shape.
    """
    x, y = scores.reshape(-1).astype(np.float64), is_chosen.reshape(-1).astype(np.float64)
    scale, shift = 1.0, 0.0
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(scale * x + shift, -30, 30)))
        error, spread = p - y, p * (1 - p)
        gradient = np.array([(error * x).sum() + _RIDGE * (scale - 1), error.sum() + _RIDGE * shift])
        cross = (spread * x).sum()
        hessian = np.array([[(spread * x * x).sum() + _RIDGE, cross], [cross, spread.sum() + _RIDGE]])
        move = np.linalg.solve(hessian, gradient)
        size = min(1.0, 1.0 / max(1e-9, float(np.abs(move).max())))
        scale, shift = scale - size * move[0], shift - size * move[1]
        if np.abs(move).max() < 1e-6:
            break
    return float(scale), float(shift)


def calibration_error(chance: NDArray[np.float32], is_chosen: NDArray[np.bool_]) -> float:
    """Return the expected calibration error, 15 bins of equal width. Source: metrics.md, "Prediction"."""
    chance, is_chosen = chance.reshape(-1), is_chosen.reshape(-1)
    bins = np.clip((chance * BINS).astype(int), 0, BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    said = np.bincount(bins, chance, minlength=BINS)
    found = np.bincount(bins, is_chosen, minlength=BINS)
    return float(np.abs(said - found).sum() / max(1, count.sum()))


def recalls(
    scores_NLE: NDArray[np.float32], wanted_NLE: NDArray[np.float32], sizes: Sequence[int]
) -> NDArray[np.float64]:
    """Return recall@n of every row and layer, [len(sizes), N, L]: |predicted top-n and chosen| / |chosen|.

    Args:
        scores_NLE: whatever orders experts.
        wanted_NLE: 1 for those chosen.
        sizes: the numbers n.
    """
    order = np.argsort(-scores_NLE, axis=-1, kind="stable")[..., : max(sizes)]
    hits = np.cumsum(np.take_along_axis(wanted_NLE, order, axis=-1), axis=-1)
    total = np.maximum(wanted_NLE.sum(axis=-1), 1)
    return np.stack([hits[..., size - 1] / total for size in sizes])
