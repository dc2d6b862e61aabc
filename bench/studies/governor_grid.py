"""Does the governor decode as fast as the best fixed number of proposals, and never much slower than none?

    python -m bench.studies.governor_grid --cell sums:25 [--tokens 96] [--rounds 3] [--throttle 20]

Cells of a grid of genres and shares of the experts in memory, all nine if none is named; one takes about two
minutes. In turns, forwards and backwards in one process: plain decode, every fixed k from 1 to `--most`, the
governor with what its earlier turns have left (as a later run finds it, `kept_tables.py`), and the governor
that knows nothing. Each round compares what ran in it with itself only; ratios are medians over rounds of
nanoseconds a token. Plain decode has an engine of its own with the same slots; the rest share one engine, and
answers must be the same tokens.

Bars: the governor that remembers takes at most 1.03 of the best fixed k's time (0 among them), and at most
1.03 of plain decode's. The least of several noisy medians is too good by luck, so each round is held against
the k that is best in the other rounds. The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.studies.speculation_speed import GENRES, answer, ns_per_token, prompt_of
from bench.studies.turns import Dial
from drafter.api import Drafter
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine, Session
from mlx_flashnext.engine.learned import NOTHING_LEARNED
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.stats import DraftStatistics

BAR = 1.03
OUT_OF_IT = 1.2
"""Of the best fixed width's time in a round: further off than luck takes a width (a tenth)."""
MORE = {
    "sums": ("Anna has 52 coins and spends 18. How many coins are left?",),
    "code": ("Write a Python function that counts the vowels in a string.",),
    "stories": ("Tell me a story about a lost kite and a kind dog.",),
}


class Capped:
    """A drafter that proposes at most `most` tokens; everything else is the drafter's own."""

    def __init__(self, inner: Drafter, most: int) -> None:
        self._inner, self._most = inner, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def max_proposals(self) -> int:
        """Return the cap."""
        return min(self._most, self._inner.max_proposals())


class Cell:
    """One genre and budget: its two engines, and the sessions that are compared."""

    def __init__(self, plain: Engine, drafted: Engine, genre: str, num_tokens: int, num_prompts: int) -> None:
        self._plain, self._drafted, self._num_tokens = plain, drafted, num_tokens
        texts = (GENRES[genre], *MORE[genre])[:num_prompts]
        self._prompts = [prompt_of(plain, text) for text in texts]
        self._told = [answer(plain.session(), prompt, num_tokens)[0] for prompt in self._prompts]
        self._kept = NOTHING_LEARNED
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
        for prompt, told in zip(self._prompts, self._told, strict=True):
            tokens, end = answer(session(), prompt, self._num_tokens)
            if tokens != told:
                raise SystemExit("a drafted answer differs from the plain one")
            took.append(ns_per_token(end))
            if said is not None:
                said.append(_said(end.statistics.draft, end.statistics.cycles))
        return statistics.fmean(took)


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
        for _ in range(options.learn):
            runs["governor"]()
        rounds = _in_turns(runs, options.rounds, options.seconds)
    return _show(genre, budget, slots, rounds, cell)


def _in_turns(
    runs: dict[str, Callable[[], float]], num_rounds: int, max_seconds: float
) -> list[dict[str, float]]:
    """Run everything once uncounted, then in rounds there and back; fewer rounds when the time is up.

    A fixed width that was far from the best of a round is not run again: the rest gets its time.
    """
    began = time.monotonic()
    for run in runs.values():
        run()
    rounds: list[dict[str, float]] = []
    left = dict(runs)
    for _ in range(num_rounds):
        started = time.monotonic()
        totals = dict.fromkeys(left, 0.0)
        for name in [*left, *reversed(left)]:
            totals[name] += left[name]() / 2
        rounds.append(totals)
        least = min(totals[name] for name in _fixed_of(left))
        for name in _fixed_of(left):
            if name != "none" and totals[name] > OUT_OF_IT * least:
                del left[name]
        if time.monotonic() - began + (time.monotonic() - started) > max_seconds:
            break
    return rounds


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
    parser.add_argument("--learn", type=int, default=3, help="earlier runs of the governor that remembers")
    parser.add_argument("--most", type=int, default=7, help="largest fixed k")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, choices=(1, 2), default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=250.0, help="of a cell; fewer rounds if need be")
    parser.add_argument("--throttle", type=float, default=None, help="simulated disk, MB/s")
    options = parser.parse_args()
    asked = options.cell or [f"{genre}:{budget}" for genre in GENRES for budget in (25, 50, 100)]
    cells = [measure(options, genre, int(budget)) for genre, budget in (one.split(":") for one in asked)]
    print(json.dumps({"study": "governor_grid", "tokens": options.tokens, "cells": cells}))


if __name__ == "__main__":
    main()
