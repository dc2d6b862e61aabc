"""A target without a model, for replays: scripted logits, features and routes under the real cycle.

Entry point: `ReplayRig`. State transaction, store, tickets, hints, verification and drafting are the
product's; the state's one layer is the list of tokens whose rows are cached, and the store's records have
eight bytes each, read one at a time and only when they are demanded.
"""

# Shapes: T rows, V vocabulary, W width of a row's features.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol, cast

import mlx.core as mx

from drafter.api import Drafter, RouteHints
from drafter.record import LAST_STACK, LAYER_OUTPUT, TraceRefused
from expert_store.keys import Prefetch, ReadClass
from expert_store.layout import RecordLayout, Span
from expert_store.lease import Lease
from expert_store.prefetch import NO_OUTLOOK, PrefetchLimits
from expert_store.stats import Fate
from expert_store.store import ExpertStore
from expert_store.testing import DictMemory, MemorySource, StepReader
from mlx_flashnext.engine.cycle import CycleFacts, Target, Timeline
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.predictors import Guess, Rows
from mlx_flashnext.engine.sampler import Sampler
from mlx_flashnext.engine.verify import Rule
from mlx_flashnext.experts import HandOver, RouteListener, StreamedExperts
from mlx_flashnext.layer_state import LayerState, Staged
from mlx_flashnext.model.flashnext import FlashNext, ForwardOutput
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.rows import StreamedRows
from mlx_flashnext.state import Block, Carried, SequenceState, TransactionalState
from mlx_flashnext.traces.recording import Recorder

_RECORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Capture:
    """What a drafter is shown: stage and layers as in a trace's header, and the shape of a row."""

    stage: str
    layers: tuple[int, ...]
    row_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RigSize:
    """Experts of each layer, and the most that one block names of it."""

    experts: Mapping[int, int]
    widest: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class BlockScript:
    """What a target computes of a block.

    Attributes:
        logits: [T, V].
        hidden: of every row, [T, *row_shape]; None if nothing is captured.
        routes: every row's experts by layer.
        guesses: (layer, passes ahead, confidence by expert).
    """

    logits: mx.array
    hidden: mx.array | None
    routes: Mapping[int, Sequence[Sequence[int]]]
    guesses: Sequence[tuple[int, int, Mapping[int, float]]]


class Script(Protocol):
    """Stands for the weights."""

    def block(self, position: int, tokens: Sequence[int]) -> BlockScript:
        """Return what the target computes of tokens behind `position` others."""
        ...


@dataclass(frozen=True, slots=True)
class _CachedRows:
    """A layer's cache, and its own way back: the tokens whose rows it holds."""

    tokens: tuple[int, ...]
    before: int = 0

    def arrays(self) -> list[mx.array]:
        return []

    def state_after(self, rows: int) -> "_CachedRows":
        return _CachedRows(self.tokens[: self.before + rows])


class _State(TransactionalState):
    """The transaction over one layer of `_CachedRows`."""

    def __init__(self) -> None:
        layers = cast("tuple[LayerState, ...]", (_CachedRows(()),))
        # The geometry is only looked at by layers that have one.
        super().__init__(cast("Any", None), Carried(0, layers, None), None)

    def check_consistent(self, carried: Carried) -> None:
        assert len(cast("_CachedRows", carried.layers[0]).tokens) == carried.num_tokens

    @property
    def cached(self) -> tuple[int, ...]:
        return cast("_CachedRows", self.carried.layers[0]).tokens


class _Predictor:
    """Says what is scripted: guesses for the block at its start, for the next one after its first layer."""

    look_ahead = ()
    wants_routes = False

    def __init__(self) -> None:
        self.guesses: Sequence[tuple[int, int, Mapping[int, float]]] = ()

    def early(self, routes: RouteHints) -> list[Guess]:
        del routes
        return []

    def drafted(self, routes: RouteHints | None) -> None:
        del routes

    def begin(self, tokens: Sequence[int], position: int) -> list[Guess]:
        del tokens, position
        return self._of_pass(0)

    def routed(self, layer: int, ids_TK: Rows) -> list[Guess]:
        del layer, ids_TK
        later, self.guesses = self._of_pass(1), ()
        return later

    def expect(self, layer: int, ids_TN: Rows) -> list[Guess]:
        del layer, ids_TN
        return []

    def outlook(self) -> Mapping[int, memoryview]:
        return NO_OUTLOOK

    def commit(self, num_rows: int) -> None:
        del num_rows

    def _of_pass(self, wanted: int) -> list[Guess]:
        return [
            Guess(layer, expert, confidence, ahead)
            for layer, ahead, guesses in self.guesses
            if ahead == wanted
            for expert, confidence in guesses.items()
        ]


