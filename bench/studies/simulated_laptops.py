"""What would this store make of Qwen3.8-Flash-Next on laptops that are not here? SIMULATED, every figure.

    python -m bench.studies.simulated_laptops > docs/SIMULATED.md

Writes the page (its text: `simulated_laptops.md`): inputs, arithmetic, tables, and what would show that they
are wrong. The routes are the demo's, scaled (simulated_routes.py, `scaled`): one answer of the demo is a
stream of 64 experts, eight of them name 512. Two numbers are fitted, to two that were published: how much
recurs from token to token, and how unevenly the streams contribute. What else was published of this model's
routes is printed beside them and fits or does not.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from expert_store.layout import RecordLayout
from expert_store.simulate import Drive, plain_layouts
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.checkpoint.imagined import BUILDS, imagine, real_config
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import BudgetTooSmall
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.machine import mac_of
from mlx_flashnext.engine.plan import PlanRequest, make_plan
from mlx_flashnext.engine.predictors import NearGate
from mlx_flashnext.engine.routes import RouteLog
from mlx_flashnext.reports.measure import GREEDY, answer
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks
from mlx_flashnext.simulation.simulated_machine import FREE, Compute, SimulatedMachine
from mlx_flashnext.simulation.simulated_report import Cell, Sweep, sweep
from mlx_flashnext.simulation.simulated_routes import blocks_of_passes, scaled
from mlx_flashnext.simulation.simulation import RoutedBlock
from mlx_flashnext.tokenizer import Tokenizer

NUM_STREAMS, STREAM_EXPERTS = 8, 64
TAKEN = (
    (2, 2, 1, 1, 1, 1, 1, 1),
    (3, 2, 1, 1, 1, 1, 1, 0),
    (4, 2, 1, 1, 1, 1, 0, 0),
    (4, 3, 1, 1, 1, 0, 0, 0),
    (4, 4, 1, 1, 0, 0, 0, 0),
    (4, 4, 2, 0, 0, 0, 0, 0),
)
"""How many of a token's ten experts each stream contributes: from even to uneven."""
KEPT = tuple(number / 20 for number in range(15))
"""Chances that an expert gives way to one of the token before."""
PUBLISHED_HIT = (0.29, 0.816)
"""Share of the experts in memory, and hit rate: slotstream, this model, 24 GB on an M5 Pro."""
PUBLISHED_UNIQUE, PUBLISHED_NEAR = 22.4, 0.763
"""Distinct experts of a layer that three positions want; of a token's ten, what the next layer's router
named, asked one layer early (both slotstream)."""
PUBLISHED_AGAIN = (0.354, 0.433)
"""Chosen by the token before too: of other models, none of this one."""
EFFICIENCY_FROM = (93.0, 546e9)
"""Tokens a second with every expert in memory, 4 bits, and the memory's bytes a second: mlx-serve, M4 Max."""
LATENCY_NS = round((2.764_800e6 / 9.46e9 - 2.764_800e6 / 17.3e9) * 1e9)
"""Of a read: what makes 17.3 GB/s at depth 8 into 9.46 at depth 1 with records of 2.76 MB (M5 Pro)."""
OVERHEAD_NS = 40_000
"""Of a record beside the drive: what our readers were measured to add, on another machine (dispatch.py)."""
SYNC_NS = (210_000, 380_000)
"""Of a layer's wait for the device: ids with the router on a base M4; slotstream's whole cost of a layer on
an M5 Pro."""
WIDTH, ACCEPTANCE = 4, 0.75
"""Rows of a verified block; 1 + 0.75 + 0.56 + 0.42 = 2.73 tokens, as 2.74 were served with DFlash v1."""
CONTEXT = 32_768
PAGE: Final = Path(__file__).with_suffix(".md")
"""The page, with places for what is found."""
WARM = 24
"""Blocks that fill slots and do not count."""


@dataclass(frozen=True)
class Laptop:
    """One machine: vendor's memory bandwidth and a drive's rate, both as published.

    Attributes:
        name: what tables call it.
        memory_gib: of the machine.
        memory_rate: bytes a second.
        drive_rate: bytes a second.
        drive_from: whose figure.
        others: what other engines reached on it, at their own budgets.
    """

    name: str
    memory_gib: int
    memory_rate: float
    drive_rate: float
    drive_from: str
    others: str = ""


