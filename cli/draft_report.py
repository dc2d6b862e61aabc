"""`flashnext bench --report draft`: flags to what is measured, and the report for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cli.bench_output import condition_lines
from cli.bench_report import ReportWork
from cli.bench_speed import throttled
from cli.console import Console, counted, size

if TYPE_CHECKING:
    from mlx_flashnext.reports.draft_report import VariantReport
    from mlx_flashnext.reports.draft_report_run import DraftReport


def draft_report(work: ReportWork, drafts: Sequence[tuple[str, int]]) -> "DraftReport":
    """Measure what `--report draft` asks for.

    Args:
        work: as of every report; drafters that nobody named may be missing.
        drafts: drafters with the most proposals of a cycle, 0 for their own.
    """
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.reports.draft_report_run import Asked
    from mlx_flashnext.reports.prompt_sets import CHAT_SET, demo_tasks

    prompts, request = work.prompts(demo_tasks())
    asked = Asked(
        directory=work.found.directory,
        label=work.found.label,
        request=request,
        drafts=drafts,
        may_lack=work.measured.drafts is None and work.measured.draft_model is None,
        prompts=prompts,
        prompt_set=f"{len(prompts)} {CHAT_SET}",
        num_tokens=work.num_tokens,
        repetitions=work.measured.repetitions,
        page_cache=work.disk.page_cache or "as-is",
        disk=work.disk.label,
        wrap_source=throttled(work.disk),
    )
    return work.services.measure_drafts(asked, detect_machine(), work.console.progress)


def show_draft_report(console: Console, report: "DraftReport") -> None:
    """Write the report to stdout."""
    variants = report.variants
    if report.conditions.disk != "real":
        console.line(f"{report.conditions.disk}; nothing below is a figure of the drive in this machine")
        console.line()
    _rates(console, variants)
    _acceptance(console, variants)
    _break_even(console, variants)
    _phases(console, variants)
    _memory(console, variants)
    for line in condition_lines(report.conditions.to_dict(), variants[0].repetitions):
        console.line(line.replace("after one not counted", "in turns, A/B/B/A, after a warm-up each"))
    prompts, tokens = counted(report.num_prompts, "prompt"), counted(report.num_output_tokens, "token")
    console.line(f"each repetition: {prompts}, {tokens}, the same tokens from every drafter")
    console.line("the governor is off: a drafter proposes all it may, whether that pays or not")
    console.line("oracle: proposals of a recorded run; what any drafter of that many proposals could reach")
    for one in report.left_out:
        console.line(f"left out: {one.draft}: {one.why}")
    for notice in report.notices:
        console.line(f"note: {notice}")


def _table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console.line(title)
    console.table(("draft", *headings), rows, right=tuple(range(1, 1 + len(headings))))
    console.line()


def _label(one: "VariantReport") -> str:
    return f"{one.draft} {one.num_draft_tokens}" if one.num_draft_tokens else "target-only"


def _rates(console: Console, variants: "Sequence[VariantReport]") -> None:
    _table(
        console,
        "what is said",
        ("tokens/s", "from, to", "against target-only", "prefill ms/token", "read/token", "waited ms/token"),
        [
            (
                _label(one),
                f"{one.tokens_per_s:.2f}",
                f"{one.tokens_per_s_range[0]:.2f}, {one.tokens_per_s_range[1]:.2f}",
                _ratio(one.ratios),
                _ms(one.prefill_ns_per_token),
                size(one.read_bytes_per_token),
                _ms(one.exposed_wait_ns_per_token),
            )
            for one in variants
        ],
    )


def _acceptance(console: Console, variants: "Sequence[VariantReport]") -> None:
    drafted = [one for one in variants if one.num_draft_tokens]
    width = max((len(one.acceptance_by_slot) for one in drafted), default=0)
    if not width:
        return
    _table(
        console,
        "what is kept of what is proposed",
        ("tokens/cycle", "proposing", "accepted", *(f"slot {slot + 1}" for slot in range(width))),
        [
            (
                _label(one),
                f"{one.tokens_per_cycle:.2f}",
                _share(one.proposing_share),
                _share(one.accepted_share),
                *(_share(share) for share in one.acceptance_by_slot),
                *("" for _ in range(width - len(one.acceptance_by_slot))),
            )
            for one in drafted
        ],
    )


def _break_even(console: Console, variants: "Sequence[VariantReport]") -> None:
    """Show U_B against top_k x tau, where experts are streamed."""
    rows = [
        (
            _label(one),
            f"{found.unique:.2f}",
            f"{found.tokens_per_cycle:.2f}",
            f"{found.plain:.2f}",
            f"{found.ratio:.2f}",
            ", ".join(f"{unique:.1f}" for unique in found.unique_by_rows.values()),
            ", ".join(map(str, found.unique_by_rows)),
        )
        for one in variants
        if (found := one.break_even) is not None
    ]
    if not rows:
        return
    _table(
        console,
        "routed experts: a block saves bytes where U_B, its distinct experts a layer, is below top_k x tau",
        ("U_B", "tau", "top_k x tau", "U_B / (top_k x tau)", "U by rows", "rows"),
        rows,
    )


def _phases(console: Console, variants: "Sequence[VariantReport]") -> None:
    _table(
        console,
        "phases of a cycle, ms: each waits for its own work, in a run of its own",
        (
            "draft",
            "verify 1 row",
            "verify m rows",
            "m",
            "verify(m)/verify(1)",
            "commit",
            "rollback",
            "capture",
        ),
        [
            (
                _label(one),
                _ms(one.costs.draft_ns if one.num_draft_tokens else None),
                _ms(one.costs.verify_ns.get(1)),
                _ms(None if one.costs.verify_rows is None else one.costs.verify_ns[one.costs.verify_rows]),
                "" if one.costs.verify_rows is None else str(one.costs.verify_rows),
                "" if one.costs.verify_ratio is None else f"{one.costs.verify_ratio:.2f}",
                _ms(one.costs.commit_ns),
                _ms(one.costs.rollback_ns),
                _ms(one.costs.observe_ns if one.num_draft_tokens else None),
            )
            for one in variants
        ],
    )


def _memory(console: Console, variants: "Sequence[VariantReport]") -> None:
    _table(
        console,
        "memory, and what it costs in experts",
        ("planned", "of the drafter", "peak of arrays", "experts", "experts at equal memory", "experts lost"),
        [
            (
                _label(one),
                size(one.budget.planned_bytes),
                size(one.budget.draft_bytes),
                size(one.peak_array_bytes),
                str(one.budget.slots),
                _slots(one.budget.slots_at_same_memory),
                _slots(one.budget.slots_lost),
            )
            for one in variants
        ],
    )


def _slots(value: int | None) -> str:
    return "does not fit" if value is None else str(value)


def _ms(value_ns: float | None) -> str:
    return "" if value_ns is None else f"{value_ns / 1e6:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def _ratio(ratios: Sequence[float]) -> str:
    ordered = sorted(ratios)
    return f"{ordered[len(ordered) // 2]:.2f} [{ordered[0]:.2f} to {ordered[-1]:.2f}]"
