"""`flashnext bench --report predictors`: flags to what is measured, and the report for people."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cli.bench_options import Share
from cli.bench_output import condition_lines
from cli.bench_report import ReportWork
from cli.bench_speed import throttled
from cli.console import Console, size
from cli.errors import UsageProblem
from cli.settings import expanded

if TYPE_CHECKING:
    from mlx_flashnext.reports.predictor_report_run import PredictorReport

NUM_FIXED = 3
"""Tasks of the demo that come before its held-out ones."""
SHARE_OF_GAP = 0.5


def predictor_report(
    work: ReportWork,
    budgets: Sequence[Share],
    drafts: Sequence[tuple[str, int]],
    seed: int | None,
    sources: Sequence[str] | None,
) -> "PredictorReport":
    """Measure what `--report predictors` asks for.

    Args:
        work: as of every report.
        budgets: each is served under.
        drafts: the one that proposes.
        seed: of random hints.
        sources: of hints that are served; None: all that are there.

    Raises:
        UsageProblem: several drafts are named: what predictors say of their blocks cannot be added up.
    """
    if len(drafts) > 1:
        named = ",".join(f"{kind}:{most}" if most else kind for kind, most in drafts)
        raise UsageProblem(
            f"--report predictors takes one drafter: --drafts {named}",
            hint=f"such as --drafts {drafts[-1][0]}",
        )
    from drafter.train.captures import CaptureSet
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.reports.predictor_report_run import PredictorsAsked
    from mlx_flashnext.reports.prompt_sets import CHAT_SET, demo_tasks
    from mlx_flashnext.reports.ssd_wait_run import Asked

    prompts, request = work.prompts(demo_tasks()[NUM_FIXED:])
    served = Asked(
        directory=work.found.directory,
        label=work.found.label,
        request=request,
        slots=work.slots(budgets),
        drafts=drafts,
        hints=[],
        prompts=prompts,
        prompt_set=f"{len(prompts)} held-out {CHAT_SET}",
        num_tokens=work.num_tokens,
        repetitions=work.measured.repetitions,
        page_cache=work.disk.page_cache or "as-is",
        disk=work.disk.label,
        wrap_source=throttled(work.disk),
        seed=seed or 0,
    )
    captures = _captures(work.measured.captures)
    counted = None if captures is None else CaptureSet.open(captures)
    asked = PredictorsAsked(served, counted, sources=sources)
    return work.services.measure_predictors(asked, detect_machine(), work.console.progress)


def _captures(place: Path | None) -> Path | None:
    return None if place is None else expanded(str(place))


def show_predictor_report(console: Console, report: "PredictorReport") -> None:
    """Write the report to stdout."""
    from mlx_flashnext.reports.predictor_report import ANCHOR_ONLY, MULTIPLES

    sizes = [f"@{named}" for named in report.sizes]
    console.line(f"recall of {sum(report.num_rows)} verified rows, mean over layers; n experts named of each")
    console.table(
        ("predictor", *sizes, "precision", "off by"),
        [
            (
                one.name,
                *(f"{recall:.3f}" for recall in one.recall),
                _share(one.precision),
                _share(one.calibration_error),
            )
            for one in report.figures
        ],
        right=tuple(range(1, len(sizes) + 3)),
    )
    early = [one.name for one in report.figures if one.name in ANCHOR_ONLY]
    if early:
        console.line(
            f"{early[0]} is asked before the draft runs: of the anchor's row alone, {report.num_rows[0]} rows"
        )
    console.line()
    at = report.sizes[MULTIPLES.index(2.0)]
    console.line(f"recall@{at} by layer")
    console.table(
        ("predictor", *(str(layer) for layer in report.layers)),
        [(one.name, *(f"{recall:.2f}" for recall in one.by_layer)) for one in report.figures],
        right=tuple(range(1, len(report.layers) + 1)),
    )
    console.line()
    rows = [row for row, count in enumerate(report.num_rows) if count]
    console.line(f"recall@{at} by row of the block, the anchor first")
    console.table(
        ("predictor", *(str(row) for row in rows)),
        [(one.name, *(_share(one.by_row[row], 2) for row in rows)) for one in report.figures],
        right=tuple(range(1, len(rows) + 1)),
    )
    kept = " ".join(f"{report.num_kept[row] / report.num_rows[row]:.2f}" for row in rows)
    console.line(f"share of rows that the answer kept: {kept}")
    console.line()
    _served(console, report)
    _bars(console, report)
    console.line(f"frequencies were counted of {report.counted_of}")
    if report.draft_ns is not None and report.head_ns is not None:
        without, told = report.draft_ns
        console.line(
            f"a proposal took {without / 1e6:.2f} ms, {told / 1e6:.2f} ms with its routes; the host scored "
            f"all layers of a block in {report.head_ns / 1e6:.2f} ms"
        )
    for notice in report.notices:
        console.line(f"note: {notice}")
    if report.wait is not None:
        for line in condition_lines(report.wait.conditions.to_dict(), report.wait.variants[0].repetitions):
            console.line(line)


def _served(console: Console, report: "PredictorReport") -> None:
    disk = "" if report.wait is None else report.wait.conditions.disk
    if disk != "real":
        console.line(f"{disk}; nothing below is a figure of the drive in this machine")
    console.line(f"in service, each allowed {size(report.hint_bytes)} a block; per committed token")
    console.table(
        ("slots", "hints", "timely", "resident", "used of read", "read ahead", "read", "waited ms", "ms"),
        [
            (
                str(one.slots),
                one.hints + (" (stopped)" if one.stopped else ""),
                _share(one.timely),
                _share(one.resident),
                _share(one.precision),
                size(int(one.predicted_bytes)),
                size(int(one.physical_bytes)),
                f"{one.exposed_wait_ns / 1e6:.1f}",
                f"{one.token_ns / 1e6:.1f}",
            )
            for one in report.served
        ],
        right=(0, *range(2, 9)),
    )
    console.line()


def _bars(console: Console, report: "PredictorReport") -> None:
    bars = report.bars
    if bars.gap_closed is not None:
        verdict = "holds" if bars.gap_closed >= SHARE_OF_GAP else "does not hold"
        console.line(f"sidecar closes {100 * bars.gap_closed:.0f}% of frequency's distance to 1: {verdict}")
    if bars.above_frequency is not None:
        above, layers = bars.above_frequency
        verdict = "holds" if above == layers else "does not hold"
        console.line(f"sidecar is above frequency in {above} of {layers} layers: {verdict}")
    if bars.above_previous is not None:
        verdict = "holds" if bars.above_previous else "does not hold"
        console.line(f"sidecar is above the last token's route: {verdict}")
    if bars.both_over_either is not None:
        verdict = "holds" if bars.both_over_either else "does not hold"
        console.line(f"both are more often timely than either alone: {verdict}")


def _share(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
