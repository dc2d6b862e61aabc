"""`flashnext bench`: how fast a model reads and answers here, prefill and decode apart."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeVar

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
from cli.bench_report import ReportWork, show_warm_start, ssd_wait_report, warm_start_report
from cli.bench_speed import SpeedRequest, measure_speed
from cli.console import OPENING, Console, as_json_value
from cli.draft_report import draft_report, show_draft_report
from cli.engine_factory import Services
from cli.errors import FAILED, INTERRUPTED, OK, CommandError, UsageProblem, describe
from cli.interrupts import Interrupts
from cli.model_path import find_model
from cli.options import MemoryOptions, ModelOptions
from cli.parse import parse_whole
from cli.predictor_report import predictor_report, show_predictor_report
from cli.ssd_wait_output import show_report
from cli.verify_report import show_verify_report, verify_report

if TYPE_CHECKING:
    from cli.html.place import PagePlace

REPORT_TOKENS = "16"
DRAFT_REPORT_TOKENS = "64"
PREDICTOR_TOKENS = "48"
PLAIN_TOKENS = "128"

_ANSWERS = {"n_gen", "repetitions"}
_DRAFTS = {"drafts", "draft_model"}
_PAGE = {"html"}
READS: Final[Mapping[str | None, set[str]]] = {
    None: {"n_prompt", "n_depth", "hints", *_ANSWERS, *_DRAFTS},
    "ssd-wait": {"prompts", "budgets", "hints", *_ANSWERS, *_DRAFTS, *_PAGE},
    "warm-start": _ANSWERS,
    "verify": set(),
    "draft": {"prompts", *_ANSWERS, *_DRAFTS, *_PAGE},
    "predictors": {"prompts", "budgets", "hints", "captures", *_ANSWERS, *_DRAFTS, *_PAGE},
}
"""Which options of `BenchOptions` each report looks at; None: plain measuring of speed."""
SAVED: Final = {"html", "from_json"}
"""Which of them making a page of a saved report looks at."""


class Report(Protocol):
    """What a report found."""

    def to_dict(self) -> object:
        """Return it as plain values."""
        ...


R = TypeVar("R", bound=Report)


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

    --html FILE draws ssd-wait, draft or predictors as well: where a token's time goes, a cycle step by step,
    wait against budget, bytes against recall, what became of reads, acceptance. What is printed is the same.
    """
    if json and measured.output != "md":
        raise UsageProblem(f"Two forms of output: --json and --output {measured.output}", hint="give one")
    if measured.from_json is not None:
        return _draw_saved(console, measured.from_json, measured)
    services: Services = context.obj
    form = "json" if json else measured.output
    drafts_left_out = {"draft": ALL_DRAFTS, "predictors": "dflash2"}
    drafts = drafts_of(measured.drafts or drafts_left_out.get(measured.report or "", "none"))
    _check_read(measured)
    if measured.draft_model is not None and "dflash2" not in dict(drafts):
        raise UsageProblem(
            f"Nothing reads --draft-model with --drafts {measured.drafts or 'none'}",
            hint=f"--drafts none,dflash2 --draft-model {measured.draft_model}",
        )
    place = _place(measured.html)
    found = find_model(model.model)
    if measured.report is not None:
        if form not in ("md", "json"):
            raise UsageProblem(f"A report is a document or a page: --output {form}", hint="md or json")
        console.progress(OPENING, 0, 0)
        with Interrupts():
            if measured.report == "verify":
                checked = verify_report(services, console, found, memory, disk)
                _show(console, form, checked, show_verify_report)
                return OK if checked.is_passed else FAILED
            work = ReportWork(services, console, found, measured, memory, disk, _answer_tokens(measured))
            if measured.report == "draft":
                return _show(console, form, draft_report(work, drafts), show_draft_report, place)
            if measured.report == "warm-start":
                _show(console, form, warm_start_report(work), show_warm_start)
                return OK
            budgets = shares("--budgets", measured.budgets)
            if measured.report == "predictors":
                named = words_of("--hints", measured.hints, BENCH_HINTS) if measured.hints else None
                known = predictor_report(work, budgets, drafts, seed, named)
                return _show(console, form, known, show_predictor_report, place)
            hints = words_of("--hints", measured.hints or "off,near-gate,oracle", BENCH_HINTS)
            return _show(console, form, ssd_wait_report(work, budgets, drafts, hints), show_report, place)
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


def _draw_saved(console: Console, saved: Path, measured: BenchOptions) -> int:
    """Make the page of a report that was printed before."""
    from cli.html.place import PagePlace, read_report

    _check_read(measured, SAVED, "with --from-json")
    if measured.html is None:
        raise UsageProblem(f"Nothing reads --from-json without --html: {saved}", hint="--html FILE")
    with Interrupts():
        report = read_report(saved)
        PagePlace(measured.html).publish(report)
    console.note(f"page: {measured.html}")
    return OK


def _place(path: Path | None) -> "PagePlace | None":
    """Return where a page is to go, once it is sure that it can."""
    if path is None:
        return None
    from cli.html.place import PagePlace

    return PagePlace(path)


def _check_read(measured: BenchOptions, known: set[str] | None = None, where: str = "") -> None:
    """Refuse options that what was asked for does not look at."""
    plain = BenchOptions()
    known = {"output", "report", *READS[measured.report]} if known is None else known
    where = where or (f"with --report {measured.report}" if measured.report else "without --report")
    for option in fields(BenchOptions):
        value = getattr(measured, option.name)
        if option.name in known or value == getattr(plain, option.name):
            continue
        raise UsageProblem(
            f"Nothing reads --{option.name.replace('_', '-')} {where}: {value}", hint="leave it out"
        )


def _answer_tokens(measured: BenchOptions) -> int:
    """Return the tokens of a report's answers."""
    defaults = {"draft": DRAFT_REPORT_TOKENS, "predictors": PREDICTOR_TOKENS}
    values = counts("--n-gen", measured.n_gen or defaults.get(measured.report or "", REPORT_TOKENS))
    if len(values) != 1 or not values[0]:
        raise UsageProblem("A report takes one length of answers: --n-gen", hint="such as --n-gen 32")
    return values[0]


def _show(
    console: Console,
    form: str,
    report: R,
    show: Callable[[Console, R], None],
    place: "PagePlace | None" = None,
) -> int:
    """Write a report as a document or as text, then its page; return the exit code.

    What was measured is printed before anything can go wrong with the page, and says so on stderr alone.
    """
    console.end_progress()
    document: Any = as_json_value(report.to_dict())
    if form == "json":
        console.document(document)
    else:
        show(console, report)
    if place is None:
        return OK
    try:
        place.publish(document)
    except CommandError as error:
        console.failure(describe(error))
        return error.code
    except KeyboardInterrupt:
        console.note("interrupted: the report is whole, there is no page of it")
        return INTERRUPTED
    console.note(f"page: {place.path}")
    return OK
