"""Trained guesses of routes: a draft's route sidecar, a model's near map, or both. Entry: `learned`.

    sidecar      before a proposal is made: every layer, for the anchor's row. When it is made: every layer,
                 for all rows, from the draft's state, ordered by deadline. After layer l has chosen: the
                 next `REFRESHED_LAYERS` again, from codes that now know layer l
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
from drafter.near import CODE_STEPS, LAYERS_AHEAD, NearMap
from drafter.sidecar import RouteHead, union_confidence
from mlx_flashnext.engine.guess import Guess, Rows
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.model.moe import LookAhead

EARLY_TIMES: Final = 2
"""Experts named early of a layer, in multiples of those a row chooses: the block's other rows choose too."""
REFRESHED_LAYERS: Final = 2
"""Layers behind the running one that are scored again. Those further on are scored when their turn is nearer:
the real model's head has 48 layers of 512 experts, and this runs on the thread that decodes."""
_SURE: Final = 12.0
_CHANCES = np.clip(np.arange(CODE_STEPS) / (CODE_STEPS - 1), 1e-5, 1 - 1e-5)
_LOG_ODDS: Final = np.minimum(np.log(_CHANCES / (1 - _CHANCES)), _SURE).astype(np.float32)
"""Of every confidence that a near map's code can say."""


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
        self._said: dict[int, NDArray[np.float32]] = {}
        self.look_ahead: tuple[LookAhead, ...] = () if near is None else (NearAhead(near),)
        self.wants_routes = head is not None
        self.num_drafted = 0

    def early(self, routes: RouteHints) -> Iterable[Guess]:
        """Return the sidecar's guesses for the anchor's row, of all layers, before there is a proposal."""
        if self._head is None:
            return ()
        scores = self._head.log_odds_of(routes.codes, slice(None), "early")
        return self._named(self._head.layers, scores, self._head.cut, most=EARLY_TIMES * self._top_k)

    def drafted(self, routes: RouteHints | None) -> None:
        """Take the codes of the block that is about to begin; without any the sidecar is silent for it."""
        self._codes = None if routes is None or self._head is None else routes.codes
        self.num_drafted += self._codes is not None

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        """Return the sidecar's guesses of all layers."""
        del position
        self._said.clear()
        if self._head is None or self._codes is None:
            return ()
        if len(self._codes) != len(tokens):
            self._codes = None
            return ()
        return self._named(
            self._head.layers, self._head.log_odds(self._codes, is_refreshed=False), self._head.cut
        )

    def expect(self, layer: int, ids_TN: Rows) -> Iterable[Guess]:
        """Take the near map's opinion of a layer; where the sidecar has one too, `routed` names of both."""
        if self._near is None:
            return ()
        log_odds = near_log_odds(ids_TN, self._layers.get(layer, 0))
        if self._head is not None and self._codes is not None and layer in self._head.layers:
            self._said[layer] = log_odds
            return ()
        return self._named((layer,), log_odds[None], self._near.cut)

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        """Let the sidecar see what a layer chose, and return its guesses of the next layers."""
        if self._head is None or self._codes is None:
            return ()
        self._codes = self._head.after(self._codes, layer, ids_TK)
        first = self._head.place_after(layer)
        layers = self._head.layers[first : first + REFRESHED_LAYERS]
        if not layers:
            return ()
        scores = self._head.log_odds(self._codes, first, first + REFRESHED_LAYERS, is_refreshed=True)
        for place, later in enumerate(layers):
            if later in self._said:
                scores[place] = averaged(self._said[later], scores[place])
        return self._named(layers, scores, self._head.cut)

    def commit(self, num_rows: int) -> None:
        """Forget the block."""
        del num_rows
        self._codes = None

    def _named(
        self,
        layers: Sequence[int],
        log_odds_LTE: NDArray[np.float32],
        cut: float,
        most: int | None = None,
    ) -> list[Guess]:
        """Return the experts of streamed layers that reach the cut, the likeliest of each layer first."""
        most = log_odds_LTE.shape[1] * self._top_k if most is None else most
        chance = union_confidence(log_odds_LTE)
        best = np.argsort(-chance, axis=-1, kind="stable")[:, :most]
        sure = np.take_along_axis(chance, best, axis=-1)
        count = (sure >= cut).sum(axis=-1).tolist()
        each = zip(layers, best.tolist(), sure.tolist(), count, strict=True)
        return [
            Guess(layer, expert, confidence)
            for layer, experts, confidences, number in each
            if layer in self._layers
            for expert, confidence in zip(experts[:number], confidences[:number], strict=True)
        ]


def averaged(near_TE: NDArray[np.float32], far_TE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of both opinions' log-odds; the far one's alone of what the near one does not name."""
    found: NDArray[np.float32] = np.where(np.isfinite(near_TE), 0.5 * (near_TE + far_TE), far_TE)
    return found


def near_log_odds(codes_TN: Rows, num_experts: int) -> NDArray[np.float32]:
    """Return [T, E] log-odds of what a near map named, minus infinity elsewhere."""
    found = np.full((len(codes_TN), num_experts), -np.inf, np.float32)
    codes = np.asarray(codes_TN)
    np.put_along_axis(found, codes // CODE_STEPS, _LOG_ODDS[codes % CODE_STEPS], axis=1)
    return found


def learned(
    layers: Mapping[int, int], top_k: int, near: NearMap | None, head: RouteHead | None
) -> Learned | None:
    """Return the predictor of what there is; None where there is neither."""
    return None if near is None and head is None else Learned(layers, top_k, near, head)
