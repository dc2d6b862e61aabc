"""`flashnext trace simulate`: what a trace would have waited for on other disks, budgets, machines."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.bench_options import counts, shares, slots_of_shares, words_of
from cli.commands.trace import TraceFile, identity_of, opened_trace
from cli.console import Console, as_json_value, counted
from cli.engine_factory import Services
from cli.errors import INCOMPATIBLE, OK, CommandError, UsageProblem
from cli.model_path import find_model
from cli.parse import parse_number, parse_size
from cli.settings import expanded

if TYPE_CHECKING:
    from expert_store.layout import RecordLayout
    from mlx_flashnext.simulation.simulated_machine import SimulatedMachine
    from mlx_flashnext.simulation.simulated_report import Cell, Sweep
    from mlx_flashnext.simulation.simulated_routes import Answers

_MODEL, _SWEEP = "Model", "What is simulated"
SIMULATED_HINTS = ("off", "frequency", "previous", "random", "recorded", "oracle")
MOST_CELLS = 512
MOST_EXPERTS = 1 << 12
MOST_WIDTH = 17


def simulate(
    context: typer.Context,
    console: Console,
    trace: TraceFile,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            metavar="FILE",
            help="A machine: its drive and what it takes to compute (docs/FORMATS.md). Give several to "
            "compare. Left out: no times, only what is asked for, found and read.",
            rich_help_panel=_SWEEP,
        ),
    ] = None,
    budgets: Annotated[
        str,
        typer.Option(
            "--budgets",
            metavar="LIST",
            help="Experts in memory: 25%,50% or slots of a layer. With 100% all are there before the first "
            "block, as in a run; with less, slots begin empty.",
            rich_help_panel=_SWEEP,
        ),
    ] = "25%,50%,75%",
    hints: Annotated[
        str,
        typer.Option(
            "--hints",
            metavar="LIST",
            help=f"Who says what to read ahead: {', '.join(SIMULATED_HINTS)}. recorded: what was said when "
            "the trace was recorded, taken to have been said one layer early; let in or not as in a run.",
            rich_help_panel=_SWEEP,
        ),
    ] = "off",
    widths: Annotated[
        str,
        typer.Option(
            "--widths",
            metavar="LIST",
            help="Rows of a block, such as 1,2,4; 0: as recorded.",
            rich_help_panel=_SWEEP,
        ),
    ] = "0",
    acceptance: Annotated[
        float,
        typer.Option(
            "--acceptance",
            metavar="SHARE",
            help="With --widths: chance that a proposal is accepted, if those before it were.",
            parser=parse_number,
            rich_help_panel=_SWEEP,
        ),
    ] = 1.0,
    warm: Annotated[
        str,
        typer.Option(
            "--warm",
            metavar="N",
            help="Leave the first blocks out of the figures: a trace has no prompts, whose experts would be "
            "in the slots by then.",
            rich_help_panel=_SWEEP,
        ),
    ] = "0",
    policy: Annotated[
        Literal["lru", "slru"],
        typer.Option("--policy", help="Which record leaves when a slot is needed.", rich_help_panel=_SWEEP),
    ] = "lru",
    seed: Annotated[
        int, typer.Option("--seed", help="Of chance, in --acceptance and random.", rich_help_panel=_SWEEP)
    ] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Experts and record sizes are this checkpoint's; a trace of another is refused.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            "--experts", metavar="N", help="Instead of --model: experts of a layer.", rich_help_panel=_MODEL
        ),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            "--record",
            metavar="SIZE",
            help="With --experts: size of one expert's record, such as 2.76MB.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Play a trace's routes through the store of a machine that is not here.

    The store itself runs, with its policy, queue and readahead, on a virtual clock: hits and misses are its
    own, times are the machine file's. Every figure is simulated, none is measured. Rows of the n-gram table
    are not in it.
    """
    from mlx_flashnext.simulation.simulated_machine import FREE, read_machine
    from mlx_flashnext.simulation.simulated_report import Sweep, sweep, to_dict

    machines = [read_machine(expanded(name)) for name in machine or ()] or [FREE]
    wanted_widths = counts("--widths", widths)
    if any(width > MOST_WIDTH for width in wanted_widths):
        raise UsageProblem(
            f"--widths: a block has at most {MOST_WIDTH} rows: {max(wanted_widths)}", hint="write 1,2,4"
        )
    if not 0 <= acceptance <= 1:  # not a number compares false
        raise UsageProblem(f"--acceptance is a share: {acceptance:g}", hint="give a number from 0 to 1")
    if acceptance != 1 and not any(wanted_widths):
        raise UsageProblem(
            f"Nothing reads --acceptance without --widths: {acceptance:g}",
            hint="add --widths 2,4",
        )
    budgets_asked = shares("--budgets", budgets)
    chosen_hints = words_of("--hints", hints, SIMULATED_HINTS)
    answers = _answers(context.obj, trace, model, has_sizes=experts is not None or record is not None)
    for name, one in zip(machine or (), machines, strict=False):
        one.compute.check(len(answers[0][0].routes), name)
    layouts, num_experts = _layouts(context.obj, answers, model, experts, record)
    fewest = max(2, max(len(row) for rows in answers[0][0].routes.values() for row in rows))
    asked = Sweep(
        slots=slots_of_shares(console, budgets_asked, num_experts, fewest),
        hints=list(dict.fromkeys(chosen_hints)),
        widths=list(dict.fromkeys(wanted_widths)),
        acceptance=acceptance,
        policy=policy,
        num_warm=_one_count("--warm", warm),
        seed=seed,
    )
    num_cells = len(asked.slots) * len(asked.hints) * len(asked.widths) * len(machines)
    if num_cells > MOST_CELLS:
        raise UsageProblem(f"{num_cells} combinations are more than {MOST_CELLS}", hint="ask for fewer")
    cells: list[Cell] = []
    for cell in sweep(answers, layouts, machines, asked):
        cells.append(cell)
        console.progress("simulating", len(cells), num_cells)
    console.end_progress()
    if json:
        console.document(as_json_value(to_dict(cells, machines, asked)))
    else:
        _show(console, cells, machines, asked, answers)
    for note in notes_of(cells):
        console.note(f"note: {note}")
    return OK


