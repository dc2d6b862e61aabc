"""How good guesses were, whatever became of their reads. Entry: `score`, over the passes of a run.

Guesses are held against what their layer really chose in the pass that they were for: also those that were
withheld, whose record was in memory, or that the store refused. So a predictor is judged apart from slots,
queue and drive.

Source: metrics.md, "Prediction".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mlx_flashnext.engine.routes import Pass, Rows

NUM_BINS: Final = 15
_NONE: Final = (0,) * NUM_BINS


@dataclass(frozen=True, slots=True)
class Prediction:
    """Sums over (row, layer), so that two of them can be added.

    Attributes:
        num_places: rows of all passes, times layers.
        recall_sum: for each place, the share of the row's choice that is among the `top_k x rows` surest
            guesses of the layer: as many as were really chosen.
        num_guesses: distinct (pass, layer, expert) that were named.
        bin_nums: of them, by confidence.
        bin_hits: those that were right, by confidence.
        bin_confidences: their confidences, summed, by confidence.
    """

    num_places: int = 0
    recall_sum: float = 0.0
    num_guesses: int = 0
    bin_nums: tuple[int, ...] = _NONE
    bin_hits: tuple[int, ...] = _NONE
    bin_confidences: tuple[float, ...] = (0.0,) * NUM_BINS

    @property
    def recall(self) -> float | None:
        """recall@n with n = top_k x rows; None before the first place."""
        return self.recall_sum / self.num_places if self.num_places else None

    @property
    def correct_share(self) -> float | None:
        """Guesses that were right, of all; None without guesses."""
        return sum(self.bin_hits) / self.num_guesses if self.num_guesses else None

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error of the confidences, 15 bins; None without guesses."""
        if not self.num_guesses:
            return None
        bins = zip(self.bin_hits, self.bin_confidences, strict=True)
        return sum(abs(hits - confidence) for hits, confidence in bins) / self.num_guesses


def score(passes: Sequence[Pass]) -> Prediction:
    """Judge the guesses of consecutive passes; those for a pass beyond the last are not judged."""
    surest = _surest(passes)
    num_places, recall_sum = 0, 0.0
    nums, hits, confidences = [0] * NUM_BINS, [0] * NUM_BINS, [0.0] * NUM_BINS
    for number, one in enumerate(passes):
        for layer, rows in one.routes.items():
            guesses = surest.get((number, layer), {})
            chosen = {expert for row in rows for expert in row}
            for expert, confidence in guesses.items():
                bin_ = min(NUM_BINS - 1, int(confidence * NUM_BINS))
                nums[bin_] += 1
                hits[bin_] += expert in chosen
                confidences[bin_] += confidence
            num_places += len(rows)
            recall_sum += _recall(guesses, rows)
    return Prediction(num_places, recall_sum, sum(nums), tuple(nums), tuple(hits), tuple(confidences))


def _surest(passes: Sequence[Pass]) -> dict[tuple[int, int], dict[int, float]]:
    """Return for each pass and layer the experts that were named for it, at their highest confidence."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for number, one in enumerate(passes):
        for guesses in one.guesses:
            for layer, expert, confidence, passes_ahead in guesses:
                if 0.0 <= confidence <= 1.0:  # else the store has refused it, as a hint that makes no sense
                    named = found.setdefault((number + passes_ahead, layer), {})
                    named[expert] = max(confidence, named.get(expert, 0.0))
    return found


def _recall(guesses: dict[int, float], rows: Rows) -> float:
    """Return the recall of every row, summed."""
    num_chosen = sum(len(row) for row in rows)
    top = set(sorted(guesses, key=lambda expert: -guesses[expert])[:num_chosen])
    return sum(len(top.intersection(row)) / len(row) for row in rows)
