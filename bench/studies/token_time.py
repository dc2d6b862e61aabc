"""Where does the time of a decoded token go beside its waits, and who takes it from the inference thread?

    python -m bench.studies.token_time [--model DIR] [--rounds 8]

Plain decode from the page cache, everything in one process, forwards and backwards in turns:

    resident, streamed       every expert in memory; all but one of every layer: hardly a read
    ... at the end           the same with no layer submitted before its ids are asked for (flashnext.py F3)
    a quarter, its oracle    a quarter of the experts, without hints and with perfect ones, whose reads run
                             beside the inference thread

Printed are milliseconds a token: all, waited for experts, and processor time of the inference thread and of
the process. What is neither waited nor computed is the interpreter's lock and waking up. Ratios are medians
and quartiles over rounds. At the end the experts' products of one token alone: the most that computing some
of them while others load (waves) could hide.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import mlx.core as mx

from bench.studies.hint_speed import Bench, add_bench_options
from bench.studies.turns import Recorded
from mlx_flashnext.engine.deltas import since
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.predictors import Oracle
from mlx_flashnext.experts import expert_glu
from mlx_flashnext.model import flashnext
from mlx_flashnext.reports.measure import answer

PRODUCTS = 60


class _NothingSubmitted:
    """`mlx.core` without `async_eval`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def async_eval(self, *arrays: mx.array) -> None:
        del arrays


@dataclass(frozen=True, slots=True)
class Times:
    """One answer, in nanoseconds a token."""

    token: float
    waited: float
    thread: float
    process: float


@contextlib.contextmanager
def submitted(*, each_layer: bool) -> Iterator[None]:
    """Run the model as it is, or without submitting a layer when it is described."""
    if each_layer:
        yield
        return
    with mock.patch.object(flashnext, "mx", _NothingSubmitted()):
        yield


def measure(engine: Engine, recorded: Recorded, num_tokens: int, *, has_hints: bool) -> Times:
    """Answer a recorded prompt once; the prompt is read before the clocks run."""
    predictor = Oracle(recorded.routes) if has_hints else None
    session = engine.session(is_guarded=False, hints=Hints(predictor, engine.config.num_hidden_layers))
    store = engine.target.store
    answer(session, recorded.prompt, 0)
    store.wait_idle()
    before = store.statistics()
    thread_ns, process_ns = time.thread_time_ns(), time.process_time_ns()
    took_ns = answer(session, recorded.prompt, num_tokens).decode_ns
    thread_ns, process_ns = time.thread_time_ns() - thread_ns, time.process_time_ns() - process_ns
    store.wait_idle()
    waited_ns = since(store.statistics(), before).exposed_wait_ns
    return Times(
        took_ns / num_tokens, waited_ns / num_tokens, thread_ns / num_tokens, process_ns / num_tokens
    )


def products_ns(engine: Engine) -> float:
    """Return the median time of one token's expert products, over all layers, alone."""
    config, banks = engine.config, engine.target.experts._banks
    x_1D = mx.random.normal((1, config.hidden_size))
    mx.eval(x_1D)
    took: list[int] = []
    for number in range(PRODUCTS):
        slots = [
            (number * 7 + rank) % engine.plan.slots_per_layer for rank in range(config.num_experts_per_tok)
        ]
        began_ns = time.perf_counter_ns()
        mx.eval(expert_glu(x_1D, mx.array([slots], mx.uint32), banks.bank(number % config.num_hidden_layers)))
        took.append(time.perf_counter_ns() - began_ns)
    return statistics.median(took) * config.num_hidden_layers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_bench_options(parser)
    parser.set_defaults(rounds=8, prompts=1)
    options = parser.parse_args()
    with contextlib.ExitStack() as resources:
        bench = Bench(options, resources)
        whole, nearly, quarter = map(bench.open, (bench.num_experts, bench.num_experts - 1, options.quarter))
        variants = {
            "resident": (whole, True, False),
            "resident at the end": (whole, False, False),
            "streamed": (nearly, True, False),
            "streamed at the end": (nearly, False, False),
            "a quarter": (quarter, True, False),
            "its oracle": (quarter, True, True),
        }
        found: dict[str, list[Times]] = {name: [] for name in variants}
        for number in range(1 + options.rounds):
            for name in list(variants) if number % 2 == 0 else reversed(variants):
                engine, each_layer, has_hints = variants[name]
                with submitted(each_layer=each_layer):
                    times = measure(engine, bench.recorded[0], options.tokens, has_hints=has_hints)
                if number:
                    found[name].append(times)
        products = products_ns(whole)
    for name, rows in found.items():
        took, waited, thread, process = (
            statistics.median(getattr(row, part) for row in rows) / 1e6 for part in Times.__slots__
        )
        print(
            f"{name:20} {took:6.2f} ms a token, waited {waited:5.2f}, thread {thread:6.2f}, "
            f"process {process:6.2f}"
        )
    ratios = {
        f"{over} / {under}": [
            (a.token - a.waited) / (b.token - b.waited)
            for a, b in zip(found[over], found[under], strict=True)
        ]
        for over, under in (
            ("resident", "resident at the end"),
            ("streamed", "streamed at the end"),
            ("streamed", "resident"),
            ("a quarter", "streamed"),
            ("its oracle", "streamed"),
        )
    }
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:36} {middle:.3f} [{low:.3f} to {high:.3f}] without waits, {len(values)} rounds")
    print(f"expert products of a token alone: {products / 1e6:.2f} ms")
    print(json.dumps({"study": "token_time", "ratios": ratios, "products_ns": products}))


if __name__ == "__main__":
    main()