def _answers(services: Services, trace: str, model: str | None, *, has_sizes: bool) -> "Answers":
    """Return the blocks of a trace that is whole, and of this model."""
    from drafter.record_check import Identity, read_trace
    from mlx_flashnext.simulation.simulated_routes import NoRoutes, blocks_of_trace

    if model is not None and has_sizes:
        raise UsageProblem("--model and --experts both say what the experts are", hint="give one")
    identity = Identity() if has_sizes else identity_of(services, model or "demo")
    with opened_trace(trace) as stream:
        lines = read_trace(stream, identity)
    try:
        return blocks_of_trace(lines)
    except NoRoutes as error:
        raise CommandError(
            f"{trace}: {error}",
            hint="trace record --slots N, with fewer slots than experts, writes routes",
            code=INCOMPATIBLE,
        ) from None


def _layouts(
    services: Services, answers: "Answers", model: str | None, experts: str | None, record: str | None
) -> "tuple[Mapping[int, RecordLayout], int]":
    """Return the records of each layer, and the experts of one."""
    if experts is None and record is None:
        inspection = services.inspect_checkpoint(find_model(model).directory)
        checkpoint = inspection.checkpoint
        if checkpoint is None:
            raise CommandError(f"The checkpoint does not open: {model}", hint=f"flashnext show {model}")
        return {layer: one.record for layer, one in checkpoint.experts.items()}, checkpoint.config.num_experts
    if experts is None or record is None:
        raise UsageProblem("--experts and --record go together", hint="--experts 512 --record 2.76MB")
    from expert_store.simulate import plain_layouts

    number = _one_count("--experts", experts)
    if not 1 <= number <= MOST_EXPERTS:
        raise UsageProblem(
            f"--experts must be from 1 to {MOST_EXPERTS}: {number}", hint="the experts of one layer"
        )
    try:
        num_bytes = parse_size(record)
    except typer.BadParameter as error:
        raise UsageProblem(f"--record: {error.message}", hint="such as 2.76MB") from error
    if num_bytes > 1 << 30:
        raise UsageProblem(f"--record is more than 1 GiB: {record}", hint="the size of one expert")
    return plain_layouts(dict.fromkeys(answers[0][0].routes, number), num_bytes), number


