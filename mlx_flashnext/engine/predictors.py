"""Guesses of routes that need no training, behind one protocol. Entry: `make_predictor`.

A predictor says which experts a layer will probably choose and how sure it is; `hints.py` makes reads of it.
It hears of a block when it begins, of every layer's true choice, of the next layer's early choice if it wants
to, and how many rows of the block stay. Nothing it says can change an answer (I1), and whatever it raises
ends prediction, not the answer.

    frequency   what a layer chose most often so far
    previous    what the layer chose for the token before
    random      anything: what hints cost when they are worth nothing
    near-gate   the next layer's router, asked one layer early
    near-linear, sidecar, both   trained: see `learned_predictors.py`
    oracle      what a recorded run of the same tokens chose: the bound of all of them

Source: metrics.md, "Prediction"; qwen4exp.md 2.7 for the router.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, get_args

import mlx.core as mx

from drafter.api import RouteHints
from drafter.near import NearMap
from drafter.sidecar import RouteHead
from expert_store.prefetch import NO_OUTLOOK
from mlx_flashnext.engine.guess import Guess as Guess
from mlx_flashnext.engine.guess import Rows as Rows
from mlx_flashnext.engine.learned_predictors import learned
from mlx_flashnext.engine.routes import RecordedRoutes
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.model.moe import LookAhead


class Predictor(Protocol):
    """Guesses routes."""

    look_ahead: tuple[LookAhead, ...]
    """Who guesses later layers while earlier ones run."""
    wants_routes: bool
    """Whether it has a use for what a drafter says of its proposals' routes."""

    def early(self, routes: RouteHints) -> Iterable[Guess]:
        """Return guesses of the block that begins next, from what a drafter says of the anchor's row."""
        ...

    def drafted(self, routes: RouteHints | None) -> None:
        """Hear what the drafter says of the block that is about to begin; None if it says nothing."""
        ...

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        """Return guesses at the start of a block of tokens, of which the first follows `position` others."""
        ...

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        """Return guesses after a layer has chosen."""
        ...

    def expect(self, layer: int, ids_TN: Rows) -> Iterable[Guess]:
        """Return guesses from what one of `look_ahead` said of a layer."""
        ...

    def outlook(self) -> Mapping[int, memoryview]:
        """Return what the last answer says of layers as a whole, once.

        That is how likely the block wants each expert, float32 by layer, whether it is worth reading or not:
        what is hardly wanted makes room for what is named.
        """
        ...

    def commit(self, num_rows: int) -> None:
        """Learn that the first rows of the block stay."""
        ...


class _Silent(Predictor):
    """Guesses nothing."""

    look_ahead: tuple[LookAhead, ...] = ()
    wants_routes = False

    def early(self, routes: RouteHints) -> Iterable[Guess]:
        del routes
        return ()

    def drafted(self, routes: RouteHints | None) -> None:
        del routes

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        del tokens, position
        return ()

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        del layer, ids_TK
        return ()

    def expect(self, layer: int, ids_TN: Rows) -> Iterable[Guess]:
        del layer, ids_TN
        return ()

    def outlook(self) -> Mapping[int, memoryview]:
        return NO_OUTLOOK

    def commit(self, num_rows: int) -> None:
        del num_rows


class GateAhead(LookAhead):
    """Asks the next layer's own router; says expert ids, the likeliest first.

    Args:
        num_ids: how many; None for as many as the router chooses.
    """

    layers_ahead = 1

    def __init__(self, num_ids: int | None = None) -> None:
        self._num_ids = num_ids

    def guess(self, layer: int, later: DecoderLayer, stack_TGD: mx.array) -> mx.array:
        """Return ids_TN."""
        del layer
        return later.early_route(stack_TGD, self._num_ids)


class NearGate(_Silent):
    """The next layer's router, on what its own read finds before this layer's experts have answered."""

    look_ahead = (GateAhead(),)

    def expect(self, layer: int, ids_TN: Rows) -> Iterable[Guess]:
        """Return the early choice, the likeliest first."""
        return best_by_rank(layer, ids_TN)


class Previous(_Silent):
    """Every layer's choice for the last committed token.

    Args:
        layers: the layers that are streamed.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._last: dict[int, Sequence[int]] = {}
        self._open: dict[int, Rows] = {}

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        """Return the last token's route."""
        del tokens, position
        self._open = {}
        return [Guess(layer, expert) for layer in self._layers for expert in self._last.get(layer, ())]

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        """Take note."""
        self._open[layer] = ids_TK
        return ()

    def commit(self, num_rows: int) -> None:
        """Keep the route of the last row that stays."""
        if num_rows:
            self._last = {layer: rows[num_rows - 1] for layer, rows in self._open.items()}


