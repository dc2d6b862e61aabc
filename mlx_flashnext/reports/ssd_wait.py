"""How long compute stood still for the SSD, why, and how far that is from the best. Entry: `summarise`.

Owner of the format of the report. The words are those of METRICS.md. A `Run` is one repetition of one variant
over all prompts, decode alone; `summarise` makes one `VariantReport` of a variant's runs and the bounds that
were measured beside them.
"""

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from expert_store.keys import WaitCause
from expert_store.stats import Fate, HintOutcome, LatencyStatistics, RowStatistics, StoreStatistics
from mlx_flashnext.engine.deltas import plus
from mlx_flashnext.reports.prediction import Prediction
from mlx_flashnext.reports.ticket_books import Books, books_of, used_shares
from mlx_flashnext.reports.waterfall import RecordedCycle

FORMAT = "flashnext-ssd-wait"
VERSION = 3
_NAMED = (WaitCause.COLD, WaitCause.EVICTED, WaitCause.LATE_HINT)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compared.

    Attributes:
        slots: experts of each layer in memory.
        draft: where proposals come from.
        num_draft_tokens: most proposals of a cycle.
        hints: who says what to read ahead.
    """

    slots: int
    draft: str
    num_draft_tokens: int
    hints: str


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition over all prompts, decode alone; times in nanoseconds.

    Attributes:
        output_tokens: tokens committed.
        cycles: propose-verify-commit turns.
        wall_ns: of decoding.
        token_ns: wall time of each cycle, divided by its tokens.
        store: what happened in the store meanwhile.
        rows: what happened in the n-gram table meanwhile.
        num_hints: guesses handed over.
        hints_stopped: why a predictor was left alone, "" if none was.
        prediction: what the guesses were worth.
        num_blocks: blocks that streamed layers saw, times layers.
        num_unique: distinct experts that those blocks chose.
        proposed_by_slot: cycles that proposed an i-th token.
        accepted_by_slot: those in which it was accepted.
    """

    variant: Variant
    output_tokens: int
    cycles: int
    wall_ns: int
    token_ns: tuple[float, ...]
    store: StoreStatistics
    rows: RowStatistics
    num_hints: int = 0
    hints_stopped: str = ""
    prediction: Prediction = field(default_factory=Prediction)
    num_blocks: int = 0
    num_unique: int = 0
    proposed_by_slot: tuple[int, ...] = ()
    accepted_by_slot: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no run with these slots, this drive and this drafter can do better than.

    Attributes:
        compute_ns: per token, every expert resident.
        bytes_per_s: bandwidth of this drive with the same records, readers and queue; None if unknown.
        belady_hit_rate: of the same demands, with the best eviction there is; None without demands.
    """

    compute_ns: float
    bytes_per_s: float | None
    belady_hit_rate: float | None


@dataclass(frozen=True, slots=True)
class Waits:
    """Exposed wait per token in nanoseconds, by cause.

    Attributes:
        cold: the record had never been in a slot; its read time.
        evicted: it had been in one; its read time.
        late_hint: a prediction had issued its read, not early enough.
        other: no slot could be freed, or the wait was given up.
        ngram: rows of the n-gram table.
        queueing: of all of these, the time before the read had begun.
    """

    cold: float
    evicted: float
    late_hint: float
    other: float
    ngram: float
    queueing: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.cold + self.evicted + self.late_hint + self.other + self.ngram + self.queueing


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer; waits per token in nanoseconds, selections as shares of the layer's own.

    Attributes:
        exposed_wait_ns: all of the waits.
        cold: as in `Waits`, and so the next four.
        evicted: see `Waits`.
        late_hint: see `Waits`.
        other: see `Waits`.
        queueing: see `Waits`.
        resident: native selections that were resident for their own sake.
        prefetched: those that a guess had brought before they were demanded.
        joined: those whose record was in flight when it was demanded.
    """

    exposed_wait_ns: float
    cold: float
    evicted: float
    late_hint: float
    other: float
    queueing: float
    resident: float | None
    prefetched: float | None
    joined: float | None