def _one_count(flag: str, text: str) -> int:
    if "," in text:
        raise UsageProblem(f"{flag} takes one number: {text}", hint="leave the others out")
    return counts(flag, text, example="512")[0]


def _show(
    console: Console,
    cells: "Sequence[Cell]",
    machines: "Sequence[SimulatedMachine]",
    asked: "Sweep",
    answers: "Answers",
) -> None:
    num_blocks = sum(len(blocks) for blocks in answers)
    console.line(
        f"SIMULATED, nothing here was measured: {counted(len(answers), 'answer')}, "
        f"{counted(num_blocks, 'block')} of the trace, policy {asked.policy}"
        + (f", the first {counted(asked.num_warm, 'block')} left out" if asked.num_warm else "")
    )
    for machine in machines:
        if machine.about:
            console.line(f"{machine.name}: {machine.about}")
    console.line()
    has_times = any(cell.token_ns for cell in cells)
    times = ("wait ms", "token ms", "drive ms", "tokens/s") if has_times else ()
    headings = ("machine", "slots", "hints", "rows", "tokens", "hits", "ahead", "MB", "unused MB", *times)
    rows = [_row(cell, has_times=has_times) for cell in cells]
    console.table(headings, rows, right=(1, *range(3, len(headings))))
    console.line()
    console.line("tokens: that stayed of a block; hits: demands found in a slot, ahead: brought by a hint;")
    console.line(
        "MB: read for a token, unused of it for nothing; "
        + (
            "wait: exposed, of a token; drive: the bytes at its full rate"
            if has_times
            else "--machine FILE adds times"
        )
    )


def notes_of(cells: "Sequence[Cell]") -> list[str]:
    """Return what a reader should not have to find out: guesses of the trace that changed little."""
    found: dict[tuple[int, int], str] = {}
    for cell in cells:
        if cell.hints != "recorded" or cell.slots >= cell.num_experts:
            continue
        name = f"hints recorded, {cell.slots} slots"
        reads = counted(cell.num_guessed_reads, "read")
        if not cell.num_recorded:
            note = f"{name}: no guess is left: the trace's are of blocks of several rows, not of one"
        elif 2 * cell.num_guesses < cell.num_recorded:
            note = (
                f"{name}: of {cell.num_recorded} guesses of the trace {cell.num_guesses} were let in and "
                f"led to {reads}: as in a run, guesses are held back where such guesses were seldom right"
            )
        else:
            continue
        found.setdefault((cell.slots, cell.width), note)
    return list(found.values())


def _row(cell: "Cell", *, has_times: bool) -> tuple[str, ...]:
    rate = cell.tokens_per_s
    times = (
        f"{cell.wait_ns / 1e6:.2f}",
        f"{cell.token_ns / 1e6:.2f}",
        "" if cell.storage_ns is None else f"{cell.storage_ns / 1e6:.2f}",
        "" if rate is None else f"{rate:.2f}",
    )
    return (
        cell.machine,
        f"{cell.slots} of {cell.num_experts}",
        cell.hints,
        str(cell.width) if cell.width else "as recorded",
        f"{cell.tokens_per_block:.2f}",
        "" if cell.hit_rate is None else f"{cell.hit_rate:.3f}",
        "" if cell.prefetched is None else f"{cell.prefetched:.3f}",
        f"{cell.token_bytes / 1e6:.2f}",
        f"{cell.rejected_bytes / 1e6:.2f}",
        *(times if has_times else ()),
    )
