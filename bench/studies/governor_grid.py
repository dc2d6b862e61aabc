"""Does the governor decode as fast as the best fixed number of proposals, and never much slower than none?

    python -m bench.studies.governor_grid --cell sums:25 [--tokens 96] [--prompts 6] [--throttle 20]

Cells of a grid of genres and shares of the experts in memory, all nine if none is named; one takes about
three minutes. Asked are the first held-out prompts of the genre, answered to their end or to `--tokens`. In
turns, forwards and backwards in one process: plain decode, every fixed k from 1 to `--most`, the
governor with what its earlier turns have left (as a later run finds it, `kept_tables.py`), and the governor
that knows nothing. Each round compares what ran in it with itself only; ratios are medians over rounds of
nanoseconds a token. Plain decode has an engine of its own with the same slots; the rest share one engine, and
answers must be the same tokens.

Bars: the governor that remembers takes at most 1.03 of the best fixed k's time (0 among them), and at most
1.03 of plain decode's. The least of several noisy medians is too good by luck, so each round is held against
the k that is best in the other rounds.

Beside it the same by prices: every cycle of every answer costs what a cycle with as many proposals took in
the median of the whole cell, in plain steps of its round. That leaves out what the machine's pace did to one
answer, and what a governor's own work costs; what is left is whether it chose well. The last line of stdout
is one JSON document.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from bench.studies.speculation_speed import GENRES, GREEDY, ns_per_token, prompt_of
from bench.studies.turns import Dial
from drafter.api import Drafter
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine, Session
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.learned import NOTHING_LEARNED
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.stats import DraftStatistics

BAR = 1.03
OUT_OF_IT = 1.2
"""Of the best fixed width's time in a round: further off than luck takes a width (a tenth)."""


class Capped:
    """A drafter that proposes at most `most` tokens; everything else is the drafter's own."""

    def __init__(self, inner: Drafter, most: int) -> None:
        self._inner, self._most = inner, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def max_proposals(self) -> int:
        """Return the cap."""
        return min(self._most, self._inner.max_proposals())


@dataclass(frozen=True, slots=True)
class Cycle:
    """What a governor counted: proposals, tokens committed, and nanoseconds."""

    width: int
    tokens: int
    took_ns: int


@contextlib.contextmanager
def counted() -> Iterator[list[Cycle]]:
    """Collect every cycle that any governor counts meanwhile."""
    cycles: list[Cycle] = []
    count = Governor.count

    def spied(self: Governor, num_proposed: int, num_accepted: int, num_tokens: int, cycle_ns: int) -> None:
        cycles.append(Cycle(num_proposed, num_tokens, cycle_ns))
        count(self, num_proposed, num_accepted, num_tokens, cycle_ns)

    with mock.patch.object(Governor, "count", spied):
        yield cycles


def priced(rounds: Sequence[dict[str, list[Cycle]]]) -> dict[str, list[float]]:
    """Return the steps a token of every round's answers, by name, at the prices of the whole cell.

    Args:
        rounds: cycles by name; "none" among them, whose cycles of a round are its plain steps.
    """
    found: dict[int, list[float]] = {}
    for one in rounds:
        step = statistics.median(cycle.took_ns for cycle in one["none"])
        for cycle in itertools.chain.from_iterable(one.values()):
            found.setdefault(cycle.width, []).append(cycle.took_ns / step)
    prices = {width: statistics.median(steps) for width, steps in found.items()}
    return {
        name: [
            sum(prices[cycle.width] for cycle in one[name]) / sum(cycle.tokens for cycle in one[name])
            for one in rounds
            if name in one
        ]
        for name in rounds[0]
    }