@dataclass(frozen=True, slots=True)
class VariantReport:
    """One variant; times in nanoseconds, bytes per committed token.

    Attributes:
        token_ns: per token, the median over repetitions; `token_ns_range` its least and greatest.
        token_ns_quantiles: p50, p95 and p99 of single cycles' time per token, over all repetitions.
        waits: exposed wait by cause.
        layers: the same and timely recall, layer by layer.
        exact_io_ns: exact I/O wall time per token.
        hidden_fraction: 1 - exposed wait for experts / exact I/O wall time; None without reads.
        resident_recall: native selections that were resident for their own sake.
        prefetched_recall: those that were ready because of a prediction.
        hit_rate: native selections whose record was in a slot.
        exact_bytes: logical, of exact tickets.
        predicted_bytes: logical, of predicted ones.
        rejected_bytes: of them, those never used.
        physical_bytes: really read, n-gram rows left out.
        speculative_bytes: of them, by reads that nobody had demanded when they began.
        required_bytes: of records that were used and had not been resident, once per absence.
        amplification: physical over logical bytes of the reads that began.
        useful_prefetch_ratio: predicted bytes used, of those read; None if none were read.
        precision: predicted records that a native route used, of those read; None if none were read.
        recall: of the guesses, recall@n with n = top_k x rows, whatever became of their reads.
        calibration_error: of the confidences, 15 bins; None without guesses.
        num_hints: guesses handed over, per token.
        books: every ticket's end, by class, in records and bytes.
        hints: hints handed over, by outcome.
        issue_to_ready: p50, p95, p99.
        queue_depth_max: the most at once, since the engine was opened.
        slack_early: half of the predicted records that were demanded in time were ready so long before.
        slack_late: half of the late ones came so long after.
        storage_ns: the storage bound per token; None if the bandwidth is unknown.
        attainment: max(compute bound, storage bound) / measured.
        unique_experts: U_B, distinct experts of a layer in one block.
        break_even_experts: top_k x acceptance length: U_B below which a block reads less than plain decode.
        per_position_acceptance: share of the cycles proposing an i-th token that accepted it.
        of_belady: what was resident for its own sake, as a fraction of Belady's hit rate.
        ratios: time per token over that of the first variant, one a repetition.
        cycle: one of an answer beyond those that were measured, step by step.
    """

    variant: Variant
    repetitions: int
    output_tokens: int
    acceptance_length: float
    token_ns: float
    token_ns_range: tuple[float, float]
    token_ns_quantiles: tuple[float, float, float]
    waits: Waits
    layers: Mapping[int, LayerReport]
    exact_io_ns: float
    hidden_fraction: float | None
    resident_recall: float | None
    prefetched_recall: float | None
    hit_rate: float | None
    exact_bytes: float
    predicted_bytes: float
    rejected_bytes: float
    physical_bytes: float
    speculative_bytes: float
    required_bytes: float
    amplification: float | None
    useful_prefetch_ratio: float | None
    precision: float | None
    recall: float | None
    calibration_error: float | None
    num_hints: float
    books: Books
    hints: Mapping[str, int]
    queue_depth_mean: float | None
    queue_depth_max: int
    issue_to_ready: tuple[int, int, int]
    slack_early: int | None
    slack_late: int | None
    bounds: Bounds
    storage_ns: float | None
    attainment: float | None
    unique_experts: float | None
    break_even_experts: float
    per_position_acceptance: tuple[float, ...]
    of_belady: float | None
    hints_stopped: str = ""
    ratios: tuple[float, ...] = field(default=())
    cycle: RecordedCycle | None = None

    @property
    def exposed_wait_ns(self) -> float:
        """Exposed wait per token, whatever the cause."""
        return self.waits.total

    @property
    def exposed_wait_per_cycle_ns(self) -> float:
        """Exposed wait per propose-verify-commit turn."""
        return self.waits.total * self.acceptance_length


def summarise(runs: Sequence[Run], bounds: Bounds, record_bytes: float, top_k: int) -> VariantReport:
    """Return a variant's report.

    Args:
        runs: repetitions of one variant.
        bounds: measured beside them.
        record_bytes: of one expert, the mean over layers.
        top_k: experts that a layer chooses for a token.
    """
    stores = [run.store for run in runs]
    tokens, num_cycles = sum(run.output_tokens for run in runs), sum(run.cycles for run in runs)
    per_token = [run.wall_ns / run.output_tokens for run in runs]
    demands = sum(store.num_demands for store in stores)
    hits = sum(store.num_hits for store in stores)
    prefetched = sum(store.num_prefetched for store in stores)
    absent = sum(s.num_misses + s.num_joined + s.num_prefetched + s.num_stale_used for s in stores)
    waited = sum(store.exposed_wait_ns for store in stores)
    reading = sum(store.exact_io_ns for store in stores)
    token_ns = statistics.median(per_token)
    required = absent * record_bytes / tokens
    storage_ns = None if bounds.bytes_per_s is None else required / bounds.bytes_per_s * 1e9
    best_ns = max(bounds.compute_ns, storage_ns or 0.0)
    hit_rate = hits / demands if demands else None
    early, late = (_merged([getattr(store.slack, side) for store in stores]) for side in ("early", "late"))
    ready = _merged([store.issue_to_ready for store in stores])
    num_reads = sum(store.queue.num_reads for store in stores)
    resident = (hits - prefetched) / demands if demands else None
    belady = bounds.belady_hit_rate
    books = books_of(stores)
    precision, useful = used_shares(books, stores)
    prediction = functools.reduce(plus, (run.prediction for run in runs))
    num_blocks, num_unique = sum(run.num_blocks for run in runs), sum(run.num_unique for run in runs)
    return VariantReport(
        variant=runs[0].variant,
        repetitions=len(runs),
        output_tokens=runs[0].output_tokens,
        acceptance_length=tokens / num_cycles,
        token_ns=token_ns,
        token_ns_range=(min(per_token), max(per_token)),
        token_ns_quantiles=_quantiles([one for run in runs for one in run.token_ns]),
        waits=_waits(runs, tokens),
        layers={layer.layer: _layer(stores, at, tokens) for at, layer in enumerate(stores[0].layers)},
        exact_io_ns=reading / tokens,
        hidden_fraction=1 - waited / reading if reading else None,
        resident_recall=resident,
        prefetched_recall=(prefetched + books.predicted(Fate.JOINED).num) / demands if demands else None,
        hit_rate=hit_rate,
        exact_bytes=sum(store.exact_bytes for store in stores) / tokens,
        predicted_bytes=sum(store.predicted_bytes for store in stores) / tokens,
        rejected_bytes=sum(store.rejected_bytes for store in stores) / tokens,
        physical_bytes=sum(store.physical_bytes for store in stores) / tokens,
        speculative_bytes=sum(store.predicted_physical_bytes for store in stores) / tokens,
        required_bytes=required,
        amplification=_amplification(stores),
        useful_prefetch_ratio=useful,
        precision=precision,
        recall=prediction.recall if prediction.num_guesses else None,
        calibration_error=prediction.calibration_error,
        num_hints=sum(run.num_hints for run in runs) / tokens,
        books=books,
        hints={one.name.lower(): sum(store.hints[one] for store in stores) for one in HintOutcome},
        queue_depth_mean=sum(s.queue.depth_total for s in stores) / num_reads if num_reads else None,
        queue_depth_max=max(store.queue.depth_max for store in stores),
        issue_to_ready=(ready.quantile_ns(0.5), ready.quantile_ns(0.95), ready.quantile_ns(0.99)),
        slack_early=early.quantile_ns(0.5) if early.num else None,
        slack_late=late.quantile_ns(0.5) if late.num else None,
        bounds=bounds,
        storage_ns=storage_ns,
        attainment=best_ns / token_ns if token_ns > 0 else None,
        unique_experts=num_unique / num_blocks if num_blocks else None,
        break_even_experts=top_k * tokens / num_cycles,
        per_position_acceptance=_acceptance(runs),
        of_belady=resident / belady if resident is not None and belady else None,
        hints_stopped=next((run.hints_stopped for run in runs if run.hints_stopped), ""),
    )


