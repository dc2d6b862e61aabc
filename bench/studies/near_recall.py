"""How well does the next layer's router, asked early, know what it will choose? Two places to ask it.

    python -m bench.studies.near_recall [--model DIR] [--tokens 48]

    after attention   the stack before layer l's experts have answered. Rides on the read-back of layer l's
                      own ids: costs no wait for the device, and leaves all of layer l's experts to read in
    after the layer   the stack after layer l. Knows what the experts said, but can be read back only by one
                      more wait for the device in every layer

Both skip layer l + 1's own mixer. Baselines at the same number of guesses: the same layer's choice for the
token before, its most frequent experts so far, the layer before's ids, chance. Recall is the share of native
choices that were guessed, averaged over positions and layers; decoded positions only, text from the model
itself. The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from expert_store.keys import Prefetch
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.predictors import GateAhead
from mlx_flashnext.experts import HandOver
from mlx_flashnext.model.moe import LookAhead
from mlx_flashnext.reports.measure import GREEDY
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks

Rows = list[list[int]]


class Ear:
    """Hears true and early choices."""

    def __init__(self) -> None:
        self.true: dict[int, Rows] = {}
        self.early: dict[int, Rows] = {}

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        del layer
        return (GateAhead(),)

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> None:
        self.early[layer] = [list(row) for row in ids_TN]

    def routed(self, layer: int, ids_TK: Sequence[Sequence[int]]) -> HandOver:
        self.true[layer] = [list(row) for row in ids_TK]
        return HandOver()

    def accepted(self, hints: Sequence[Prefetch]) -> None:
        del hints


def recall(guessed: Sequence[int], chosen: Sequence[int]) -> float:
    return len(set(guessed) & set(chosen)) / len(chosen)


def of_sequence(engine: Engine, tokens: list[int], start: int) -> dict[str, dict[int, list[float]]]:
    """Return recalls by predictor and layer for the positions from `start` on."""
    ear, model = Ear(), engine.target.model
    top_k = engine.config.num_experts_per_tok
    engine.target.experts.listener = ear
    try:
        with model.new_state().begin(len(tokens), revocable=False) as block:
            output = model.forward(tokens, block, logits="none", taps=range(engine.config.num_hidden_layers))
            engine.target.experts.device_busy()
            mx.eval(output.stack)
    finally:
        engine.target.experts.end_pass()
        engine.target.experts.device_idle()
    found: dict[str, dict[int, list[float]]] = {}
    for layer in range(1, engine.config.num_hidden_layers):
        after: Rows = model._layers[layer].early_route(output.taps[layer - 1]).tolist()
        popular: Counter[int] = Counter()
        for position, chosen in enumerate(ear.true[layer]):
            guesses = {
                "after attention": ear.early[layer][position],
                "after the layer": after[position],
                "previous token": ear.true[layer][position - 1] if position else [],
                "previous layer": ear.true[layer - 1][position],
                "frequency": [expert for expert, _ in popular.most_common(top_k)],
            }
            popular.update(chosen)
            if position >= start:
                for name, guessed in guesses.items():
                    found.setdefault(name, {}).setdefault(layer, []).append(recall(guessed, chosen))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; the demo if left out")
    parser.add_argument("--tokens", type=int, default=48, help="decoded tokens of each prompt")
    parser.add_argument("--prompts", type=int, default=6)
    options = parser.parse_args()
    model = options.model or demo_dir()
    with Engine.open(model, PlanRequest(context_tokens=512)) as probe:
        num_experts, top_k = probe.plan.num_experts, probe.config.num_experts_per_tok
    request = PlanRequest(context_tokens=512, slots_per_layer=num_experts - 1)  # resident layers say nothing
    by_layer: dict[str, dict[int, list[float]]] = {}
    with Engine.open(model, request) as engine:
        for prompt in chat_prompts(model, engine.tokenizer, demo_tasks()[: options.prompts]):
            events = engine.session().generate(prompt, GREEDY, max_tokens=options.tokens)
            tokens = [*prompt, *(event.token_id for event in events if isinstance(event, Token))]
            for name, layers in of_sequence(engine, tokens, len(prompt)).items():
                for layer, recalls in layers.items():
                    by_layer.setdefault(name, {}).setdefault(layer, []).extend(recalls)
    layers = sorted(by_layer["after attention"])
    print(f"recall@{top_k} of {num_experts} experts, by layer {layers}; chance {top_k / num_experts:.3f}")
    result: dict[str, float] = {}
    for name, found in by_layer.items():
        means = [statistics.fmean(found[layer]) for layer in layers]
        result[name] = statistics.fmean(means)
        print(f"{name:16} {result[name]:.3f}   {' '.join(f'{mean:.2f}' for mean in means)}")
    positions = len(by_layer["after attention"][layers[0]])
    document = {"positions": positions, "top_k": top_k, "experts": num_experts, "recall": result}
    name = "demo" if options.model is None else model.name
    print(json.dumps({"study": "near_recall", "model": name, **document}))


if __name__ == "__main__":
    main()
