"""Recorded routes through the store of a machine that is not here. Entry: `Simulation`.

The store, its queue and its policy are `expert_store` itself on a virtual clock (expert_store/simulate.py);
what is read ahead is decided by `Hints` itself, with the predictors of a run. This file only plays the part
of the model: it says what `cycle.py` and `experts.py` say, in their order, and lets time pass for computing.
A test holds the outcome of that against a real engine on the same routes, demand by demand.

Rows of the n-gram table are in it where it is said how many bytes they are; the MTP module's own layer is
not.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Self

import mlx.core as mx

from expert_store.keys import Prefetch
from expert_store.layout import RecordLayout
from expert_store.lease import Lease
from expert_store.prefetch import PrefetchLimits
from expert_store.simulate import Simulated
from expert_store.stats import StoreStatistics
from mlx_flashnext.engine.deltas import plus, since
from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.guess import Guess, Rows
from mlx_flashnext.engine.hints import LONGEST_HINT, Hints
from mlx_flashnext.engine.predictors import Predictor, Previous
from mlx_flashnext.experts import HandOver
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.model.moe import LookAhead
from mlx_flashnext.simulation.simulated_machine import SimulatedMachine

OWNER = 1


@dataclass(frozen=True, slots=True)
class RoutedBlock:
    """One forward pass, as it was recorded.

    Attributes:
        position: tokens before it.
        num_kept: rows that stay.
        routes: the experts of every row, by streamed layer, in the order in which layers run.
        guesses: what was said of each layer while the one before it ran, or at the start of the first.
        is_prefill: a chunk of the prompt: none of its rows can be rejected, and nothing is guessed.
    """

    position: int
    num_kept: int
    routes: Mapping[int, Rows]
    guesses: Mapping[int, Sequence[Guess]] = field(default_factory=dict[int, Sequence[Guess]])
    is_prefill: bool = False

    @property
    def num_rows(self) -> int:
        """Tokens in it."""
        return max((len(rows) for rows in self.routes.values()), default=0)


@dataclass(frozen=True, slots=True)
class NgramReads:
    """Rows of the n-gram table: asked for before the first layer, waited for by one of them.

    Attributes:
        num_bytes: of one token.
        place: of the layer that adds them, among those that are streamed, from 0.
    """

    num_bytes: int
    place: int


@dataclass(frozen=True, slots=True)
class Played:
    """What became of blocks.

    Attributes:
        num_blocks: forward passes.
        num_tokens: rows that stayed.
        wall_ns: what they took on the virtual clock.
        store: what happened in the store meanwhile.
        num_guesses: guesses that were handed over.
        num_recorded: guesses that were recorded with the blocks, whoever guesses here.
    """

    num_blocks: int
    num_tokens: int
    wall_ns: int
    store: StoreStatistics
    num_guesses: int = 0
    num_recorded: int = 0

    @property
    def wait_ns(self) -> float:
        """Exposed wait for experts, per token."""
        return self.store.exposed_wait_ns / self.num_tokens if self.num_tokens else 0.0

    @property
    def token_ns(self) -> float:
        """Time per token."""
        return self.wall_ns / self.num_tokens if self.num_tokens else 0.0

    @property
    def token_bytes(self) -> float:
        """Bytes read per token."""
        return self.store.physical_bytes / self.num_tokens if self.num_tokens else 0.0

    def followed_by(self, other: Self) -> "Played":
        """Return both as one."""
        return Played(
            self.num_blocks + other.num_blocks,
            self.num_tokens + other.num_tokens,
            self.wall_ns + other.wall_ns,
            plus(self.store, other.store),
            self.num_guesses + other.num_guesses,
            self.num_recorded + other.num_recorded,
        )


class _RecordedAhead(LookAhead):
    """Stands for whoever asked a router one layer early when the routes were recorded."""

    layers_ahead = 1

    def guess(self, layer: int, later: DecoderLayer, stack_TGD: mx.array) -> mx.array:
        raise NotImplementedError  # there is no model here


class RecordedGuesses(Previous):
    """Says what was said when the routes were recorded; see `RoutedBlock.guesses`."""

    look_ahead: tuple[LookAhead, ...] = (_RecordedAhead(),)

    def __init__(self) -> None:
        super().__init__(())
        self.block: RoutedBlock | None = None

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        """Return what was said of the first layer, for which no layer is early."""
        del tokens, position
        assert self.block is not None
        first = next(iter(self.block.routes), -1)
        return self.block.guesses.get(first, ())

    def expect(self, layer: int, ids_TN: Rows) -> Iterable[Guess]:
        """Return what was said of a layer."""
        del ids_TN
        assert self.block is not None
        return self.block.guesses.get(layer, ())

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        """Return nothing more."""
        del layer, ids_TK
        return ()

    def commit(self, num_rows: int) -> None:
        """Learn nothing."""
        del num_rows


class Simulation:
    """One store with its slots, from cold, and whatever is played into it.

    Layers with a slot for every expert are read before anything is played, as an engine does.

    Args:
        layouts: where the records of each layer lie; their number and sizes matter.
        machine: what reads and computes.
        slots: of each layer.
        widest: rows of the widest block that is not a prompt's.
        top_k: experts of a row.
        policy: eviction policy.
        num_layers: of the model, those included that are not streamed; None for the last streamed one's.
        ngram: rows of the n-gram table; None leaves them out.

    Raises:
        MachineForeign: the machine has times of other layers.
        InvalidRequest: no layer has that place.
        StoreError: there can be no such store.
    """

    def __init__(
        self,
        layouts: Mapping[int, RecordLayout],
        machine: SimulatedMachine,
        *,
        slots: Mapping[int, int],
        widest: int = 1,
        top_k: int = 1,
        policy: str = "lru",
        num_layers: int | None = None,
        ngram: NgramReads | None = None,
    ) -> None:
        machine.compute.check(len(layouts), machine.name)
        if ngram is not None and not (0 <= ngram.place < len(layouts) and ngram.num_bytes >= 0):
            raise InvalidRequest(
                f"There are no such rows: {ngram.num_bytes} bytes for layer {ngram.place} of {len(layouts)}",
                hint="give zero bytes or more, and a place among the layers that are streamed",
            )
        self.machine = machine
        self._slots = dict(slots)
        self._num_layers = max(layouts) + 1 if num_layers is None else num_layers
        self._place = {layer: place for place, layer in enumerate(sorted(layouts))}
        self._simulated = Simulated.open(
            layouts,
            machine.drive,
            slots=slots,
            policy=policy,
            limits=limits_of(slots, top_k * widest),
        )
        self.store = self._simulated.store
        for layer, layout in layouts.items():
            if slots[layer] >= layout.num_experts:  # as an engine that streams nothing of a layer
                self.store.preload(layer)
        self._untold: tuple[int, Rows] | None = None
        self._tell_in_ns = 0
        self._ngram = ngram
        self._has_waited = False
        self._held: list[Lease] = []
        self._generation = 0
        self._hints = Hints(None, self._num_layers)
        self._predictor: Predictor | None = None

    def begin_answer(self, predictor: Predictor | None) -> None:
        """Begin an answer: hints start anew, the predictor keeps what it has learned."""
        self._hints = Hints(predictor, self._num_layers)
        self._predictor = predictor

    def end_answer(self) -> None:
        """End an answer: what was read ahead for it is nobody's any more."""
        self._generation += LONGEST_HINT + 1
        self.store.leave(OWNER, self._generation)

    def play(self, blocks: Iterable[RoutedBlock]) -> Played:
        """Run blocks of the answer that was begun; return what became of them alone."""
        before, began_ns = self.store.statistics(), self._simulated.clock()
        guessed = self._hints.num_guesses
        num_blocks = num_tokens = num_recorded = 0
        for block in blocks:
            self._pass(block)
            num_blocks += 1
            num_tokens += block.num_kept
            num_recorded += sum(map(len, block.guesses.values()))
        now = self.store.statistics()
        return Played(
            num_blocks,
            num_tokens,
            self._simulated.clock() - began_ns,
            since(now, before),
            self._hints.num_guesses - guessed,
            num_recorded,
        )

    def settle(self) -> None:
        """Let every read that is under way end; nobody waits."""
        self.store.wait_idle()

    def close(self) -> None:
        """Close the store."""
        self._idle()
        self.store.close()

    def _pass(self, block: RoutedBlock) -> None:
        """Do what a timeline does with a block."""
        compute, hints = self.machine.compute, self._hints
        if isinstance(self._predictor, RecordedGuesses):
            self._predictor.block = block
        tokens = [0] * block.num_rows
        self._compute(compute.pass_ns)
        self._hand_over(hints.begin(tokens, block.position, is_prefill=block.is_prefill))
        is_revocable = not block.is_prefill and block.num_rows > 1
        ngram, order = self._ngram, list(block.routes)
        if ngram is not None:
            self._simulated.read_rows(ngram.num_bytes * block.num_rows)
        for layer, after in zip(order, [*order[1:], None], strict=True):
            rows, place = block.routes[layer], self._place[layer]
            if ngram is not None and ngram.place == place:
                self._simulated.wait_for_rows()
            woken_ns = compute.woken_ns if self._has_waited else 0
            self._compute(compute.of_layer(place, len(rows)) + woken_ns)
            self._tell_untold()  # at the latest before the ids are read back, and what rides on them
            if after is not None and hints.looks_ahead(layer):
                hints.expect(after, ())
            self._experts(layer, rows, is_revocable=is_revocable)
        self._tell_untold()
        self._idle()
        self._generation += 1
        self.store.advance(OWNER, self._generation, num_rows=block.num_kept)
        hints.commit(block.num_kept)

    def _experts(self, layer: int, rows: Rows, *, is_revocable: bool) -> None:
        """Do what `StreamedExperts.run` does."""
        self._idle()
        union = sorted({expert for row in rows for expert in row})
        expert_ns = self.machine.compute.expert_ns
        if len(union) <= self._slots[layer]:
            masks = _row_masks(union, rows) if is_revocable else None
            is_told = False

            def tell() -> None:
                nonlocal is_told
                is_told = True
                self._tell(layer, rows)

            lease = self.store.acquire(layer, union, owner=OWNER, row_masks=masks, meanwhile=tell)
            self._held.append(lease)
            self._has_waited = is_told
            if not is_told:
                self._untold, self._tell_in_ns = (layer, rows), self.machine.compute.tell_ns
            self._compute(expert_ns * len(union))
            return
        self._has_waited = True
        half = max(1, self._slots[layer] // 2)
        groups = [union[start : start + half] for start in range(0, len(union), half)]
        request = self.store.request(layer, groups[0], owner=OWNER)
        self._tell(layer, rows)
        for later in [*groups[1:], None]:
            with request.wait() as lease:
                if later is not None:
                    request = self.store.request(layer, later, owner=OWNER)
                self._compute(expert_ns * len(lease.experts))

    def _tell(self, layer: int, rows: Rows, *, is_free: bool = False) -> None:
        self._hand_over(self._hints.routed(layer, rows), is_free=is_free)

    def _hand_over(self, ahead: HandOver, *, is_free: bool = False) -> None:
        if ahead.hints or ahead.outlook:
            issued: list[Prefetch] = []
            generation = self._generation + ahead.passes_ahead
            self.store.prefetch(
                ahead.hints, owner=OWNER, generation=generation, issued=issued, outlook=ahead.outlook
            )
            self._hints.accepted(issued)
            if not is_free:
                self._simulated.hold(self.machine.compute.hint_ns)

    def _compute(self, duration_ns: int) -> None:
        """Let the device compute; what was to be told meanwhile is told."""
        if self._untold is not None and self._tell_in_ns <= duration_ns:
            self._simulated.compute(self._tell_in_ns, self.machine.compute.record_ns)
            duration_ns -= self._tell_in_ns
            self._tell_untold()
        self._tell_in_ns -= duration_ns
        self._simulated.compute(duration_ns, self.machine.compute.record_ns)

    def _tell_untold(self) -> None:
        if self._untold is not None:
            (layer, rows), self._untold = self._untold, None
            self._tell(layer, rows, is_free=True)  # the device computes meanwhile

    def _idle(self) -> None:
        for lease in self._held:
            lease.release()
        self._held.clear()


def limits_of(slots: Mapping[int, int], widest_demand: int) -> PrefetchLimits:
    """Return what a run with these slots lets guesses take.

    Args:
        slots: of each layer.
        widest_demand: experts that a block that is not a prompt's can ask of a layer at once.
    """
    kept = min(widest_demand, (min(slots.values()) + 1) // 2)
    return PrefetchLimits(max_queued=max(1024, sum(slots.values())), min_exact_slots=kept)


def _row_masks(union: Sequence[int], rows: Rows) -> list[int]:
    """Return which rows chose each expert."""
    return [sum(1 << place for place, row in enumerate(rows) if expert in row) for expert in union]


def play_answers(
    simulation: Simulation,
    answers: Iterable[Sequence[RoutedBlock]],
    predictors: Iterator[Predictor | None],
    *,
    num_warm: int = 0,
) -> Played:
    """Play answers one after the other, each with its predictor, and close the store.

    Args:
        simulation: where they are played; nothing was yet.
        answers: blocks of each. Prompts fill slots and do not count; see `Played`.
        predictors: one for each answer.
        num_warm: first blocks of all that do not count either.

    Raises:
        InvalidRequest: there is no answer.
        StoreError: of the store.
    """
    total: Played | None = None
    with closing(simulation):
        for blocks in answers:
            simulation.begin_answer(next(predictors))
            uncounted = [block for block in blocks if block.is_prefill]
            decoded = [block for block in blocks if not block.is_prefill]
            cut = min(num_warm, len(decoded))
            num_warm -= cut
            simulation.play([*uncounted, *decoded[:cut]])
            simulation.settle()
            played = simulation.play(decoded[cut:])
            simulation.end_answer()
            total = played if total is None else total.followed_by(played)
    if total is None:
        raise InvalidRequest("There is no answer to play", hint="record one: flashnext trace record")
    return total
