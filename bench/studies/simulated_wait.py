"""Does the simulator say how long compute will stand still? Recorded, measured and predicted in one run.

    python -m bench.studies.simulated_wait [--rate 4e6] [--budgets 16,32,48] [--hints off,near-gate,oracle]

What the prediction is given, all of it taken apart from the runs it is held against:

- routes and guesses: of one answer to each prompt at the first budget;
- the drive: its rate, which is set (simulated disk), and what a request costs beside it, from requests of one
  to four records in a store of their own;
- computing: the time from the end of one layer's wait to the next layer's demand, the median of each layer,
  what a hand-over takes, and when it comes where nothing was waited for, of a run with each kind of hints at
  the first budget; and how much longer that time is for every record that is read in it, by least squares
  over the runs with hints.

Then every budget with every kind of hints is measured in an engine of its own, prompts read beforehand, and
simulated from cold in the same order. Without hints, hits must be the same to the last one. The bar: exposed
wait within 10 %. The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.studies.turns import Dial
from expert_store.layout import ReadOp
from expert_store.lease import Lease
from expert_store.simulate import Drive
from expert_store.source import ByteSource, FileSource
from expert_store.stats import StoreStatistics
from expert_store.store import ExpertStore
from expert_store.testing import DictMemory, ThrottledSource
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.deltas import plus, since
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.predictors import NearGate, Oracle, Predictor
from mlx_flashnext.engine.routes import RecordedRoutes, RouteLog
from mlx_flashnext.reports.measure import GREEDY, answer
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks
from mlx_flashnext.simulation.simulated_machine import Compute, SimulatedMachine, write_machine
from mlx_flashnext.simulation.simulated_routes import Answers, blocks_of_passes, routes_by_position
from mlx_flashnext.simulation.simulation import Played, RecordedGuesses, Simulation, play_answers
from mlx_flashnext.tokenizer import Tokenizer

BAR = 0.10
LEAST_SHARE = 0.02
"""Of a token's time that a wait must be to be compared: what is less is the noise of waking up."""
HINTS = ("off", "near-gate", "oracle")


@dataclass
class Clocked:
    """What stands in an engine's store for `acquire`: the same, with the time before it, in it and after.

    Attributes:
        count: says how many records were read so far.
        gaps: by layer, nanoseconds from the end of the wait before to the demand, and records read in them.
        hints_ns: from the demand to the begin of the wait, where hints were handed over.
        described_ns: from the end of the wait until the device has work again, when what was not told is.
    """

    acquire: Callable[..., Lease]
    count: Callable[[], int]
    is_on: bool = False
    gaps: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    hints_ns: list[int] = field(default_factory=list[int])
    described_ns: list[int] = field(default_factory=list[int])
    _left_ns: int = 0
    _left_at: int = 0

    def __call__(
        self, layer: int, experts: Sequence[int], *, meanwhile: Callable[[], None], **named: Any
    ) -> Lease:
        """Do what the store does."""
        began_ns = time.perf_counter_ns()
        if self.is_on and self._left_ns:
            gap = (began_ns - self._left_ns, self.count() - self._left_at)
            self.gaps.setdefault(layer, []).append(gap)

        def clocked() -> None:
            handed_ns = time.perf_counter_ns()
            meanwhile()
            if self.is_on:
                self.hints_ns.append(time.perf_counter_ns() - handed_ns)

        lease = self.acquire(layer, experts, meanwhile=clocked, **named)
        self._left_at, self._left_ns = self.count(), time.perf_counter_ns()
        return lease

    def before(self, busy: Callable[[], None]) -> Callable[[], None]:
        """Return `StreamedExperts.device_busy`, clocked."""

        def clocked() -> None:
            if self.is_on and self._left_ns:
                self.described_ns.append(time.perf_counter_ns() - self._left_ns)
            busy()

        return clocked


class CountingDial(Dial):
    """A drive whose rate can be changed, and that counts the records it has given.

    Attributes:
        num_read: records.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_read = 0

    def wrap(self, source: ByteSource) -> ByteSource:
        """Wrap an engine's files."""
        return _Counting(self, super().wrap(source))


