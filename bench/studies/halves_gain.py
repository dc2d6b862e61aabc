"""What a second stream gains where the backend computes a stream on one core (`model/halves.py`).

    python -m bench.studies.halves_gain --model CHECKPOINT [--slots 217] [--rounds 8]

Two answers to one prompt, token by token in turns of four, large products whole and in halves; and a new
prompt of 16 tokens a round, read both ways, in an order that alternates. Same tokens, or it stops. A model
whose products are small (the demo) computes both the same way: its bound is 1. That of two cores is 0.5.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Event, Token
from mlx_flashnext.engine.machine import usable_cpus
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.model.halves import compute_in_halves
from mlx_flashnext.reports.measure import GREEDY

TURN, PROMPT = 4, 16


def some_tokens(events: Iterator[Event], number: int) -> list[int]:
    """Return the next tokens of an answer."""
    found: list[int] = []
    while len(found) < number:
        event = next(events)
        if isinstance(event, Token):
            found.append(event.token_id)
    return found


def ratios_of(seconds: dict[bool, list[float]]) -> list[float]:
    """Return the time in halves over the whole's, round by round, ascending."""
    return sorted(cut / whole for whole, cut in zip(seconds[False], seconds[True], strict=True))


def main() -> None:
    """Decode in turns and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--slots", type=int, help="experts of each layer in memory; all if left out")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    prompts: dict[bool, list[float]] = {False: [], True: []}
    with Engine.open(options.model, PlanRequest(context_tokens=512, slots_per_layer=options.slots)) as engine:
        answers = {}
        for in_halves in (False, True):
            compute_in_halves(in_halves)
            events = engine.session().generate(list(range(10, 26)), GREEDY, max_tokens=400)
            answers[in_halves] = events, some_tokens(events, 2)
        for number in range(options.rounds):
            for in_halves in (False, True) if number % 2 == 0 else (True, False):
                compute_in_halves(in_halves)
                events, tokens = answers[in_halves]
                began = time.perf_counter()
                tokens += some_tokens(events, TURN)
                seconds[in_halves].append((time.perf_counter() - began) / TURN)
            prompt = random.Random(number).choices(range(8, 4000), k=PROMPT)
            firsts = set[int]()
            for in_halves in (False, True) if number % 2 == 0 else (True, False):
                compute_in_halves(in_halves)
                began = time.perf_counter()
                firsts |= set(some_tokens(engine.session().generate(prompt, GREEDY, max_tokens=1), 1))
                prompts[in_halves].append(time.perf_counter() - began)
            if len(firsts) > 1:
                raise SystemExit("the answers differ")
    if answers[False][1] != answers[True][1]:
        raise SystemExit("the answers differ")
    ratios, of_prompts = ratios_of(seconds), ratios_of(prompts)
    facts = {
        "study": "halves_gain",
        "cpus": usable_cpus(),
        "slots": options.slots,
        "whole_ms": statistics.median(seconds[False]) * 1e3,
        "halves_ms": statistics.median(seconds[True]) * 1e3,
        "ratio": [statistics.median(ratios), ratios[0], ratios[-1]],
        "prompt_ratio": [statistics.median(of_prompts), of_prompts[0], of_prompts[-1]],
        "bound": 0.5,
    }
    print(
        f"whole {facts['whole_ms']:.1f} ms a token, in halves {facts['halves_ms']:.1f}, "
        f"{statistics.median(ratios):.2f} [{ratios[0]:.2f} to {ratios[-1]:.2f}], a prompt "
        f"{statistics.median(of_prompts):.2f} [{of_prompts[0]:.2f} to {of_prompts[-1]:.2f}]; "
        "bound 0.5 on two cores"
    )
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
