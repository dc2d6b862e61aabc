"""What each source of hints knows, at equal bytes: recall, precision and honesty by layer and row.

Entry points: `Scoring`, `judge`. Every verified row of every layer is scored for every predictor as of the
moment at which its hint would be issued: what it ranks first is held against what the native router chose. A
row counts whether it was kept or not, since its experts are read either way. A predictor that says nothing of
a layer has recalled nothing of it.

Source: metrics.md, "Prediction".
"""

# Shapes: T rows of a block, L layers, E experts, K experts of a row.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drafter.train.route_losses import BINS, recalls

FORMAT = "flashnext-predictors"
VERSION = 1
MULTIPLES: Final = (1.0, 1.5, 2.0, 3.0)
"""Experts that a predictor may name of a row and a layer, in multiples of those that a router chooses."""
AT: Final = 2
"""Which of them single figures are quoted at: 2 x top_k."""
PREDICTORS: Final = (
    "random", "frequency", "token-frequency", "previous", "near-gate", "near-linear",
    "sidecar-early", "sidecar", "sidecar-refreshed", "both", "oracle",
)  # fmt: skip
WITH_CHANCES: Final = (
    "frequency", "token-frequency", "near-linear", "sidecar-early", "sidecar", "sidecar-refreshed", "both",
)  # fmt: skip
ANCHOR_ONLY: Final = ("sidecar-early",)
"""Asked before there is a proposal, and so of the anchor's row alone: no other row counts."""


@dataclass(slots=True)
class _Sums:
    """Sums over rows of one predictor."""

    by_layer: NDArray[np.float64]  # [sizes, L]
    by_row: NDArray[np.float64]  # [sizes, most rows]
    said: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))
    right: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))
    count: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))
    num_named: float = 0.0
    num_hits: float = 0.0


class Scoring:
    """Adds up how right predictors were.

    Args:
        layers: that are streamed.
        num_experts: of each.
        top_k: that a row chooses.
        most_rows: of a block.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, top_k: int, most_rows: int) -> None:
        self.layers = tuple(layers)
        self.sizes = tuple(min(num_experts, int(multiple * top_k)) for multiple in MULTIPLES)
        self._top_k, self._num_experts, self._most_rows = top_k, num_experts, most_rows
        self._sums: dict[str, _Sums] = {}
        self.num_rows = np.zeros(most_rows)
        self.num_kept = np.zeros(most_rows)

    def add(
        self,
        scores: Mapping[str, NDArray[np.float32]],
        wanted_TLE: NDArray[np.float32],
        num_kept: int,
    ) -> None:
        """Take a verified block.

        Args:
            scores: [T, L, E] by predictor, [1, L, E] of those in `ANCHOR_ONLY`: log-odds where it has them,
                else whatever orders experts; minus infinity for what it does not name.
            wanted_TLE: 1 for what the routers chose.
            num_kept: rows that the answer kept.
        """
        rows = len(wanted_TLE)
        self.num_rows[:rows] += 1
        self.num_kept[:num_kept] += 1
        for name, scores_TLE in scores.items():
            sums = self._sums.setdefault(name, self._fresh())
            is_named, asked = np.isfinite(scores_TLE), len(scores_TLE)
            truth = wanted_TLE[:asked]
            found = recalls(scores_TLE, truth * is_named, self.sizes) * _share_named(truth, is_named)
            sums.by_layer += found.sum(axis=1)
            sums.by_row[:, :asked] += found.mean(axis=2)
            named = np.minimum(is_named.sum(axis=-1), self.sizes[AT])
            sums.num_named += float(named.sum())
            sums.num_hits += float(found[AT].sum()) * self._top_k
            if name in WITH_CHANCES:
                chance = 1 / (1 + np.exp(-np.clip(scores_TLE[is_named].astype(np.float64), -30, 30)))
                bins = np.clip((chance * BINS).astype(int), 0, BINS - 1)
                sums.count += np.bincount(bins, minlength=BINS)
                sums.said += np.bincount(bins, chance, minlength=BINS)
                sums.right += np.bincount(bins, truth[is_named], minlength=BINS)

    def results(self) -> list["PredictorFigures"]:
        """Return the figures of every predictor that was scored, in the order of `PREDICTORS`."""
        return [self._figures(name) for name in PREDICTORS if name in self._sums]

    def _figures(self, name: str) -> "PredictorFigures":
        sums, rows = self._sums[name], self.num_rows.copy()
        if name in ANCHOR_ONLY:
            rows[1:] = 0
        by_row = sums.by_row[AT] / np.maximum(rows, 1)
        total = rows.sum()
        error = float(np.abs(sums.said - sums.right).sum() / max(1.0, sums.count.sum()))
        return PredictorFigures(
            name=name,
            recall=tuple((sums.by_layer.mean(axis=1) / total).tolist()),
            by_layer=tuple((sums.by_layer[AT] / total).tolist()),
            by_row=tuple(
                float(recall) if asked else None for recall, asked in zip(by_row, rows, strict=True)
            ),
            precision=sums.num_hits / sums.num_named if sums.num_named else None,
            calibration_error=error if name in WITH_CHANCES else None,
        )

    def _fresh(self) -> _Sums:
        sizes = len(self.sizes)
        return _Sums(np.zeros((sizes, len(self.layers))), np.zeros((sizes, self._most_rows)))


def _share_named(wanted_TLE: NDArray[np.float32], is_named: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return [T, L]: which share of the chosen experts a predictor named at all."""
    return (wanted_TLE * is_named).sum(axis=-1) / np.maximum(wanted_TLE.sum(axis=-1), 1)


