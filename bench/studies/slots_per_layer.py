"""Do slots that are divided among layers as a trace asks for them save reads, on text that was not seen?

    python -m bench.studies.slots_per_layer [--prompts 8] [--tokens 32] [--budgets 16,32,48]

The demo answers prompts, and its routes, prompts included, are played into the store itself on a virtual
clock (no times, no hints, LRU as in a run). Layers do not share slots: one sweep over uniform budgets gives
every layer's misses against its own slots. Of half of the prompts (every other one) that curve decides: slots
go one by one to where they save the most, along the curve's lower hull, none below what a token needs. Judged
by the misses of the other half, each way round, against as many slots divided equally. `hindsight` has seen
the half it is judged by: no division of slots can do better there, but for what the hull leaves out.

No clock is read: the figures are the same on every machine. The last line of stdout is one JSON document.
"""

import argparse
import heapq
import json
from collections.abc import Mapping, Sequence
from contextlib import closing

from bench.studies.simulated_wait import numbers
from expert_store.layout import RecordLayout
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.routes import RouteLog
from mlx_flashnext.reports.measure import GREEDY, answer
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks
from mlx_flashnext.simulation.simulated_machine import FREE
from mlx_flashnext.simulation.simulated_routes import Answers, blocks_of_passes
from mlx_flashnext.simulation.simulation import Simulation
from mlx_flashnext.tokenizer import Tokenizer

Misses = dict[int, int]
"""Misses by layer."""


def record(num_prompts: int, num_tokens: int) -> tuple[dict[int, RecordLayout], int, Answers]:
    """Let the demo answer, and return its layouts, experts of a token, and routes."""
    directory = demo_dir()
    prompts = chat_prompts(directory, Tokenizer.open(directory), demo_tasks()[:num_prompts])
    context = max(map(len, prompts)) + num_tokens + 1
    answers: Answers = []
    with Engine.open(directory, PlanRequest(context_tokens=context, slots_per_layer=60)) as engine:
        for prompt in prompts:
            log = RouteLog()
            hints = Hints(None, engine.config.num_hidden_layers, log)
            session = engine.session(is_guarded=False, hints=hints)
            answer(session, prompt, 0)
            num_prefill = len(log.passes)
            list(session.generate(prompt, GREEDY, max_tokens=num_tokens))
            answers.append(blocks_of_passes(log.passes, num_prefill))
        layouts = {layer: one.record for layer, one in engine.checkpoint.experts.items()}
        return layouts, engine.config.num_experts_per_tok, answers


def misses(layouts: Mapping[int, RecordLayout], slots: Mapping[int, int], answers: Answers) -> Misses:
    """Return what decoding all answers one after the other misses, by layer.

    What a layer with a slot for every expert reads before it starts is counted too: without that, such a
    layer would seem to have spared the first read of each record.
    """
    found = {
        layer: one.num_experts if slots[layer] >= one.num_experts else 0 for layer, one in layouts.items()
    }
    with closing(Simulation(layouts, FREE, slots=slots)) as simulation:
        for blocks in answers:
            simulation.begin_answer(None)
            simulation.play(block for block in blocks if block.is_prefill)
            played = simulation.play(block for block in blocks if not block.is_prefill)
            simulation.end_answer()
            for layer in played.store.layers:
                found[layer.layer] += layer.num_misses
    return found


def curves(layouts: Mapping[int, RecordLayout], fewest: int, answers: Answers) -> dict[int, Misses]:
    """Return misses by layer and slots."""
    found: dict[int, Misses] = {layer: {} for layer in layouts}
    most = min(one.num_experts for one in layouts.values())
    for slots in range(fewest, most + 1):
        for layer, num in misses(layouts, dict.fromkeys(layouts, slots), answers).items():
            found[layer][slots] = num
    return found


def hull(curve: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the corners of a curve's lower hull: steps that save less and less a slot."""
    corners: list[tuple[int, int]] = []
    for point in sorted(curve.items()):
        while len(corners) > 1 and _saves(corners[-2], corners[-1]) <= _saves(corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners


def _saves(left: tuple[int, int], right: tuple[int, int]) -> float:
    return (left[1] - right[1]) / (right[0] - left[0])


def divide(by_layer: Mapping[int, Mapping[int, int]], total: int) -> dict[int, int]:
    """Return slots of each layer, `total` together, by what a slot saves."""
    corners = {layer: hull(curve) for layer, curve in by_layer.items()}
    slots = {layer: points[0][0] for layer, points in corners.items()}
    left = total - sum(slots.values())
    steps = [(-_saves(*points[:2]), layer, 1) for layer, points in corners.items() if len(points) > 1]
    heapq.heapify(steps)
    while left and steps:
        _, layer, at = heapq.heappop(steps)
        taken = min(left, corners[layer][at][0] - slots[layer])
        slots[layer] += taken
        left -= taken
        if at + 1 < len(corners[layer]):
            heapq.heappush(steps, (-_saves(*corners[layer][at : at + 2]), layer, at + 1))
    return slots


def compare(
    layouts: Mapping[int, RecordLayout], fewest: int, halves: Sequence[Answers], budgets: Sequence[int]
) -> list[dict[str, object]]:
    """Print and return a row for every budget."""
    seen = [curves(layouts, fewest, half) for half in halves]
    rows: list[dict[str, object]] = []
    for budget in budgets:
        total = budget * len(layouts)
        uniform, chosen, best = 0, 0, 0
        divisions = [divide(curve, total) for curve in seen]
        for number, judged in enumerate(halves):
            uniform += sum(misses(layouts, dict.fromkeys(layouts, budget), judged).values())
            chosen += sum(misses(layouts, divisions[1 - number], judged).values())
            best += sum(misses(layouts, divisions[number], judged).values())
        print(
            f"{budget:3} slots a layer: {uniform} misses divided equally; as the other half asks "
            f"{chosen} ({chosen / uniform - 1:+.1%}), in hindsight {best} ({best / uniform - 1:+.1%}); "
            f"slots {[list(one.values()) for one in divisions]}",
            flush=True,
        )
        rows.append(
            {"budget": budget, "uniform": uniform, "chosen": chosen, "hindsight": best, "slots": divisions}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--budgets", type=numbers, default=[16, 32, 48])
    options = parser.parse_args()
    layouts, top_k, answers = record(options.prompts, options.tokens)
    rows = compare(layouts, top_k, (answers[::2], answers[1::2]), options.budgets)
    print(json.dumps({"study": "slots_per_layer", "simulated": True, "rows": rows}))


if __name__ == "__main__":
    main()
