"""Runs the predictor report: answers prompts once with everybody listening, then with each in charge.

Entry point: `measure_predictors`. The first part serves every prompt with the draft and lets all predictors
say what they would have said of every block; nothing is read ahead then. The second serves the same prompts
under a budget of slots, one source of hints after the other, with the same bytes allowed to each, and takes
from the store's own books what was ready in time.
"""

# Shapes: T rows of a block, L layers, E experts, K experts of a row.

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from drafter.api import Drafter, DraftSampling, Proposal, RouteDrafter, RouteHints
from drafter.near import LAYERS_AHEAD
from drafter.train.captures import TRAIN, CaptureSet
from drafter.train.route_losses import wanted
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.learned_predictors import NearAhead, averaged, near_log_odds
from mlx_flashnext.engine.machine import Machine
from mlx_flashnext.engine.predictors import GateAhead, Rows
from mlx_flashnext.experts import HandOver
from mlx_flashnext.model.moe import LookAhead
from mlx_flashnext.reports.measure import GREEDY
from mlx_flashnext.reports.predictor_report import (
    FORMAT,
    VERSION,
    Bars,
    PredictorFigures,
    Scoring,
    Served,
    judge,
)
from mlx_flashnext.reports.ssd_wait import VariantReport
from mlx_flashnext.reports.ssd_wait_run import DRAFT_ORACLE, Asked, SsdWaitReport, measure_ssd_wait

SMOOTHING: Final = 3.0
"""Rows of the layer's own frequency that a token's counts are mixed with."""
_NAMED: Final = 3
_FAR: Final = 1e-6
SERVED: Final = (
    "frequency",
    "previous",
    "random",
    "near-gate",
    "near-linear",
    "sidecar",
    "both",
    DRAFT_ORACLE,
)


