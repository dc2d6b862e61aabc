"""`flashnext plan`: what a run would use of this machine, line by line, before anything is loaded."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.answer import plan_request
from cli.console import Console, as_json_value, counted, size
from cli.engine_factory import Planned, Services
from cli.errors import OK, CommandError, UsageProblem
from cli.model_path import ALIASES, FoundModel, chosen_model
from cli.options import DraftOptions, MemoryOptions, ModelOptions
from cli.parse import parse_number, parse_size
from cli.plan_table import GIB, expectation_document, show_table, speed_range, table_document
from cli.settings import popularity

if TYPE_CHECKING:
    from mlx_flashnext.checkpoint import Checkpoint
    from mlx_flashnext.reports.expectation import Expectation

_EXPECT = "Expectation"
MEASURE = "measure"


def plan(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    memory: MemoryOptions,
    draft: DraftOptions,
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)
    ] = None,
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="Plans for Macs of 16 to 128 GB, 4, 3, 2 bits, FP8 and BF16, 8K to 256K tokens, with each "
            "drafter. Without MODEL: of Qwen3.8-Flash-Next, which need not be here.",
            rich_help_panel=_EXPECT,
        ),
    ] = False,
    drive: Annotated[
        str | None,
        typer.Option(
            "--drive",
            metavar="RATE",
            help="What the drive gives a second, such as 6.5GB, or measure: adds bounds and speeds.",
            rich_help_panel=_EXPECT,
        ),
    ] = None,
    resident_rate: Annotated[
        float | None,
        typer.Option(
            "--resident-rate",
            metavar="NUMBER",
            help="Tokens a second with every expert in memory, as flashnext bench measures them.",
            parser=parse_number,
            rich_help_panel=_EXPECT,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Show what a run would use of this machine, and why.

    Nothing is loaded. Exit code 4 means that it does not fit; the message then names the smallest budget that
    does. Speeds are expectations with their arithmetic, never measurements.
    """
    services: Services = context.obj
    if resident_rate is not None and (resident_rate <= 0 or drive is None):
        raise UsageProblem(
            f"--resident-rate {resident_rate:g} is of no use"
            + (" without --drive" if resident_rate > 0 else ": it must be above zero"),
            hint="--drive RATE, such as 6.5GB, or --drive measure"
            if resident_rate > 0
            else "--resident-rate 20, as flashnext bench measures it",
        )
    if table:
        return _table(console, services, model, memory, draft, target, drive, resident_rate, json=json)
    found = chosen_model(target, model.model)
    from mlx_flashnext.reports.expectation import expect

    planned = services.make_plan(found.directory, plan_request(memory, found, draft))
    mirror = None
    if memory.mirror is not None:
        from mlx_flashnext.engine.sources import mirror_of

        mirror = mirror_of(planned.checkpoint, memory.mirror)
    rate = _rate(services, found, drive)
    expected = expect(
        planned.checkpoint,
        planned.plan,
        bytes_per_s=rate,
        resident_tokens_per_s=resident_rate,
        demands=_demands(planned.checkpoint),
    )
    if json:
        console.document(_report(found, planned, expected))
        return OK
    _show(console, found, planned)
    if mirror is not None:
        console.line(f"mirror           {counted(len(mirror.files), 'data file')} in {memory.mirror}")
        for note in mirror.notes:
            console.note(f"note: {note}")
    console.line()
    for step in expected.steps:
        console.line(step)
    if expected.tokens_per_s is not None:
        console.line(f"tokens a second     {speed_range(expected)}, expected, not measured")
    else:
        console.line("--drive RATE or --drive measure adds the storage bound and a range of speeds")
    return OK


def _demands(checkpoint: "Checkpoint") -> Mapping[int, Sequence[float]] | None:
    """Return what earlier runs of this model asked for, None if nothing is known of any."""
    from expert_store.popularity import PopularityUnusable, load_popularity

    counts = {layer: one.record.num_experts for layer, one in checkpoint.experts.items()}
    path = popularity() / f"{checkpoint.digest[:32]}.json"
    try:
        return load_popularity(path, model_digest=checkpoint.digest, num_experts=counts).counts
    except PopularityUnusable:
        return None


def _rate(services: Services, found: FoundModel | None, drive: str | None) -> float | None:
    """Return the bandwidth of the drive, as told or as measured now."""
    if drive is None:
        return None
    if drive != MEASURE:
        try:
            return float(parse_size(drive))
        except typer.BadParameter as error:
            raise UsageProblem(f"--drive: {error.message}", hint="such as 6.5GB, or measure") from error
    if found is None:
        raise UsageProblem(
            "--drive measure reads a model, and there is none here", hint="--drive RATE, such as 6.5GB"
        )
    measured = services.measure_drive(found.directory)
    if measured is None:
        raise CommandError(
            "The drive could not be measured: the model's pages are in memory",
            hint="--drive RATE, such as 6.5GB; flashnext doctor says more",
        )
    return measured


