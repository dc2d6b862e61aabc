"""How many proposals of each drafter does the target say too, on real text?

    python -m bench.studies.draft_acceptance [--tokens 160] [--conversations 1] [--width 4]

The conversations of `lookup_match`: answers of the demo model, replayed cycle by cycle. A cycle proposes up
to `width` tokens, keeps those that the answer says too, and adds one: what the coupled rule keeps. `mtp` is
the demo's own trained module; the target's stacks come from one pass over each answer.

    fires      share of cycles with a proposal
    right      share of proposed tokens that were kept
    tok/cyc    tokens of a cycle; the bound is width + 1
    slots      share of the cycles with a first, second, ... proposal whose first, second, ... was kept

The last line of stdout is one JSON document.
"""

import argparse
import json
from collections.abc import Sequence

import mlx.core as mx

from bench.studies.lookup_match import GENRES, Answer, answers
from drafter.api import Drafter, DraftSampling
from drafter.lookup import LookupDrafter
from drafter.mtp import MtpDrafter
from expert_store.source import FileSource
from mlx_flashnext.demo import DEMO_SLOTS, demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.mtp_view import MtpView, open_mtp_view
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.experts import ResidentExperts
from mlx_flashnext.weights import CheckpointWeights

CHUNK = 64


def mtp_view(engine: Engine) -> MtpView:
    """Return the demo's MTP module over an engine's target, its experts all in memory."""
    checkpoint, layer = engine.checkpoint, engine.config.num_hidden_layers
    source = FileSource(checkpoint.table.files)
    try:
        layouts = checkpoint.expert_layouts(mtp=True)
        experts = ResidentExperts({layer: layouts[layer]}, source)
        weights = CheckpointWeights(checkpoint, source, compute_dtype=engine.target.model.compute_dtype)
        return open_mtp_view(engine.target.model, weights, experts, engine.target.sync)
    finally:
        source.close()


def stacks_of(engine: Engine, text: Sequence[int]) -> mx.array:
    """Return the target's stack of every token."""
    model, state = engine.target.model, engine.target.model.new_state()
    found = []
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK]
        with state.begin(len(chunk), revocable=False) as block:
            stack = model.forward(chunk, block, logits="none").stack
            block.commit()
        mx.eval(stack)
        engine.target.experts.device_idle()
        found.append(stack)
    return mx.concatenate(found)


def replay(drafter: Drafter, answer: Answer, stacks: mx.array, width: int) -> list[tuple[int, int]]:
    """Return tokens proposed and kept of every cycle of one answer."""
    text, start = answer
    drafter.reset()
    drafter.observe(text[: start - 1], text[start - 1], stacks[: start - 1])
    cycles: list[tuple[int, int]] = []
    at = start - 1
    while at < len(text) - 1:
        room = len(text) - 2 - at
        tokens = drafter.propose(min(width, room), DraftSampling(0.0, 0, at + 1)).tokens
        kept = 0
        while kept < len(tokens) and tokens[kept] == text[at + 1 + kept]:
            kept += 1
        cycles.append((len(tokens), kept))
        drafter.observe(text[at : at + kept + 1], text[at + kept + 1], stacks[at : at + kept + 1])
        at += kept + 1
    return cycles


def row(cycles: Sequence[tuple[int, int]], width: int) -> dict[str, object]:
    """Return the figures of one table row."""
    proposed, kept = (sum(column) for column in zip(*cycles, strict=True))
    slots = []
    for slot in range(width):
        reached = [one for one in cycles if one[0] > slot]
        slots.append(round(sum(one[1] > slot for one in reached) / max(1, len(reached)), 3))
    return {
        "fires": round(sum(one[0] > 0 for one in cycles) / len(cycles), 3),
        "right": round(kept / max(1, proposed), 3),
        "tok/cyc": round((len(cycles) + kept) / len(cycles), 3),
        "slots": slots,
    }


def main() -> None:
    """Print a row for each genre and drafter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--conversations", type=int, default=1)
    parser.add_argument("--width", type=int, default=4)
    options = parser.parse_args()
    report: dict[str, dict[str, dict[str, object]]] = {}
    everything: dict[str, list[tuple[int, int]]] = {"lookup": [], "mtp": []}
    with Engine.open(demo_dir(), PlanRequest(slots_per_layer=DEMO_SLOTS, context_tokens=2048)) as engine:
        drafters: dict[str, Drafter] = {"lookup": LookupDrafter(2048), "mtp": MtpDrafter(mtp_view(engine))}
        for genre, questions in GENRES.items():
            of_genre: dict[str, list[tuple[int, int]]] = {kind: [] for kind in drafters}
            for seed in range(options.conversations):
                for answer in answers(engine, questions, options.tokens, seed):
                    stacks = stacks_of(engine, answer[0])
                    for kind, drafter in drafters.items():
                        of_genre[kind] += replay(drafter, answer, stacks, options.width)
            report[genre] = {kind: row(cycles, options.width) for kind, cycles in of_genre.items()}
            for kind, cycles in of_genre.items():
                everything[kind] += cycles
                print(f"{genre:8} {kind:6} {report[genre][kind]}", flush=True)
    report["all"] = {kind: row(cycles, options.width) for kind, cycles in everything.items()}
    for kind, figures in report["all"].items():
        print(f"{'all':8} {kind:6} {figures}")
    print(json.dumps({"width": options.width, "tables": report}))


if __name__ == "__main__":
    main()