_DRAFTS: Final = "Flash-next-ssd 17.46, 27.8 with drafts"
LAPTOPS = (
    Laptop("M2, 16 GB", 16, 100e9, 1.5e9, "M2 mini 256 GB", "slotstream 1.41"),
    Laptop("M4 Air, 32 GB", 32, 120e9, 2.4e9, "streamlx", "streamlx 3.96 to 4.71"),
    Laptop("M4 mini, 32 GB, 2 drives", 32, 120e9, 4.99e9, "slotstream, 1.81 + 3.18", "slotstream 7.35"),
    Laptop("M5, 24 GB", 24, 153e9, 4.6e9, "implied by ds4 627", ""),
    Laptop("M5 Air, 32 GB", 32, 153e9, 4.6e9, "as the M5 of 24 GB: assumed", "slotstream 6.22"),
    Laptop("M3 Max, 48 GB", 48, 400e9, 17.5e9, "flash-moe, sequential", ""),
    Laptop("M4 Max, 64 GB", 64, 546e9, 7.0e9, "assumed: nobody published one", "slotstream 15.93"),
    Laptop("M5 Pro, 48 GB", 48, 307e9, 17.3e9, "slotstream, depth 8", "slotstream 13.47 to 15.86"),
    Laptop(
        "M5 Pro, 64 GB, 2 drives",
        64,
        307e9,
        12.3e9,
        "Flash-next-ssd, 6.5 + 5.7",
        _DRAFTS,
    ),
)


@dataclass(frozen=True)
class Model:
    """What is read and computed of the imagined checkpoint, in bytes."""

    checkpoint: Checkpoint
    layouts: Mapping[int, RecordLayout]
    record_bytes: int
    head_bytes: int
    layer_bytes: float

    @property
    def token_bytes(self) -> float:
        """What a token reads of memory with every expert there."""
        top_k = self.checkpoint.config.num_experts_per_tok
        return self.head_bytes + len(self.layouts) * (self.layer_bytes + top_k * self.record_bytes)


def imagined() -> Model:
    """Return Qwen3.8-Flash-Next in 4 bits."""
    build = next(build for build in BUILDS if build.name == "4-bit")
    checkpoint = imagine(real_config(), build)
    record = next(iter(checkpoint.experts.values())).record.record_bytes
    layouts = plain_layouts(
        {layer: one.record.num_experts for layer, one in checkpoint.experts.items()}, record
    )
    stored = {name: tensor.loaded_bytes(2) for name, tensor in checkpoint.tensors.items()}
    head = stored["lm_head"]
    trunk = sum(stored.values()) - head - stored["embed_tokens"]
    return Model(checkpoint, layouts, record, head, trunk / len(layouts))


def machine_of(laptop: Laptop, model: Model, sync_ns: int, efficiency: float) -> SimulatedMachine:
    """Return a laptop as a machine."""
    rate = laptop.memory_rate * efficiency
    compute = Compute(
        layer_ns=round(model.layer_bytes / rate * 1e9),
        expert_ns=round(model.record_bytes / rate * 1e9),
        sync_ns=sync_ns,
        pass_ns=round(model.head_bytes / rate * 1e9),
    )
    drive = Drive(laptop.drive_rate, LATENCY_NS, OVERHEAD_NS, 20_000, 8)
    return SimulatedMachine(laptop.name, drive, compute, laptop.drive_from)


def slots_of(laptop: Laptop, model: Model) -> int | None:
    """Return what the planner gives each layer; None if the model does not fit."""
    try:
        plan = make_plan(model.checkpoint, mac_of(laptop.memory_gib), PlanRequest(context_tokens=CONTEXT))
    except BudgetTooSmall:
        return None
    return plan.slots_per_layer


def record(num_tokens: int) -> list[list[RoutedBlock]]:
    """Return the streams: one answer of the demo each, with what near-gate said."""
    directory = demo_dir()
    prompts = chat_prompts(directory, Tokenizer.open(directory), demo_tasks()[:NUM_STREAMS])
    context = max(map(len, prompts)) + num_tokens + 1
    streams: list[list[RoutedBlock]] = []
    with Engine.open(directory, PlanRequest(context_tokens=context, slots_per_layer=16)) as engine:
        for prompt in prompts:
            log = RouteLog()
            hints = Hints(NearGate(), engine.config.num_hidden_layers, log)
            session = engine.session(is_guarded=False, hints=hints)
            answer(session, prompt, 0)
            log.passes.clear()
            list(session.generate(prompt, GREEDY, max_tokens=num_tokens))
            streams.append(blocks_of_passes(log.passes))
    return streams


@dataclass(frozen=True)
class Locality:
    """What scaled routes are like."""

    taken: tuple[int, ...]
    kept: float
    hits: float
    again: float
    unique: float
    near: float


