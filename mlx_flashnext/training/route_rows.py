"""Rows that a route sidecar is trained on: blocks of committed text, and blocks that a draft really proposed.

Entry points: `clean_rows`, `served_paths`, `candidate_rows`, and `early_rows` for its early trunk. What a row
is made of, the frozen draft computes from the captured features; what it wanted, the target's routers said.
"""

# Shapes: S tokens, R = S - 1 rows, A anchors, B slots, H hidden, L layers, K experts of a row.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.fuse import fuse
from drafter.sidecar import NUM_BEFORE
from drafter.train.batches import Blocks
from drafter.train.captures import CapturedDocument
from drafter.train.fit_early import EarlyRows
from drafter.train.fit_sidecar import SidecarRows, joined
from drafter.train.losses import block_states
from mlx_flashnext.engine.cycle import CycleFacts, Timeline
from mlx_flashnext.engine.draft_target import DraftTarget
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.routes import RouteLog
from mlx_flashnext.engine.sampler import Sampler, SamplingParams
from mlx_flashnext.training.draft_training import LoadedDraft

_AT_ONCE: Final = 32


def some_anchors(document: CapturedDocument, count: int, generator: np.random.Generator) -> list[int]:
    """Return positions of the answer at which blocks may begin, drawn and ascending."""
    places = np.arange(max(1, document.num_prompt - 1), len(document.routes))
    return np.sort(generator.choice(places, min(count, len(places)), replace=False)).tolist()


def clean_rows(
    engine: Engine, draft: LoadedDraft, document: CapturedDocument, number: int, starts: Sequence[int]
) -> SidecarRows:
    """Return the rows of blocks of committed text that begin at some positions, block by block."""
    block = draft.config.block_size
    tokens = np.concatenate([document.tokens, np.zeros(block, np.int32)])
    paths = {start: tokens[start : start + block] for start in starts}
    kept = dict.fromkeys(paths, block)
    routes = {start: document.routes[start : start + block] for start in paths}
    return _rows(engine, draft, document, number, paths, routes, kept, is_candidate=False)


def early_rows(draft: LoadedDraft, document: CapturedDocument, places: Sequence[int]) -> EarlyRows:
    """Return some rows of a document's answer as they are known before a draft runs.

    Args:
        draft: fuses the context.
        document: captured with features and routes.
        places: positions of the rows, at least 1.
    """
    at = np.asarray(places, np.int64)
    features = mx.array(document.features[at - 1]).astype(mx.float32)
    pad = np.full(NUM_BEFORE, draft.config.mask_token_id, np.int32)
    text = np.concatenate([pad, document.tokens])
    ids = np.stack([text[at + NUM_BEFORE - back] for back in range(NUM_BEFORE + 1)], axis=1)
    context = half(fuse(draft.params, draft.config, features))
    return EarlyRows(ids.astype(np.int32), context, document.routes[at])


@dataclass(frozen=True, slots=True)
class ServedBlock:
    """One verified block: position of the anchor, its tokens, rows that stayed, routes [T, L, K]."""

    position: int
    tokens: tuple[int, ...]
    num_kept: int
    routes: NDArray[np.uint16]


class _PathRecorder:
    """Writes verified blocks down with what native routers chose for every row; an `AnswerObserver`."""

    def __init__(self, num_layers: int) -> None:
        self._log = RouteLog()
        self._num_layers = num_layers
        self.blocks: list[ServedBlock] = []

    def listen(self, hints: Hints | None) -> Hints:
        del hints
        return Hints(None, self._num_layers, self._log)

    def begin_answer(self, timeline: Timeline, prompt: Sequence[int], sampler: Sampler) -> None:
        del timeline, prompt, sampler

    def end_answer(self, timeline: Timeline) -> None:
        del timeline

    def cycle_ended(self, facts: CycleFacts, sampler: Sampler) -> None:
        del sampler
        chosen = self._log.passes[-1].routes
        routes = np.asarray([chosen[layer] for layer in sorted(chosen)], np.uint16).swapaxes(0, 1)
        tokens = (facts.anchor, *facts.proposal.tokens)
        self.blocks.append(ServedBlock(facts.position, tokens, facts.num_kept, routes))
        self._log.passes.clear()


