"""`flashnext bench --report verify`: runs the verification report, and shows it to people."""

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from cli.answer import plan_request
from cli.bench_options import DiskOptions
from cli.bench_speed import open_measured
from cli.console import Console, size
from cli.engine_factory import Services
from cli.model_path import FoundModel
from cli.options import MemoryOptions

if TYPE_CHECKING:
    from mlx_flashnext.reports.verify_report import VerifyReport


def verify_report(
    services: Services,
    console: Console,
    found: FoundModel,
    memory: MemoryOptions,
    disk: DiskOptions,
) -> "VerifyReport":
    """Run the report."""
    from mlx_flashnext.reports.verify_report import NUM_PROPOSALS, verify_report

    # Planned for blocks, so that the way back has its memory; nobody proposes.
    request = replace(plan_request(memory, found), draft="lookup", num_draft_tokens=NUM_PROPOSALS)
    with closing(open_measured(services, found, request, disk, console)) as engine:
        return verify_report(engine, console.progress)


def show_verify_report(console: Console, report: "VerifyReport") -> None:
    """Write the title, the tolerance, every block, and every criterion with what was seen."""
    console.line(report.title)
    lengths = ", ".join(map(str, report.prompt_tokens))
    console.line(f"prompts of {lengths} tokens, {report.backend} backend")
    for what, difference, tolerance in (
        ("logits", report.row_difference, report.tolerance),
        ("state", report.state_row_difference, report.state_tolerance),
    ):
        exact = "bit for bit the same" if not difference else f"differs by {difference:.2g} of its spread"
        console.line(f"{what} of a row in a block and alone: {exact}; tolerance {tolerance:.2g}")
    console.line()
    headings = (
        "prompt",
        "case",
        "accepted",
        "at",
        "then",
        "next",
        "logits off",
        "verify",
        "rollback",
        "journal",
    )
    rows = [
        (
            str(block.prompt + 1),
            block.case,
            f"{block.accepted} of {len(block.proposed)}",
            str(block.position),
            str(block.num_tokens),
            str(block.next_token),
            f"{block.largest_difference:.2g}",
            f"{block.verify_ns / 1e6:.1f} ms",
            f"{block.rollback_ns / 1e6:.1f} ms",
            size(block.journal_bytes),
        )
        for block in report.blocks
    ]
    console.table(headings, rows, right=(0, 2, 3, 4, 5, 6, 7, 8, 9))
    console.line()
    for criterion in report.criteria:
        console.line(f"{'pass' if criterion.is_met else 'FAIL'}  {criterion.name}: {criterion.detail}")