class Cell:
    """One genre and budget: its two engines, and the sessions that are compared.

    Attributes:
        num_asked: how many prompts a run asks, the first ones.
        widths: what the governors' answers said of themselves.
    """

    def __init__(self, plain: Engine, drafted: Engine, genre: str, num_tokens: int, num_prompts: int) -> None:
        self._plain, self._drafted, self._num_tokens = plain, drafted, num_tokens
        texts = [task["prompt"] for task in held_out() if task["genre"] == genre][:num_prompts]
        self._prompts = [prompt_of(plain, text) for text in texts]
        self._told = [self._answer(plain.session(), prompt)[0] for prompt in self._prompts]
        self._kept = NOTHING_LEARNED
        self.num_asked = num_prompts
        self.widths: dict[str, list[str]] = {"governor": [], "governor, new": []}

    def contenders(self, most: int) -> dict[str, Callable[[], float]]:
        """Return what is compared, by name: each answers all prompts and returns nanoseconds a token."""
        drafter = self._drafted.new_drafter()
        assert drafter is not None
        fixed = {f"k = {k}": self._fixed(Capped(drafter, k)) for k in range(1, most + 1)}
        return {
            "none": lambda: self._run(self._plain.session),
            **fixed,
            "governor": self._remembering,
            "governor, new": self._new,
        }

    def _fixed(self, drafter: Any) -> Callable[[], float]:
        return lambda: self._run(lambda: self._drafted.session(drafter, is_guarded=False))

    def _remembering(self) -> float:
        self._drafted.warm.learned = self._kept
        took = self._run(self._drafted.session, self.widths["governor"])
        self._kept = self._drafted.warm.learned
        return took

    def _new(self) -> float:
        def forgetful() -> Session:
            self._drafted.warm.learned = NOTHING_LEARNED
            return self._drafted.session()

        return self._run(forgetful, self.widths["governor, new"])

    def _run(self, session: Callable[[], Session], said: list[str] | None = None) -> float:
        took: list[float] = []
        for prompt, told in list(zip(self._prompts, self._told, strict=True))[: self.num_asked]:
            tokens, end = self._answer(session(), prompt)
            if tokens != told:
                raise SystemExit("a drafted answer differs from the plain one")
            took.append(ns_per_token(end))
            if said is not None:
                said.append(_said(end.statistics.draft, end.statistics.cycles))
        return statistics.fmean(took)

    def _answer(self, session: Session, prompt: Sequence[int]) -> tuple[list[int], Finished]:
        """Return an answer to its natural end, if that comes first, and its figures."""
        stops = self._plain.tokenizer.eos_ids
        events = list(session.generate(prompt, GREEDY, max_tokens=self._num_tokens, stop_ids=stops))
        assert isinstance(events[-1], Finished)
        return [event.token_id for event in events if isinstance(event, Token)], events[-1]


def held_out() -> list[dict[str, Any]]:
    """Return the demo's held-out prompts with their genres."""
    tasks: list[dict[str, Any]] = json.loads((demo_dir() / "prompts.json").read_text())["held_out"]
    return tasks


def _said(draft: DraftStatistics, cycles: int) -> str:
    share = draft.num_accepted / draft.num_proposed if draft.num_proposed else 0.0
    return f"{draft.num_cycles}/{cycles} cycles, {draft.num_proposed} proposed, {share:.2f} kept"


def measure(options: argparse.Namespace, genre: str, budget: int) -> dict[str, Any]:
    """Print one cell and return its figures."""
    config = open_checkpoint(options.model).config
    slots = max(config.num_experts_per_tok, round(config.num_experts * budget / 100))
    request = PlanRequest(context_tokens=512, slots_per_layer=slots)
    drafted = PlanRequest(context_tokens=512, slots_per_layer=slots, draft=options.draft)
    dials = Dial(), Dial()
    with (
        Engine.open(options.model, request, wrap_source=dials[0].wrap) as plain,
        Engine.open(options.model, drafted, wrap_source=dials[1].wrap) as engine,
    ):
        for dial in dials:
            dial.turn(None if options.throttle is None else options.throttle * 1e6)
        cell = Cell(plain, engine, genre, options.tokens, options.prompts)
        runs = cell.contenders(min(options.most, engine.plan.num_draft_tokens))
        cell.num_asked = 1
        for run in [*runs.values(), *[runs["governor"]] * options.learn]:
            run()
        cell.num_asked = options.prompts
        rounds, cycles = _in_turns(runs, options.rounds, options.seconds)
    return _show(genre, budget, slots, rounds, cell) | _show_priced(cycles)


def _in_turns(
    runs: dict[str, Callable[[], float]], num_rounds: int, max_seconds: float
) -> tuple[list[dict[str, float]], list[dict[str, list[Cycle]]]]:
    """Run everything in rounds there and back; fewer rounds when the time is up.

    A fixed width that was far from the best of a round is not run again: the rest gets its time.
    """
    began = time.monotonic()
    rounds: list[dict[str, float]] = []
    cycles: list[dict[str, list[Cycle]]] = []
    left = dict(runs)
    for _ in range(num_rounds):
        started = time.monotonic()
        totals = dict.fromkeys(left, 0.0)
        seen: dict[str, list[Cycle]] = {name: [] for name in left}
        for name in [*left, *reversed(left)]:
            with counted() as run:
                totals[name] += left[name]() / 2
            seen[name] += run
        rounds.append(totals)
        cycles.append(seen)
        least = min(totals[name] for name in _fixed_of(left))
        for name in _fixed_of(left):
            if name != "none" and totals[name] > OUT_OF_IT * least:
                del left[name]
        if time.monotonic() - began + (time.monotonic() - started) > max_seconds:
            break
    return rounds, cycles