@dataclass
class _Experts:
    """What the cycle asks of streamed experts, over a store that is read step by step.

    Attributes:
        outstanding: guesses that became tickets and were not demanded, with the last generation they are for.
    """

    store: ExpertStore
    reader: StepReader
    owner: int = 0
    generation: int = 0
    num_unverified: int = 0
    listener: RouteListener | None = None
    outstanding: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    _held: list[Lease] = field(default_factory=list[Lease])

    def hand_over(self, ahead: HandOver) -> None:
        """Give hints to the store one by one, to know which of them became tickets."""
        generation = self.generation + ahead.passes_ahead
        for hint in ahead.hints:
            one = Prefetch(*hint)
            if self.store.prefetch([one], owner=self.owner, generation=generation):
                self.outstanding[hint.layer, hint.expert] = generation

    def run(self, layer: int, ids_TK: Sequence[Sequence[int]]) -> None:
        """Demand a layer's experts; nothing but what is demanded is read."""
        union = sorted({expert for row in ids_TK for expert in row})
        masks = None
        if self.num_unverified:
            masks = [sum(1 << row for row, ids in enumerate(ids_TK) if expert in ids) for expert in union]
        request = self.store.request(layer, union, owner=self.owner, row_masks=masks)
        if self.listener is not None:
            self.hand_over(self.listener.routed(layer, ids_TK))
        while not request.is_ready:
            if not self.reader.step():
                raise TraceRefused(f"layer {layer}: a demanded expert is neither resident nor queued")
        self._held.append(request.wait_nowait())
        for expert in union:
            self.outstanding.pop((layer, expert), None)

    def device_busy(self) -> None:
        """Do nothing: whoever listens has heard it."""

    def end_pass(self) -> None:
        """Let nobody listen any more."""
        self.listener, self.num_unverified = None, 0

    def device_idle(self) -> None:
        """End every lease held."""
        for lease in self._held:
            lease.release()
        self._held.clear()


class _Model:
    """Stages what is scripted."""

    def __init__(
        self, script: Script, capture: Capture, vocab_size: int, experts: _Experts, predictor: _Predictor
    ) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self._script = script
        self._capture = capture
        self._experts = experts
        self._predictor = predictor

    def announce(self, position: int, tokens: Sequence[int]) -> None:
        """Tell the predictor what it will guess of the next block."""
        self._predictor.guesses = self._script.block(position, tokens).guesses

    def forward(
        self,
        tokens: Sequence[int],
        block: Block,
        *,
        logits: str = "all",
        taps: Sequence[int] = (),
        contraction: str | None = None,
    ) -> ForwardOutput:
        """Return what is scripted of a block, having demanded its experts; prompts compute nothing."""
        del contraction
        block.check_rows(len(tokens))
        held = cast("_CachedRows", block.before.layers[0]).tokens
        staged = _CachedRows((*held, *tokens), before=len(held))
        left: Staged[Any] = Staged(cast("Any", staged), cast("Any", staged))
        block.stage([left])  # pyright: ignore[reportUnknownMemberType]  (a layer of our own)
        capture, num_rows = self._capture, len(tokens)
        hidden = mx.zeros((num_rows, *capture.row_shape))
        scores = None
        if logits != "none":
            said = self._script.block(block.position, tokens)
            scores, hidden = said.logits, hidden if said.hidden is None else said.hidden
            for layer, rows in sorted(said.routes.items()):
                self._experts.run(layer, rows)
        columns: list[mx.array] = []
        if capture.stage == LAYER_OUTPUT:
            columns = list(cast("Any", mx.split(hidden, len(capture.layers), axis=-1)))
        stack = hidden if capture.stage == LAST_STACK else mx.zeros((num_rows, 1, 1))
        return ForwardOutput(scores, stack, dict(zip(capture.layers if taps else (), columns, strict=False)))


