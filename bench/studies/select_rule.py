"""Which way to choose the k largest with ties to the smaller index: counting, or one sort of unique ranks?

    python -m bench.studies.select_rule [--rounds 5] [--calls 100]

`counting` finds the k-th score, counts what is above it, and lets equals in by running count, as qwen4exp.md
2.5 words the rule; `ranks` is `model.select`. Both give the same indices. Rounds are A/B/B/A in one process;
the ratio is the median over rounds. The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from mlx_flashnext.model.select import select_top

Rule = Callable[[mx.array, int], mx.array]
# The router and the indexer of the real model, one row; a prefill chunk's router.
CASES = {
    "router": ((1, 512), 10),
    "indexer at 64k tokens": ((1, 16_384), 512),
    "router, 256 rows": ((256, 512), 10),
}


def counting(scores_RN: mx.array, k: int) -> mx.array:
    """Return what `select_top` returns, by counting."""
    R, N = scores_RN.shape
    cut_R1 = mx.partition(scores_RN, N - k, axis=-1)[:, N - k : N - k + 1]
    above_RN = scores_RN > cut_R1
    equal_RN = scores_RN == cut_R1
    need_R1 = k - above_RN.sum(axis=-1, keepdims=True)
    chosen_RN = above_RN | (equal_RN & (mx.cumsum(equal_RN.astype(mx.int32), axis=-1) <= need_R1))
    rank_RN = mx.where(chosen_RN, mx.cumsum(chosen_RN.astype(mx.int32), axis=-1) - 1, k)
    index_RN = mx.broadcast_to(mx.arange(N, dtype=mx.int32), (R, N))
    return mx.put_along_axis(mx.zeros((R, k + 1), mx.int32), rank_RN, index_RN, axis=-1)[:, :k]


def lower_quartile(rule: Rule, scores: mx.array, k: int, calls: int) -> float:
    """Return a call's time in seconds, the quarter that others disturbed least."""
    times: list[float] = []
    for _ in range(calls):
        began = time.perf_counter()
        mx.eval(rule(scores, k))
        times.append(time.perf_counter() - began)
    return sorted(times)[calls // 4]


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    found: dict[str, float] = {}
    for name, (shape, k) in CASES.items():
        scores = mx.softmax(mx.random.normal(shape, key=mx.random.key(1)), axis=-1)
        assert mx.array_equal(counting(scores, k), select_top(scores, k))
        ratios: list[float] = []
        for _ in range(options.rounds):
            times = [
                lower_quartile(rule, scores, k, options.calls)
                for rule in (counting, select_top, select_top, counting)
            ]
            ratios.append((times[1] + times[2]) / (times[0] + times[3]))
        found[name] = statistics.median(ratios)
        spread = f"[{min(ratios):.2f} to {max(ratios):.2f}]"
        print(f"{name:24} time of ranks over counting: {found[name]:.2f} {spread}")
    print(json.dumps({"study": "select_rule", "ratios": found}))


if __name__ == "__main__":
    main()