def _waits(runs: Sequence[Run], tokens: int) -> Waits:
    """Return exposed wait per token: read time by cause, queueing apart."""
    reading = {cause: sum(run.store.waits[cause].read_ns for run in runs) / tokens for cause in WaitCause}
    queueing = sum(split.queue_ns for run in runs for split in run.store.waits.values())
    return Waits(
        cold=reading[WaitCause.COLD],
        evicted=reading[WaitCause.EVICTED],
        late_hint=reading[WaitCause.LATE_HINT],
        other=sum(value for cause, value in reading.items() if cause not in _NAMED),
        ngram=sum(run.rows.exposed_wait_ns for run in runs) / tokens,
        queueing=queueing / tokens,
    )


def _amplification(stores: Sequence[StoreStatistics]) -> float | None:
    """Return physical over logical bytes of the reads that began: cancelled and dropped tickets never did."""
    unread = (Fate.CANCELLED, Fate.DROPPED)
    logical = sum(s.logical_bytes - sum(s.fates[fate].num_bytes for fate in unread) for s in stores)
    return sum(store.physical_bytes for store in stores) / logical if logical else None


def _layer(stores: Sequence[StoreStatistics], at: int, tokens: int) -> LayerReport:
    """Return the figures of one layer."""
    layers = [store.layers[at] for store in stores]
    reading = {cause: sum(one.waits[cause].read_ns for one in layers) / tokens for cause in WaitCause}
    demands = sum(one.num_demands for one in layers)

    def share(num: int) -> float | None:
        return num / demands if demands else None

    return LayerReport(
        exposed_wait_ns=sum(one.exposed_wait_ns for one in layers) / tokens,
        cold=reading[WaitCause.COLD],
        evicted=reading[WaitCause.EVICTED],
        late_hint=reading[WaitCause.LATE_HINT],
        other=sum(value for cause, value in reading.items() if cause not in _NAMED),
        queueing=sum(split.queue_ns for one in layers for split in one.waits.values()) / tokens,
        resident=share(sum(one.num_hits - one.num_prefetched for one in layers)),
        prefetched=share(sum(one.num_prefetched for one in layers)),
        joined=share(sum(one.num_joined for one in layers)),
    )


def _acceptance(runs: Sequence[Run]) -> tuple[float, ...]:
    proposed = added_slots([run.proposed_by_slot for run in runs])
    accepted = added_slots([run.accepted_by_slot for run in runs])
    return tuple(right / tried for right, tried in zip(accepted, proposed, strict=True))


def added_slots(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the sums of counts by slot; runs may have proposed different numbers of tokens."""
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


def _merged(parts: Sequence[LatencyStatistics]) -> LatencyStatistics:
    return LatencyStatistics(
        sum(part.num for part in parts),
        sum(part.total_ns for part in parts),
        max(part.max_ns for part in parts),
        tuple(sum(nums) for nums in zip(*(part.bins for part in parts), strict=True)),
    )


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    at = [min(len(ordered) - 1, int(share * len(ordered))) for share in (0.5, 0.95, 0.99)]
    return ordered[at[0]], ordered[at[1]], ordered[at[2]]
