"""The near map: which experts a layer will choose, two layers before its turn, by a trained linear map.

Entry point: `NearMap`. The layer to come reads the stack of the layer that runs as it would read its own,
and a map of its own, trained on native routes, scores its experts: two layers early its router is no longer
right. Scores are calibrated: what comes out is the probability that the row chooses the expert.

What it says fits on the read-back of the running layer's ids: int32, expert and confidence in one.

Source: DESIGN 6, step 9; the idea of a trained map two layers early is public (docs/reference/FIELD.md, C.1).
"""

# Shapes: T rows, D hidden, E experts, N guesses of a row.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

LAYERS_AHEAD = 2
CODE_STEPS = 1024
"""A code is expert * CODE_STEPS + confidence in steps of 1 / (CODE_STEPS - 1)."""


class NearMap:
    """Maps of all layers that have a layer two before them.

    Args:
        weights: [E, D] by layer.
        biases: [E] by layer.
        calibration: scale and shift of the log-odds by layer.
        num_guesses: N, experts named of a row.
        cut: confidence below which an expert is not worth reading.
    """

    def __init__(
        self,
        weights: Mapping[int, mx.array],
        biases: Mapping[int, mx.array],
        calibration: Mapping[int, tuple[float, float]],
        *,
        num_guesses: int,
        cut: float,
    ) -> None:
        # Folded in float32 once, so that the pass pays for one product.
        self._weights = {
            layer: (weight.astype(mx.float32) * calibration[layer][0]).astype(weight.dtype)
            for layer, weight in weights.items()
        }
        self._biases = {
            layer: bias.astype(mx.float32) * calibration[layer][0] + calibration[layer][1]
            for layer, bias in biases.items()
        }
        self.layers = tuple(sorted(self._weights))
        self.num_guesses, self.cut = num_guesses, cut

    def log_odds(self, layer: int, x_TD: mx.array) -> mx.array:
        """Return calibrated log-odds [T, E], float32, lazy, that each row chooses each expert.

        Args:
            layer: to come.
            x_TD: what it would read of the stack now.
        """
        weight = self._weights[layer]
        return (x_TD.astype(weight.dtype) @ weight.T).astype(mx.float32) + self._biases[layer]

    def codes(self, layer: int, x_TD: mx.array) -> mx.array:
        """Return every row's likeliest experts with their confidence, int32 [T, N], lazy; see `decoded`."""
        chance_TE = mx.sigmoid(self.log_odds(layer, x_TD))
        experts_TN = mx.argsort(-chance_TE, axis=-1)[:, : self.num_guesses]
        chance_TN = mx.take_along_axis(chance_TE, experts_TN, axis=-1)
        steps_TN = mx.round(chance_TN * (CODE_STEPS - 1)).astype(mx.int32)
        return experts_TN.astype(mx.int32) * CODE_STEPS + steps_TN

    def num_bytes(self) -> int:
        """Return the bytes held."""
        return sum(value.nbytes for value in (*self._weights.values(), *self._biases.values()))


def decoded(codes: Sequence[int]) -> list[tuple[int, float]]:
    """Return the experts and confidences of one row's codes, the likeliest first."""
    return [(code // CODE_STEPS, (code % CODE_STEPS) / (CODE_STEPS - 1)) for code in codes]
