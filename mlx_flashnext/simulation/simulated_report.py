"""What a trace would have waited for elsewhere: budgets x hints x widths x machines. Entry: `sweep`.

Owner of the format of the report. Every figure is simulated, none is measured, and titles say so.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from expert_store.keys import ReadClass
from expert_store.layout import RecordLayout
from expert_store.stats import Fate
from mlx_flashnext.engine.errors import InvalidRequest, TargetDiffers
from mlx_flashnext.engine.predictors import Predictor, PredictorSetting, make_predictor
from mlx_flashnext.simulation.simulated_machine import SimulatedMachine
from mlx_flashnext.simulation.simulated_routes import Answers, has_guesses, in_width, routes_by_position
from mlx_flashnext.simulation.simulation import Played, RecordedGuesses, Simulation, play_answers

FORMAT = "flashnext-simulation"
VERSION = 1
SIMULATED_HINTS: Final = ("off", "frequency", "previous", "random", "recorded", "oracle")
"""Who may say what to read ahead. `recorded`: what was said when the trace was recorded, one layer early."""
_GUESSED: Final = (ReadClass.NEAR, ReadClass.SPECULATIVE)
AS_RECORDED: Final = 0
"""The width of blocks as they are in the trace."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is simulated.

    Attributes:
        slots: budgets: experts of each layer in memory.
        hints: of `SIMULATED_HINTS`.
        widths: rows of a block; `AS_RECORDED` leaves them as they are.
        acceptance: chance that a row after the first is accepted, if those before it were; of other widths.
        policy: eviction policy.
        num_warm: first blocks that fill slots and do not count.
        seed: of chance, in acceptance and `random` hints.
    """

    slots: Sequence[int]
    hints: Sequence[str] = ("off",)
    widths: Sequence[int] = (AS_RECORDED,)
    acceptance: float = 1.0
    policy: str = "lru"
    num_warm: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination; times in nanoseconds and bytes, per token that stayed.

    Attributes:
        machine: its name.
        slots: experts of each layer in memory.
        num_experts: of a layer.
        hints: who said what to read ahead.
        width: rows of a block; 0 as recorded.
        tokens_per_block: tokens that stayed of a block.
        num_tokens: tokens that count.
        wait_ns: exposed wait for experts.
        token_ns: wait and computing.
        storage_ns: bytes read by the drive's rate; None if nothing limits it.
        token_bytes: bytes read, whoever asked for them.
        hit_rate: of demands; None without any.
        prefetched: demands whose record a guess had brought or was bringing.
        rejected_bytes: of guesses that were never used.
        num_guesses: in all, that were handed over to the store.
        num_recorded: in all, that the trace has, whoever guesses here.
        num_guessed_reads: in all, records that were asked for because they were guessed.
    """

    machine: str
    slots: int
    num_experts: int
    hints: str
    width: int
    tokens_per_block: float
    num_tokens: int
    wait_ns: float
    token_ns: float
    storage_ns: float | None
    token_bytes: float
    hit_rate: float | None
    prefetched: float | None
    rejected_bytes: float
    num_guesses: int
    num_recorded: int
    num_guessed_reads: int

    @property
    def tokens_per_s(self) -> float | None:
        """Rate; None where neither computing nor waiting takes time."""
        return 1e9 / self.token_ns if self.token_ns else None


def sweep(
    answers: Answers,
    layouts: Mapping[int, RecordLayout],
    machines: Sequence[SimulatedMachine],
    asked: Sweep,
) -> Iterator[Cell]:
    """Yield a cell for every combination.

    Args:
        answers: blocks of each answer.
        layouts: of the model; layers without routes are left out.
        machines: at least one.
        asked: the rest.

    Raises:
        InvalidRequest: there is nothing left to count.
        TargetDiffers: the routes are not of these layouts.
        StoreError: there can be no such store.
    """
    layers = _checked(answers, layouts)
    own = {layer: layouts[layer] for layer in layers}
    if "recorded" in asked.hints and not has_guesses(answers):
        raise InvalidRequest(
            "The trace has no guesses to replay: recorded", hint="trace record --hints near-gate writes them"
        )
    for width in asked.widths:
        played = _in_width(answers, width, asked)
        num_blocks = sum(len(blocks) for blocks in played)
        if num_blocks <= asked.num_warm:
            raise InvalidRequest(
                f"{num_blocks} blocks are too few to leave out the first {asked.num_warm}",
                hint="leave out fewer, or record a longer answer",
            )
        top_k = max(len(row) for row in played[0][0].routes[layers[0]])
        widest = max(block.num_rows for blocks in played for block in blocks if not block.is_prefill)
        for machine in machines:
            for slots in asked.slots:
                for hints in asked.hints:
                    simulation = Simulation(
                        own,
                        machine,
                        slots={layer: min(slots, one.num_experts) for layer, one in own.items()},
                        widest=widest,
                        top_k=top_k,
                        policy=asked.policy,
                    )
                    predictors = _predictors(hints, played, own, top_k, asked.seed)
                    result = play_answers(simulation, played, predictors, num_warm=asked.num_warm)
                    yield _cell(result, machine, slots, own, hints, width)


