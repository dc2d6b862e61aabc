"""Writes the cycles of a session into a trace. Entry points: `Recorder`, `TraceSettings`.

Off unless asked for; nothing here reaches the answer. What a cycle left on the device is read when the next
one has ended: by then it is computed, so that reading waits for nothing. Lines are made of `BATCH` cycles at
once: what is done between two steps of the model finds the caches cold, and costs several times as much.
A recorder that fails stops for good and says why (`failure`); the answer goes on.
"""

# Shapes: T rows of a block, k = T - 1 proposals, K candidates of a slot, R rows that stay, V vocabulary.

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

import mlx.core as mx
import numpy as np

from drafter.api import RouteHints
from drafter.record import (
    FORMAT,
    LAST_STACK,
    LAYER_OUTPUT,
    MAX_PROMPT_PIECE,
    NO_FEATURES,
    VERSION,
    Answer,
    Header,
    PromptPiece,
    TraceWriter,
)
from drafter.record_check import Totals
from expert_store.keys import Prefetch
from mlx_flashnext.engine.cycle import CycleFacts, Timeline
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.sampler import Sampler
from mlx_flashnext.engine.verify import Rule
from mlx_flashnext.experts import HandOver
from mlx_flashnext.model.host import HostSync, fence, to_host
from mlx_flashnext.model.moe import LookAhead
from mlx_flashnext.traces.record_lines import CycleValues, Heard, answer_line, cycle_line

_log = logging.getLogger(__name__)

MOST_LOGITS = 40_000
"""Logits of a block that may be kept: their line stays below a line's limit."""
BATCH = 16
"""Cycles that are kept as values before lines are made of them."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What a trace is of, and how much of it is kept.

    Attributes:
        target_model_revision: digest of the checkpoint.
        tokenizer_revision: digest of the tokenizer.
        vocab_size: of the target.
        num_layers: of the target, the MTP module's left out.
        draft_digest: of the draft's files; empty asks the drafter, who may have none.
        hidden: keep hidden rows whole, or their digest.
        keeps_logits: keep the target's logits where they are few: then the trace can be replayed.
        keeps_routes: keep native routes and guesses.
    """

    target_model_revision: str
    tokenizer_revision: str
    vocab_size: int
    num_layers: int
    draft_digest: str = ""
    hidden: Literal["digest", "payload"] = "digest"
    keeps_logits: bool = False
    keeps_routes: bool = True


class OverheardHints(Hints):
    """Says what other hints say, or nothing, and lets a recorder listen.

    Args:
        inner: who says it.
        num_layers: of the model.
    """

    def __init__(self, inner: Hints | None, num_layers: int) -> None:
        super().__init__(None, num_layers)
        self._inner = inner
        self._heard = Heard()
        self._heard_early: list[HandOver] = []

    def take(self) -> Heard:
        """Return what was heard since the last time."""
        heard, self._heard = self._heard, Heard()
        return heard

    @property
    def wants_routes(self) -> bool:
        """See `Hints`."""
        return self._inner is not None and self._inner.wants_routes

    def set_level(self, least_right: float) -> None:
        """See `Hints`."""
        if self._inner is not None:
            self._inner.set_level(least_right)

    def early(self, routes: RouteHints) -> HandOver:
        """Listen; see `Hints`."""
        if self._inner is None:
            return HandOver()
        ahead = self._inner.early(routes)
        self._heard_early = [ahead]
        return ahead

    def begin(
        self,
        tokens: Sequence[int],
        position: int,
        *,
        is_prefill: bool,
        routes: RouteHints | None = None,
    ) -> HandOver:
        """Open a block; see `Hints`."""
        self._heard, self._heard_early = Heard(ahead=self._heard_early), []
        if self._inner is None:
            return HandOver()
        return self._pass_on(self._inner.begin(tokens, position, is_prefill=is_prefill, routes=routes))

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        """See `Hints`."""
        return () if self._inner is None else self._inner.looks_ahead(layer)

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> None:
        """See `Hints`."""
        if self._inner is not None:
            self._inner.expect(layer, ids_TN)

    def routed(self, layer: int, ids_TK: Sequence[Sequence[int]]) -> HandOver:
        """Listen; see `Hints`."""
        if layer < self._num_layers:
            self._heard.rows[layer] = ids_TK
        return HandOver() if self._inner is None else self._pass_on(self._inner.routed(layer, ids_TK))

    def accepted(self, hints: Sequence[Prefetch]) -> None:
        """See `Hints`."""
        if self._inner is not None:
            self._inner.accepted(hints)

    def commit(self, num_rows: int) -> None:
        """See `Hints`."""
        if self._inner is not None:
            self._inner.commit(num_rows)

    def _pass_on(self, ahead: HandOver) -> HandOver:
        if ahead.hints:
            self._heard.ahead.append(ahead)
        return ahead