def served_paths(engine: Engine, document: CapturedDocument, params: SamplingParams) -> list[ServedBlock]:
    """Serve a captured prompt with the engine's draft; return its blocks, none if the answer is another."""
    recorder = _PathRecorder(engine.config.num_hidden_layers)
    session = engine.session(is_guarded=False, recorder=recorder)
    prompt = document.tokens[: document.num_prompt].tolist()
    answer = document.tokens[document.num_prompt :].tolist()
    events = session.generate(
        prompt, params, max_tokens=len(answer), stop_ids=engine.tokenizer.eos_ids, rule="coupled"
    )
    said = [event.token_id for event in events if isinstance(event, Token)]
    return recorder.blocks if said == answer else []


def candidate_rows(
    engine: Engine, draft: LoadedDraft, document: CapturedDocument, number: int, blocks: Sequence[ServedBlock]
) -> tuple[SidecarRows, NDArray[np.float64]]:
    """Return the rows of served blocks, and [2, B]: rows kept and rows verified of every slot."""
    counts = np.zeros((2, draft.config.block_size))
    whole = [one for one in blocks if one.position >= 1 and one.position < len(document.tokens) - 1]
    for one in whole:
        counts[0, : one.num_kept] += 1
        counts[1, : len(one.tokens)] += 1
    paths = {one.position: np.asarray(one.tokens, np.int32) for one in whole}
    routes = {one.position: one.routes for one in whole}
    kept = {one.position: one.num_kept for one in whole}
    return _rows(engine, draft, document, number, paths, routes, kept, is_candidate=True), counts


def _rows(
    engine: Engine,
    draft: LoadedDraft,
    document: CapturedDocument,
    number: int,
    paths: Mapping[int, NDArray[np.int32]],
    routes: Mapping[int, NDArray[np.uint16]],
    kept: Mapping[int, int],
    *,
    is_candidate: bool,
) -> SidecarRows:
    """Return the rows of blocks that begin at some positions, each with its tokens, routes and rows kept."""
    view = DraftTarget(engine.target.model, engine.target.sync)
    parts: list[SidecarRows] = []
    starts, block = sorted(paths), draft.config.block_size
    for first in range(0, len(starts), _AT_ONCE):
        some = starts[first : first + _AT_ONCE]
        begin = (
            0
            if draft.config.window is None or not draft.config.all_slide
            else max(0, some[0] - draft.config.window)
        )
        blocks = Blocks(
            begin,
            document.features[begin : some[-1]],
            tuple(some),
            document.tokens[some],
            np.zeros((len(some), block - 1), np.int32),
        )
        states, fused = block_states(draft.params, draft.config, view, blocks)
        newest = fused[mx.array([start - 1 - begin for start in some], mx.int32)]
        hidden, context = half(states), half(newest)
        for place, start in enumerate(some):
            num_rows = min(len(paths[start]), len(routes[start]), block)
            text = np.concatenate([document.tokens[max(0, start - 2) : start], paths[start]])
            text = np.concatenate([np.full(max(0, 2 - start), draft.config.mask_token_id, np.int32), text])
            at = 2 + np.arange(num_rows)
            parts.append(
                SidecarRows(
                    hidden=hidden[place, :num_rows],
                    ids=np.stack([text[at], text[at - 1], text[at - 2]], axis=1).astype(np.int32),
                    context=context[place : place + 1],
                    anchor=np.zeros(num_rows, np.int32),
                    slot=np.arange(num_rows, dtype=np.int32),
                    routes=routes[start][:num_rows],
                    is_kept=np.arange(num_rows) < kept[start],
                    is_candidate=np.full(num_rows, is_candidate),
                    document=np.full(num_rows, number, np.int32),
                )
            )
    if not parts:
        hidden_size, layers = draft.config.hidden_size, document.routes.shape[1:]
        return SidecarRows(
            np.zeros((0, hidden_size), np.float16), np.zeros((0, 3), np.int32),
            np.zeros((0, hidden_size), np.float16), np.zeros(0, np.int32), np.zeros(0, np.int32),
            np.zeros((0, *layers), np.uint16), np.zeros(0, bool), np.zeros(0, bool), np.zeros(0, np.int32),
        )  # fmt: skip
    return joined(parts)


def half(array: mx.array) -> NDArray[np.float16]:
    """Return an array in half precision, on the host."""
    return cast("NDArray[np.float16]", np.array(array.astype(mx.float16)))