def unique(blocks: Sequence[RoutedBlock], width: int = 3) -> float:
    """Return the distinct experts of a layer that so many tokens together want, on average."""
    rows = [{layer: set(one[0]) for layer, one in block.routes.items()} for block in blocks]
    return _mean(
        [
            len(set.union(*(row[layer] for row in rows[at : at + width])))
            for at in range(len(rows) - width + 1)
            for layer in rows[at]
        ]
    )


def locality(blocks: Sequence[RoutedBlock], model: Model, taken: tuple[int, ...], kept: float) -> Locality:
    """Measure scaled routes: hits at the published share, recurrence, union of three tokens, recall."""
    share, _ = PUBLISHED_HIT
    slots = round(share * model.checkpoint.config.num_experts)
    cell = next(sweep([list(blocks)], model.layouts, [FREE], Sweep([slots], num_warm=WARM)))
    rows = [{layer: set(rows[0]) for layer, rows in block.routes.items()} for block in blocks]
    again = [len(a[layer] & b[layer]) / len(b[layer]) for a, b in pairwise(rows) for layer in b]
    near = [
        len(row[layer] & {guess.expert for guess in said}) / len(row[layer])
        for row, block in zip(rows, blocks, strict=True)
        for layer, said in block.guesses.items()
    ]
    assert cell.hit_rate is not None
    return Locality(taken, kept, cell.hit_rate, _mean(again), unique(blocks), _mean(near))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def fitted(
    streams: Sequence[Sequence[RoutedBlock]], model: Model
) -> tuple[list[RoutedBlock], Locality, list[Locality]]:
    """Return the scaled routes that are nearest to what was published, and all that were tried.

    First the union of three tokens decides how much recurs, with streams that contribute evenly; then the hit
    rate decides how unevenly they do.
    """
    kept = min(KEPT, key=lambda one: abs(unique(_scaled(streams, model, TAKEN[0], one)) - PUBLISHED_UNIQUE))
    tried: list[tuple[list[RoutedBlock], Locality]] = []
    for taken, of in [(TAKEN[0], 0.0), *((taken, kept) for taken in TAKEN)]:
        blocks = _scaled(streams, model, taken, of)
        tried.append((blocks, locality(blocks, model, taken, of)))
    blocks, best = min(tried[1:], key=lambda one: abs(one[1].hits - PUBLISHED_HIT[1]))
    return blocks, best, [one for _, one in tried]


def _scaled(
    streams: Sequence[Sequence[RoutedBlock]], model: Model, taken: tuple[int, ...], kept: float
) -> list[RoutedBlock]:
    return scaled(
        streams,
        num_layers=len(model.layouts),
        experts_per_stream=STREAM_EXPERTS,
        taken=taken,
        first_layer=1,
        kept=kept,
    )


@dataclass(frozen=True)
class Row:
    """One laptop's cells, by (hints, width), for both costs of waiting for the device."""

    laptop: Laptop
    slots: int
    machines: tuple[SimulatedMachine, SimulatedMachine]
    cells: Mapping[tuple[str, int], tuple[Cell, Cell]]


def rows(blocks: list[RoutedBlock], model: Model, efficiency: float) -> Iterator[Row]:
    """Simulate every laptop that the model fits."""
    for laptop in LAPTOPS:
        slots = slots_of(laptop, model)
        if slots is None:
            continue
        machines = tuple(machine_of(laptop, model, sync_ns, efficiency) for sync_ns in SYNC_NS)
        assert len(machines) == 2
        found: dict[tuple[str, int], list[Cell]] = {}
        for hints, width in (("off", 1), ("recorded", 1), ("oracle", 1), ("off", WIDTH), ("recorded", WIDTH)):
            asked = Sweep([slots], [hints], [width], ACCEPTANCE, num_warm=WARM // width)
            found[hints, width] = list(sweep([blocks], model.layouts, machines, asked))
        yield Row(laptop, slots, machines, {key: (cells[0], cells[1]) for key, cells in found.items()})


def _range(pair: tuple[Cell, Cell]) -> str:
    """Return a rate from the costlier to the cheaper wait for the device."""
    cheap, dear = (1e9 / cell.token_ns for cell in pair)
    return f"{dear:.1f} to {cheap:.1f}"


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, numbers to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines))


