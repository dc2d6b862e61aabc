"""`flashnext doctor`: what this machine is, and how fast its drive gives the model's experts."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import Console, as_json_value, counted, size
from cli.doctor_health import health_document, show_health
from cli.engine_factory import Services
from cli.errors import DAMAGED, OK, describe
from cli.golden import checked_golden, why_not
from cli.interrupts import Interrupts
from cli.model_path import FoundModel, chosen_model
from cli.options import ModelOptions

if TYPE_CHECKING:
    from mlx_flashnext.checkpoint import Checkpoint
    from mlx_flashnext.reports.doctor import DiskLine, Examination


def doctor(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)
    ] = None,
    golden: Annotated[
        bool,
        typer.Option(
            "--golden/--no-golden",
            help="Load the model, say 32 greedy tokens and compare them with those of the first time.",
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Examine this machine: memory, swap, power, versions, backend, the drive under the model, and the model.

    The drive is read as a run reads it: records of the model's own size, several at once. What could not be
    measured here is listed. Exit code 5 means that the model no longer says what it said the first time.
    """
    services: Services = context.obj
    found = chosen_model(target, model.model)
    from mlx_flashnext.engine.errors import EngineError
    from mlx_flashnext.reports.surroundings import look_around

    console.progress("looking at machine and model", 0, 0)
    with Interrupts():
        checkpoint, seen = services.examine(
            found.directory, lambda done, total: console.progress("reading the drive", done, total)
        )
        console.end_progress()
        around = look_around(found.directory)
        check, problem = checked_golden(services, found.directory, console) if golden else (None, None)
    console.end_progress()
    why_none = why_not(problem)
    if json:
        document = _report(found, checkpoint, seen)
        console.document({**document, **health_document(around, check, why_none)})
    else:
        _show(console, found, checkpoint, seen)
        show_health(console, around, check, why_none)
    if problem is not None and not isinstance(problem, EngineError):
        return describe(problem).code  # it does not load, as the golden's line says
    return DAMAGED if check is not None and check.outcome == "differs" else OK


def _show(console: Console, found: FoundModel, checkpoint: "Checkpoint", seen: "Examination") -> None:
    machine = seen.machine
    versions = ", ".join(f"{name} {number}" for name, number in seen.versions.items())
    facts = [
        ("machine", f"{machine.name}, {counted(seen.num_cpus, 'processor')} for this process"),
        ("memory", f"{size(machine.total_bytes)}, {size(machine.available_bytes)} free now"),
        ("a run may use", f"{size(machine.ceiling_bytes())} and leave the machine usable"),
        ("backend", f"{machine.backend}, computing in {machine.compute_dtype}"),
        ("versions", versions),
        ("model", f"{found.label}, {checkpoint.layout} layout, {seen.quantisation}"),
        ("experts", f"{counted(seen.num_records, 'record')} of {size(seen.record_bytes)}"),
        ("free space", f"{size(seen.free_bytes)} where the model lies"),
    ]
    width = max(len(name) for name, _ in facts)
    for name, fact in facts:
        console.wrapped(f"{name:<{width}}  {fact}")
    console.line()
    console.table(
        ("page cache", "readers", "bandwidth", "p50 ms", "p95 ms", "p99 ms", "records"),
        [_disk_row(line) for line in seen.disk],
        right=(1, 2, 3, 4, 5, 6),
    )
    console.line()
    best = max((line for line in seen.disk if line.was_cold), key=_bandwidth, default=None)
    if best is not None:
        console.line(f"fastest when cold: --readers {best.rate.num_readers}")
    for what in seen.unmeasured:
        console.wrapped(f"not measured: {what}")


def _disk_row(line: "DiskLine") -> tuple[str, ...]:
    rate = line.rate
    state = "dropped" if line.page_cache == "cold" and not line.was_cold else line.page_cache
    if line.cached_share is not None:
        state += f", {100 * line.cached_share:.0f}% cached"
    tails = (rate.read_p50_ns, rate.read_p95_ns, rate.read_p99_ns)
    return (
        state,
        str(rate.num_readers),
        "unknown" if rate.bytes_per_s is None else f"{size(rate.bytes_per_s)}/s",
        *(f"{tail / 1e6:.2f}" for tail in tails),
        str(rate.num_records),
    )


def _bandwidth(line: "DiskLine") -> float:
    return line.rate.bytes_per_s or 0.0


def _report(found: FoundModel, checkpoint: "Checkpoint", seen: "Examination") -> dict[str, Any]:
    from dataclasses import asdict

    document: dict[str, Any] = as_json_value(asdict(seen))
    for shown, line in zip(document["disk"], seen.disk, strict=True):
        shown["rate"]["bytes_per_s"] = line.rate.bytes_per_s
    document["machine"]["ceiling_bytes"] = seen.machine.ceiling_bytes()
    document["model"] = {"name": found.label, "layout": checkpoint.layout, "digest": checkpoint.digest}
    return document
