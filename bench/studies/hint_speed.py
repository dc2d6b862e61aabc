"""What do hints gain, what do they cost where they gain nothing, and what bounds them?

    python -m bench.studies.hint_speed roofline [--factors 1] [--slots 16] [--rounds 6]
    python -m bench.studies.hint_speed roofline --draft dflash2 --width 3 --hints off,both,oracle-draft
    python -m bench.studies.hint_speed resident [--tokens 16] [--rounds 5]

`roofline`: a simulated disk whose storage bound without hints at the 25 % budget equals the compute bound,
and slower and faster ones by the factors. Bars: attainment with oracle hints 0.85; random hints cost at most
1 %; the wait for n-gram rows is below 1 % of a token. near-gate is reported beside them. Attainment is the
greater of the compute bound (every expert resident, measured in the same round) and the storage bound (bytes
of the records that were needed and absent, at the disk's rate) over the time measured. With --draft all of
it is a drafter's blocks of --width proposals at most, the compute bound too; bars for `both` at 25 %: at most
0.6 of the wait without hints, 0.7 of what the oracle saves, 1.25 of the tokens a second.

`resident`: one slot short of every expert, warmed, with books and prefetcher, with and without near-gate,
against a model whose experts are all resident. Bar: 0.95 of its decode rate.

Everything runs in one process, forwards and backwards in turns (A/B/B/A); ratios are medians over rounds with
their spread. With --model and --routes another checkpoint decodes with the routes of a recorded run: see
`replayed_routes`. The last line of stdout is one JSON document.
"""

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

from bench.studies import replayed_routes
from bench.studies.turns import (
    Contender,
    Dial,
    Recorded,
    Turn,
    Turns,
    attained,
    causes,
    in_turns,
    median_of,
    ratios,
    record,
)
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.route_files import kind_that_loads
from mlx_flashnext.reports.measure import answer
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks
from mlx_flashnext.tokenizer import Tokenizer

ATTAINED, RANDOM_COST, NGRAM_SHARE, RESIDENT = 0.85, 1.01, 0.01, 0.95
MAX_WARM_UPS = 20
HINTS = ("off", "random", "near-gate", "oracle")


class Bench:
    """Engines of one checkpoint with different budgets, the drive under them, and what they are to say."""

    def __init__(self, options: argparse.Namespace, resources: contextlib.ExitStack) -> None:
        self._model: Path = options.model or demo_dir()
        self._options = options
        self._resources = resources
        self._dials: list[Dial] = []
        self._routes = None if options.routes is None else replayed_routes.load(options.routes)
        prompts = self._prompts()
        self._context = max(map(len, prompts)) + options.tokens + 1
        with self.closed(options.quarter, "none") as probe:
            self.num_experts = probe.plan.num_experts
            self.recorded: list[Recorded] = [record(probe, prompt, options.tokens) for prompt in prompts]
        self._dials.clear()

    def open(self, slots: int) -> Engine:
        """Open an engine that lives as long as the bench."""
        return self._resources.enter_context(self.closed(slots))

    def closed(self, slots: int, draft: str = "", width: int = 0) -> Engine:
        """Open an engine that the caller closes; with the drafter of the options, unless one is named."""
        dial = Dial()
        draft, width = (draft, width) if draft else (self._options.draft, self._options.width)
        request = PlanRequest(
            memory_bytes=self._options.memory,
            context_tokens=self._context + width,
            slots_per_layer=slots,
            draft=draft,
            num_draft_tokens=width or None,
            hints=kind_that_loads(self._options.hints),
        )
        engine = Engine.open(self._model, request, wrap_source=dial.wrap)
        self._dials.append(dial)
        if self._routes is not None:
            replayed_routes.install(engine, self._routes)
        return engine

    def throttle(self, bytes_per_s: float | None) -> None:
        """Set the rate of every drive."""
        for dial in self._dials:
            dial.turn(bytes_per_s)

    def _prompts(self) -> list[list[int]]:
        if self._routes is not None:
            return [[300 + 7 * number for number in range(4)]]
        return chat_prompts(self._model, Tokenizer.open(self._model), demo_tasks()[: self._options.prompts])


def roofline(options: argparse.Namespace) -> dict[str, object]:
    """Measure the bars of a disk that is as slow as computing, and of others."""
    with contextlib.ExitStack() as resources:
        bench = Bench(options, resources)
        turns = Turns(bench.recorded, options.tokens)
        whole = Contender("resident", bench.open(bench.num_experts))
        quarter = Contender("off", bench.open(options.quarter))
        matched, compute_ns, required = float(options.rate), 0.0, 0.0
        for _ in range(
            0 if matched else 2
        ):  # a processor that sleeps between reads computes at another pace: ask it again
            bench.throttle(matched or None)
            base = in_turns([whole, quarter], turns, options.match_rounds)
            compute_ns = median_of(base["resident"]).token_ns
            required = median_of(base["off"]).required_bytes
            matched = required / compute_ns * 1e9
        print(
            f"without hints, {options.quarter} of {bench.num_experts} experts: {required / 1e3:.0f} kB a "
            f"token, computing {compute_ns / 1e6:.1f} ms: the bounds meet at {matched / 1e6:.2f} MB/s "
            "(simulated disk)"
        )
        found: list[dict[str, object]] = []
        for slots in options.slots:
            engine = {bench.num_experts: whole.engine, options.quarter: quarter.engine}.get(slots)
            engine = engine or bench.open(slots)
            contenders = [whole, *(Contender(f"{slots} {name}", engine, name) for name in options.hints)]
            for factor in options.factors:
                bench.throttle(matched * factor)
                shown = in_turns(contenders, turns, options.rounds, max_seconds=options.seconds)
                found += [_row(factor, slots, one, shown, matched * factor) for one in contenders[1:]]
            bench.throttle(None)
    return {"matched_bytes_per_s": matched, "rows": found, "bars": [ATTAINED, RANDOM_COST, NGRAM_SHARE]}


