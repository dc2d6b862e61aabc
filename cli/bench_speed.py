"""Rows of `flashnext bench`: cases in an engine of their own for each drafter, hints compared inside it."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cli.answer import plan_request
from cli.bench_options import DiskOptions
from cli.console import OPENING, Console
from cli.engine_factory import Services
from cli.errors import UsageProblem
from cli.model_path import FoundModel
from cli.options import MemoryOptions

if TYPE_CHECKING:
    from expert_store.source import ByteSource
    from mlx_flashnext.engine.engine import Engine
    from mlx_flashnext.engine.plan import PlanRequest
    from mlx_flashnext.reports.measure import Case, Row
    from mlx_flashnext.reports.page_cache import CacheState


@dataclass(frozen=True, slots=True)
class SpeedRequest:
    """What is measured.

    Attributes:
        prompts: prompt tokens to read, 0 for none.
        answers: tokens to say, 0 for none.
        depths: tokens in the context before the clock starts.
        repetitions: of each case, after one that is not counted.
        drafts: drafters with the most proposals of a cycle.
        draft_directory: of the draft of `dflash2`; None for the one beside the model.
        hints: who says what to read ahead.
        seed: of the prompts' salt; None draws one.
    """

    prompts: Sequence[int]
    answers: Sequence[int]
    depths: Sequence[int]
    repetitions: int
    drafts: Sequence[tuple[str, int]]
    draft_directory: Path | None
    hints: Sequence[str]
    seed: int | None

    def cases(self) -> "list[Case]":
        """Return every case.

        Raises:
            UsageProblem: there is none, or one needs a recorded run.
        """
        from mlx_flashnext.reports.measure import cases_of

        cases = cases_of(self.prompts, self.answers, self.depths)
        if not cases:
            raise UsageProblem("Nothing to measure: --n-prompt 0 --n-gen 0", hint="give one of them a number")
        replayed = [name for name in (*self.hints, *(kind for kind, _ in self.drafts)) if "oracle" in name]
        if replayed:
            raise UsageProblem(
                f"It replays a recorded run, which only a report makes: {replayed[0]}",
                hint="--report ssd-wait",
            )
        return cases


def measure_speed(
    services: Services,
    console: Console,
    found: FoundModel,
    asked: SpeedRequest,
    memory: MemoryOptions,
    disk: DiskOptions,
) -> "Iterator[Row]":
    """Measure every case under every drafter and source of hints."""
    cases = asked.cases()
    request = plan_request(memory, found)
    if request.context_tokens is None:
        request = replace(request, context_tokens=max(case.context_tokens for case in cases))
    first_salt = secrets.randbits(62) if asked.seed is None else asked.seed
    salts = [first_salt + repetition for repetition in range(asked.repetitions)]
    for kind, num_tokens in asked.drafts:
        own = replace(
            request,
            draft=kind,
            draft_directory=asked.draft_directory,
            num_draft_tokens=num_tokens or None,
        )
        with closing(open_measured(services, found, own, disk, console)) as engine:
            for hints in asked.hints:
                for case in cases:
                    yield _row(console, found, engine, case, hints, salts, disk)


def _row(
    console: Console,
    found: FoundModel,
    engine: "Engine",
    case: "Case",
    hints: str,
    salts: Sequence[int],
    disk: DiskOptions,
) -> "Row":
    from mlx_flashnext.engine.conditions import conditions_of
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.reports.measure import run_case
    from mlx_flashnext.reports.page_cache import prepare
    from mlx_flashnext.reports.prompt_sets import SALTED_SET, demo_tasks

    files = [info.path for info in engine.checkpoint.table.files]
    state = disk.page_cache or "as-is"
    conditions = conditions_of(
        engine.checkpoint,
        detect_machine(),
        engine.plan,
        model=found.label,
        hints=hints,
        page_cache=state,
        page_cache_how=prepare(files, state).how,
        disk=disk.label,
        prompt_set=SALTED_SET,
    )
    console.progress(case.name, 0, len(salts) + 1)
    return run_case(
        lambda: engine.session(hints=engine.new_hints(hints)),
        engine.tokenizer,
        case,
        conditions,
        texts=demo_tasks(),
        salts=salts,
        before_each=lambda: _prepare(files, state),
        after_each=lambda done: console.progress(case.name, done, len(salts) + 1),
    )


def _prepare(files: Sequence[Path], state: "CacheState") -> None:
    from mlx_flashnext.reports.page_cache import prepare

    prepare(files, state)


def open_measured(
    services: Services, found: FoundModel, request: "PlanRequest", disk: DiskOptions, console: Console
) -> "Engine":
    """Open an engine whose reads go through the disk that was asked for."""

    def progress(stage: str, done: int, total: int) -> None:
        console.progress(f"loading {stage}", done, total, is_bytes=total > 1 << 20)

    console.progress(OPENING, 0, 0)
    engine = services.open_measured(found.directory, request, progress, throttled(disk))
    console.end_progress()
    return engine


def throttled(disk: DiskOptions) -> "Callable[[ByteSource], ByteSource]":
    """Return what to put between the files and the readers: nothing, or a slower drive."""
    from expert_store.testing import ThrottledSource

    if disk.throttle is None and disk.latency is None:
        return lambda source: source
    return lambda source: ThrottledSource(source, latency_s=disk.latency or 0.0, bytes_per_s=disk.throttle)