def _show(
    genre: str, budget: int, slots: int, rounds: Sequence[dict[str, float]], cell: Cell
) -> dict[str, Any]:
    def over(name: str, base: str) -> list[float]:
        return [one[name] / one[base] for one in rounds if name in one and base in one]

    names, fixed = list(rounds[0]), _fixed_of(rounds[-1])
    medians = {name: statistics.median(over(name, "none")) for name in names}
    best = min(fixed, key=lambda name: medians[name])
    print(f"{genre}, {budget} % of the experts ({slots}), {len(rounds)} rounds; time over plain decode's")
    for name in names:
        ratios = over(name, "none")
        said = f"   {cell.widths[name][-1]}" if name in cell.widths else ""
        print(f"  {name:14} {medians[name]:.3f} [{min(ratios):.3f} to {max(ratios):.3f}]{said}")
    found: dict[str, Any] = {"genre": genre, "budget": budget, "slots": slots, "rounds": len(rounds)}
    chosen = [_best_elsewhere(rounds, number, fixed) for number in range(len(rounds))]
    found |= {"over_none": medians, "best": best, "chosen": chosen}
    for name in ("governor", "governor, new"):
        ratios = [one[name] / one[k] for one, k in zip(rounds, chosen, strict=True)]
        found[f"{name} over best"] = statistics.median(ratios)
        print(
            f"  {name}: {statistics.median(ratios):.3f} [{min(ratios):.3f} to {max(ratios):.3f}] of the best "
            f"fixed ({best}; by the other rounds {', '.join(chosen)}); {medians[name]:.3f} of none"
        )
    is_met = found["governor over best"] <= BAR and medians["governor"] <= BAR
    found["is_met"] = is_met
    print(f"  bars of {BAR}: {'met' if is_met else 'MISSED'}", flush=True)
    return found


def _show_priced(rounds: Sequence[dict[str, list[Cycle]]]) -> dict[str, Any]:
    steps = {name: statistics.median(each) for name, each in priced(rounds).items()}
    best = min(_fixed_of(steps), key=lambda name: steps[name])
    said = ", ".join(f"{name} {each:.3f}" for name, each in steps.items())
    print(f"  by prices, plain steps a token: {said}")
    found: dict[str, Any] = {"priced": steps, "priced best": best}
    for name in ("governor", "governor, new"):
        found[f"{name} over best, priced"] = steps[name] / steps[best]
        widths = " ".join(str(cycle.width) for cycle in rounds[-1][name])
        print(f"  {name}, by prices: {steps[name] / steps[best]:.3f} of {best}; widths {widths}", flush=True)
    return found


def _fixed_of(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("governor")]


def _best_elsewhere(rounds: Sequence[dict[str, float]], number: int, fixed: Sequence[str]) -> str:
    """Return the fixed k that is best in all rounds but one; in that one if there is no other."""
    others = [one for at, one in enumerate(rounds) if at != number] or list(rounds)
    return min(fixed, key=lambda name: statistics.median(one[name] / one["none"] for one in others))


def main() -> None:
    """Run cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=demo_dir())
    parser.add_argument("--draft", default="dflash2")
    parser.add_argument("--cell", action="append", default=None, help="such as sums:25; left out: all nine")
    parser.add_argument("--learn", type=int, default=2, help="earlier answers of the governor that remembers")
    parser.add_argument("--most", type=int, default=7, help="largest fixed k")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=6, help="of each genre, 20 at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=250.0, help="of a cell; fewer rounds if need be")
    parser.add_argument("--throttle", type=float, default=None, help="simulated disk, MB/s")
    options = parser.parse_args()
    asked = options.cell or [f"{genre}:{budget}" for genre in GENRES for budget in (25, 50, 100)]
    cells = [measure(options, genre, int(budget)) for genre, budget in (one.split(":") for one in asked)]
    print(json.dumps({"study": "governor_grid", "tokens": options.tokens, "cells": cells}))


if __name__ == "__main__":
    main()
