"""What could hints born from a draft gain at most? Before any is trained.

    python -m bench.studies.hint_ceiling [--budgets 16] [--widths 1,2,3,5,7] [--accept 0.6,0.8,1.0]

The drafter replays a recorded answer and spoils each token with a chance of 1 - `accept`. Hints of `block`
are perfect: when a block's tokens are drafted, every layer's experts of all its rows are named, those of
rows that will be rejected too, taken from a run of the very same blocks. Nothing a trained route sidecar
says can be more right or come earlier. Beside them: no hints, the most popular experts, and near-gate,
which asks the next layer's router and needs no draft.

Each row says tokens a second over plain decode without hints of the same budget, measured in the same rounds,
and the exposed wait of a token. The disk is simulated: its rate makes plain decode's reading at the first
budget as long as its computing. Medians over rounds, in turns; the last line of stdout is one JSON document.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterable, Sequence

from bench.studies.hint_speed import Bench, add_bench_options, numbers
from bench.studies.turns import Contender, Recorded, Turns, in_turns, median_of, ratios
from drafter.oracle import OracleDrafter
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.guess import Guess, Rows
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.predictors import Predictor, Previous
from mlx_flashnext.engine.routes import Pass, RouteLog
from mlx_flashnext.reports.measure import GREEDY, answer

HINTS = ("off", "frequency", "near-gate", "block")


class Narrow(OracleDrafter):
    """An oracle that proposes at most `width` tokens."""

    width = 0

    def max_proposals(self) -> int:
        return self.width


class Block(Previous):
    """Every layer's experts of all rows of the block that begins, as the same block chose them before."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        super().__init__(())
        self._passes = {(one.position, one.num_rows): one.routes for one in passes}

    def begin(self, tokens: Sequence[int], position: int) -> Iterable[Guess]:
        routes = self._passes.get((position, len(tokens)), {})
        return [
            Guess(layer, expert)
            for layer, rows in routes.items()
            for expert in dict.fromkeys(expert for row in rows for expert in row)
        ]

    def routed(self, layer: int, ids_TK: Rows) -> Iterable[Guess]:
        del layer, ids_TK
        return ()

    def commit(self, num_rows: int) -> None:
        del num_rows


class CeilingTurns(Turns):
    """Turns whose `block` hints come from a run of the same blocks."""

    def __init__(self, recorded: Sequence[Recorded], num_tokens: int) -> None:
        super().__init__(recorded, num_tokens)
        self._passes: dict[tuple[str, tuple[int, ...]], list[Pass]] = {}

    def listen(self, one: Contender, name: str) -> None:
        """Run a contender's blocks once and write their routes down."""
        for recorded in self._recorded:
            log = RouteLog()
            hints = Hints(None, one.engine.config.num_hidden_layers, log)
            assert one.drafter is not None
            session = one.engine.session(one.drafter(recorded), is_guarded=False, hints=hints)
            answer(session, recorded.prompt, 0)
            log.passes.clear()
            list(session.generate(recorded.prompt, GREEDY, max_tokens=self._num_tokens))
            self._passes[name, recorded.prompt] = log.passes

    def _predictor(self, one: Contender, recorded: Recorded) -> Predictor | None:
        if one.hints != "block":
            return super()._predictor(one, recorded)
        return Block(self._passes[one.name.rsplit(" ", 1)[0], recorded.prompt])


def maker(engine: Engine, width: int, accept: float) -> Callable[[Recorded], OracleDrafter]:
    """Return what makes the drafter of a recorded prompt."""

    def make(recorded: Recorded) -> OracleDrafter:
        drafter = Narrow(
            [*recorded.prompt, *recorded.tokens],
            engine.config.vocab_size,
            error_rate=1 - accept,
            seed=len(recorded.prompt),
        )
        drafter.width = width
        return drafter

    return make


def ceiling(options: argparse.Namespace) -> dict[str, object]:
    """Measure the table."""
    rows: list[dict[str, object]] = []
    with contextlib.ExitStack() as resources:
        bench = Bench(options, resources)
        turns = CeilingTurns(bench.recorded, options.tokens)
        whole = Contender("resident", bench.open(bench.num_experts))
        plain = Contender("plain", bench.open(options.quarter))
        matched = options.rate
        for _ in range(0 if matched else 2):
            bench.throttle(matched or None)
            base = in_turns([whole, plain], turns, options.match_rounds)
            required, compute = median_of(base["plain"]), median_of(base["resident"])
            matched = required.required_bytes / compute.token_ns * 1e9
        print(f"simulated disk: {matched / 1e6:.2f} MB/s")
        for slots in options.budgets:
            base_engine = plain.engine if slots == options.quarter else bench.open(slots)
            for width in options.widths:
                with bench.closed(slots, draft="oracle", width=width) as engine:
                    bench.throttle(matched)
                    rows += _width(options, turns, base_engine, engine, slots, width)
    return {"bytes_per_s": matched, "rows": rows}


def _width(
    options: argparse.Namespace, turns: CeilingTurns, base: Engine, engine: Engine, slots: int, width: int
) -> list[dict[str, object]]:
    contenders = [Contender("plain", base), Contender("plain near-gate", base, "near-gate")]
    for accept in options.accept:
        name = f"{width} {accept:g}"
        made = [Contender(f"{name} {hints}", engine, hints, maker(engine, width, accept)) for hints in HINTS]
        is_resident = slots >= engine.plan.num_experts
        if not is_resident:
            turns.listen(made[0], name)
        contenders += made[:1] if is_resident else made
    found = in_turns(contenders, turns, options.rounds, max_seconds=options.seconds)
    rows: list[dict[str, object]] = []
    for one in contenders[1:]:
        middle = median_of(found[one.name])
        gain, low, high = ratios(found["plain"], found[one.name])
        print(
            f"{slots:3} experts, k {width}, {one.name:18} {1e9 / middle.token_ns:6.1f} tokens/s, "
            f"{gain:.2f} [{low:.2f} to {high:.2f}] of plain, waited {middle.wait_ns / 1e6:5.1f} ms a token, "
            f"{middle.accepted:.2f} tokens a cycle, read {middle.physical_bytes / 1e3:.0f} kB",
            flush=True,
        )
        row = {
            "slots": slots, "width": width, "name": one.name, "tokens_per_s": 1e9 / middle.token_ns,
            "over_plain": [gain, low, high], "wait_ms": middle.wait_ns / 1e6,
            "tokens_a_cycle": middle.accepted, "physical_bytes": middle.physical_bytes,
        }  # fmt: skip
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_bench_options(parser)
    parser.set_defaults(prompts=1, rounds=2, match_rounds=3)
    parser.add_argument("--budgets", type=numbers(int), default=[16])
    parser.add_argument("--widths", type=numbers(int), default=[1, 2, 3, 5, 7])
    parser.add_argument("--accept", type=numbers(float), default=[0.6, 0.8, 1.0])
    options = parser.parse_args()
    print(json.dumps({"study": "hint_ceiling", **ceiling(options)}))


if __name__ == "__main__":
    main()