def _table(
    console: Console,
    services: Services,
    model: ModelOptions,
    memory: MemoryOptions,
    draft: DraftOptions,
    target: str | None,
    drive: str | None,
    resident_rate: float | None,
    *,
    json: bool,
) -> int:
    """Show plans for machines that are not here."""
    from mlx_flashnext.reports.plan_table import DRAFTERS, MEMORY_GIB, Cell, plan_table

    if memory != MemoryOptions() or draft != DraftOptions():
        raise UsageProblem(
            "--table has its own machines, contexts and drafters", hint="leave the other flags out"
        )
    found, checkpoints, about = _builds(services, model, target)
    rate = _rate(services, found, drive)
    cells: list[Cell] = []
    for cell in plan_table(checkpoints, bytes_per_s=rate, resident_tokens_per_s=resident_rate):
        console.progress("planning", MEMORY_GIB.index(cell.memory_bytes // GIB), len(MEMORY_GIB))
        cells.append(cell)
    console.end_progress()
    if json:
        console.document(
            {
                "drive_bytes_per_s": rate,
                "resident_tokens_per_s": resident_rate,
                "cells": table_document(cells),
            }
        )
        return OK
    about = [
        *about,
        "slots: experts of each layer in memory, with each drafter; needs: the least budget that would do",
        "hits, bytes, speeds: without a drafter; from every expert being as likely as any other to the best",
        "hit rate that was published; flashnext plan MODEL --drive RATE shows the arithmetic of a case",
        f"drive: {rate / 1e9:.2f} GB/s, {'measured here' if drive == MEASURE else 'as told'}"
        if rate is not None
        else "--drive RATE or --drive measure adds the storage bound and a range of speeds",
    ]
    if rate is not None and resident_rate is None:
        about.append("computing is not counted; --resident-rate gives its speed")
    show_table(console, cells, DRAFTERS, about)
    return OK


def _builds(
    services: Services, model: ModelOptions, target: str | None
) -> tuple[FoundModel | None, "list[tuple[str, Checkpoint]]", list[str]]:
    """Return the model that is here, if any, and what to plan for."""
    from mlx_flashnext.checkpoint.imagined import BUILDS, imagine, real_config

    config = real_config()
    imagined = [(build.name, imagine(config, build)) for build in BUILDS]
    about = [f"{build.name}: {build.about}" for build in BUILDS]
    name = model.model if target is None else target
    if name is None:
        return None, imagined, about
    try:
        found = chosen_model(target, model.model)
    except CommandError:
        if name not in ALIASES and name not in ALIASES.values():
            raise
        return None, imagined, about
    checkpoint = services.inspect_checkpoint(found.directory)
    if checkpoint.checkpoint is None:
        raise checkpoint.problems[0]
    here = ("here", checkpoint.checkpoint)
    about = [f"here: {found.label}, {checkpoint.layout} layout"]
    if checkpoint.config != config:
        return found, [here], about
    return found, [here, *imagined], [*about, *(f"{build.name}: {build.about}" for build in BUILDS)]


def _show(console: Console, found: FoundModel, planned: Planned) -> None:
    from mlx_flashnext.demo import DEMO_SLOTS

    plan, machine = planned.plan, planned.machine
    rows = [(line.name, size(line.bytes), line.reason) for line in plan.lines]
    rows.append(("total", size(plan.total_bytes), f"of a budget of {size(plan.budget_bytes)}"))
    console.table(("memory", "size", "why"), rows, right=(1,))
    where = "every expert stays in memory" if plan.is_resident else "the rest comes from disk"
    if found.is_demo and plan.slots_per_layer == DEMO_SLOTS:
        where += f", as with a large model; --slots {plan.num_experts} holds all"
    layers = len(planned.checkpoint.experts)
    facts = (
        ("model", f"{found.label}, {planned.checkpoint.layout} layout"),
        ("machine", f"{machine.name}, {machine.backend}, {size(machine.total_bytes)} of memory"),
        (
            "experts",
            f"{plan.slots_per_layer} of {plan.num_experts} slots in each of {layers} layers; {where}",
        ),
        ("context", f"{plan.context_tokens} tokens"),
        ("largest context", f"{plan.max_context_tokens} tokens with these slots"),
        ("", f"{plan.longest_context_tokens} tokens with the fewest slots"),
        ("smallest budget", f"{size(plan.smallest_budget_bytes)} for this context"),
        ("drafts", f"from {plan.draft}: {plan.draft_reason}" if plan.draft != "none" else "none"),
        ("reading", f"{plan.num_readers} threads, policy {plan.policy}"),
        ("prefill", f"{plan.prefill_step} tokens at a time"),
    )
    console.line()
    width = max(len(name) for name, _ in facts)
    for name, fact in facts:
        console.line(f"{name:<{width}}  {fact}")


def _report(found: FoundModel, planned: Planned, expected: "Expectation") -> Mapping[str, Any]:
    from dataclasses import asdict

    return {
        "model": {
            "name": found.label,
            "directory": str(found.directory),
            "layout": planned.checkpoint.layout,
            "digest": planned.checkpoint.digest,
        },
        "machine": as_json_value(asdict(planned.machine)),
        "plan": as_json_value(planned.plan.to_dict()),
        "expected": expectation_document(expected),
    }
