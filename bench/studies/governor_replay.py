"""How well does the governor choose on real acceptance, whatever the machine's pace?

    python -m bench.studies.governor_replay [--first 0] [--prompts 20] [--repetitions 8] [--other-prices]

Held-out prompts of the demo are answered plainly while the draft proposes a whole block at every token, and
nothing is committed of it: that says how many proposals would have been kept at each place, for every width.
On that the governor and every fixed width are played without a clock, at prices of cycles with k proposals
that `governor_grid` found (fused kernels, page cache, sums), for three budgets; prices of a governor's cycles
scatter by 8 %, as cycles do. A genre has twenty prompts: of fewer, a best width that is known afterwards is
the best by luck as well. They are answered

    together    one after the other in a conversation, by a governor that has had such a one before
    apart       each in a process of its own, with what the earlier ones have kept: a clock is new there, so
                each begins with a plain step
    new         each in a process that knows nothing

Bars, of the first: at most 1.03 of the best fixed width, and of none. The last line of stdout is one JSON
document.
"""

import argparse
import json
import random
import statistics
from typing import Any, Final

from bench.studies.governor_grid import GENRES, held_out
from bench.studies.speculation_speed import GREEDY, prompt_of
from drafter.api import Drafter, DraftSampling, Proposal
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.learned import NOTHING_LEARNED
from mlx_flashnext.engine.plan import PlanRequest

BAR: Final = 1.03
MOST: Final = 7
PRICES: Final = {
    25: (1.0, 2.81, 3.25, 3.70, 4.41, 5.22, 5.94, 6.19),
    50: (1.0, 2.94, 3.54, 3.95, 4.61, 4.68, 5.33, 4.91),
    100: (1.0, 3.45, 4.30, 4.57, 5.48, 5.48, 6.85, 6.12),
}
"""Of a cycle with 0 to 7 proposals, in plain steps, by per cent of the experts in memory."""
OTHER_PRICES: Final = {
    "between 25 and 50 %": tuple((low + high) / 2 for low, high in zip(PRICES[25], PRICES[50], strict=True)),
    "between 50 and 100 %": tuple(
        (low + high) / 2 for low, high in zip(PRICES[50], PRICES[100], strict=True)
    ),
    "50 %, blocks cheaper by a fifth": tuple(1 + 0.8 * (price - 1) for price in PRICES[50]),
    "25 %, blocks dearer by 15 %": tuple(1 + 1.15 * (price - 1) for price in PRICES[25]),
    "in a line, as of one token a row": tuple(1 + 0.42 * number for number in range(MOST + 1)),
    "flat": tuple(1 + 0.02 * number for number in range(MOST + 1)),
    "a step at 6 rows": tuple((1 if number < 5 else 2.2) + 0.03 * number for number in range(MOST + 1)),
}
"""On which nothing was tuned."""
SCATTER: Final = 0.08
FIRST_WIDTH: Final = 4

Answer = list[int]
"""How many of seven proposals are kept, by the tokens answered before them; its length is the answer's."""


class Proposing:
    """A drafter that proposes to nobody: it writes down what it would have said."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.said: dict[int, tuple[int, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Return nothing."""
        del k
        self.said[sampling.position] = tuple(self._inner.propose(MOST, sampling).tokens)
        self._inner._num_pending = 0  # a proposal that nobody saw was not rejected
        return Proposal(())


def recorded(first: int, num_prompts: int, num_tokens: int) -> dict[str, list[Answer]]:
    """Return the acceptance of held-out answers by genre."""
    found: dict[str, list[Answer]] = {}
    with Engine.open(demo_dir(), PlanRequest(context_tokens=512, draft="dflash2")) as engine:
        for genre in GENRES:
            tasks = [task for task in held_out() if task["genre"] == genre][first : first + num_prompts]
            found[genre] = [_recorded(engine, task["prompt"], num_tokens) for task in tasks]
    return found


def _recorded(engine: Engine, text: str, num_tokens: int) -> Answer:
    inner: Drafter | None = engine.new_drafter()
    drafter: Any = Proposing(inner)
    prompt = prompt_of(engine, text)
    session = engine.session(drafter, is_guarded=False)
    stops = engine.tokenizer.eos_ids
    events = session.generate(prompt, GREEDY, max_tokens=num_tokens, stop_ids=stops)
    tokens = [event.token_id for event in events if isinstance(event, Token)]
    return [_kept(drafter.said.get(len(prompt) + at, ()), tokens[at:]) for at in range(len(tokens))]


