"""Trained guesses of routes: a draft's route sidecar, a model's near map, or both. Entry: `learned`.

    sidecar      before a proposal is made: every layer, for the anchor's row. When it is made: every layer,
                 for all rows, from the draft's state, ordered by deadline. After layer l has chosen: the
                 next `REFRESHED_LAYERS` again, from codes that now know layer l
    near-linear  while layer l runs: layer l + 2, from the stack
    both         the sidecar far ahead and its refreshed guesses, the near map close by; where both speak of a
                 layer, their log-odds are averaged

An expert is named if the chance that any row of the block chooses it reaches the cut, and no more experts of
a layer than its rows can choose: what lies beyond is overfetch by construction. The chances of all experts
are said beside (`outlook`): what is hardly wanted makes room.

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
the real model's head has 48 layers of 512 experts. It is done while a layer's reads are waited for, or,
if none are, while the device computes it."""
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
        self._place = {} if head is None else {layer: place for place, layer in enumerate(head.layers)}
        self._codes: NDArray[np.float32] | None = None
        # [L, T, E]: half of what the near map has said of the block, and what the sidecar's opinion weighs.
        self._close = self._weight = np.zeros((0, 0, 0), np.float32)
        self._said: dict[int, memoryview] = {}
        self.look_ahead: tuple[LookAhead, ...] = () if near is None else (NearAhead(near),)
        self.wants_routes = head is not None
        self.num_drafted = 0

    def early(self, routes: RouteHints) -> Iterable[Guess]:
        """Return the sidecar's guesses for the anchor's row, of all layers, before there is a proposal."""
        if self._head is None:
            return ()
        scores = self._head.log_odds_of(routes.codes, slice(None), "early")
        return self._named(self._head.layers, scores, self._head.cut, EARLY_TIMES * self._top_k)

    def drafted(self, routes: RouteHints | None) -> None:
        """Take the codes of the block that is about to begin; without any the sidecar is silent for it."""
        self._codes = None if routes is None or self._head is None else routes.codes
        self.num_drafted += self._codes is not None

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        """Return the sidecar's guesses of all layers."""
        del position
        if self._head is None or self._codes is None:
            return ()
        if len(self._codes) != len(tokens):
            self._codes = None
            return ()
        scores = self._head.log_odds(self._codes, is_refreshed=False)
        if self._near is not None:
            self._close, self._weight = np.zeros_like(scores), np.ones_like(scores)
        return self._named(self._head.layers, scores, self._head.cut, len(tokens) * self._top_k)

    def expect(self, layer: int, ids_TN: Rows) -> Iterable[Guess]:
        """Take the near map's opinion of a layer; where the sidecar has one too, `routed` names of both."""
        if self._near is None:
            return ()
        place = None if self._codes is None else self._place.get(layer)
        if place is None:
            log_odds = near_log_odds(ids_TN, self._layers.get(layer, 0))
            return self._named((layer,), log_odds[None], self._near.cut, len(ids_TN) * self._top_k)
        rows_TN, experts_TN, log_odds_TN = _said(ids_TN)
        self._weight[place, rows_TN, experts_TN] = 0.5
        self._close[place, rows_TN, experts_TN] = 0.5 * log_odds_TN
        return ()

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
        if self._near is not None:  # `averaged`, of all layers at once
            scores *= self._weight[first : first + REFRESHED_LAYERS]
            scores += self._close[first : first + REFRESHED_LAYERS]
        return self._named(layers, scores, self._head.cut, len(ids_TK) * self._top_k)

    def outlook(self) -> Mapping[int, memoryview]:
        """Return how likely the block wants each expert of the layers that were last spoken of, once."""
        said, self._said = self._said, {}
        return said

    def commit(self, num_rows: int) -> None:
        """Forget the block."""
        del num_rows
        self._codes = None

    def _named(
        self, layers: Sequence[int], log_odds_LTE: NDArray[np.float32], cut: float, most: int
    ) -> list[Guess]:
        """Return the experts of streamed layers that reach the cut, of each layer the `most` likeliest."""
        chance_LE = union_confidence(log_odds_LTE)
        streamed = self._layers
        self._said.update(
            (layer, memoryview(row))
            for layer, row in zip(layers, chance_LE, strict=True)
            if layer in streamed
        )
        is_named = chance_LE >= cut
        if np.count_nonzero(is_named) > most and (is_named.sum(axis=1) > most).any():
            rest_LE = np.argsort(-chance_LE, axis=1, kind="stable")[:, most:]
            np.put_along_axis(is_named, rest_LE, values=False, axis=1)
        places, experts = is_named.nonzero()
        each = zip(places.tolist(), experts.tolist(), chance_LE[is_named].tolist(), strict=True)
        return [
            Guess(layers[place], expert, chance)
            for place, expert, chance in each
            if layers[place] in streamed
        ]


def averaged(near_TE: NDArray[np.float32], far_TE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of both opinions' log-odds; the far one's alone of what the near one does not name."""
    found: NDArray[np.float32] = np.where(np.isfinite(near_TE), 0.5 * (near_TE + far_TE), far_TE)
    return found


def near_log_odds(codes_TN: Rows, num_experts: int) -> NDArray[np.float32]:
    """Return [T, E] log-odds of what a near map named, minus infinity elsewhere."""
    rows_TN, experts_TN, log_odds_TN = _said(codes_TN)
    found = np.full((len(codes_TN), num_experts), -np.inf, np.float32)
    found[rows_TN, experts_TN] = log_odds_TN
    return found


def _said(codes_TN: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return rows [T, 1], experts and log-odds [T, N] of a near map's codes."""
    experts_TN, steps_TN = np.divmod(np.asarray(codes_TN, np.int64), CODE_STEPS)
    return np.arange(len(codes_TN))[:, None], experts_TN, _LOG_ODDS[steps_TN]


def learned(
    layers: Mapping[int, int], top_k: int, near: NearMap | None, head: RouteHead | None
) -> Learned | None:
    """Return the predictor of what there is; None where there is neither."""
    return None if near is None and head is None else Learned(layers, top_k, near, head)
