"""Trained guesses of routes: a draft's route sidecar, a model's near map, or both. Entry: `learned`.

    sidecar      when a proposal is made: every layer, from the draft's state, ordered by deadline. After
                 layer l has chosen: the next `REFRESHED_LAYERS` again, from codes that now know layer l
    near-linear  while layer l runs: layer l + 2, from the stack
    both         the sidecar far ahead and its refreshed guesses, the near map close by; where both speak of a
                 layer, their log-odds are averaged

An expert is named if the chance that any row of the block chooses it reaches the cut, and no more experts of
a layer than its rows can choose: what lies beyond is overfetch by construction.

Source: drafter/sidecar.py, drafter/near.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.api import RouteHints
from drafter.near import LAYERS_AHEAD, NearMap, decoded
from drafter.sidecar import RouteHead, union_confidence
from mlx_flashnext.engine.guess import Guess, Rows
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.model.moe import LookAhead

REFRESHED_LAYERS: Final = 2
"""Layers behind the running one that are scored again. Those further on are scored when their turn is nearer:
the real model's head has 48 layers of 512 experts, and this runs on the thread that decodes."""
_SURE: Final = 12.0


class NearAhead(LookAhead):
    """Asks the near map of the layer after the next one.

    Args:
        near: the map.
    """

    layers_ahead = LAYERS_AHEAD

    def __init__(self, near: NearMap) -> None:
        self._near = near

    def guess(self, layer: int, later: DecoderLayer, stack_TGD: mx.array) -> mx.array:
        """Return codes of the likeliest experts of every row."""
        return self._near.codes(layer, later.early_read(stack_TGD))


class Learned:
    """See the module; a `Predictor`.

    Args:
        layers: the layers that are streamed, with their number of experts.
        top_k: experts that a row chooses of a layer.
        near: the near map, or None.
        head: the sidecar's, or None.

    Attributes:
        num_drafted: proposals that came with routes.
    """

    def __init__(
        self, layers: Mapping[int, int], top_k: int, near: NearMap | None, head: RouteHead | None
    ) -> None:
        self._layers, self._top_k = dict(layers), top_k
        self._near, self._head = near, head
        self._codes: NDArray[np.float32] | None = None
        self._num_rows = 0
        self.look_ahead: tuple[LookAhead, ...] = () if near is None else (NearAhead(near),)
        self.wants_routes = head is not None
        self.num_drafted = 0

    def drafted(self, routes: RouteHints | None) -> None:
        """Take the codes of the block that is about to begin; without any the sidecar is silent for it."""
        self._codes = None if routes is None or self._head is None else routes.codes
        self.num_drafted += self._codes is not None

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        """Return the sidecar's guesses of all layers."""
        del position
        self._num_rows = len(tokens)
        if self._head is None or self._codes is None:
            return ()
        if len(self._codes) != len(tokens):
            self._codes = None
            return ()
        return self._far(0, None, is_refreshed=False)

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        """Let the sidecar see what a layer chose, and return its guesses of the next layers."""
        if self._head is None or self._codes is None:
            return ()
        self._codes = self._head.after(self._codes, layer, ids_TK)
        first = self._head.place_after(layer)
        return self._far(first, first + REFRESHED_LAYERS, is_refreshed=True)

    def expect(self, layer: int, ids_TN: Rows) -> Iterable[Guess]:
        """Return the near map's guesses of a layer; with the sidecar's opinion of its experts, if any."""
        if self._near is None:
            return ()
        num_experts = self._layers.get(layer, 0)
        log_odds = near_log_odds(ids_TN, num_experts)
        if self._head is not None and self._codes is not None and layer in self._head.layers:
            place = self._head.layers.index(layer)
            others = self._head.log_odds(self._codes, place, place + 1, is_refreshed=True)[0]
            log_odds = averaged(log_odds, others)
        return self._named(layer, log_odds, self._near.cut)

    def commit(self, num_rows: int) -> None:
        """Forget the block."""
        del num_rows
        self._codes = None

    def _far(self, first: int, last: int | None, *, is_refreshed: bool) -> list[Guess]:
        assert self._head is not None
        assert self._codes is not None
        layers = self._head.layers[first:last]
        if not layers:
            return []
        scores = self._head.log_odds(self._codes, first, last, is_refreshed=is_refreshed)
        return [
            guess
            for layer, log_odds in zip(layers, scores, strict=True)
            if layer in self._layers
            for guess in self._named(layer, log_odds, self._head.cut)
        ]

    def _named(self, layer: int, log_odds_TE: NDArray[np.float32], cut: float) -> list[Guess]:
        """Return a layer's experts that reach the cut, the likeliest first."""
        chance = union_confidence(log_odds_TE)
        most = len(log_odds_TE) * self._top_k
        best = np.argsort(-chance, kind="stable")[:most]
        return [Guess(layer, int(expert), float(chance[expert])) for expert in best if chance[expert] >= cut]


def averaged(near_TE: NDArray[np.float32], far_TE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of both opinions' log-odds; the far one's alone of what the near one does not name."""
    found: NDArray[np.float32] = np.where(np.isfinite(near_TE), 0.5 * (near_TE + far_TE), far_TE)
    return found


def near_log_odds(codes_TN: Rows, num_experts: int) -> NDArray[np.float32]:
    """Return [T, E] log-odds of what a near map named, minus infinity elsewhere."""
    found = np.full((len(codes_TN), num_experts), -np.inf, np.float32)
    for row, codes in enumerate(codes_TN):
        for expert, chance in decoded(codes):
            bounded = min(max(chance, 1e-5), 1 - 1e-5)
            found[row, expert] = min(np.log(bounded / (1 - bounded)), _SURE)
    return found


def learned(
    layers: Mapping[int, int], top_k: int, near: NearMap | None, head: RouteHead | None
) -> Learned | None:
    """Return the predictor of what there is; None where there is neither."""
    return None if near is None and head is None else Learned(layers, top_k, near, head)