def to_dict(cells: Sequence[Cell], machines: Sequence[SimulatedMachine], asked: Sweep) -> dict[str, object]:
    """Return everything as plain values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "simulated": True,
        "asked": asdict(asked),
        "machines": [asdict(machine) for machine in machines],
        "cells": [{**asdict(cell), "tokens_per_s": cell.tokens_per_s} for cell in cells],
    }


def _checked(answers: Answers, layouts: Mapping[int, RecordLayout]) -> list[int]:
    """Return the layers of the routes; refuse routes that are not of these layouts."""
    layers = sorted(answers[0][0].routes)
    for layer in layers:
        if layer not in layouts:
            raise TargetDiffers(
                f"The routes are of another model: it has no streamed layer {layer}",
                hint="give the model that the trace was recorded from",
            )
        most = max(expert for blocks in answers for b in blocks for row in b.routes[layer] for expert in row)
        if most >= layouts[layer].num_experts:
            raise TargetDiffers(
                f"The routes name expert {most} of layer {layer}, which has {layouts[layer].num_experts}",
                hint="give the model that the trace was recorded from, or its number of experts",
            )
    return layers


def _in_width(answers: Answers, width: int, asked: Sweep) -> Answers:
    """Return the blocks of a width."""
    if width == AS_RECORDED:
        return answers
    chance = random.Random(asked.seed)
    found = [in_width(blocks, width, asked.acceptance, chance) for blocks in answers]
    found = [blocks for blocks in found if any(not block.is_prefill for block in blocks)]
    if not found:
        raise InvalidRequest(
            f"No answer of the trace has {width} tokens for one block", hint="ask for narrower blocks"
        )
    return found


def _predictors(
    hints: str, answers: Answers, layouts: Mapping[int, RecordLayout], top_k: int, seed: int
) -> Iterator[Predictor | None]:
    """Yield who guesses, for one answer after the other; who learns goes on from one to the next."""
    counts = {layer: one.num_experts for layer, one in layouts.items()}
    kept: Predictor | None = None
    if hints not in ("recorded", "oracle"):
        kept = make_predictor(hints, PredictorSetting(counts, top_k, seed=seed))
    for blocks in answers:
        if hints == "recorded":
            yield RecordedGuesses()
        elif hints == "oracle":
            setting = PredictorSetting(counts, top_k, routes=routes_by_position(blocks))
            yield make_predictor("oracle", setting)
        else:
            yield kept


def _cell(
    played: Played,
    machine: SimulatedMachine,
    slots: int,
    layouts: Mapping[int, RecordLayout],
    hints: str,
    width: int,
) -> Cell:
    store, rate = played.store, machine.drive.bytes_per_s
    demands = store.num_demands
    return Cell(
        machine=machine.name,
        slots=slots,
        num_experts=max(one.num_experts for one in layouts.values()),
        hints=hints,
        width=width,
        tokens_per_block=played.num_tokens / played.num_blocks,
        num_tokens=played.num_tokens,
        wait_ns=played.wait_ns,
        token_ns=played.token_ns,
        storage_ns=None if rate is None else played.token_bytes / rate * 1e9,
        token_bytes=played.token_bytes,
        hit_rate=store.hit_rate,
        prefetched=(store.num_prefetched + _joined_guesses(played)) / demands if demands else None,
        rejected_bytes=store.rejected_bytes / played.num_tokens,
        num_guesses=played.num_guesses,
        num_recorded=played.num_recorded,
        num_guessed_reads=sum(store.classes[kind].num for kind in _GUESSED),
    )


def _joined_guesses(played: Played) -> int:
    """Return the demands that found a guess of theirs under way."""
    classes = played.store.classes
    return sum(classes[kind].fates[fate].num for kind in _GUESSED for fate in (Fate.JOINED, Fate.LATE))
