"""What route predictors are trained for, and how their confidence is made honest.

Entry points: `loss_and_slope`, `fit_calibration`, `calibration_error`, `recalls`. Three things are asked of
the scores of a row and a layer, all of the same logits:

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

import numpy as np
from numpy.typing import NDArray

from drafter.train.schedule import BETAS, EPSILON

RANKING, OVERFETCH = 0.3, 0.05
BINS = 15
_NEWTON_STEPS = 20
_RIDGE = 1e-3


def layer_weights(layers: Sequence[int]) -> NDArray[np.float32]:
    """Return what a hint for each layer is worth by its deadline: half for the first, near one for the last.

    A ticket for layer l that is issued with the proposal has the time of l layers to be read in.
    """
    return np.asarray([(layer + 1) / (layer + 2) for layer in layers], np.float32)


def loss_and_slope(
    scores_LNE: NDArray[np.float32],
    wanted_LNE: NDArray[np.float32],
    weights_LN: NDArray[np.float32],
    *,
    top_k: int,
    ranking: float = RANKING,
    overfetch: float = OVERFETCH,
) -> tuple[float, NDArray[np.float32]]:
    """Return the weighted mean over rows and layers of what is minimised, and its slope in every score.

    Written out rather than differentiated: the predictors are shallow, and this is several times faster on a
    processor than any framework here.

    Args:
        scores_LNE: log-odds.
        wanted_LNE: 1 for the experts that the native router chose, else 0.
        weights_LN: of every layer and row; 0 leaves it out.
        top_k: experts that a row chooses.
        ranking: weight of the listwise part.
        overfetch: weight of the expected number of experts beyond `top_k`.
    """
    whole = max(float(weights_LN.sum()), 1e-6)
    largest = scores_LNE.max(axis=-1, keepdims=True)
    raised = np.exp(scores_LNE - largest)
    total = raised.sum(axis=-1, keepdims=True)
    decay = np.exp(-np.abs(scores_LNE))  # chance and its log without overflow
    chance = np.where(scores_LNE >= 0, 1.0, decay) / (1.0 + decay)
    softplus = np.maximum(scores_LNE, 0.0) + np.log1p(decay)
    chosen = (wanted_LNE * scores_LNE).sum(axis=-1)
    beyond = chance.sum(axis=-1) - top_k
    among = (largest + np.log(total)).squeeze(-1) - chosen / top_k
    each = softplus.sum(axis=-1) - chosen + ranking * among + overfetch * np.maximum(beyond, 0.0)
    slope = chance - wanted_LNE
    slope += ranking * (raised / total - wanted_LNE / top_k)
    slope += (overfetch * (beyond > 0))[..., None] * (chance * (1.0 - chance))
    slope *= (weights_LN / whole)[..., None]
    return float((weights_LN * each).sum() / whole), slope.astype(np.float32)


class Adam:
    """The optimiser of drafts (`adam.py`) on numpy arrays, in place, gradients clipped by their common norm.

    Args:
        params: changed by every step.
        clip: largest norm.

    Attributes:
        params, first, second, count: values, moments and steps done; a checkpoint keeps them.
    """

    def __init__(self, params: dict[str, NDArray[np.float32]], clip: float = 1.0) -> None:
        self.params, self._clip, self.count = params, clip, 0
        self.first = {name: np.zeros_like(value) for name, value in params.items()}
        self.second = {name: np.zeros_like(value) for name, value in params.items()}

    def step(self, gradients: dict[str, NDArray[np.float32]], rate: float) -> None:
        """Move the parameters once."""
        (beta1, beta2), self.count = BETAS, self.count + 1
        norm = float(np.sqrt(sum(float(np.square(value).sum()) for value in gradients.values())))
        factor = np.float32(min(1.0, self._clip / (norm + 1e-6)))
        size = np.float32(rate / (1 - beta1**self.count))
        root = np.float32(1 / (1 - beta2**self.count))
        for name, value in gradients.items():
            first, second = self.first[name], self.second[name]
            first *= beta1
            first += (1 - beta1) * factor * value
            second *= beta2
            second += (1 - beta2) * np.square(factor * value)
            self.params[name] -= size * first / (np.sqrt(root * second) + EPSILON)


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
