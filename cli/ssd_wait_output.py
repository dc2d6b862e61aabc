"""The SSD wait report for people: where the time of a token goes, why compute stood still, what was read.

Every table fits 80 columns. Words are those of docs/METRICS.md; what a heading cannot say is said below.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, groupby
from typing import TYPE_CHECKING

from cli.bench_output import condition_lines
from cli.console import Console, counted, size

if TYPE_CHECKING:
    from mlx_flashnext.reports.ssd_wait import VariantReport
    from mlx_flashnext.reports.ssd_wait_run import SsdWaitReport

Cells = Callable[["VariantReport"], Sequence[str]]
_NUM_LAYERS_SHOWN = 6
_WORDS = """\
against      over the first row of the group: median and range of the ratios
p95, p99     of single cycles
waited       compute stood still for records; a wake-up is part of it
attained     the larger bound over the time that was measured
queueing     of the waits, before the read had begun; causes are what came after
hidden       1 - waited for experts / time in which needed records were read;
             no 3.0x: waited three times as long as that, so nothing was hidden
early, late  slack: half of the guessed records came so long before their
             demand; of those that came after it, half so long after
recall       of a layer's choice among as many of its surest guesses
precision    guessed records used, of those read; error: expected calibration
             error of the confidences, 15 bins
required     of records used that had not stayed in memory, once per absence
read/asked   amplification: bytes the files gave, over bytes of those records
depth, most  tickets left waiting when a read begins
unread       cancelled or displaced in the queue
stale        came for a generation that had ended; evicted: never used before
tokens       of a cycle; U_B: distinct experts of a layer in one block; break
             even: U_B above which a block reads more than plain decode"""


def show_report(console: Console, report: "SsdWaitReport") -> None:
    """Write the report to stdout."""
    variants, disk = report.variants, report.conditions.disk
    from mlx_flashnext.reports.page_cache import MOST_CACHED

    title = "" if disk == "real" else " (simulated disk)"
    if title:
        console.line(f"{disk}; nothing below is a figure of the drive in this machine")
        console.line()
    for name, headings, cells in _tables(variants):
        _table(console, name + title, headings, variants, cells)
    _layers(console, variants)
    if any(one.attainment is not None and one.attainment > 1 for one in variants):
        console.wrapped(
            "attained above 100%: the bound was measured slower than the run; repeat with more -r, -n"
        )
    _books(console, variants)
    _bounds(console, report)
    console.line()
    console.line(_WORDS)
    console.line()
    facts = report.conditions.to_dict()
    for line in condition_lines(facts, variants[0].repetitions):
        console.wrapped(line)
    console.line(f"answers: {counted(variants[0].output_tokens, 'token')} a repetition, over all prompts")
    shares = report.page_cache.cached_share
    if shares is not None:
        console.line(
            f"page cache before the first repetition: {100 * shares:.0f}% of sampled pages in memory"
        )
    left = report.page_cache
    if left.state == "cold" and left.cached_share is not None and left.cached_share > MOST_CACHED:
        console.wrapped("note: not cold: pages stayed in memory though they were dropped")
    for note in notes(variants):
        console.wrapped(f"note: {note}")


def notes(variants: "Sequence[VariantReport]") -> list[str]:
    """Return what a reader should not have to find out: guesses that did nothing, memory that did harm."""
    found: list[str] = []
    for one in variants:
        name = f"{_group(one)}, {one.variant.hints}"
        if one.hints_stopped:
            found.append(f"{name}: hints stopped: {one.hints_stopped}")
        elif one.num_hints and not one.speculative_bytes:
            most = max(one.hints, key=lambda outcome: one.hints[outcome])
            found.append(f"{name}: no guess led to a read; most were {most.replace('_', ' ')}")  # FIELD P15
    for less, more in combinations(variants, 2):
        alike = replace(less.variant, slots=more.variant.slots) == more.variant
        small, large = sorted((less, more), key=lambda one: one.variant.slots)
        is_slower = large.token_ns_range[0] > small.token_ns_range[1]  # beyond noise (FIELD P03)
        if alike and is_slower and small.variant.slots < large.variant.slots:
            found.append(
                f"{_group(large)}, {large.variant.hints}: slower than with {small.variant.slots}; the page "
                f"cache has less room, which may be why: --slots {small.variant.slots}"
            )
    return found


def _tables(variants: "Sequence[VariantReport]") -> list[tuple[str, Sequence[str], Cells]]:
    """Return title, headings and cells of every table that says something of these variants."""
    unit, scale = _unit(max(max(one.physical_bytes, one.exact_bytes) for one in variants))
    time = ("median", "from", "to", "p95", "p99", "against")
    bounds = ("waited", "compute bound", "storage bound", "attained")
    causes = ("never read", "evicted", "late hint", "other", "n-gram", "queueing", "hidden")
    recall = ("resident", "prefetched", "hit rate", "of Belady", "early", "late")
    guesses = ("guesses a token", "recall", "precision", "useful bytes", "error")
    traffic = ("exact", "predicted", "rejected", "physical", "required", "read/asked")
    reads = ("p50", "p95", "p99", "depth", "most")
    fates = ("exact", "guessed", "used", "late", "unread", "stale", "evicted", "failed")
    draft = ("tokens", "U_B", "break even", "guessed bytes", "accepted by place")
    tables: list[tuple[str, Sequence[str], Cells]] = [
        ("time of a committed token, ms", time, _time),
        ("time of a committed token and its bounds, ms", bounds, _against_bounds),
        ("exposed wait of a token by cause, ms", causes, _waits),
        ("native selections that were there in time; slack, ms", recall, _recall),
    ]
    if any(one.variant.hints != "off" for one in variants):
        tables.append(("guesses", guesses, _guesses))
    tables += [
        (f"bytes of a committed token, {unit}", traffic, partial(_bytes, scale=scale)),
        ("reads: from queue to ready, ms; queue depth", reads, _reads),
        ("tickets by fate, all repetitions", fates, _fates),
    ]
    if any(one.variant.num_draft_tokens for one in variants):
        tables.append(("speculation", draft, partial(_speculation, unit=unit, scale=scale)))
    return tables


def _table(
    console: Console, title: str, headings: Sequence[str], variants: "Sequence[VariantReport]", cells: Cells
) -> None:
    """Write a table whose rows are grouped by budget and drafter."""
    rows = [(one.variant.hints, *cells(one)) for one in variants]
    widths = [max(map(len, column)) for column in zip(("", *headings), *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        values = [value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(("  " + row[0].ljust(widths[0]), *values)).rstrip()

    console.line(title)
    console.line(line(("", *headings)))
    console.line("─" * (2 + sum(widths) + 2 * (len(widths) - 1)))
    at = iter(rows)
    for name, group in groupby(variants, key=_group):
        console.line(name)
        for _ in group:
            console.line(line(next(at)))
    console.line()


def _group(one: "VariantReport") -> str:
    variant = one.variant
    draft = variant.draft if not variant.num_draft_tokens else f"{variant.draft} {variant.num_draft_tokens}"
    return f"{variant.slots} experts a layer, " + ("no draft" if draft == "none" else f"draft {draft}")


def _time(one: "VariantReport") -> Sequence[str]:
    times = (one.token_ns, *one.token_ns_range, *one.token_ns_quantiles[1:])
    return (*map(_ms, times), _ratio(one.ratios))


def _against_bounds(one: "VariantReport") -> Sequence[str]:
    storage = "unknown" if one.storage_ns is None else _ms(one.storage_ns)
    return (_ms(one.exposed_wait_ns), _ms(one.bounds.compute_ns), storage, _share(one.attainment))


def _waits(one: "VariantReport") -> Sequence[str]:
    waits = one.waits
    causes = (waits.cold, waits.evicted, waits.late_hint, waits.other, waits.ngram, waits.queueing)
    return (*map(_ms, causes), hidden_text(one.hidden_fraction))


def _recall(one: "VariantReport") -> Sequence[str]:
    shares = (one.resident_recall, one.prefetched_recall, one.hit_rate, one.of_belady)
    slack = ("" if value is None else _ms(value) for value in (one.slack_early, one.slack_late))
    return (*map(_share, shares), *slack)


def _guesses(one: "VariantReport") -> Sequence[str]:
    error = "" if one.calibration_error is None else f"{one.calibration_error:.3f}"
    shares = (one.recall, one.precision, one.useful_prefetch_ratio)
    return (f"{one.num_hints:.1f}", *map(_share, shares), error)


def _bytes(one: "VariantReport", *, scale: int) -> Sequence[str]:
    kinds = (one.exact_bytes, one.predicted_bytes, one.rejected_bytes, one.physical_bytes, one.required_bytes)
    ratio = "" if one.amplification is None else f"{one.amplification:.3f}"
    return (*(f"{value / scale:.1f}" for value in kinds), ratio)


def _reads(one: "VariantReport") -> Sequence[str]:
    mean = "" if one.queue_depth_mean is None else f"{one.queue_depth_mean:.1f}"
    return (*(_ms(value) for value in one.issue_to_ready), mean, str(one.queue_depth_max))


def _fates(one: "VariantReport") -> Sequence[str]:
    def guessed(*names: str) -> str:
        kinds = [one.books.classes[kind].fates for kind in ("near", "speculative")]
        return str(sum(fates[name].num for fates in kinds for name in names))

    issued = {kind: tickets.issued.num for kind, tickets in one.books.classes.items()}
    return (
        str(issued["exact"]),
        str(issued["near"] + issued["speculative"]),
        guessed("in_time", "joined"),
        guessed("late"),
        guessed("cancelled", "dropped"),
        guessed("stale"),
        guessed("evicted_unused"),
        guessed("failed"),
    )


def _speculation(one: "VariantReport", *, unit: str, scale: int) -> Sequence[str]:
    unique = "" if one.unique_experts is None else f"{one.unique_experts:.1f}"
    places = " ".join(f"{100 * share:.0f}%" for share in one.per_position_acceptance)
    guessed = f"{one.speculative_bytes / scale:.1f} {unit}"
    return (f"{one.acceptance_length:.2f}", unique, f"{one.break_even_experts:.1f}", guessed, places)


def _layers(console: Console, variants: "Sequence[VariantReport]") -> None:
    """Write the layers that waited most; --json has them all."""
    console.line("exposed wait of a token, the layers that waited most: ms (layer)")
    for name, group in groupby(variants, key=_group):
        console.line(name)
        for one in group:
            worst = sorted(one.layers, key=lambda layer: -one.layers[layer].exposed_wait_ns)
            shown = [
                f"{_ms(one.layers[layer].exposed_wait_ns)} ({layer})" for layer in worst[:_NUM_LAYERS_SHOWN]
            ]
            console.line(f"  {one.variant.hints}: {', '.join(shown)}")
    console.line()


def _books(console: Console, variants: "Sequence[VariantReport]") -> None:
    """Say that every ticket has a fate, or which rows have some without."""
    wrong = [f"{_group(one)}, {one.variant.hints}" for one in variants if not one.books.add_up]
    issued = sum(one.books.issued.num for one in variants)
    if wrong:
        console.wrapped(f"THE BOOKS DO NOT ADD UP, so these figures are void: {'; '.join(wrong)}")
    else:
        num_bytes = sum(one.books.issued.num_bytes for one in variants)
        console.line(f"books: each of {counted(issued, 'ticket')}, {size(num_bytes)}, has exactly one fate")


def _bounds(console: Console, report: "SsdWaitReport") -> None:
    disk = report.disk
    rate = "unknown" if disk.bytes_per_s is None else f"{size(disk.bytes_per_s)}/s"
    console.wrapped(
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


def _unit(most: float) -> tuple[str, int]:
    """Return the unit in which the largest of some sizes has few digits."""
    return next(
        ((unit, scale) for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)) if most >= scale),
        ("KiB", 1 << 10),
    )


def _ms(value_ns: float) -> str:
    milliseconds = value_ns / 1e6
    return f"{milliseconds:.1f}" if milliseconds >= 100 else f"{milliseconds:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def hidden_text(value: float | None) -> str:
    """Return the hidden fraction; where waits were longer than reading, how much longer."""
    if value is None or value >= 0:
        return _share(value)
    return f"no {1 - value:.{0 if value < -9 else 1}f}x"


def _ratio(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    ordered = sorted(ratios)
    return f"{ordered[len(ordered) // 2]:.2f} [{ordered[0]:.2f}, {ordered[-1]:.2f}]"
