"""`flashnext plan`: what a run would use of this machine, line by line, before anything is loaded."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cli.answer import plan_request
from cli.console import Console, as_json_value, size
from cli.engine_factory import Planned, Services
from cli.errors import OK
from cli.model_path import FoundModel, chosen_model
from cli.options import DraftOptions, MemoryOptions, ModelOptions


def plan(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    memory: MemoryOptions,
    draft: DraftOptions,
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Show what a run would use of this machine, and why.

    Nothing is loaded. Exit code 4 means that it does not fit; the message then names the smallest budget that
    does.
    """
    services: Services = context.obj
    found = chosen_model(target, model.model)
    planned = services.make_plan(found.directory, plan_request(memory, found, draft))
    if json:
        console.document(_report(found, planned))
        return OK
    _show(console, found, planned)
    return OK


def _show(console: Console, found: FoundModel, planned: Planned) -> None:
    plan, machine = planned.plan, planned.machine
    rows = [(line.name, size(line.bytes), line.reason) for line in plan.lines]
    rows.append(("total", size(plan.total_bytes), f"of a budget of {size(plan.budget_bytes)}"))
    console.table(("memory", "size", "why"), rows, right=(1,))
    where = "every expert stays in memory" if plan.is_resident else "the rest comes from disk"
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


def _report(found: FoundModel, planned: Planned) -> Mapping[str, Any]:
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
    }
