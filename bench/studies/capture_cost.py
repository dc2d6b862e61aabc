"""What does capturing features cost prefill and decode, and how many waits for the device?

    python -m bench.studies.capture_cost [--prompt 256] [--tokens 64] [--rounds 7]

The demo, every expert in memory, a recorded answer proposed by an oracle, so that blocks are as wide as a
draft's. Compared are an oracle that looks at nothing and one that asks for four taps by `mean` and lets them
be computed; what a draft does with them is its own cost, `capture` of `flashnext bench --report draft`. Order
A/B/B/A, one round uncounted; ratios round by round of wall and of processor time. The bar is 1.02 and no wait
more. The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import mlx.core as mx

from drafter.api import Drafter, FeatureRequest
from drafter.oracle import OracleDrafter
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.reports.measure import GREEDY
from mlx_flashnext.reports.prompt_sets import demo_tasks, salted_prompt

TAPS = (1, 3, 4, 6)
BAR = 1.02


class Capturing(OracleDrafter):
    """Proposes a recorded answer and has its rows' features computed."""

    def __init__(self, recorded: Sequence[int], vocab_size: int) -> None:
        super().__init__(recorded, vocab_size)
        self.feature_request = FeatureRequest(TAPS, "mean", None)

    def observe(
        self,
        tokens: Sequence[int],
        next_token: int,
        stack_TGD: mx.array | None = None,
        *,
        features_RF: mx.array | None = None,
    ) -> None:
        super().observe(tokens, next_token, stack_TGD)
        if features_RF is not None:
            mx.async_eval(features_RF)


def run(engine: Engine, drafter: Drafter, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
    """Return times of reading and saying, processor time of both, and waits while saying."""
    session, began = engine.session(drafter, is_guarded=False), time.process_time()
    *_, end = session.generate(prompt, GREEDY, max_tokens=num_tokens)
    mx.synchronize()
    assert isinstance(end, Finished)
    return {
        "prefill": end.statistics.prefill_ns,
        "decode": end.statistics.decode_ns,
        "processor": time.process_time() - began,
        "waits": end.statistics.num_syncs,
    }


def main() -> None:
    """Print medians of ratios with their spread."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--prompt", type=int, default=256)
    ap.add_argument("--tokens", type=int, default=64)
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--width", type=int, default=7)
    options = ap.parse_args()
    request = PlanRequest(context_tokens=1024, draft="oracle", num_draft_tokens=options.width)
    ratios: dict[str, list[float]] = {"prefill": [], "decode": [], "processor": []}
    waits = set[tuple[float, float]]()
    with Engine.open(demo_dir(), request) as engine:
        for number in range(options.rounds + 1):
            prompt = salted_prompt(engine.tokenizer, demo_tasks(), options.prompt, number)
            events = engine.session().generate(prompt, GREEDY, max_tokens=options.tokens)
            text = [*prompt, *(event.token_id for event in events if isinstance(event, Token))]
            vocabulary = engine.config.vocab_size
            order = (OracleDrafter, Capturing) if number % 2 else (Capturing, OracleDrafter)
            sums = {kind: dict[str, float]() for kind in order}
            for kind in (*order, *reversed(order)):
                for name, value in run(engine, kind(text, vocabulary), prompt, options.tokens).items():
                    sums[kind][name] = sums[kind].get(name, 0) + value
            plain, captured = sums[OracleDrafter], sums[Capturing]
            waits.add((plain["waits"], captured["waits"]))
            if number:
                for name, found in ratios.items():
                    found.append(captured[name] / plain[name])
    report: dict[str, object] = {"waits": sorted(waits), "bar": BAR}
    for name, found in ratios.items():
        report[name] = {"median": statistics.median(found), "from": min(found), "to": max(found)}
        print(f"{name}: {statistics.median(found):.4f} [{min(found):.4f} to {max(found):.4f}] of no capture")
    print(f"waits while saying, without and with: {sorted(waits)}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
