"""`flashnext bench`: how fast a model reads and answers here, prefill and decode apart."""

from typing import Annotated

import typer

from cli.bench_options import (
    ALL_DRAFTS,
    BENCH_HINTS,
    BenchOptions,
    DiskOptions,
    counts,
    drafts_of,
    shares,
    words_of,
)
from cli.bench_output import write_rows
from cli.bench_report import show_warm_start, ssd_wait_report, warm_start_report
from cli.bench_speed import SpeedRequest, measure_speed
from cli.console import Console, as_json_value
from cli.draft_report import draft_report, show_draft_report
from cli.engine_factory import Services
from cli.errors import OK, UsageProblem
from cli.interrupts import Interrupts
from cli.model_path import find_model
from cli.options import MemoryOptions, ModelOptions
from cli.parse import parse_whole
from cli.predictor_report import predictor_report, show_predictor_report
from cli.ssd_wait_output import show_report
from cli.verify_report import verify_report

REPORT_TOKENS = "16"
DRAFT_REPORT_TOKENS = "64"
PREDICTOR_TOKENS = "48"
PLAIN_TOKENS = "128"


def bench(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    measured: BenchOptions,
    memory: MemoryOptions,
    disk: DiskOptions,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Of the prompts' salt. Left out: another every time.",
            parser=parse_whole,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Short for --output json.")] = False,
) -> int:
    """Measure how fast a model reads prompts and answers.

    Prefill and decode are measured apart; a row is the median over the repetitions with the least and the
    greatest. Decode is greedy and goes on after stop tokens.

    With --report ssd-wait the same answers are given under several budgets, drafters and hints. Every wait is
    told by its cause, beside the bounds of this drive and of computing alone.

    With --report verify blocks of two proposals, right and wrong, are held against one token at a time: that
    validates how verification and rollback are integrated, not the quality or speed of any draft.

    With --report draft every drafter gives the same greedy answers, the governor off: rates against plain
    decode, acceptance, what each phase costs, and what it takes of the memory for experts.

    With --report predictors every source of hints says of every verified block what it would have read ahead,
    and is held against what was chosen; then each serves the same answers with the same bytes allowed.
    """
    if json and measured.output != "md":
        raise UsageProblem(f"Two forms of output: --json and --output {measured.output}", hint="give one")
    services: Services = context.obj
    form = "json" if json else measured.output
    drafts_left_out = {"draft": ALL_DRAFTS, "predictors": "dflash2"}
    drafts = drafts_of(measured.drafts or drafts_left_out.get(measured.report or "", "none"))
    if measured.captures is not None and measured.report != "predictors":
        raise UsageProblem(
            f"Nothing reads --captures without --report predictors: {measured.captures}", hint="leave it out"
        )
    _check_read(measured)
    if measured.draft_model is not None and "dflash2" not in dict(drafts):
        raise UsageProblem(
            f"Nothing reads --draft-model with --drafts {measured.drafts or 'none'}",
            hint=f"--drafts none,dflash2 --draft-model {measured.draft_model}",
        )
    found = find_model(model.model)
    if measured.report is not None:
        if form not in ("md", "json"):
            raise UsageProblem(f"A report is a document or a page: --output {form}", hint="md or json")
        if measured.report == "verify":
            with Interrupts():
                return verify_report(services, console, found, memory, disk, as_json=form == "json")
        defaults = {"draft": DRAFT_REPORT_TOKENS, "predictors": PREDICTOR_TOKENS}
        default = defaults.get(measured.report, REPORT_TOKENS)
        (num_tokens,) = _one(counts("--n-gen", measured.n_gen or default))
        if measured.report == "draft":
            with Interrupts():
                drafted = draft_report(services, console, found, measured, memory, disk, num_tokens, drafts)
            console.end_progress()
            if form == "json":
                console.document(as_json_value(drafted.to_dict()))
            else:
                show_draft_report(console, drafted)
            return OK
        if measured.report == "warm-start":
            with Interrupts():
                started = warm_start_report(services, console, found, measured, memory, disk, num_tokens)
            console.end_progress()
            if form == "json":
                console.document(as_json_value(started.to_dict()))
            else:
                show_warm_start(console, started)
            return OK
        budgets = shares("--budgets", measured.budgets)
        if measured.report == "predictors":
            with Interrupts():
                known = predictor_report(
                    services, console, found, measured, memory, disk, num_tokens, budgets, drafts, seed,
                    words_of("--hints", measured.hints, BENCH_HINTS) if measured.hints else None,
                )  # fmt: skip
            console.end_progress()
            if form == "json":
                console.document(as_json_value(known.to_dict()))
            else:
                show_predictor_report(console, known)
            return OK
        hints = words_of("--hints", measured.hints or "off,near-gate,oracle", BENCH_HINTS)
        with Interrupts():
            report = ssd_wait_report(
                services, console, found, measured, memory, disk, num_tokens, budgets, drafts, hints
            )
        console.end_progress()
        if form == "json":
            console.document(as_json_value(report.to_dict()))
        else:
            show_report(console, report)
        return OK
    request = SpeedRequest(
        prompts=counts("--n-prompt", measured.n_prompt),
        answers=counts("--n-gen", measured.n_gen or PLAIN_TOKENS),
        depths=counts("--n-depth", measured.n_depth),
        repetitions=measured.repetitions,
        drafts=drafts,
        draft_directory=measured.draft_model,
        hints=words_of("--hints", measured.hints or "off", BENCH_HINTS),
        seed=seed,
    )
    with Interrupts():
        rows = list(measure_speed(services, console, found, request, memory, disk))
    console.end_progress()
    write_rows(console, rows, form)
    return OK


def _check_read(measured: BenchOptions) -> None:
    """Refuse flags that the report asked for does not read."""
    unread = {
        "verify": ("hints", "budgets", "drafts"),
        "draft": ("hints", "budgets"),
        "warm-start": ("hints", "budgets"),
    }
    plain = BenchOptions()
    for name in unread.get(measured.report or "", ()):
        if getattr(measured, name) != getattr(plain, name):
            raise UsageProblem(
                f"Nothing reads --{name} with --report {measured.report}: {getattr(measured, name)}",
                hint="leave it out",
            )


def _one(values: list[int]) -> list[int]:
    if len(values) != 1 or not values[0]:
        raise UsageProblem("A report takes one length of answers: --n-gen", hint="such as --n-gen 32")
    return values
