"""How many graph nodes does one decoded token build, part by part?

    python -m bench.studies.graph_nodes [--model DIR] [--tokens 300]

Every node costs host time to build and to hand to the backend, and while the host builds, a device waits.
Views count as nodes too. On the CPU backend the kernels of `mx.fast` are written out as their steps, so Metal
has fewer: a figure compares versions, not machines. The last line of stdout is one JSON document.
"""

import argparse
import json
import re
import tempfile
from collections import Counter
from pathlib import Path

import mlx.core as mx

from bench.studies.token_time import submitted
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.state import SequenceState
from tests.tiny.stepping import advance

PREFILL_BLOCK = 16


def nodes(*arrays: mx.array) -> Counter[str]:
    """Return how often each primitive stands in the graph of some arrays that are not computed yet."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *arrays)
        return Counter(re.findall(r'label ?="([A-Za-z]\w*)', path.read_text()))


def parts(model: FlashNext, state: SequenceState) -> dict[str, Counter[str]]:
    """Return the nodes of the parts of a layer of each kind, and of a whole token."""
    config, position = model.config, state.num_tokens
    stack_TGD = mx.zeros((1, config.hc_count, config.hidden_size), model.compute_dtype)
    x_TD = mx.zeros((1, config.hidden_size), model.compute_dtype)
    mx.eval(stack_TGD, x_TD)
    found: dict[str, Counter[str]] = {}
    for kind in ("gdn", "qsa"):
        index = config.layer_kinds.index(kind)
        layer = model._layers[index]
        found[f"{kind} read"] = nodes(*layer._attn_hyper.read(stack_TGD))
        y_TD, staged = layer._mix(x_TD, state.layers[index], position, is_revocable=False)
        found[f"{kind} mixer"] = nodes(y_TD, *staged.arrays())
        found[f"{kind} router"] = nodes(*layer._moe.route(x_TD))
        found[f"{kind} experts"] = nodes(layer._moe(x_TD))
        mx.eval(staged.arrays())
    with submitted(each_layer=False):  # else only what follows the last layer is left to count
        output = advance(model, [0], state)
    assert output.logits is not None
    found["token"] = nodes(output.logits)
    return found


def main() -> None:
    """Print a line per part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; the demo if left out")
    parser.add_argument("--tokens", type=int, default=300, help="tokens before the one that is counted")
    options = parser.parse_args()
    model_dir = options.model or demo_dir()
    with Engine.open(model_dir, PlanRequest(context_tokens=512)) as probe:
        experts = probe.plan.num_experts
    # Every expert resident: then a token is one graph.
    with Engine.open(model_dir, PlanRequest(context_tokens=512, slots_per_layer=experts)) as engine:
        model, vocabulary = engine.target.model, engine.config.vocab_size
        state = model.new_state()
        prompt = [(17 * position + 3) % (vocabulary // 2) for position in range(options.tokens)]
        for start in range(0, len(prompt), PREFILL_BLOCK):
            mx.eval(advance(model, prompt[start : start + PREFILL_BLOCK], state, logits="none").stack)
        found = parts(model, state)
    for name, counts in found.items():
        most = ", ".join(f"{primitive} {count}" for primitive, count in counts.most_common(4))
        print(f"{name:12} {counts.total():5}  {most}")
    print(json.dumps({"study": "graph_nodes", **{name: counts.total() for name, counts in found.items()}}))


if __name__ == "__main__":
    main()
