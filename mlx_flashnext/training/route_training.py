"""Trains route hints on an open target: rows from captured documents, then the fit, then files.

Entry points: `train_near`, `train_sidecar`. Labels are native routes, from the capture set or from a run of
the same target; the draft is frozen. Two kinds of rows are kept apart, and their numbers are written beside
what was trained on them:

    clean       committed text: any position of a captured answer may begin a block
    candidate   what the draft really proposed when it served that prompt, rejected tokens included: the
                target's routers say what those rows wanted too. Only runs that say the captured answer again
                count, since the context of their blocks is the captured one

    early       rows of committed text for the early trunk, which needs no block of the draft: more of them

Documents of the held-out split are not touched. Every twelfth training document is put aside for calibration.
"""

# Shapes: S tokens, R = S - 1 rows, A anchors, B slots, H hidden, L layers, K experts of a row.

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError
from drafter.near import LAYERS_AHEAD
from drafter.route_files import Lineage, NearDocument, SidecarDocument
from drafter.sidecar import SidecarSizes
from drafter.train.captures import TRAIN, CaptureSet, DocumentInfo
from drafter.train.fit_early import EarlyRows, fit_early, joined_early
from drafter.train.fit_near import NearSettings, fit_near
from drafter.train.fit_sidecar import EmbeddingTable, SidecarRows, SidecarSettings, fit_sidecar, joined
from drafter.train.fit_state import FitState
from mlx_flashnext.engine.conditions import version_of
from mlx_flashnext.engine.draft_target import DraftTarget
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.prefill import prefill
from mlx_flashnext.engine.route_files import route_facts
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.model.moe import LookAhead
from mlx_flashnext.training.draft_training import LoadedDraft, check_build, check_features
from mlx_flashnext.training.route_rows import (
    candidate_rows,
    clean_rows,
    early_rows,
    half,
    served_paths,
    some_anchors,
)