@dataclass(frozen=True, slots=True)
class _Pending:
    """A cycle whose values are still on the device."""

    facts: CycleFacts
    heard: Heard
    candidates: tuple[mx.array, mx.array] | None
    target: mx.array
    logits: mx.array | None
    hidden: mx.array | None
    cancelled: Mapping[int, Sequence[int]] | None


class Recorder:
    """Writes the answers of one session into one trace; an `AnswerObserver`.

    Not thread-safe; every call on the inference thread.

    Args:
        stream: where lines go; the caller closes it.
        settings: what the trace is of.
        cancelled: asked after every cycle which guesses of each layer ended unread with it; None: not known.

    Attributes:
        failure: why it stopped; empty while it has not.
        cause: what was raised then: of the stream an `OSError`, which knows no path.
        num_cycles: cycles seen.
    """

    def __init__(
        self,
        stream: BinaryIO,
        settings: TraceSettings,
        *,
        cancelled: Callable[[], Mapping[int, Sequence[int]]] | None = None,
    ) -> None:
        self.failure = ""
        self.cause: Exception | None = None
        self.num_cycles = 0
        self._writer = TraceWriter(stream)
        self._settings = settings
        self._cancelled = cancelled
        self._sync = HostSync()
        self._hints: OverheardHints | None = None
        self._header: Header | None = None
        self._timeline: Timeline | None = None
        self._prompt: Sequence[int] = ()
        self._request: Answer | None = None
        self._totals = Totals()
        self._pending: _Pending | None = None
        self._values: list[CycleValues] = []

    def listen(self, hints: Hints | None) -> Hints | None:
        """Return hints that say the same and are overheard; see `AnswerObserver`."""
        if not self._settings.keeps_routes:
            return hints
        self._hints = OverheardHints(hints, self._settings.num_layers)
        return self._hints

    def begin_answer(self, timeline: Timeline, prompt: Sequence[int], sampler: Sampler) -> None:
        """Remember the request; it is written with its first cycle."""
        self._timeline, self._prompt = timeline, tuple(prompt)
        self._request, self._totals, self._pending, self._values = None, Totals(), None, []
        self._rule: Rule = timeline.drafting.rule
        del sampler

    def cycle_ended(self, facts: CycleFacts, sampler: Sampler) -> None:
        """Read the cycle before this one, and keep this one; see `CycleObserver`."""
        if self.failure:
            return
        try:
            if self._request is None:
                self._begin(facts, sampler)
            self._read_pending()
            if len(self._values) >= BATCH:
                self._write()
            self._pending = self._keep(facts)
            self.num_cycles += 1
        except Exception as error:  # noqa: BLE001  a full disk, say: the answer goes on
            self._stop(error)

    def end_answer(self, timeline: Timeline) -> None:
        """Write the last cycles and what all add up to; an answer given up long ago is over already."""
        if self.failure or self._request is None or timeline is not self._timeline:
            return
        try:
            self.settle()
            self._writer.write(self._totals.end())
            self._writer.flush()
            self._request = None
        except Exception as error:  # noqa: BLE001  as in `cycle_ended`
            self._stop(error)

    def settle(self) -> None:
        """Write what is left of the cycles so far.

        Raises:
            OSError: of the stream.
        """
        self._read_pending()
        self._write()

    def _stop(self, error: Exception) -> None:
        self.failure, self.cause = f"{type(error).__name__}: {error}", error
        self._pending, self._values = None, []
        _log.warning("recording stopped: %s", self.failure)

    def _begin(self, facts: CycleFacts, sampler: Sampler) -> None:
        assert self._timeline is not None
        if self._header is None:
            self._header = self._describe(facts, self._timeline)
            self._writer.write(self._header)
        self._request = answer_line(
            self._header, self._timeline.owner, facts.generation, self._prompt, sampler, self._rule
        )
        self._writer.write(self._request)
        for start in range(0, len(self._prompt), MAX_PROMPT_PIECE):
            piece = tuple(self._prompt[start : start + MAX_PROMPT_PIECE])
            self._writer.write(PromptPiece(start, piece))
            self._totals.begin(list(piece))

    def _describe(self, facts: CycleFacts, timeline: Timeline) -> Header:
        settings, (stack, features) = self._settings, facts.seen
        seen = features if features is not None else stack
        stage, layers, dtype, shape = NO_FEATURES, (), NO_FEATURES, ()
        if seen is not None:
            taps = timeline.drafting.wants().taps
            is_stack = features is None
            stage = LAST_STACK if is_stack else LAYER_OUTPUT
            layers = (settings.num_layers - 1,) if is_stack else taps
            dtype, shape = str(seen.dtype).removeprefix("mlx.core."), tuple(seen.shape[1:])
        return Header(
            format=FORMAT,
            schema_version=VERSION,
            target_model_revision=settings.target_model_revision,
            tokenizer_revision=settings.tokenizer_revision,
            vocab_size=settings.vocab_size,
            draft_kind=timeline.drafting.statistics().drafter,
            draft_digest=settings.draft_digest or timeline.drafting.draft_digest,
            captured_stage=stage,
            captured_layer_ids=layers,
            hidden_dtype=dtype,
            hidden_row_shape=shape,
        )

    def _keep(self, facts: CycleFacts) -> _Pending:
        """Submit what is wanted of the cycle's arrays, so that it is there when the next one has ended."""
        assert self._header is not None
        proposal, candidates = facts.proposal, None
        if proposal.row_ids is not None and proposal.row_probs is not None:
            candidates = (proposal.row_ids, proposal.row_probs)
        stack, features = facts.seen
        hidden = features if features is not None else stack
        if hidden is not None and self._header.captured_stage == NO_FEATURES:
            hidden = None
        target, logits = _target_probabilities(facts), None
        if self._settings.keeps_logits and facts.logits.size <= MOST_LOGITS:
            logits = facts.logits.astype(mx.float32)
        heard = Heard() if self._hints is None else self._hints.take()
        cancelled = None if self._cancelled is None else self._cancelled()
        waiting = [array for array in (target, logits, hidden, *(candidates or ())) if array is not None]
        mx.async_eval(waiting)  # pyright: ignore[reportUnknownMemberType]  (half typed stubs)
        return _Pending(facts, heard, candidates, target, logits, hidden, cancelled)

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        facts, candidates, hidden = pending.facts, pending.candidates, pending.hidden
        self._values.append(
            CycleValues(
                generation=facts.generation,
                position=facts.position,
                anchor=facts.anchor,
                tokens=facts.proposal.tokens,
                law=facts.proposal.law,
                accepted=facts.verdict.accepted,
                bonus=facts.verdict.tokens[-1],
                num_kept=facts.num_kept,
                heard=pending.heard,
                candidates=None
                if candidates is None
                else (to_host(self._sync, candidates[0]), to_host(self._sync, candidates[1])),
                target=to_host(self._sync, pending.target),
                logits=None
                if pending.logits is None
                else np.frombuffer(self._bytes(pending.logits), np.float32).reshape(facts.logits.shape),
                hidden=None if hidden is None else (tuple(hidden.shape), self._bytes(hidden)),
                cancelled=pending.cancelled,
            )
        )

    def _write(self) -> None:
        values, self._values = self._values, []
        header, request = self._header, self._request
        if header is None or request is None:
            return
        for cycle in values:
            line = cycle_line(cycle, header, request, keeps_rows=self._settings.hidden == "payload")
            self._writer.write(line)
            self._totals.add(line)

    def _bytes(self, array: mx.array) -> bytes:
        """Return an array's bytes, row by row, little-endian."""
        flat = array if array.dtype == mx.float32 else array.view(mx.uint16)
        fence(self._sync, flat)
        return bytes(np.array(flat, copy=True).tobytes())


def _target_probabilities(facts: CycleFacts) -> mx.array:
    """Return, [T, K + 1], the probability of every candidate of a slot, and of the bonus; row k repeats."""
    proposal, num_rows, scores_TV = facts.proposal, facts.logits.shape[0], facts.verdict.scores
    assert scores_TV is not None
    ids = proposal.row_ids
    bonus_T1 = mx.full((num_rows, 1), facts.verdict.tokens[-1], mx.int32)
    if num_rows == 1:
        ids_TK = bonus_T1
    elif ids is not None:
        ids_kK = mx.clip(ids.astype(mx.int32), 0, facts.logits.shape[1] - 1)
        ids_TK = mx.concatenate([mx.concatenate([ids_kK, ids_kK[-1:]]), bonus_T1], axis=-1)
    else:
        drafted_T1 = mx.array([*proposal.tokens, proposal.tokens[-1]], mx.int32)[:, None]
        ids_TK = mx.concatenate([drafted_T1, bonus_T1], axis=-1)
    norms_T1 = mx.logsumexp(scores_TV, axis=-1, keepdims=True)
    return mx.exp(mx.take_along_axis(scores_TV, ids_TK, axis=-1) - norms_T1)