def _row(
    factor: float, slots: int, one: Contender, shown: dict[str, list[Turn]], bytes_per_s: float
) -> dict[str, object]:
    """Print and return one variant."""
    turns, resident = shown[one.name], shown["resident"]
    middle = median_of(turns)
    ratio = ratios(turns, shown[f"{slots} off"])
    reached = attained(turns, resident, bytes_per_s)
    storage_ns = middle.required_bytes / bytes_per_s * 1e9
    compute_ns = median_of(resident).token_ns
    ngram = middle.ngram_ns / middle.token_ns
    print(
        f"{factor:g}x {slots:3} experts {one.hints:9} {middle.token_ns / 1e6:7.1f} ms (computing "
        f"{compute_ns / 1e6:.1f}, reading {storage_ns / 1e6:.1f}), {ratio[0]:.3f} [{ratio[1]:.3f} to "
        f"{ratio[2]:.3f}] of no hints, attained {reached[0]:.2f} [{reached[1]:.2f} to {reached[2]:.2f}], "
        f"waited {middle.wait_ns / 1e6:.1f} ms ({causes(middle)}), n-gram {100 * ngram:.2f} %, prefetched "
        f"{100 * middle.prefetched:.0f} %, read {middle.physical_bytes / 1e3:.0f} kB, {middle.accepted:.2f} "
        f"tokens a cycle, {len(turns)} rounds",
        flush=True,
    )
    return {
        "factor": factor, "slots": slots, "hints": one.hints, "rounds": len(turns),
        "token_ms": middle.token_ns / 1e6, "compute_ms": compute_ns / 1e6, "storage_ms": storage_ns / 1e6,
        "ratio": ratio, "attained": reached, "ngram_share": ngram,
        "waits_ms": {name: value / 1e6 for name, value in middle.waits_ns.items()},
        "prefetched": middle.prefetched, "physical_bytes": middle.physical_bytes,
    }  # fmt: skip


def resident(options: argparse.Namespace) -> dict[str, object]:
    """Measure what streaming with everything on costs when it never misses."""
    with contextlib.ExitStack() as resources:
        bench = Bench(options, resources)
        whole = bench.open(bench.num_experts)
        streamed = bench.open(bench.num_experts - 1)
        return _resident(options, bench, whole, streamed)


def _resident(
    options: argparse.Namespace, bench: Bench, whole: Engine, streamed: Engine
) -> dict[str, object]:
    prompt, num_layers = bench.recorded[0].prompt, whole.config.num_hidden_layers
    for _ in range(MAX_WARM_UPS):
        if answer(streamed.session(), prompt, options.tokens).hit_rate == 1.0:
            break
    answer(whole.session(), prompt, options.tokens)
    found: dict[str, list[float]] = {"off": [], "near-gate": []}
    asked = {name: streamed.new_hints(name) for name in found}  # kept: what was learned stays known
    for _ in range(options.rounds):
        times = {"resident": 0, "off": 0, "near-gate": 0}
        for name in ("resident", "off", "near-gate", "near-gate", "off", "resident"):
            engine = whole if name == "resident" else streamed
            hints = asked.get(name) or Hints(None, num_layers)
            times[name] += answer(engine.session(hints=hints), prompt, options.tokens).decode_ns
        for name, rates in found.items():
            rates.append(times["resident"] / times[name])
    read = streamed.target.store.statistics()
    for name, rates in found.items():
        low, middle, high = statistics.quantiles(rates, n=4)
        print(
            f"decode rate over resident, hints {name}: {middle:.3f}, quartiles {low:.3f} to {high:.3f}, "
            f"{len(rates)} rounds, bar {RESIDENT}"
        )
    outcomes = {outcome.name.lower(): number for outcome, number in read.hints.items() if number}
    return {"experts": bench.num_experts, "ratios": found, "bar": RESIDENT, "outcomes": outcomes}


def numbers(kind: type) -> Callable[[str], list[object]]:
    """Return a reader of numbers between commas."""
    return lambda text: [kind(word) for word in text.split(",")]


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add what `Bench` reads."""
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; the demo if left out")
    parser.add_argument("--routes", type=Path, default=None, help="decode with these routes: replayed_routes")
    parser.add_argument("--draft", default="none", help="who proposes in all of it")
    parser.add_argument("--width", type=int, default=0, help="most proposals of a cycle")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second of the disk; 0 finds it")
    parser.add_argument("--quarter", type=int, default=16, help="slots at which the bounds are to meet")
    parser.add_argument("--memory", type=int, default=None, help="bytes that a plan may take")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--match-rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=100.0, help="stop a comparison early after so long")
    parser.add_argument("--hints", type=lambda text: text.split(","), default=list(HINTS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["roofline", "resident"])
    add_bench_options(parser)
    parser.add_argument("--slots", type=numbers(int), default=[16, 32, 64])
    parser.add_argument("--factors", type=numbers(float), default=[1.0])
    options = parser.parse_args()
    result = roofline(options) if options.part == "roofline" else resident(options)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps({"study": "hint_speed", "part": options.part, **machine, **result}))


if __name__ == "__main__":
    main()