ASIDE_EVERY: Final = 12
NEAR_CUT: Final = 0.2
SIDECAR_CUT: Final = 0.2
GUESSES: Final = 3
"""Experts that a near map names of a row, in multiples of those it chooses."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """How much is trained on.

    Attributes:
        num_rows: most rows of captured text read for a near map.
        num_anchors: blocks of each document, for a sidecar.
        num_documents: most documents of the training split; None: all.
        num_candidates: documents that are served again with the draft.
        num_early: rows of each document for a sidecar's early trunk.
        seed: of which anchors.
    """

    num_rows: int = 40_000
    num_anchors: int = 12
    num_documents: int | None = None
    num_candidates: int = 48
    num_early: int = 256
    seed: int = 0


class ReadCollector(LookAhead):
    """Keeps what later layers would read of the stacks of earlier ones; says nothing.

    Attributes:
        reads: float16 [T, D] pieces by the layer to come.
    """

    layers_ahead = LAYERS_AHEAD

    def __init__(self) -> None:
        self.reads: dict[int, list[mx.array]] = {}

    def guess(self, layer: int, later: DecoderLayer, stack_TGD: mx.array) -> mx.array:
        """Keep the read of the layer to come, and return nothing of use."""
        read_TD = later.early_read(stack_TGD).astype(mx.float16)
        mx.async_eval(read_TD)  # pyright: ignore[reportUnknownMemberType]
        self.reads.setdefault(layer, []).append(read_TD)
        return mx.zeros((read_TD.shape[0], 1), mx.int32)


class _Collecting(Hints):
    """Lets a collector look at every pass, prefill chunks included, and guesses nothing."""

    def __init__(self, collector: ReadCollector, num_layers: int) -> None:
        super().__init__(None, num_layers)
        self._collector = collector

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        del layer
        return (self._collector,)


def near_reads(engine: Engine, tokens: Sequence[int]) -> dict[int, NDArray[np.float16]]:
    """Read a document as a prompt; return what every later layer would have read two layers early [R, D]."""
    collector = ReadCollector()
    hints = _Collecting(collector, engine.config.num_hidden_layers)
    timeline = engine.new_timeline(None, Governor(0), hints)
    for _ in prefill(timeline, tokens, engine.plan.prefill_step, lambda: False, lambda: None):
        pass
    timeline.rest()
    return {
        layer: np.concatenate([half(piece) for piece in pieces]) for layer, pieces in collector.reads.items()
    }


def train_near(
    engine: Engine,
    captures: CaptureSet,
    request: RouteRequest,
    settings: NearSettings,
    progress: Progress = lambda _what, _done, _total: None,
    state_directory: Path | None = None,
) -> tuple[NearDocument, dict[str, NDArray[np.float32]]]:
    """Train a near map on captured documents.

    Args:
        engine: the target that was captured, with fewer slots than experts: where all are resident, nothing
            is looked at early.
        captures: with routes.
        request: how much.
        settings: how.
        progress: called with (what is done, steps done, steps in all).
        state_directory: of a state from which a killed fit goes on; None keeps none.

    Raises:
        TargetDiffers: the set is of another build.
        DrafterError: the state is of another fit, or the set holds no routes, or too few documents.
    """
    check_build(engine, captures.identity.target_digest, "capture set")
    _check_routes(engine, captures)
    reads: dict[int, list[NDArray[np.float16]]] = {}
    routes: list[NDArray[np.uint16]] = []
    aside: list[NDArray[np.bool_]] = []
    num_rows, infos = 0, captures.of_split(TRAIN)[: request.num_documents]
    kept_aside = put_aside(infos)
    for number, info in enumerate(infos):
        if num_rows >= request.num_rows:
            infos = infos[:number]
            break
        document = captures.read(info)
        for layer, read in near_reads(engine, document.tokens.tolist()).items():
            reads.setdefault(layer, []).append(read)
        routes.append(document.routes)
        aside.append(np.full(len(document.routes), info.key in kept_aside))
        num_rows += len(document.routes)
        progress("reading", min(num_rows, request.num_rows), request.num_rows)
    layers = tuple(sorted(reads))
    places = [captures.identity.route_layers.index(layer) for layer in layers]
    whole, is_aside = np.concatenate(routes)[:, places], np.concatenate(aside)
    stacked = np.stack([np.concatenate(reads[layer]) for layer in layers])
    config = engine.config
    arrays = fit_near(
        stacked, whole, is_aside, layers, config.num_experts, settings,
        lambda done, total, loss: progress(f"loss {loss:.3f}", done, total),
        _state(state_directory, captures, request, settings, ""),
    )  # fmt: skip
    document = NearDocument(
        tensors_digest="",
        router_digest=route_facts(engine.checkpoint).router_digest,
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        layers=list(layers),
        layers_ahead=LAYERS_AHEAD,
        num_guesses=min(config.num_experts, GUESSES * config.num_experts_per_tok),
        cut=NEAR_CUT,
        lineage=_lineage(
            captures,
            infos,
            int((~is_aside).sum()),
            0,
            int(is_aside.sum()),
            settings.num_steps,
            settings.seed,
        ),
    )
    return document, arrays


def train_sidecar(
    engine: Engine,
    draft: LoadedDraft,
    captures: CaptureSet,
    request: RouteRequest,
    settings: SidecarSettings,
    progress: Progress = lambda _what, _done, _total: None,
    state_directory: Path | None = None,
) -> tuple[SidecarDocument, dict[str, NDArray[np.float32]]]:
    """Train the route sidecar of a draft.

    Args:
        engine: the target that was captured, opened with the draft, with fewer slots than experts.
        draft: the same draft, frozen.
        captures: features at its taps, and routes.
        request: how much.
        settings: how.
        progress: called with (what is done, steps done, steps in all).
        state_directory: of a state from which a killed fit goes on; None keeps none.

    Raises:
        TargetDiffers: the set is of another build.
        DrafterError: the state is of another fit, or the set holds no routes, other features, or too few
            documents.
    """
    identity, config = captures.identity, engine.config
    check_build(engine, identity.target_digest, "capture set")
    check_features(draft.config, captures, draft.contraction)
    _check_routes(engine, captures)
    infos = captures.of_split(TRAIN)[: request.num_documents]
    generator, kept_aside = np.random.default_rng((request.seed, 5)), put_aside(infos)
    train: list[SidecarRows] = []
    aside: list[SidecarRows] = []
    early: tuple[list[EarlyRows], list[EarlyRows]] = ([], [])
    survival = np.zeros((2, draft.config.block_size))
    for number, info in enumerate(infos):
        document = captures.read(info)
        starts = some_anchors(document, request.num_anchors, generator)
        rows = clean_rows(engine, draft, document, number, starts)
        (aside if info.key in kept_aside else train).append(rows)
        places = some_anchors(document, request.num_early, generator)
        early[info.key in kept_aside].append(early_rows(draft, document, places))
        if number < request.num_candidates:
            paths = served_paths(engine, document, _params(captures))
            rows, kept = candidate_rows(engine, draft, document, number, paths)
            (aside if info.key in kept_aside else train).append(rows)
            survival += kept
        progress("documents", number + 1, len(infos))
    sizes = SidecarSizes(
        config.hidden_size,
        settings.rank,
        draft.config.block_size,
        identity.route_layers,
        config.num_experts,
        identity.top_k,
    )
    learnt, calibrating = joined(train), joined(aside)
    early_learnt, early_aside = (joined_early(parts) for parts in early)
    table = table_of(engine, learnt, calibrating, early_learnt, early_aside)
    arrays = fit_sidecar(
        learnt, calibrating, survival_of(survival), sizes, table, settings,
        lambda done, total, loss: progress(f"loss {loss:.3f}", done, total),
        _state(state_directory, captures, request, settings, draft.verdict.digest),
    )  # fmt: skip
    arrays = fit_early(
        arrays, early_learnt, early_aside, sizes, table, settings,
        lambda done, total, loss: progress(f"early loss {loss:.3f}", done, total),
    )  # fmt: skip
    num_candidates = int(learnt.is_candidate.sum())
    document = SidecarDocument(
        tensors_digest="",
        router_digest=route_facts(engine.checkpoint).router_digest,
        draft_digest=draft.verdict.digest,
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        top_k=identity.top_k,
        layers=list(identity.route_layers),
        hidden_size=config.hidden_size,
        rank=settings.rank,
        num_slots=draft.config.block_size,
        cut=SIDECAR_CUT,
        lineage=_lineage(
            captures,
            infos,
            len(learnt) - num_candidates,
            num_candidates,
            len(calibrating),
            settings.num_steps,
            settings.seed,
            len(early_learnt),
        ),
    )
    return document, arrays


def table_of(engine: Engine, *parts: SidecarRows | EarlyRows) -> EmbeddingTable:
    """Return the target's embedding rows of every token that occurs in some rows."""
    view = DraftTarget(engine.target.model, engine.target.sync)
    ids = np.concatenate([part.ids.reshape(-1) for part in parts])

    def embed(some: NDArray[np.int32]) -> NDArray[np.float32]:
        return cast("NDArray[np.float32]", np.array(view.embed(mx.array(some)).astype(mx.float32)))

    return EmbeddingTable(ids, embed)