@dataclass(frozen=True, slots=True)
class PredictorFigures:
    """One predictor over all verified rows.

    Attributes:
        name: of `PREDICTORS`.
        recall: recall@n for n of `MULTIPLES` x top_k, mean over layers.
        by_layer: recall at 2 x top_k of every layer.
        by_row: recall at 2 x top_k of every row of a block, the anchor first; None where it was never asked.
        precision: of what it named, at most 2 x top_k a row and layer; None if it named nothing.
        calibration_error: of its confidences, 15 bins; None if it has none.
    """

    name: str
    recall: tuple[float, ...]
    by_layer: tuple[float, ...]
    by_row: tuple[float | None, ...]
    precision: float | None
    calibration_error: float | None


@dataclass(frozen=True, slots=True)
class Served:
    """One source of hints in service, with the same bytes allowed as the others.

    Attributes:
        slots: experts of each layer in memory.
        hints: which.
        timely: native selections that were ready because of a prediction.
        resident: those that were resident for their own sake.
        predicted_bytes: read because of hints, per token.
        physical_bytes: read in all, per token.
        exposed_wait_ns: per token.
        token_ns: per token.
        precision: predicted records that were used, of those read; None if none were read.
        stopped: why it was no longer asked, "" if it was.
    """

    slots: int
    hints: str
    timely: float | None
    resident: float | None
    predicted_bytes: float
    physical_bytes: float
    exposed_wait_ns: float
    token_ns: float
    precision: float | None
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """What a sidecar is held to; None where a figure is missing.

    Attributes:
        gap_closed: of the distance from frequency's recall at 2 x top_k to 1, the share that it closes.
        above_frequency: layers in which it is above frequency, of all.
        above_previous: whether it is above the last token's route.
        both_over_either: whether both together are more often timely than either alone, in service, under
            every budget.
    """

    gap_closed: float | None
    above_frequency: tuple[int, int] | None
    above_previous: bool | None
    both_over_either: bool | None


def judge(figures: Sequence[PredictorFigures], served: Sequence[Served]) -> Bars:
    """Return how the bars stand."""
    by_name = {one.name: one for one in figures}
    sidecar, frequency, previous = (by_name.get(name) for name in ("sidecar", "frequency", "previous"))
    gap = above = beats = None
    if sidecar is not None and frequency is not None:
        base = frequency.recall[AT]
        gap = (sidecar.recall[AT] - base) / max(1e-9, 1 - base)
        pairs = list(zip(sidecar.by_layer, frequency.by_layer, strict=True))
        above = sum(mine > other for mine, other in pairs), len(pairs)
    if sidecar is not None and previous is not None:
        beats = sidecar.recall[AT] > previous.recall[AT]
    return Bars(gap, above, beats, _both_over_either(served))


def _both_over_either(served: Sequence[Served]) -> bool | None:
    """Return whether both together are the most timely wherever all three were served; None if nowhere."""
    timely = {(one.slots, one.hints): one.timely for one in served if one.timely is not None}
    budgets = [
        [timely[slots, name] for name in ("both", "sidecar", "near-linear")]
        for slots in dict.fromkeys(slots for slots, _ in timely)
        if {(slots, name) for name in ("both", "sidecar", "near-linear")} <= timely.keys()
    ]
    return all(both > max(alone) for both, *alone in budgets) if budgets else None