def _kept(proposed: tuple[int, ...], tokens: list[int]) -> int:
    """Return how many proposals are what came."""
    count = 0
    for one, came in zip(proposed, tokens, strict=False):
        if one != came:
            break
        count += 1
    return count


def fixed(answer: Answer, width: int, prices: tuple[float, ...]) -> float:
    """Return the plain steps of an answer with the same width in every cycle."""
    at, steps = 1, 0.0
    while at < len(answer):
        now = min(width, len(answer) - at - 1)
        steps += prices[now]
        at += min(answer[at], now) + 1
    return steps


def governed(governor: Governor, answer: Answer, prices: tuple[float, ...], luck: random.Random) -> float:
    """Return the plain steps of an answer that is governed."""
    governor.begin_answer()
    at, steps = 1, 0.0
    while at < len(answer):
        now = governor.width(min(MOST, len(answer) - at - 1))
        kept = min(answer[at], now)
        steps += prices[now]
        took_ns = int(prices[now] * 1e7 * luck.lognormvariate(0, SCATTER))
        governor.count(now, kept, kept + 1, took_ns)
        at += kept + 1
    return steps


def together(answers: list[Answer], prices: tuple[float, ...], luck: random.Random) -> float:
    """Return the plain steps of answers in one conversation, after one like it."""
    earlier, steps = NOTHING_LEARNED, 0.0
    for _ in range(2):
        governor = Governor(MOST, earlier=earlier, first_width=FIRST_WIDTH)
        steps = sum(governed(governor, answer, prices, luck) for answer in answers)
        earlier = governor.learned()
    return steps


def apart(answers: list[Answer], prices: tuple[float, ...], luck: random.Random) -> float:
    """Return the plain steps of answers in processes of their own, after as many."""
    earlier, steps = NOTHING_LEARNED, 0.0
    for _ in range(2):
        steps = 0.0
        for answer in answers:
            governor = Governor(MOST, earlier=earlier, first_width=FIRST_WIDTH)
            steps += governed(governor, answer, prices, luck)
            earlier = governor.learned()
    return steps


def new(answers: list[Answer], prices: tuple[float, ...], luck: random.Random) -> float:
    """Return the plain steps of answers in processes of their own, each of which knows nothing."""
    return sum(governed(Governor(MOST, first_width=FIRST_WIDTH), answer, prices, luck) for answer in answers)


WAYS: Final = {"together": together, "apart": apart, "new": new}


def cell(answers: list[Answer], prices: tuple[float, ...], repetitions: int) -> dict[str, Any]:
    """Return what the governors take over the best fixed width and over none."""
    totals = [sum(fixed(answer, width, prices) for answer in answers) for width in range(MOST + 1)]
    best = min(range(MOST + 1), key=lambda width: totals[width])
    means = {
        name: statistics.fmean(way(answers, prices, random.Random(seed)) for seed in range(repetitions))
        for name, way in WAYS.items()
    }
    return {
        "best": best,
        "best_over_none": totals[best] / totals[0],
        "over_best": {name: each / totals[best] for name, each in means.items()},
        "over_none": {name: each / totals[0] for name, each in means.items()},
    }


def main() -> None:
    """Record, then play every cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="of the genre's held-out prompts")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--other-prices", action="store_true", help="those on which nothing was tuned")
    options = parser.parse_args()
    answers = recorded(options.first, options.prompts, options.tokens)
    rows = []
    tuned = {f"{share:3} %": prices for share, prices in PRICES.items()}
    for budget, prices in (OTHER_PRICES if options.other_prices else tuned).items():
        for genre, each in answers.items():
            row = cell(each, prices, options.repetitions)
            rows.append({"genre": genre, "budget": budget, **row})
            best, none = row["over_best"], row["over_none"]
            is_met = best["together"] <= BAR and none["together"] <= BAR
            ways = ", ".join(f"{name} {best[name]:.3f} of it, {none[name]:.3f} of none" for name in WAYS)
            print(
                f"{genre:8} {budget}: best k = {row['best']} ({row['best_over_none']:.3f} of none); {ways}"
                f"{'' if is_met else '   MISSED'}",
                flush=True,
            )
    print(json.dumps({"study": "governor_replay", "first": options.first, "cells": rows}))


if __name__ == "__main__":
    main()