class Frequency(_Silent):
    """The experts that committed tokens chose most often, of every layer.

    Args:
        layers: the layers that are streamed, with their number of experts.
        num_guesses: experts named of each layer.
        counts: choices so far, by layer and expert, from earlier runs.
    """

    def __init__(
        self,
        layers: Mapping[int, int],
        num_guesses: int,
        counts: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        given = counts or {}
        self._counts: dict[int, list[float]] = {
            layer: list(given[layer]) if len(given.get(layer, ())) == num_experts else [0.0] * num_experts
            for layer, num_experts in layers.items()
        }
        self._num_guesses = num_guesses
        self._open: dict[int, Rows] = {}

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        """Return every layer's most popular experts."""
        del tokens, position
        self._open = {}
        return [guess for layer in self._counts for guess in self._popular(layer)]

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        """Take note."""
        self._open[layer] = ids_TK
        return ()

    def commit(self, num_rows: int) -> None:
        """Count the rows that stay."""
        for layer, rows in self._open.items():
            counts = self._counts.get(layer)
            if counts is not None:
                for row in rows[:num_rows]:
                    for expert in row:
                        counts[expert] += 1

    def _popular(self, layer: int) -> list[Guess]:
        counts = self._counts[layer]
        total = sum(counts)
        if not total:
            return []
        best = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))[: self._num_guesses]
        return [Guess(layer, expert, counts[expert] / total) for expert in best if counts[expert]]


class Random(_Silent):
    """Experts drawn from a hat.

    Args:
        layers: the layers that are streamed, with their number of experts.
        num_guesses: experts named of the next layer after every layer.
        seed: of the draws.
    """

    def __init__(self, layers: Mapping[int, int], num_guesses: int, seed: int = 0) -> None:
        self._layers = dict(layers)
        self._num_guesses = num_guesses
        self._random = random.Random(seed)

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        """Guess the first layer."""
        del tokens, position
        return self._draw(min(self._layers))

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        """Guess the next layer."""
        del ids_TK
        return self._draw(layer + 1)

    def _draw(self, layer: int) -> list[Guess]:
        num_experts = self._layers.get(layer, 0)
        drawn = self._random.sample(range(num_experts), min(self._num_guesses, num_experts))
        return [Guess(layer, expert, self._random.random()) for expert in drawn]


class Oracle(_Silent):
    """What a recorded run of the same tokens chose.

    At the start of a block it names every layer of the block, and after each layer that layer of the block
    after it: so far ahead that only slots and bandwidth are in the way.

    Args:
        routes: of the recorded run.
        looks_beyond: also name the block after the one that runs. Without, it is what a perfect predictor
            could say that knows the block's tokens alone: the ceiling of hints born from a draft.
    """

    def __init__(self, routes: RecordedRoutes, *, looks_beyond: bool = True) -> None:
        self._routes = routes
        self._looks_beyond = looks_beyond
        self._position = self._num_rows = 0

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        """Return the routes of the block's positions, again: what was resident when named may have left."""
        self._position, self._num_rows = position, len(tokens)
        found = dict.fromkeys(
            (layer, expert)
            for row in range(self._num_rows)
            for layer, experts in self._routes.at(position + row).items()
            for expert in experts
        )
        return [Guess(layer, expert) for layer, expert in found]

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        """Return the layer's route in the block after this one, if all of this one stays."""
        del ids_TK
        if not self._looks_beyond:
            return ()
        start = self._position + self._num_rows
        rows = range(start, start + self._num_rows)
        found = dict.fromkeys(expert for row in rows for expert in self._routes.at(row).get(layer, ()))
        return [Guess(layer, expert, passes_ahead=1) for expert in found]


HintKind = Literal[
    "off", "frequency", "previous", "random", "near-gate", "near-linear", "sidecar", "both", "oracle"
]
HINTS: Final[tuple[str, ...]] = get_args(HintKind)


@dataclass(frozen=True, slots=True)
class PredictorSetting:
    """What predictors are made from.

    Attributes:
        layers: the layers that are streamed, with their number of experts.
        top_k: experts a token chooses of a layer.
        counts: choices of earlier runs by layer and expert, for `frequency`.
        routes: of a recorded run, for `oracle`.
        seed: of draws, for `random`.
        near: the trained map of this model, for `near-linear` and `both`.
        head: of the draft's route sidecar, for `sidecar` and `both`.
    """

    layers: Mapping[int, int]
    top_k: int
    counts: Mapping[int, Sequence[float]] | None = None
    routes: RecordedRoutes | None = None
    seed: int = 0
    near: NearMap | None = None
    head: RouteHead | None = None


def make_predictor(kind: str, setting: PredictorSetting) -> Predictor | None:
    """Return a predictor by name; None for `off`, and where what it is made from is not there."""
    makers: dict[str, Callable[[], Predictor | None]] = {
        "off": lambda: None,
        "frequency": lambda: Frequency(setting.layers, 2 * setting.top_k, setting.counts),
        "previous": lambda: Previous(sorted(setting.layers)),
        "random": lambda: Random(setting.layers, setting.top_k, setting.seed),
        "near-gate": NearGate,
        "near-linear": lambda: learned(setting.layers, setting.top_k, setting.near, None),
        "sidecar": lambda: learned(setting.layers, setting.top_k, None, setting.head),
        "both": lambda: learned(setting.layers, setting.top_k, setting.near, setting.head),
        "oracle": lambda: None if setting.routes is None else Oracle(setting.routes),
    }
    return makers[kind]()


def best_by_rank(layer: int, ids_TN: Rows) -> list[Guess]:
    """Return a guess for every expert that any row names, as sure as its best rank among the rows."""
    best: dict[int, int] = {}
    for row in ids_TN:
        for rank, expert in enumerate(row):
            if rank < best.get(expert, len(row)):
                best[expert] = rank
    return [Guess(layer, expert, 1.0 / (1 + rank)) for expert, rank in best.items()]
