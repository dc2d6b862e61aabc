"""What is gained when pieces of a pass are replayed instead of described, block by block?

    FLASHNEXT_FUSE=1 python -m bench.studies.replay_gain [--model DIR] [--rows 1 2 4 8 16] [--rounds 8]

Blocks of each number of rows with every expert in memory, and with all but one of every layer, described and
replayed in turns (A/B/B/A) in one process. Printed are milliseconds a block, the inference thread's processor
time in them, and ratios: medians and quartiles over rounds. That both say the same logits is checked. On the
CPU backend the first round builds fused kernels with g++ and is not counted. The last line of stdout is one
JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.model.traced import replay_pieces
from tests.tiny.stepping import advance

PROMPT, BLOCKS = 16, 16


def measure(engine: Engine, rows: int, *, is_replayed: bool) -> tuple[float, float, mx.array]:
    """Return the median time of a block and of the inference thread in it, in ns, and the last logits."""
    replay_pieces(is_replayed)
    model, vocabulary = engine.target.model, engine.config.vocab_size
    state = model.new_state(PROMPT + rows * BLOCKS)
    prompt = [(17 * position + 3) % (vocabulary // 2) for position in range(PROMPT)]
    mx.eval(advance(model, prompt, state, logits="none").stack)
    took: list[int] = []
    thread: list[int] = []
    logits = None
    for number in range(BLOCKS):
        tokens = [(31 * number + 7 * row) % (vocabulary // 2) for row in range(rows)]
        began_ns, thread_ns = time.perf_counter_ns(), time.thread_time_ns()
        logits = advance(model, tokens, state, logits="all").logits
        assert logits is not None
        mx.eval(logits)
        took.append(time.perf_counter_ns() - began_ns)
        thread.append(time.thread_time_ns() - thread_ns)
    assert logits is not None
    return statistics.median(took), statistics.median(thread), logits


def compared(engine: Engine, rows: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """Print a line per number of rows; return the ratios of every round."""
    found: dict[int, list[float]] = {}
    for count in rows:
        lines: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(1 + rounds):
            said = {}
            for is_replayed in (False, True) if number % 2 else (True, False):
                took, thread, said[is_replayed] = measure(engine, count, is_replayed=is_replayed)
                if number:
                    lines[is_replayed].append((took, thread))
            if not mx.array_equal(said[False], said[True]).item():
                raise SystemExit(f"Blocks of {count} rows differ when they are replayed")
        found[count] = [b[0] / a[0] for a, b in zip(lines[False], lines[True], strict=True)]
        low, middle, high = statistics.quantiles(found[count], n=4)
        plain, fused = (
            [statistics.median(line[part] for line in lines[which]) / 1e6 for part in (0, 1)]
            for which in (False, True)
        )
        print(
            f"  {count:2} rows: described {plain[0]:6.2f} ms (thread {plain[1]:6.2f}), "
            f"replayed {fused[0]:6.2f} ({fused[1]:6.2f}), ratio {middle:.3f} [{low:.3f} to {high:.3f}]"
        )
    return found


def main() -> None:
    """Compare both ways, resident and streamed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; the demo if left out")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    directory, document = options.model or demo_dir(), {}
    context = PROMPT + BLOCKS * max(options.rows) + 1
    with Engine.open(directory, PlanRequest(context_tokens=context)) as probe:
        num_experts = probe.plan.num_experts
    for name, slots in (("resident", num_experts), ("streamed", num_experts - 1)):
        print(name)
        with Engine.open(directory, PlanRequest(context_tokens=context, slots_per_layer=slots)) as engine:
            document[name] = compared(engine, options.rows, options.rounds)
    print(json.dumps({"study": "replay_gain", **document}))


if __name__ == "__main__":
    main()