def put_aside(infos: Sequence[DocumentInfo]) -> frozenset[str]:
    """Return the keys of the training documents that are for calibration alone: by hash, at least one."""
    found = frozenset(info.key for info in infos if int(info.key[8:16], 16) % ASIDE_EVERY == 0)
    return found or frozenset(sorted(info.key for info in infos)[:1])


def survival_of(counts: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return how likely the answer keeps the row of each slot.

    Args:
        counts: [2, B], rows kept and rows verified of every slot. Slots never verified count as the last one
            that was; without any, all rows count alike.
    """
    kept, verified = counts
    found = np.ones(len(kept), np.float32)
    for slot in range(len(kept)):
        found[slot] = kept[slot] / verified[slot] if verified[slot] else (found[slot - 1] if slot else 1.0)
    return found


def _params(captures: CaptureSet) -> SamplingParams:
    """Return how the answers of a set were chosen, where they can be said again: greedily.

    Raises:
        DrafterError: they were drawn, each with a seed of its own.
    """
    if captures.identity.sampling.get("temperature", 1.0) > 0:
        raise DrafterError(
            "The answers of this set were drawn, so that serving its prompts again says others",
            hint="capture with --temp 0, or train with --candidates 0",
        )
    return SamplingParams(temperature=0.0)


def _check_routes(engine: Engine, captures: CaptureSet) -> None:
    if not captures.identity.route_layers or engine.plan.is_resident:
        what = (
            "The capture set holds no routes" if not captures.identity.route_layers else "Nothing is streamed"
        )
        raise DrafterError(
            f"{what}, so there is nothing to learn from", hint="give --slots below all experts"
        )


def _state(
    kept: Path | None,
    captures: CaptureSet,
    request: RouteRequest,
    settings: NearSettings | SidecarSettings,
    draft_digest: str,
) -> FitState | None:
    """Return where a fit keeps itself, with all that its steps follow from."""
    if kept is None:
        return None
    description = {
        "request": asdict(request),
        "settings": asdict(settings),
        "captures_digest": captures.digest(),
        "target_digest": captures.identity.target_digest,
        "draft_digest": draft_digest,
        "runtime_version": version_of("flashnext") or "",
    }
    return FitState(kept, description)


def _lineage(
    captures: CaptureSet,
    infos: Sequence[DocumentInfo],
    clean: int,
    candidates: int,
    aside: int,
    num_steps: int,
    seed: int,
    early: int = 0,
) -> Lineage:
    return Lineage(
        captures_digest=captures.digest(),
        target_digest=captures.identity.target_digest,
        num_documents=len(infos),
        clean_rows=clean,
        candidate_rows=candidates,
        calibration_rows=aside,
        num_steps=num_steps,
        seed=seed,
        runtime_version=version_of("flashnext") or "",
        early_rows=early,
    )
