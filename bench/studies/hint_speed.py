"""What do hints gain, what do they cost where they gain nothing, and what bounds them?

    python -m bench.studies.hint_speed roofline [--model DIR] [--tokens 16] [--rounds 5] [--factors 0.5,1,2]
    python -m bench.studies.hint_speed resident [--model DIR] [--tokens 16] [--rounds 5]

`roofline`: a simulated disk whose storage bound without hints at the 25 % budget equals the compute bound,
and slower and faster ones by the factors. Bars: attainment with oracle hints 0.85; random hints cost at most
1 %; the wait for n-gram rows is below 1 % of a token. near-gate is reported beside them.

`resident`: one slot short of every expert, warmed, with books and prefetcher, with and without near-gate,
against a model whose experts are all resident. Bar: 0.95 of its decode rate.

Hints are compared in one engine, forwards and backwards in turns (A/B/B/A); ratios are medians over rounds
with their spread. The last line of stdout is one JSON document.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from expert_store.source import ByteSource
from expert_store.testing import ThrottledSource
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.machine import detect_machine
from mlx_flashnext.engine.measure import answer
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.prompt_sets import CHAT_SET, chat_prompts, demo_tasks
from mlx_flashnext.engine.ssd_wait import VariantReport
from mlx_flashnext.engine.ssd_wait_run import Asked, measure_ssd_wait
from mlx_flashnext.tokenizer import Tokenizer

ATTAINED, RANDOM_COST, NGRAM_SHARE, RESIDENT = 0.85, 1.01, 0.01, 0.95
MAX_WARM_UPS = 20
BASE = "off"


def asked_of(
    options: argparse.Namespace, bytes_per_s: float | None, hints: Sequence[str], rounds: int
) -> Asked:
    """Return what is measured on a simulated disk, or on the page cache when no rate is given."""
    model: Path = options.model or demo_dir()
    prompts = chat_prompts(model, Tokenizer.open(model), demo_tasks()[: options.prompts])

    def throttled(source: ByteSource) -> ByteSource:
        return ThrottledSource(source, bytes_per_s=bytes_per_s)

    return Asked(
        directory=model,
        label=model.name,
        request=PlanRequest(context_tokens=max(map(len, prompts)) + options.tokens + 1),
        slots=options.slots,
        drafts=[("none", 0)],
        hints=hints,
        prompts=prompts,
        prompt_set=CHAT_SET,
        num_tokens=options.tokens,
        repetitions=rounds,
        page_cache="warm",
        disk="page cache" if bytes_per_s is None else f"simulated disk: {bytes_per_s / 1e6:.2f} MB/s",
        wrap_source=throttled,
    )


def median_ratio(one: VariantReport) -> tuple[float, float, float]:
    return statistics.median(one.ratios), min(one.ratios), max(one.ratios)


def roofline(options: argparse.Namespace) -> dict[str, object]:
    """Measure the bars of a disk that is as slow as computing, and of others."""
    base = measure_ssd_wait(asked_of(options, None, ["off"], options.rounds), detect_machine()).variants[0]
    matched = base.required_bytes / base.bounds.compute_ns * 1e9
    print(
        f"without hints, {base.variant.slots} experts: {base.required_bytes / 1e3:.0f} kB a token, computing "
        f"{base.bounds.compute_ns / 1e6:.1f} ms: the bounds meet at {matched / 1e6:.2f} MB/s (simulated disk)"
    )
    found: list[dict[str, object]] = []
    for factor in options.factors:
        asked = asked_of(options, matched * factor, [BASE, "random", "near-gate", "oracle"], options.rounds)
        for one in measure_ssd_wait(asked, detect_machine()).variants:
            ratio, low, high = median_ratio(one)
            ngram = one.waits.ngram / one.token_ns
            print(
                f"{factor:g}x {one.variant.slots:3} experts {one.variant.hints:9} {one.token_ns / 1e6:7.1f} "
                f"ms, {ratio:.3f} [{low:.3f} to {high:.3f}] of no hints, attained {one.attainment or 0:.2f}, "
                f"waited {one.exposed_wait_ns / 1e6:.1f} ms (late {one.waits.late_hint / 1e6:.1f}, queue "
                f"{one.waits.queueing / 1e6:.1f}), n-gram {100 * ngram:.1f} %, prefetched "
                f"{100 * (one.prefetched_recall or 0):.0f} %, read {one.physical_bytes / 1e3:.0f} kB",
                flush=True,
            )
            found.append(
                {
                    "factor": factor,
                    "slots": one.variant.slots,
                    "hints": one.variant.hints,
                    "token_ms": one.token_ns / 1e6,
                    "compute_ms": one.bounds.compute_ns / 1e6,
                    "storage_ms": (one.storage_ns or 0.0) / 1e6,
                    "ratio": [ratio, low, high],
                    "attained": one.attainment,
                    "ngram_share": ngram,
                    "waits_ms": {
                        name: getattr(one.waits, name) / 1e6
                        for name in ("cold", "evicted", "late_hint", "other", "ngram", "queueing")
                    },
                    "prefetched": one.prefetched_recall,
                    "physical_bytes": one.physical_bytes,
                }
            )
    return {"matched_bytes_per_s": matched, "rows": found, "bars": [ATTAINED, RANDOM_COST, NGRAM_SHARE]}


def resident(options: argparse.Namespace) -> dict[str, object]:
    """Measure what streaming with everything on costs when it never misses."""
    model: Path = options.model or demo_dir()
    with Engine.open(model, PlanRequest(context_tokens=256)) as probe:
        num_experts = probe.plan.num_experts
    prompt = chat_prompts(model, Tokenizer.open(model), demo_tasks()[:1])[0]
    request = PlanRequest(context_tokens=len(prompt) + options.tokens + 1, slots_per_layer=num_experts)
    near = PlanRequest(request.memory_bytes, request.context_tokens, num_experts - 1)
    found: dict[str, list[float]] = {"off": [], "near-gate": []}
    with Engine.open(model, request) as whole, Engine.open(model, near) as streamed:
        for _ in range(MAX_WARM_UPS):
            if answer(streamed.session(), prompt, options.tokens).hit_rate == 1.0:
                break
        answer(whole.session(), prompt, options.tokens)
        for number in range(options.rounds):
            times = {"resident": 0, "off": 0, "near-gate": 0}
            for name in ("resident", "off", "near-gate", "near-gate", "off", "resident"):
                engine = whole if name == "resident" else streamed
                hints = None if name == "resident" else engine.new_hints(name)
                times[name] += answer(engine.session(hints=hints), prompt, options.tokens).decode_ns
            for name, ratios in found.items():
                ratios.append(times["resident"] / times[name])
            shown = ", ".join(f"{name} {ratios[-1]:.3f}" for name, ratios in found.items())
            print(f"round {number + 1}: {shown}", flush=True)
        read = streamed.target.store.statistics()
    for name, ratios in found.items():
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(
            f"decode rate over resident, hints {name}: {middle:.3f} [{low:.3f} to {high:.3f}], bar {RESIDENT}"
        )
    outcomes = {outcome.name.lower(): number for outcome, number in read.hints.items() if number}
    return {"experts": num_experts, "ratios": found, "bar": RESIDENT, "outcomes": outcomes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["roofline", "resident"])
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; the demo if left out")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument(
        "--slots", type=lambda text: [int(word) for word in text.split(",")], default=[16, 32]
    )
    parser.add_argument(
        "--factors", type=lambda text: [float(word) for word in text.split(",")], default=[1.0, 0.5, 2.0]
    )
    options = parser.parse_args()
    result = roofline(options) if options.part == "roofline" else resident(options)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps({"study": "hint_speed", "part": options.part, **machine, **result}))


if __name__ == "__main__":
    main()