class ReplayRig:
    """One answer's timeline over a script.

    Args:
        script: stands for the weights.
        capture: what the drafter is shown.
        size: of the store.
        vocab_size: V.
        drafter: who proposes.
        owner: of tickets.

    Attributes:
        num_layers: as many as the script may route.
        timeline: the product's own.
    """

    def __init__(
        self,
        script: Script,
        capture: Capture,
        size: RigSize,
        vocab_size: int,
        drafter: Drafter,
        owner: int,
    ) -> None:
        reader, predictor = StepReader(), _Predictor()
        self.num_layers = max([*size.experts, *capture.layers], default=0) + 1
        self._store = _store(size, reader)
        self._experts = _Experts(self._store, reader)
        self._model = _Model(script, capture, vocab_size, self._experts, predictor)
        self._state = _State()
        self._hints = Hints(predictor, self.num_layers)
        self._facts: list[CycleFacts] = []
        self._recorder: Recorder | None = None
        self._num_cancelled = 0
        model, experts = cast("FlashNext", self._model), cast("StreamedExperts", self._experts)
        target = Target(model, experts, self._store, cast("StreamedRows", None), HostSync())
        governor = Governor(max(1, drafter.max_proposals()), is_guarded=False)
        self.timeline = Timeline(target, cast("SequenceState", self._state), drafter, governor, owner)

    def begin(
        self, recorder: Recorder, prompt: Sequence[int], generation: int, rule: Rule, sampler: Sampler
    ) -> None:
        """Consume all of a prompt but its last token, the first anchor.

        Raises:
            StoreError: the generation is one that a prompt of this length has passed.
        """
        timeline = self.timeline
        self._recorder = recorder
        timeline.hints = recorder.listen(self._hints)
        timeline.drafting.begin_answer(prompt, rule, sampler)
        if len(prompt) > 1:
            timeline.consume(prompt[:-1], prompt[-1])
        self._store.advance(timeline.owner, generation)
        timeline.generation = generation
        recorder.begin_answer(timeline, prompt, sampler)
        timeline.observer = self

    def cycle(self, anchor: int, sampler: Sampler, room: int, num_committed: int) -> CycleFacts:
        """Run one cycle and return what it did.

        Args:
            anchor: the last committed token.
            sampler: of the answer.
            room: most proposals.
            num_committed: how many tokens the answer takes.
        """
        timeline = self.timeline
        self._model.announce(len(timeline.tokens), [anchor, *[0] * room])
        kept = timeline.cycle(anchor, sampler, room, lambda tokens: min(num_committed, len(tokens)))
        for token in kept:
            sampler.observe(token)
        return self._facts[-1]

    def cycle_ended(self, facts: CycleFacts, sampler: Sampler) -> None:
        """Remember the cycle and pass it on; see `CycleObserver`."""
        assert self._recorder is not None
        self._facts.append(facts)
        self._recorder.cycle_ended(facts, sampler)

    def check_state(self, number: int) -> None:
        """Refuse a state that is not exactly what was committed: rows, positions, and no block left open.

        Raises:
            TraceRefused: names the line.
        """
        consumed = tuple(self.timeline.tokens)
        if self._state.cached != consumed or self._state.carried.num_tokens != len(consumed):
            raise TraceRefused(f"line {number}: the cache holds other rows than were committed")
        self._state.snapshot()  # refuses while a block is open

    def cancelled(self) -> dict[int, list[int]]:
        """Return the guesses that ended unread with the last cycle, as the store counts them.

        Raises:
            TraceRefused: the store counts others.
        """
        outstanding, generation = self._experts.outstanding, self.timeline.generation
        gone = [key for key, last in outstanding.items() if last < generation]
        found: dict[int, list[int]] = {}
        for layer, expert in gone:
            del outstanding[layer, expert]
            found.setdefault(layer, []).append(expert)
        classes = self._store.statistics().classes
        counted = sum(
            classes[kind].fates[Fate.CANCELLED].num for kind in (ReadClass.NEAR, ReadClass.SPECULATIVE)
        )
        if counted - self._num_cancelled != len(gone):
            raise TraceRefused(
                f"{len(gone)} tickets were stale, {counted - self._num_cancelled} were cancelled"
            )
        self._num_cancelled = counted
        return found

    def end(self, recorder: Recorder) -> None:
        """End the answer; nothing may be left that was read ahead for it.

        Raises:
            TraceRefused: a ticket survived its owner.
        """
        self.timeline.rest()
        if self._store.statistics().num_queued:
            raise TraceRefused("a ticket survived the end of its answer")
        recorder.end_answer(self.timeline)
        self._store.close()


def _store(size: RigSize, reader: StepReader) -> ExpertStore:
    layers = size.experts or {0: 1}
    source = MemorySource([bytes(_RECORD_BYTES * count) for count in layers.values()])
    records = {
        layer: RecordLayout.stacked(
            layer, count, [("record", Span(file, 0, _RECORD_BYTES * count))], file_sizes=source.file_sizes
        )
        for file, (layer, count) in enumerate(layers.items())
    }
    widest = max(size.widest.values(), default=1)
    # Room for all that one block demands beside all that is guessed meanwhile for it and for the next.
    slots = {layer: min(count, 4 * widest) for layer, count in layers.items()}
    memory = DictMemory(slot_lengths=dict.fromkeys(layers, (_RECORD_BYTES,)))
    limits = PrefetchLimits(min_exact_slots=widest)
    return ExpertStore(records, source, memory, slots=slots, reader=reader, limits=limits)