@dataclass(frozen=True, slots=True)
class PredictorsAsked:
    """What is measured.

    Attributes:
        served: prompts, budgets, drafter, drive; its first drafter is used, its hints are ours.
        captures: a capture set whose training documents the frequencies are counted of; None counts the
            report's own tokens as they come.
        hint_bytes: what hints may read for one block; None: 2 x top_k records of every row and layer.
        sources: of hints that are served, of `SERVED`; None: all that are there.
    """

    served: Asked
    captures: CaptureSet | None = None
    hint_bytes: int | None = None
    sources: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class PredictorReport:
    """Everything that was found.

    Attributes:
        figures: of every predictor that could be asked.
        served: of every source of hints that is there, under every budget.
        bars: how they stand.
        sizes: experts named at each multiple.
        layers: that were streamed.
        num_rows: verified rows by place in the block; `num_kept` those of them that stayed.
        num_kept: see `num_rows`.
        draft_ns: median time of a proposal without and with its routes; None without a sidecar.
        head_ns: median time in which the host scores all layers of a block; None without a sidecar.
        counted_of: what frequencies were counted of.
        hint_bytes: what hints might read for one block.
        wait: the report of the second part, with its conditions.
        notices: why something is missing.
    """

    figures: tuple[PredictorFigures, ...]
    served: tuple[Served, ...]
    bars: Bars
    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    num_rows: tuple[int, ...]
    num_kept: tuple[int, ...]
    draft_ns: tuple[int, int] | None
    head_ns: int | None
    counted_of: str
    hint_bytes: int
    wait: SsdWaitReport | None
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values."""
        plain = {
            name: getattr(self, name)
            for name in ("sizes", "layers", "num_rows", "num_kept", "draft_ns", "head_ns", "counted_of",
                         "hint_bytes", "notices")
        }  # fmt: skip
        return {
            "format": FORMAT,
            "version": VERSION,
            "figures": [asdict(one) for one in self.figures],
            "served": [asdict(one) for one in self.served],
            "bars": asdict(self.bars),
            **plain,
            "wait": None if self.wait is None else self.wait.to_dict(),
        }


class Priors:
    """How often experts were chosen, in all and after each token.

    Args:
        layers: that are streamed.
        num_experts: of each.
        top_k: that a row chooses.
        vocab_size: of the target.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, top_k: int, vocab_size: int) -> None:
        shape = (len(layers), num_experts)
        self._all = np.full(shape, _FAR)
        self._num_all = 1.0
        self._top_k, self._num_experts = top_k, num_experts
        self._of: dict[int, NDArray[np.float32]] = {}
        self._num_of = np.zeros(vocab_size)

    def add(self, tokens: Sequence[int], routes_TLK: NDArray[np.integer]) -> None:
        """Count rows."""
        truth = wanted(routes_TLK, self._num_experts)
        self._all += truth.sum(axis=0)
        self._num_all += len(truth)
        for token, row in zip(tokens, truth, strict=True):
            self._num_of[token] += 1
            if token in self._of:
                self._of[token] += row
            else:
                self._of[token] = row.copy()

    def scores(self, tokens: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return log-odds [T, L, E] by frequency and by frequency after each token."""
        often = np.clip(self._all / self._num_all, _FAR, 1 - _FAR)
        found = [
            np.clip(
                (self._of.get(token, 0.0) + SMOOTHING * often) / (self._num_of[token] + SMOOTHING),
                _FAR,
                1 - _FAR,
            )
            for token in tokens
        ]
        by_token = np.stack(found)
        whole = np.broadcast_to(_log_odds(often), by_token.shape)
        return whole.astype(np.float32), _log_odds(by_token).astype(np.float32)


def _log_odds(chance: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(chance) - np.log1p(-chance)


class ShadowHints(Hints):
    """Lets every predictor say what it would have, and reads nothing ahead.

    Args:
        engine: whose trained maps are asked.
        scoring: takes the blocks.
        priors: of the frequencies.
        learns: whether the report's own tokens are counted.
        seed: of the random ranking.
    """

    def __init__(
        self, engine: Engine, scoring: Scoring, priors: Priors, *, learns: bool, seed: int = 0
    ) -> None:
        super().__init__(None, engine.config.num_hidden_layers)
        routes = engine.routes
        self._near = routes.near
        self._head = None if routes.sidecar is None else routes.sidecar.head
        self._num_experts, self._top_k = engine.config.num_experts, engine.config.num_experts_per_tok
        self._scoring, self._priors, self._learns = scoring, priors, learns
        self._draws = np.random.default_rng(seed)
        self._gate: tuple[LookAhead, ...] = (GateAhead(min(self._num_experts, _NAMED * self._top_k)),)
        self._asked = self._gate if self._near is None else (*self._gate, NearAhead(self._near))
        self._running = -1
        self._is_heard = False
        self._tokens: Sequence[int] = ()
        self._codes: NDArray[np.float32] | None = None
        self._early_codes: NDArray[np.float32] | None = None
        self._next_early: NDArray[np.float32] | None = None
        self._chosen: dict[int, Rows] = {}
        self._said: dict[tuple[int, int], Rows] = {}
        self._last: NDArray[np.float32] | None = None
        self.head_ns: list[int] = []

    @property
    def wants_routes(self) -> bool:
        """Return whether there is a head to read them."""
        return self._head is not None

    def early(self, routes: RouteHints) -> HandOver:
        """Take what the drafter says of the anchor's row of the block that begins next."""
        self._next_early = routes.codes
        return HandOver()

    def begin(
        self, tokens: Sequence[int], position: int, *, is_prefill: bool, routes: RouteHints | None = None
    ) -> HandOver:
        """Open a block."""
        del position
        self._early_codes, self._next_early = self._next_early, None
        self._running, self._is_heard, self._tokens = -1, not is_prefill, tokens
        self._codes = None if routes is None else routes.codes
        self._chosen, self._said = {}, {}
        return HandOver()

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        """Ask everybody."""
        self._running = layer
        return self._asked if self._is_heard else ()

    def expect(self, layer: int, ids_TN: Rows) -> None:
        """Take what one of them says."""
        self._said[layer - self._running, layer] = ids_TN

    def routed(self, layer: int, ids_TK: Rows) -> HandOver:
        """Take what a layer chose."""
        self._chosen[layer] = ids_TK
        return HandOver()

    def commit(self, num_rows: int) -> None:
        """Score the block."""
        layers = self._scoring.layers
        if not all(layer in self._chosen for layer in layers):
            return
        routes = np.asarray([self._chosen[layer] for layer in layers]).swapaxes(0, 1)
        truth = wanted(routes, self._num_experts)
        if self._is_heard and len(self._tokens) == len(truth):
            self._scoring.add(self._scores(truth, routes), truth, num_rows)
        if self._learns and num_rows:
            self._priors.add(self._tokens[:num_rows], routes[:num_rows])
        if num_rows:
            self._last = truth[num_rows - 1]
        self._is_heard = False

    def _scores(self, truth: NDArray[np.float32], routes: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
        often, by_token = self._priors.scores(self._tokens)
        found: dict[str, NDArray[np.float32]] = {
            "random": self._draws.random(truth.shape, np.float32),
            "frequency": often,
            "token-frequency": by_token,
            "near-gate": self._early(truth.shape, 1, _by_rank),
            "oracle": np.where(truth > 0, 1.0, -np.inf).astype(np.float32),
        }
        if self._last is not None:
            found["previous"] = 100.0 * self._last[None] + often
        near = None
        if self._near is not None:
            near = found["near-linear"] = self._early(truth.shape, LAYERS_AHEAD, near_log_odds)
        if self._head is not None and self._early_codes is not None:
            ahead = self._head.log_odds_of(self._early_codes, slice(None), "early")
            found["sidecar-early"] = np.ascontiguousarray(ahead.swapaxes(0, 1))
        if self._head is None or self._codes is None:
            return found
        began = time.perf_counter_ns()
        far = self._head.log_odds(self._codes, is_refreshed=False)
        self.head_ns.append(time.perf_counter_ns() - began)
        found["sidecar"] = np.ascontiguousarray(far.swapaxes(0, 1))
        refreshed = found["sidecar-refreshed"] = self._refreshed(found["sidecar"], routes)
        found["both"] = refreshed if near is None else averaged(near, refreshed)
        return found

    def _refreshed(self, far: NDArray[np.float32], routes: NDArray[Any]) -> NDArray[np.float32]:
        """Return the sidecar's log-odds at the near map's time: all layers up to two before have shown."""
        assert self._head is not None
        assert self._codes is not None
        found, codes = far.copy(), self._codes
        for place, layer in enumerate(self._scoring.layers):
            shown = place - LAYERS_AHEAD
            if shown >= 0:
                codes = self._head.after(codes, self._scoring.layers[shown], routes[:, shown].tolist())
                at = self._head.layers.index(layer)
                found[:, place] = self._head.log_odds(codes, at, at + 1, is_refreshed=True)[0]
        return found

    def _early(
        self, shape: tuple[int, ...], ahead: int, read: Callable[[Rows, int], NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        found = np.full(shape, -np.inf, np.float32)
        for place, layer in enumerate(self._scoring.layers):
            if (ahead, layer) in self._said:
                found[:, place] = read(self._said[ahead, layer], self._num_experts)
        return found


def _by_rank(ids_TN: Rows, num_experts: int) -> NDArray[np.float32]:
    found = np.full((len(ids_TN), num_experts), -np.inf, np.float32)
    for row, ids in enumerate(ids_TN):
        found[row, list(ids)] = -np.arange(len(ids), dtype=np.float32)
    return found


@dataclass
class TimedDrafter:
    """A drafter whose proposals are made twice, with routes and without, and timed; else the drafter itself.

    A proposal leaves no trace, so that the second is the first again.
    """

    inner: Drafter
    tells_routes: bool = False
    hears_early: Callable[[RouteHints], None] | None = None
    times: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __getattr__(self, name: str) -> Any:
        """Return what the drafter has."""
        return getattr(self.inner, name)

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Return the drafter's proposal, with routes if they are wanted."""
        order = (False, True) if len(self.times) % 2 else (True, False)
        taken, made = dict[bool, int](), dict[bool, Proposal]()
        for tells in order:
            inner = cast("RouteDrafter", self.inner)
            inner.tells_routes, inner.hears_early = tells, self.hears_early if tells else None
            began = time.perf_counter_ns()
            made[tells] = self.inner.propose(k, sampling)
            taken[tells] = time.perf_counter_ns() - began
        self.times.append((taken[False], taken[True]))
        return made[self.tells_routes]


def measure_predictors(
    asked: PredictorsAsked,
    machine: Machine,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> PredictorReport:
    """Measure every predictor that there is.

    Raises:
        StoreError: a record could not be read.
        EngineError: a plan does not fit, or there is no such draft.
        TargetDiffers: the capture set is of another build.
    """
    served = asked.served
    draft, num_tokens = served.drafts[0]
    request = replace(
        served.request, draft=draft, num_draft_tokens=num_tokens or None, hints="both", slots_per_layer=None
    )
    with Engine.open(served.directory, replace(request, slots_per_layer=_all_but_one(served))) as engine:
        layers = tuple(sorted(engine.checkpoint.experts))
        config, most_rows = engine.config, engine.plan.num_draft_tokens + 1
        scoring = Scoring(layers, config.num_experts, config.num_experts_per_tok, most_rows)
        priors = Priors(layers, config.num_experts, config.num_experts_per_tok, config.vocab_size)
        counted_of = _count(engine, asked.captures, layers, priors, progress)
        times: list[tuple[int, int]] = []
        head_ns: list[int] = []
        for number, prompt in enumerate(served.prompts):
            progress("listening", number, len(served.prompts))
            shadow = ShadowHints(
                engine, scoring, priors, learns=asked.captures is None, seed=served.seed + number
            )
            times += _answer(engine, prompt, served.num_tokens, shadow)
            head_ns += shadow.head_ns
        notices = engine.routes.notices
        record_bytes = statistics.fmean(one.record.record_bytes for one in engine.checkpoint.experts.values())
        wanted_bytes = int(2 * config.num_experts_per_tok * most_rows * len(layers) * record_bytes)
        there = [one for one in _there(engine) if asked.sources is None or one in asked.sources]
    hint_bytes = asked.hint_bytes or wanted_bytes
    wait = measure_ssd_wait(
        replace(served, hints=("off", *there), hint_bytes=hint_bytes, drafts=served.drafts[:1]),
        machine,
        progress,
    )
    found = tuple(_served(one) for one in wait.variants)
    figures = tuple(scoring.results())
    return PredictorReport(
        figures=figures,
        served=found,
        bars=judge(figures, found),
        sizes=scoring.sizes,
        layers=layers,
        num_rows=tuple(int(one) for one in scoring.num_rows),
        num_kept=tuple(int(one) for one in scoring.num_kept),
        draft_ns=_medians(times),
        head_ns=int(statistics.median(head_ns)) if head_ns else None,
        counted_of=counted_of,
        hint_bytes=hint_bytes,
        wait=wait,
        notices=notices,
    )


def _all_but_one(served: Asked) -> int:
    """Return as many slots as leave one expert out: nothing is read early where all are resident."""
    from mlx_flashnext.checkpoint import open_checkpoint

    return open_checkpoint(served.directory).config.num_experts - 1


def _answer(
    engine: Engine, prompt: Sequence[int], num_tokens: int, shadow: ShadowHints
) -> list[tuple[int, int]]:
    drafter = engine.new_drafter()
    timed = None
    if engine.routes.sidecar is not None and drafter is not None:
        timed = TimedDrafter(drafter)
    session = engine.session(cast("Drafter | None", timed or drafter), is_guarded=False, hints=shadow)
    stop_ids = engine.tokenizer.eos_ids
    list(session.generate(prompt, GREEDY, max_tokens=num_tokens, stop_ids=stop_ids))
    return [] if timed is None else timed.times


def _count(
    engine: Engine,
    captures: CaptureSet | None,
    layers: Sequence[int],
    priors: Priors,
    progress: Callable[[str, int, int], None],
) -> str:
    """Count what the training documents of a set chose, and return in words what was counted."""
    if captures is None:
        return "this report's own tokens, as they came"
    from mlx_flashnext.training.draft_training import check_build

    check_build(engine, captures.identity.target_digest, "capture set")
    places = [captures.identity.route_layers.index(layer) for layer in layers]
    infos, num_rows = captures.of_split(TRAIN), 0
    for number, info in enumerate(infos):
        document = captures.read(info)
        priors.add(document.tokens[:-1].tolist(), document.routes[:, places])
        num_rows += len(document.routes)
        progress("counting", number + 1, len(infos))
    return f"{num_rows} captured rows of {len(infos)} training documents"


def _there(engine: Engine) -> tuple[str, ...]:
    """Return the sources of hints that can be served."""
    missing = set[str]()
    if engine.routes.near is None:
        missing |= {"near-linear", "both"}
    if engine.routes.sidecar is None:
        missing |= {"sidecar", "both"}
    return tuple(name for name in SERVED if name not in missing)


def _served(one: VariantReport) -> Served:
    return Served(
        slots=one.variant.slots,
        hints=one.variant.hints,
        timely=one.prefetched_recall,
        resident=one.resident_recall,
        predicted_bytes=one.speculative_bytes,
        physical_bytes=one.physical_bytes,
        exposed_wait_ns=one.exposed_wait_ns,
        token_ns=one.token_ns,
        precision=one.precision,
        stopped=one.hints_stopped,
    )


def _medians(times: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    if not times:
        return None
    without, told = zip(*times, strict=True)
    return int(statistics.median(without)), int(statistics.median(told))