class _Counting(ByteSource):
    def __init__(self, dial: CountingDial, inner: ByteSource) -> None:
        self._dial, self._inner = dial, inner

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        return self._inner.read_into(file, offset, views)

    def read_runs(self, runs: Sequence[ReadOp], views: Sequence[memoryview]) -> int:
        got = self._inner.read_runs(runs, views)
        self._dial.num_read += 1  # off by one where two end together: nobody counts with it
        return got

    def name(self, file: int) -> str:
        return self._inner.name(file)

    def close(self) -> None:
        self._inner.close()


def spin(duration_ns: int) -> None:
    """Keep the processor busy."""
    until_ns = time.perf_counter_ns() + duration_ns
    while time.perf_counter_ns() < until_ns:
        pass


@dataclass(frozen=True)
class Measured:
    """One repetition; per token."""

    wait_ns: float
    token_ns: float
    store: StoreStatistics


class Bench:
    """The demo, its prompts, and the drive under it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.directory: Path = demo_dir()
        tokenizer = Tokenizer.open(self.directory)
        self.prompts = chat_prompts(self.directory, tokenizer, demo_tasks()[: options.prompts])
        self.routes: list[RecordedRoutes] = []
        with self.open(options.budgets[0])[0] as engine:
            self.layouts = {layer: one.record for layer, one in engine.checkpoint.experts.items()}
            self.files = engine.checkpoint.table.files
            self.num_experts = engine.plan.num_experts
            self.num_readers = engine.plan.num_readers
            self.top_k = engine.config.num_experts_per_tok
            self.num_layers = engine.config.num_hidden_layers

    def open(self, slots: int) -> tuple[Engine, CountingDial]:
        dial = CountingDial()
        context = max(map(len, self.prompts)) + self.options.tokens + 1
        request = PlanRequest(context_tokens=context, slots_per_layer=slots)
        return Engine.open(self.directory, request, wrap_source=dial.wrap), dial

    def predictor(self, hints: str, number: int) -> Predictor | None:
        if hints == "oracle":
            return Oracle(self.routes[number])
        return NearGate() if hints == "near-gate" else None

    def run(
        self, slots: int, hints: str, rate: float | None, *, listen: bool = False
    ) -> tuple[Measured, Answers, Clocked]:
        """Answer every prompt in an engine of its own; the drive has the rate while answers are said."""
        engine, dial = self.open(slots)
        answers: Answers = []
        total, decode_ns, tokens = None, 0, 0
        with engine:
            store = engine.target.store
            clocked = Clocked(store.acquire, lambda: dial.num_read)
            if listen:
                store.acquire = clocked
                experts = engine.target.experts
                experts.device_busy = clocked.before(experts.device_busy)
            for number, prompt in enumerate(self.prompts):
                log = RouteLog()
                told = Hints(self.predictor(hints, number), self.num_layers, log)
                session = engine.session(is_guarded=False, hints=told)
                dial.turn(None)
                answer(session, prompt, 0)
                store.wait_idle()
                dial.turn(rate)
                num_prefill, before = len(log.passes), store.statistics()
                clocked.is_on = True
                events = list(session.generate(prompt, GREEDY, max_tokens=self.options.tokens))
                clocked.is_on = False
                store.wait_idle()
                end = events[-1]
                assert isinstance(end, Finished)
                got = since(store.statistics(), before)
                total = got if total is None else plus(total, got)
                decode_ns += end.statistics.decode_ns
                tokens += end.statistics.output_tokens
                answers.append(blocks_of_passes(log.passes, num_prefill))
        assert total is not None
        return Measured(total.exposed_wait_ns / tokens, decode_ns / tokens, total), answers, clocked

    def calibrate_drive(self, rate: float) -> Drive:
        """Find what a request costs beside the drive: requests of one to four records, nothing computing."""
        lengths = {layer: one.component_lengths for layer, one in self.layouts.items()}
        record_ns = {layer: one.record_bytes / rate * 1e9 for layer, one in self.layouts.items()}
        extra: list[float] = []
        with FileSource(self.files) as plain:
            source = ThrottledSource(plain, bytes_per_s=rate)
            slots = dict.fromkeys(self.layouts, self.num_experts - 1)
            memory = DictMemory(lengths)
            with ExpertStore(
                self.layouts, source, memory, slots=slots, num_readers=self.num_readers
            ) as store:
                for turn in range(self.options.calibrations):
                    layer = turn % len(self.layouts)
                    number = 1 + turn // len(self.layouts) % self.top_k
                    first = turn // len(self.layouts) * self.top_k % (self.num_experts - self.top_k)
                    wanted = [e for e in range(first, first + number) if not store.is_resident(layer, e)]
                    if len(wanted) < number:
                        break
                    spin(
                        2_000_000
                    )  # as in a run: readers sleep before they are asked, the processor does not
                    began_ns = time.perf_counter_ns()
                    request = store.request(layer, wanted)
                    request.wait().release()
                    extra.append(time.perf_counter_ns() - began_ns - number * record_ns[layer])
        beside = max(0, round(statistics.median(extra)))
        return Drive(rate, 0, beside // 2, beside // 4, self.num_readers)


def record_cost(runs: Sequence[Clocked]) -> float:
    """Return how much longer a gap is for a record read in it: least squares, every layer by itself."""
    together = squares = 0.0
    for one in runs:
        for gaps in one.gaps.values():
            time_ns, number = (statistics.fmean(values) for values in zip(*gaps, strict=True))
            together += sum((gap - time_ns) * (num - number) for gap, num in gaps)
            squares += sum((num - number) ** 2 for _, num in gaps)
    return max(0.0, together / squares) if squares else 0.0


def calibrate_compute(clocked: Clocked, record_ns: float) -> Compute:
    """Return what computing took between waits, reading left out."""
    own = {
        layer: round(statistics.median(gap - record_ns * number for gap, number in gaps))
        for layer, gaps in sorted(clocked.gaps.items())
    }
    hint_ns = round(statistics.median(clocked.hints_ns))
    tell_ns = round(statistics.median(clocked.described_ns)) + hint_ns
    return Compute(layer_ns=tuple(own.values()), hint_ns=hint_ns, record_ns=round(record_ns), tell_ns=tell_ns)


def simulate(bench: Bench, answers: Answers, machine: SimulatedMachine, slots: int, hints: str) -> Played:
    simulation = Simulation(
        bench.layouts, machine, slots=dict.fromkeys(bench.layouts, slots), top_k=bench.top_k
    )
    if hints == "off":
        predictors: list[Predictor | None] = [None] * len(answers)
    elif hints == "oracle":
        predictors = [Oracle(routes_by_position(blocks)) for blocks in answers]
    else:
        predictors = [RecordedGuesses() for _ in answers]
    return play_answers(simulation, answers, iter(predictors))


def numbers(text: str) -> list[int]:
    """Return the numbers of a list such as `16,32`."""
    return [int(word) for word in text.split(",")]


def calibrate(bench: Bench) -> tuple[dict[str, SimulatedMachine], dict[str, Answers]]:
    """Return, for each kind of hints, this machine and what routers and predictors said."""
    options = bench.options
    drive = bench.calibrate_drive(options.rate)
    beside_us = (drive.overhead_ns + 2 * drive.wake_ns) / 1e3
    print(f"simulated disk: {options.rate / 1e6:g} MB/s; a request costs {beside_us:.0f} us beside it")
    routes: dict[str, Answers] = {}
    listened: dict[str, Clocked] = {}
    for hints in options.hints:
        _, routes[hints], listened[hints] = bench.run(options.budgets[0], hints, options.rate, listen=True)
    record_ns = record_cost([one for hints, one in listened.items() if hints != "off"])
    print(f"a record read while computing takes {record_ns / 1e3:.0f} us from it")
    machines: dict[str, SimulatedMachine] = {}
    for hints, clocked in listened.items():
        compute = calibrate_compute(clocked, record_ns)
        machines[hints] = SimulatedMachine(f"this one, hints {hints}", drive, compute)
        assert isinstance(compute.layer_ns, tuple)
        print(
            f"{hints:10} computes {sum(compute.layer_ns) / 1e6:.2f} ms a token, hands over in "
            f"{compute.hint_ns / 1e3:.0f} us, {compute.tell_ns / 1e3:.0f} us late where nobody waited"
        )
    return machines, routes


def _by_cause(store: StoreStatistics, tokens: int) -> dict[str, list[float]]:
    """Return waits of a token in milliseconds: before the read had begun, and after."""
    return {
        cause.name.lower(): [split.queue_ns / tokens / 1e6, split.read_ns / tokens / 1e6]
        for cause, split in store.waits.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=4e6, help="bytes a second of the simulated disk")
    parser.add_argument("--budgets", type=numbers, default=[16, 32, 48], help="slots of a layer")
    parser.add_argument("--hints", type=lambda text: text.split(","), default=list(HINTS))
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--calibrations", type=int, default=96)
    parser.add_argument("--write-machine", type=Path, help="a file for the machine as calibrated")
    options = parser.parse_args()
    bench = Bench(options)
    _, plain, _ = bench.run(options.budgets[0], "off", None)
    bench.routes = [routes_by_position(blocks) for blocks in plain]
    machines, routes = calibrate(bench)
    if options.write_machine is not None:
        options.write_machine.write_text(write_machine(machines[options.hints[0]]))
    rows = [
        _row(bench, routes[hints], machines[hints], slots, hints)
        for slots in options.budgets
        for hints in options.hints
    ]
    worst = max((abs(row["error"]) for row in rows if row["is_comparable"]), default=0.0)
    print(f"worst error {worst:.1%}, bar {BAR:.0%}: {'held' if worst <= BAR else 'MISSED'}")
    document = {
        "study": "simulated_wait",
        "simulated_disk": options.rate,
        "bar": BAR,
        "worst": worst,
        "rows": rows,
    }
    print(json.dumps(document))


def _row(bench: Bench, answers: Answers, machine: SimulatedMachine, slots: int, hints: str) -> dict[str, Any]:
    runs = [bench.run(slots, hints, bench.options.rate)[0] for _ in range(bench.options.repetitions)]
    said = simulate(bench, answers, machine, slots, hints)
    waits = sorted(run.wait_ns for run in runs)
    waited, took = statistics.median(waits), statistics.median(run.token_ns for run in runs)
    found, tokens = runs[0].store, said.num_tokens
    if hints == "off":
        same = [(said.store.num_hits, said.store.num_misses), (found.num_hits, found.num_misses)]
        assert same[0] == same[1], f"hits and misses differ: simulated {same[0]}, measured {same[1]}"
    is_comparable = waited >= LEAST_SHARE * took
    error = said.wait_ns / waited - 1 if waited else 0.0
    print(
        f"{slots:3} of {bench.num_experts} slots, {hints:10} waited {waited / 1e6:7.2f} ms a token "
        f"[{waits[0] / 1e6:.2f} to {waits[-1] / 1e6:.2f}], predicted {said.wait_ns / 1e6:7.2f}, "
        f"error {error:+.1%}"
        f"{'' if is_comparable else ' (too short to compare)'}; "
        f"token {took / 1e6:.1f} ms, predicted {said.token_ns / 1e6:.1f}; "
        f"hits {found.num_hits} and {said.store.num_hits} of {found.num_demands}, "
        f"read {found.physical_bytes / 1e6:.2f} and {said.store.physical_bytes / 1e6:.2f} MB",
        flush=True,
    )
    return {
        "slots": slots,
        "hints": hints,
        "waited_ms": waited / 1e6,
        "waits_ms": [wait / 1e6 for wait in waits],
        "predicted_ms": said.wait_ns / 1e6,
        "error": error,
        "is_comparable": is_comparable,
        "token_ms": took / 1e6,
        "predicted_token_ms": said.token_ns / 1e6,
        "hits": found.num_hits,
        "predicted_hits": said.store.num_hits,
        "by_cause_ms": _by_cause(found, tokens),
        "predicted_by_cause_ms": _by_cause(said.store, tokens),
    }


if __name__ == "__main__":
    main()
