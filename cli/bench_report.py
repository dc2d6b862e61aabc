"""Runs the reports of `flashnext bench`: flags to what is measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from cli.answer import plan_request
from cli.bench_options import BenchOptions, DiskOptions, Share, slots_of_shares
from cli.bench_output import condition_lines
from cli.bench_speed import throttled
from cli.console import Console, counted
from cli.engine_factory import Services
from cli.model_path import FoundModel
from cli.options import MemoryOptions

if TYPE_CHECKING:
    from mlx_flashnext.engine.plan import PlanRequest
    from mlx_flashnext.reports.ssd_wait_run import SsdWaitReport
    from mlx_flashnext.reports.warm_run import WarmStartReport


@dataclass(frozen=True, slots=True)
class ReportWork:
    """What every report is made with.

    Attributes:
        services: what lies below the command line.
        console: shows progress.
        found: the model.
        measured: repetitions, prompts, where draft and captures lie.
        memory: a target, or slots, which stand in the place of budgets.
        disk: page cache and throttle.
        num_tokens: of each answer.
    """

    services: Services
    console: Console
    found: FoundModel
    measured: BenchOptions
    memory: MemoryOptions
    disk: DiskOptions
    num_tokens: int

    def prompts(self, tasks: Sequence[str]) -> tuple[list[list[int]], "PlanRequest"]:
        """Return the token ids of the prompts, and a request whose context holds each with its answer.

        Args:
            tasks: what is asked, taken in turns, through the model's chat template.
        """
        from mlx_flashnext.reports.prompt_sets import chat_prompts
        from mlx_flashnext.tokenizer import Tokenizer

        directory = self.found.directory
        texts = [tasks[number % len(tasks)] for number in range(self.measured.prompts)]
        prompts = chat_prompts(directory, Tokenizer.open(directory), texts)
        request = replace(plan_request(self.memory, self.found), draft_directory=self.measured.draft_model)
        if request.context_tokens is None:
            request = replace(request, context_tokens=max(map(len, prompts)) + self.num_tokens + 1)
        return prompts, request

    def slots(self, budgets: Sequence[Share]) -> list[int]:
        """Return the experts of a layer under each budget, without repeats."""
        from mlx_flashnext.checkpoint import open_checkpoint

        if self.memory.slots is not None:
            return [self.memory.slots]
        config = open_checkpoint(self.found.directory).config
        fewest = max(2, config.num_experts_per_tok)
        return slots_of_shares(self.console, budgets, config.num_experts, fewest)


def ssd_wait_report(
    work: ReportWork, budgets: Sequence[Share], drafts: Sequence[tuple[str, int]], hints: Sequence[str]
) -> "SsdWaitReport":
    """Measure what `--report ssd-wait` asks for.

    Args:
        work: as of every report.
        budgets: experts in memory.
        drafts: drafters with the most proposals of a cycle.
        hints: who says what to read ahead.
    """
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.reports.prompt_sets import CHAT_SET, demo_tasks
    from mlx_flashnext.reports.ssd_wait_run import Asked

    prompts, request = work.prompts(demo_tasks())
    asked = Asked(
        directory=work.found.directory,
        label=work.found.label,
        request=request,
        slots=work.slots(budgets),
        drafts=drafts,
        hints=hints,
        prompts=prompts,
        prompt_set=f"{len(prompts)} {CHAT_SET}",
        num_tokens=work.num_tokens,
        repetitions=work.measured.repetitions,
        page_cache=work.disk.page_cache or "cold",
        disk=work.disk.label,
        wrap_source=throttled(work.disk),
    )
    return work.services.measure_ssd_wait(asked, detect_machine(), work.console.progress)


def warm_start_report(work: ReportWork) -> "WarmStartReport":
    """Measure what `--report warm-start` asks for: first answers after a cold and a warm start."""
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.reports.prompt_sets import CHAT_SET, demo_tasks
    from mlx_flashnext.reports.warm_run import WarmAsked

    (prompt, *_), request = work.prompts(demo_tasks()[:1])
    asked = WarmAsked(
        directory=work.found.directory,
        label=work.found.label,
        request=request,
        prompt=prompt,
        prompt_set=f"the first of the {CHAT_SET}",
        num_tokens=work.num_tokens,
        rounds=work.measured.repetitions,
        page_cache=work.disk.page_cache or "cold",
        disk=work.disk.label,
        wrap_source=throttled(work.disk),
    )
    return work.services.measure_warm_start(asked, detect_machine(), work.console.progress)


def show_warm_start(console: Console, report: "WarmStartReport") -> None:
    """Write first answers as a table, their ratio to a cold start beside them, and what was gained."""
    rows: list[tuple[str, ...]] = []
    for one in report.answers:
        ratios = report.ratios(one)
        rows.append(
            (
                one.way,
                f"{one.median_ns / 1e6:.0f}",
                f"{median(one.prefill_ns) / 1e6:.0f}",
                f"{median(one.decode_ns) / 1e6:.0f}",
                f"{median(one.exposed_wait_ns) / 1e6:.1f}",
                f"{median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]",
                str(one.num_hints),
            )
        )
    disk = report.conditions.disk
    label = "" if disk == "real" else f" ({disk})"
    console.line(f"first answer after opening, {counted(report.num_tokens, 'token')}, ms{label}")
    headings = ("start", "answer", "prefill", "decode", "waited", "against cold", "named")
    console.table(headings, rows, right=(1, 2, 3, 4, 5, 6))
    for one in report.answers[1:]:
        gained_ns = report.answers[0].median_ns - one.median_ns
        when = "sooner" if gained_ns >= 0 else "later"
        console.line(f"{one.way}: first answer {abs(gained_ns) / 1e6:.0f} ms {when} than after a cold start")
    console.line()
    for line in condition_lines(report.conditions.to_dict(), len(report.answers[0].prefill_ns)):
        console.wrapped(line)
