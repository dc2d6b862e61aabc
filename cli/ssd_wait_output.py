"""The SSD wait report for people: where the time of a token goes, why compute stood still, what was read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cli.bench_output import condition_lines
from cli.console import Console, size

if TYPE_CHECKING:
    from mlx_flashnext.engine.ssd_wait import VariantReport
    from mlx_flashnext.engine.ssd_wait_run import SsdWaitReport


def show_report(console: Console, report: "SsdWaitReport") -> None:
    """Write the report to stdout."""
    variants = report.variants
    if report.conditions.disk != "real":
        console.line(f"{report.conditions.disk}; nothing below is a figure of the drive in this machine")
        console.line()
    _time(console, variants)
    if any(one.attainment is not None and one.attainment > 1 for one in variants):
        console.line(
            "attained above 100%: the bound was measured slower than the run; repeat with more -r, -n"
        )
        console.line()
    _waits(console, variants)
    _recall(console, variants)
    _bytes(console, variants)
    _reads(console, variants)
    _layers(console, variants)
    _bounds(console, report)
    for line in condition_lines(report.conditions.to_dict(), variants[0].repetitions):
        console.line(line)
    shares = report.page_cache.cached_share
    if shares is not None:
        console.line(
            f"page cache before the first repetition: {100 * shares:.0f}% of sampled pages in memory"
        )
    for one in variants:
        if one.hints_stopped:
            console.line(f"note: {one.variant.hints} hints stopped: {one.hints_stopped}")


def _label(one: "VariantReport") -> tuple[str, str, str]:
    variant = one.variant
    draft = variant.draft if not variant.num_draft_tokens else f"{variant.draft} {variant.num_draft_tokens}"
    return str(variant.slots), draft, variant.hints


def _table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console.line(title)
    names = ("experts", "draft", "hints")
    right = (0, *range(len(names), len(names) + len(headings)))
    console.table((*names, *headings), rows, right=right)
    console.line()


def _time(console: Console, variants: "Sequence[VariantReport]") -> None:
    _table(
        console,
        "time of a committed token",
        (
            "ms",
            "from, to",
            "against the first",
            "p95",
            "p99",
            "waited",
            "compute bound",
            "storage bound",
            "attained",
        ),
        [
            (
                *_label(one),
                _ms(one.token_ns),
                f"{_ms(one.token_ns_range[0])}, {_ms(one.token_ns_range[1])}",
                _ratio(one.ratios),
                _ms(one.token_ns_quantiles[1]),
                _ms(one.token_ns_quantiles[2]),
                _ms(one.exposed_wait_ns),
                _ms(one.bounds.compute_ns),
                "unknown" if one.storage_ns is None else _ms(one.storage_ns),
                _share(one.attainment),
            )
            for one in variants
        ],
    )


def _waits(console: Console, variants: "Sequence[VariantReport]") -> None:
    _table(
        console,
        "exposed wait of a token by cause, ms",
        ("never read", "evicted", "late hint", "other", "n-gram", "queueing", "hidden"),
        [
            (
                *_label(one),
                _ms(one.waits.cold),
                _ms(one.waits.evicted),
                _ms(one.waits.late_hint),
                _ms(one.waits.other),
                _ms(one.waits.ngram),
                _ms(one.waits.queueing),
                _share(one.hidden_fraction),
            )
            for one in variants
        ],
    )


def _recall(console: Console, variants: "Sequence[VariantReport]") -> None:
    _table(
        console,
        "native selections that were there in time",
        ("resident", "prefetched", "of Belady", "useful guesses", "slack", "late by", "tokens/cycle"),
        [
            (
                *_label(one),
                _share(one.resident_recall),
                _share(one.prefetched_recall),
                _share(one.of_belady),
                _share(one.useful_prefetch_ratio),
                "" if one.slack_early is None else f"{_ms(one.slack_early)} ms",
                "" if one.slack_late is None else f"{_ms(one.slack_late)} ms",
                f"{one.acceptance_length:.2f}",
            )
            for one in variants
        ],
    )


def _bytes(console: Console, variants: "Sequence[VariantReport]") -> None:
    _table(
        console,
        "bytes of a committed token",
        ("exact", "predicted", "rejected", "physical", "required", "amplification"),
        [
            (
                *_label(one),
                size(one.exact_bytes),
                size(one.predicted_bytes),
                size(one.rejected_bytes),
                size(one.physical_bytes),
                size(one.required_bytes),
                "" if one.amplification is None else f"{one.amplification:.3f}",
            )
            for one in variants
        ],
    )


def _reads(console: Console, variants: "Sequence[VariantReport]") -> None:
    _table(
        console,
        "reads: from queue to ready, ms; left waiting behind each; fates of the predicted ones",
        ("p50", "p95", "p99", "depth", "used", "late", "cancelled", "wasted", "failed"),
        [
            (
                *_label(one),
                *(_ms(value) for value in one.issue_to_ready),
                "" if one.queue_depth_mean is None else f"{one.queue_depth_mean:.1f}",
                str(_fates(one, "in_time", "joined")),
                str(_fates(one, "late")),
                str(_fates(one, "cancelled", "dropped")),
                str(_fates(one, "stale", "evicted_unused")),
                str(_fates(one, "failed")),
            )
            for one in variants
        ],
    )


def _layers(console: Console, variants: "Sequence[VariantReport]") -> None:
    console.line("exposed wait of a token by layer, ms")
    for one in variants:
        waits = " ".join(_ms(wait) for wait in one.layer_waits.values())
        console.line(f"  {' '.join(_label(one))}: {waits}")
    console.line()


def _bounds(console: Console, report: "SsdWaitReport") -> None:
    disk = report.disk
    rate = "unknown" if disk.bytes_per_s is None else f"{size(disk.bytes_per_s)}/s"
    console.line(
        f"storage bound: records of {size(disk.record_bytes)}, {disk.num_readers} at a time: {rate} "
        f"({disk.num_records} records, half of the reads below {_ms(disk.read_p50_ns)} ms)"
    )
    seen: set[int] = set()
    for one in report.variants:
        belady = one.bounds.belady_hit_rate
        if belady is not None and one.variant.slots not in seen:
            seen.add(one.variant.slots)
            console.line(f"Belady: {one.variant.slots} experts a layer can hit {100 * belady:.0f}% at best")
    console.line("compute bound: the same answers with every expert resident")
    console.line("oracle: hints of a recorded run; what any predictor could reach")


def _fates(one: "VariantReport", *names: str) -> int:
    return sum(one.fates[kind][name] for kind in ("near", "speculative") for name in names)


def _ms(value_ns: float) -> str:
    milliseconds = value_ns / 1e6
    return f"{milliseconds:.1f}" if milliseconds >= 100 else f"{milliseconds:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def _ratio(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    ordered = sorted(ratios)
    return f"{ordered[len(ordered) // 2]:.2f} [{ordered[0]:.2f} to {ordered[-1]:.2f}]"
