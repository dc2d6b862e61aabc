"""`flashnext bench`: how fast a model reads and answers here, prefill and decode apart."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.answer import plan_request
from cli.bench_options import BenchOptions, DiskOptions, counts
from cli.bench_output import write_rows
from cli.console import Console
from cli.engine_factory import Services
from cli.errors import OK, UsageProblem
from cli.interrupts import Interrupts
from cli.model_path import FoundModel, find_model
from cli.options import MemoryOptions, ModelOptions
from cli.parse import parse_whole

if TYPE_CHECKING:
    from expert_store.source import ByteSource
    from mlx_flashnext.engine.engine import Engine
    from mlx_flashnext.engine.measure import Case, Row
    from mlx_flashnext.engine.page_cache import CacheState
    from mlx_flashnext.engine.plan import PlanRequest


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
    """
    if json and measured.output != "md":
        raise UsageProblem(f"Two forms of output: --json and --output {measured.output}", hint="give one")
    from mlx_flashnext.engine.measure import cases_of

    cases = cases_of(
        counts("--n-prompt", measured.n_prompt),
        counts("--n-gen", measured.n_gen),
        counts("--n-depth", measured.n_depth),
    )
    if not cases:
        raise UsageProblem("Nothing to measure: --n-prompt 0 --n-gen 0", hint="give one of them a number")
    found = find_model(model.model)
    with Interrupts():
        rows = list(_measure(context.obj, console, found, cases, measured, memory, disk, seed))
    console.end_progress()
    write_rows(console, rows, "json" if json else measured.output)
    return OK


def _measure(
    services: Services,
    console: Console,
    found: FoundModel,
    cases: "Sequence[Case]",
    measured: BenchOptions,
    memory: MemoryOptions,
    disk: DiskOptions,
    seed: int | None,
) -> "Iterator[Row]":
    from mlx_flashnext.engine.conditions import conditions_of
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.engine.measure import run_case
    from mlx_flashnext.engine.page_cache import prepare
    from mlx_flashnext.engine.prompt_sets import SALTED_SET, demo_tasks

    machine = detect_machine()
    request = plan_request(memory, found)
    if request.context_tokens is None:
        request = replace(request, context_tokens=max(case.context_tokens for case in cases))
    first_salt = secrets.randbits(62) if seed is None else seed
    with closing(open_measured(services, found, request, disk, console)) as engine:
        files = [info.path for info in engine.checkpoint.table.files]
        prepared = prepare(files, disk.page_cache)
        total = (measured.repetitions + 1) * len(cases)
        for number, case in enumerate(cases):
            conditions = conditions_of(
                engine.checkpoint,
                machine,
                engine.plan,
                model=found.label,
                page_cache=disk.page_cache,
                page_cache_how=prepared.how,
                disk=disk.label,
                prompt_set=SALTED_SET,
            )
            done = number * (measured.repetitions + 1)
            yield run_case(
                engine.session,
                engine.tokenizer,
                case,
                conditions,
                texts=demo_tasks(),
                salts=[first_salt + repetition for repetition in range(measured.repetitions)],
                before_each=lambda: _prepare(files, disk.page_cache),
                after_each=lambda ran, done=done, case=case: console.progress(case.name, done + ran, total),
            )


def _prepare(files: Sequence[Path], state: "CacheState") -> None:
    from mlx_flashnext.engine.page_cache import prepare

    prepare(files, state)


def open_measured(
    services: Services, found: FoundModel, request: "PlanRequest", disk: DiskOptions, console: Console
) -> "Engine":
    """Open an engine whose reads go through the disk that was asked for."""

    def progress(stage: str, done: int, total: int) -> None:
        console.progress(f"loading {stage}", done, total, is_bytes=total > 1 << 20)

    engine = services.open_measured(found.directory, request, progress, throttled(disk))
    console.end_progress()
    return engine


def throttled(disk: DiskOptions) -> "Callable[[ByteSource], ByteSource]":
    """Return what to put between the files and the readers: nothing, or a slower drive."""
    from expert_store.testing import ThrottledSource

    if disk.throttle is None and disk.latency is None:
        return lambda source: source
    return lambda source: ThrottledSource(source, latency_s=disk.latency or 0.0, bytes_per_s=disk.throttle)