def routes_table(tried: Sequence[Locality], best: Locality) -> str:
    """Return what the candidates are like, beside what was published."""
    lines = [
        [
            f"{'**' if one is best else ''}{', '.join(map(str, one.taken))}{'**' if one is best else ''}",
            f"{one.kept:.2f}",
            f"{one.hits:.3f}",
            f"{one.again:.3f}",
            f"{one.unique:.1f}",
            f"{one.near:.3f}",
        ]
        for one in tried
    ]
    again = f"{PUBLISHED_AGAIN[0]} to {PUBLISHED_AGAIN[1]}, other models"
    lines.append(
        ["published", "", f"{PUBLISHED_HIT[1]}", again, f"{PUBLISHED_UNIQUE}", f"{PUBLISHED_NEAR}, all ten"]
    )
    headings = (
        "experts of a token by stream",
        "kept",
        f"hits at {PUBLISHED_HIT[0]} of the experts",
        "chosen by the token before",
        "distinct in three tokens",
        "named one layer early",
    )
    return table(headings, lines)


def inputs_table(found: Sequence[Row]) -> str:
    """Return what went in, laptop by laptop."""
    lines: list[list[str]] = []
    for row in found:
        compute, laptop = row.machines[0].compute, row.laptop
        assert isinstance(compute.layer_ns, int)
        lines.append(
            [
                laptop.name,
                f"{row.slots} of {row.cells['off', 1][0].num_experts}",
                f"{laptop.memory_rate / 1e9:.0f}",
                f"{laptop.drive_rate / 1e9:g} ({laptop.drive_from})",
                f"{compute.layer_ns / 1e6:.2f}",
                f"{compute.expert_ns / 1e6:.3f}",
                f"{compute.pass_ns / 1e6:.2f}",
            ]
        )
    headings = ("laptop", "slots", "memory GB/s", "drive GB/s", "layer ms", "expert ms", "pass ms")
    return table(headings, lines)


def results_table(found: Sequence[Row]) -> str:
    """Return what came out."""
    lines: list[list[str]] = []
    for row in found:
        off = row.cells["off", 1]
        dear = off[1]
        assert dear.hit_rate is not None
        assert dear.storage_ns is not None
        lines.append(
            [
                row.laptop.name,
                f"{dear.hit_rate:.3f}",
                f"{dear.token_bytes / 1e9:.2f}",
                f"{dear.storage_ns / 1e6:.0f}",
                f"{dear.wait_ns / 1e6:.0f}",
                f"{(dear.token_ns - dear.wait_ns) / 1e6:.0f}",
                _range(off),
                _range(row.cells["recorded", 1]),
                _range(row.cells["oracle", 1]),
                _range(row.cells["off", WIDTH]),
                _range(row.cells["recorded", WIDTH]),
                row.laptop.others,
            ]
        )
    headings = (
        "SIMULATED", "hits", "GB a token", "drive ms", "wait ms", "computing ms", "tokens/s, no hints",
        "near-gate", "oracle", f"blocks of {WIDTH}, no hints", f"blocks of {WIDTH}, near-gate",
        "published by others, tokens/s",
    )  # fmt: skip
    return table(headings, lines)


def page(
    found: Sequence[Row], tried: Sequence[Locality], best: Locality, model: Model, efficiency: float
) -> str:
    """Return the page."""
    rate, memory = EFFICIENCY_FROM
    gb = model.token_bytes / 1e9
    top_k, layers = model.checkpoint.config.num_experts_per_tok, len(model.layouts)
    record = model.record_bytes / 1e6
    return PAGE.read_text().format(
        record=record,
        gb=gb,
        layers=layers,
        top_k=top_k,
        layer=model.layer_bytes / 1e6,
        head=model.head_bytes / 1e6,
        rate=rate,
        memory=memory / 1e9,
        efficiency=efficiency,
        latency=LATENCY_NS / 1e3,
        overhead=OVERHEAD_NS / 1e3,
        sync_low=SYNC_NS[0] / 1e6,
        sync_high=SYNC_NS[1] / 1e6,
        width=WIDTH,
        acceptance=ACCEPTANCE,
        context=CONTEXT,
        warm=WARM,
        hit=PUBLISHED_HIT[1],
        share=PUBLISHED_HIT[0],
        best_hit=best.hits,
        best_unique=best.unique,
        unique=PUBLISHED_UNIQUE,
        kept=best.kept,
        routes=routes_table(tried, best),
        inputs=inputs_table(found),
        results=results_table(found),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    options = parser.parse_args()
    model = imagined()
    rate, memory = EFFICIENCY_FROM
    efficiency = rate * model.token_bytes / memory
    blocks, best, tried = fitted(record(options.tokens), model)
    print(page(list(rows(blocks, model, efficiency)), tried, best, model, efficiency), end="")


if __name__ == "__main__":
    main()
