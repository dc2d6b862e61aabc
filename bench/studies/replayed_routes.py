"""Routes of the demo, replayed by a checkpoint whose random weights would route at random. Entry: `install`.

    python -m bench.synth medium DIR --set num_hidden_layers=5 num_experts=320
    python -m bench.studies.replayed_routes ROUTES.json --layers 5
    python -m bench.studies.hint_speed roofline --model DIR --routes ROUTES.json ...

What it is: five streams of routes, side by side. A stream is what one layer of the demo chose, token by
token, while it answered, of another prompt for every stream; of its 64 experts a token chooses four, of
which the two that a fixed shuffle puts first are taken. Stream s names experts 64 s to 64 s + 63, so a
token chooses ten of 320, and each stream recurs as the demo's layers were measured to recur. Layer l of the
checkpoint takes demo layer 1 + (2 l + s) mod 7 for stream s. What near-gate said of that layer in the demo,
one layer early, is carried over in the same way: its recall is the demo's over these pairs, and is printed.

`install` puts this under an engine's routers: they compute as ever, and their choice is replaced on the
device after it was made, so that nothing is known sooner; the weights of the chosen ones are the router's own
probabilities, normalised. Only for measuring.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from expert_store.keys import Prefetch
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.predictors import GateAhead
from mlx_flashnext.experts import HandOver
from mlx_flashnext.model.moe import LookAhead
from mlx_flashnext.reports.measure import GREEDY
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks
from mlx_flashnext.tokenizer import Tokenizer

NUM_STREAMS, STREAM_EXPERTS, TAKEN = 5, 64, 2

Table = list[list[list[int]]]
"""Expert ids by position, layer, rank."""


class _Listener(Hints):
    """Writes down what every layer of the demo chose and what its router said early, row by row."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(None, num_layers)
        self.true: list[dict[int, list[int]]] = []
        self.early: list[dict[int, list[int]]] = []

    def begin(self, tokens: Sequence[int], position: int, **named: Any) -> HandOver:
        self.true.append({})
        self.early.append({})
        return super().begin(tokens, position, **named)

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        del layer
        return (GateAhead(),)

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> None:
        self.early[-1][layer] = list(ids_TN[-1])

    def routed(self, layer: int, ids_TK: Sequence[Sequence[int]]) -> HandOver:
        self.true[-1][layer] = list(ids_TK[-1])
        return HandOver()

    def accepted(self, hints: Sequence[Prefetch]) -> None:
        del hints


def record_streams(num_tokens: int) -> list[_Listener]:
    """Let the demo answer one prompt a stream, and return what its layers chose."""
    directory = demo_dir()
    prompts = chat_prompts(directory, Tokenizer.open(directory), demo_tasks()[:NUM_STREAMS])
    request = PlanRequest(context_tokens=max(map(len, prompts)) + num_tokens + 1, slots_per_layer=63)
    found = []
    with Engine.open(directory, request) as engine:
        for prompt in prompts:
            heard = _Listener(engine.config.num_hidden_layers)
            session = engine.session(hints=heard)
            list(session.generate(prompt, GREEDY, max_tokens=0))
            heard.true.clear()
            heard.early.clear()
            list(session.generate(prompt, GREEDY, max_tokens=num_tokens))
            found.append(heard)
    return found


def joined(streams: Sequence[_Listener], num_layers: int) -> tuple[Table, Table]:
    """Return the true and the early choices of every position and layer."""
    order = list(range(STREAM_EXPERTS))
    random.Random(5).shuffle(order)
    true: Table = []
    early: Table = []
    for position in range(min(len(stream.true) for stream in streams)):
        true.append([])
        early.append([])
        for layer in range(num_layers):
            chosen: list[int] = []
            guessed: list[int] = []
            for number, stream in enumerate(streams):
                source = 1 + (2 * layer + number) % 7
                for ids, into in ((stream.true, chosen), (stream.early, guessed)):
                    first = sorted(ids[position][source], key=order.__getitem__)[:TAKEN]
                    into += [number * STREAM_EXPERTS + expert for expert in first]
            true[-1].append(sorted(chosen))
            early[-1].append(guessed)
    return true, early


def load(path: Path) -> tuple[Table, Table]:
    """Read what `main` wrote."""
    document = json.loads(path.read_text())
    return document["true"], document["early"]


def install(engine: Engine, tables: tuple[Table, Table]) -> None:
    """Let an engine's routers choose what was recorded for each position; past its end, from the start."""
    true, early = tables
    model: Any = engine.target.model
    at = [0, 1]  # tokens before the running block, and its rows
    plain_forward = model.forward

    def forward(tokens: Sequence[int], block: Any, **named: Any) -> Any:
        at[:] = [block.before.num_tokens, len(tokens)]
        return plain_forward(tokens, block, **named)

    model.forward = forward
    for index, layer in enumerate(model._layers):
        _replace(layer._moe, index, true, early, at)


def _replace(moe: Any, layer: int, true: Table, early: Table, at: list[int]) -> None:
    plain_early = moe.early_route
    logits = moe._router._logits

    def rows(table: Table) -> mx.array:
        return mx.array([table[(at[0] + row) % len(table)][layer] for row in range(at[1])], mx.int32)

    def route(x_TD: mx.array) -> tuple[mx.array, mx.array]:
        probability_TE = mx.softmax(logits(x_TD).astype(mx.float32), axis=-1)
        (ids_TK,) = mx.depends([rows(true)], [probability_TE])
        weights_TK = mx.take_along_axis(probability_TE, ids_TK, axis=-1)
        return ids_TK, weights_TK / weights_TK.sum(axis=-1, keepdims=True)

    def early_route(x_TD: mx.array, num_ids: int | None = None) -> mx.array:
        (ids_TK,) = mx.depends([rows(early)], [plain_early(x_TD, num_ids)])
        return ids_TK

    moe.route, moe.early_route = route, early_route


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    true, early = joined(record_streams(options.tokens), options.layers)
    pairs = [
        (set(chosen), set(guessed))
        for by_layer in zip(true, early, strict=True)
        for chosen, guessed in zip(*by_layer, strict=True)
    ]
    recall = sum(len(chosen & guessed) for chosen, guessed in pairs) / sum(len(chosen) for chosen, _ in pairs)
    again = [
        len(set(true[number][layer]) & set(true[number - 1][layer])) / (NUM_STREAMS * TAKEN)
        for number in range(1, len(true))
        for layer in range(options.layers)
    ]
    recurrence = sum(again) / len(again)
    options.out.write_text(json.dumps({"true": true, "early": early}))
    print(
        f"{len(true)} positions, {options.layers} layers, {NUM_STREAMS * TAKEN} of "
        f"{NUM_STREAMS * STREAM_EXPERTS} experts; near-gate recall {recall:.3f}; chosen by the token before "
        f"{recurrence:.3f}"
    )


if __name__ == "__main__":
    main()
