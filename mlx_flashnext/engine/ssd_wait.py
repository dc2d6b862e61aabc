"""How long compute stood still for the SSD, why, and how far that is from the best. Entry: `summarise`.

Owner of the format of the report. The words are those of METRICS.md. A `Run` is one repetition of one variant
over all prompts, decode alone; `summarise` makes one `VariantReport` of a variant's runs and the bounds that
were measured beside them.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from expert_store.keys import ReadClass, WaitCause
from expert_store.stats import Fate, HintOutcome, LatencyStatistics, RowStatistics, StoreStatistics

FORMAT = "flashnext-ssd-wait"
VERSION = 1
_PREDICTED = (ReadClass.NEAR, ReadClass.SPECULATIVE)


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
class VariantReport:
    """One variant; times in nanoseconds, bytes per committed token.

    Attributes:
        token_ns: per token, the median over repetitions; `token_ns_range` its least and greatest.
        token_ns_quantiles: p50, p95 and p99 of single cycles' time per token, over all repetitions.
        waits: exposed wait by cause.
        layer_waits: exposed wait for experts per token, by layer.
        hidden_fraction: 1 - exposed wait / exact I/O wall time; None without reads.
        resident_recall: native selections that were resident for their own sake.
        prefetched_recall: those that were ready because of a prediction.
        hit_rate: native selections whose record was in a slot.
        exact_bytes: logical, of exact tickets.
        predicted_bytes: logical, of predicted ones.
        rejected_bytes: of them, those never used.
        physical_bytes: really read, n-gram rows left out.
        required_bytes: of records that were used and had not been resident, once per absence.
        amplification: physical over logical bytes of the reads that began.
        useful_prefetch_ratio: predicted bytes used, of those read; None if none were read.
        fates: every ticket's end, by class and fate, in records.
        hints: hints handed over, by outcome.
        issue_to_ready: p50, p95, p99.
        queue_depth_max: the most at once, since the engine was opened.
        slack_early: half of the predicted records that were demanded in time were ready so long before.
        slack_late: half of the late ones came so long after.
        storage_ns: the storage bound per token; None if the bandwidth is unknown.
        attainment: max(compute bound, storage bound) / measured.
        of_belady: what was resident for its own sake, as a fraction of Belady's hit rate.
        ratios: time per token over that of the first variant, one a repetition.
    """

    variant: Variant
    repetitions: int
    output_tokens: int
    acceptance_length: float
    token_ns: float
    token_ns_range: tuple[float, float]
    token_ns_quantiles: tuple[float, float, float]
    waits: Waits
    layer_waits: Mapping[int, float]
    hidden_fraction: float | None
    resident_recall: float | None
    prefetched_recall: float | None
    hit_rate: float | None
    exact_bytes: float
    predicted_bytes: float
    rejected_bytes: float
    physical_bytes: float
    required_bytes: float
    amplification: float | None
    useful_prefetch_ratio: float | None
    fates: Mapping[str, Mapping[str, int]]
    hints: Mapping[str, int]
    queue_depth_mean: float | None
    queue_depth_max: int
    issue_to_ready: tuple[int, int, int]
    slack_early: int | None
    slack_late: int | None
    bounds: Bounds
    storage_ns: float | None
    attainment: float | None
    of_belady: float | None
    hints_stopped: str = ""
    ratios: tuple[float, ...] = field(default=())

    @property
    def exposed_wait_ns(self) -> float:
        """Exposed wait per token, whatever the cause."""
        return self.waits.total


def summarise(runs: Sequence[Run], bounds: Bounds, record_bytes: float) -> VariantReport:
    """Return a variant's report.

    Args:
        runs: repetitions of one variant.
        bounds: measured beside them.
        record_bytes: of one expert, the mean over layers.
    """
    stores = [run.store for run in runs]
    tokens = sum(run.output_tokens for run in runs)
    per_token = [run.wall_ns / run.output_tokens for run in runs]
    demands = sum(store.num_demands for store in stores)
    hits = sum(store.num_hits for store in stores)
    prefetched = sum(store.num_prefetched for store in stores)
    joined = sum(store.classes[one].fates[Fate.JOINED].num for store in stores for one in _PREDICTED)
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
    return VariantReport(
        variant=runs[0].variant,
        repetitions=len(runs),
        output_tokens=runs[0].output_tokens,
        acceptance_length=tokens / sum(run.cycles for run in runs),
        token_ns=token_ns,
        token_ns_range=(min(per_token), max(per_token)),
        token_ns_quantiles=_quantiles([one for run in runs for one in run.token_ns]),
        waits=_waits(runs, tokens),
        layer_waits={
            layer.layer: sum(s.layers[at].exposed_wait_ns for s in stores) / tokens
            for at, layer in enumerate(stores[0].layers)
        },
        hidden_fraction=1 - waited / reading if reading else None,
        resident_recall=resident,
        prefetched_recall=(prefetched + joined) / demands if demands else None,
        hit_rate=hit_rate,
        exact_bytes=sum(store.exact_bytes for store in stores) / tokens,
        predicted_bytes=sum(store.predicted_bytes for store in stores) / tokens,
        rejected_bytes=sum(store.rejected_bytes for store in stores) / tokens,
        physical_bytes=sum(store.physical_bytes for store in stores) / tokens,
        required_bytes=required,
        amplification=_amplification(stores),
        useful_prefetch_ratio=_useful(stores),
        fates={
            one.name.lower(): {
                fate.name.lower(): sum(store.classes[one].fates[fate].num for store in stores)
                for fate in Fate
            }
            for one in ReadClass
        },
        hints={one.name.lower(): sum(store.hints[one] for store in stores) for one in HintOutcome},
        queue_depth_mean=sum(s.queue.depth_total for s in stores) / num_reads if num_reads else None,
        queue_depth_max=max(store.queue.depth_max for store in stores),
        issue_to_ready=(ready.quantile_ns(0.5), ready.quantile_ns(0.95), ready.quantile_ns(0.99)),
        slack_early=early.quantile_ns(0.5) if early.num else None,
        slack_late=late.quantile_ns(0.5) if late.num else None,
        bounds=bounds,
        storage_ns=storage_ns,
        attainment=best_ns / token_ns if token_ns > 0 else None,
        of_belady=resident / belady if resident is not None and belady else None,
        hints_stopped=next((run.hints_stopped for run in runs if run.hints_stopped), ""),
    )


def _waits(runs: Sequence[Run], tokens: int) -> Waits:
    """Return exposed wait per token: read time by cause, queueing apart."""
    reading = {cause: sum(run.store.waits[cause].read_ns for run in runs) / tokens for cause in WaitCause}
    named = (WaitCause.COLD, WaitCause.EVICTED, WaitCause.LATE_HINT)
    queueing = sum(split.queue_ns for run in runs for split in run.store.waits.values())
    return Waits(
        cold=reading[WaitCause.COLD],
        evicted=reading[WaitCause.EVICTED],
        late_hint=reading[WaitCause.LATE_HINT],
        other=sum(value for cause, value in reading.items() if cause not in named),
        ngram=sum(run.rows.exposed_wait_ns for run in runs) / tokens,
        queueing=queueing / tokens,
    )


def _amplification(stores: Sequence[StoreStatistics]) -> float | None:
    """Return physical over logical bytes of the reads that began: cancelled and dropped tickets never did."""
    unread = (Fate.CANCELLED, Fate.DROPPED)
    logical = sum(s.logical_bytes - sum(s.fates[fate].num_bytes for fate in unread) for s in stores)
    return sum(store.physical_bytes for store in stores) / logical if logical else None


def _useful(stores: Sequence[StoreStatistics]) -> float | None:
    ratios = [store.useful_prefetch_ratio for store in stores]
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.fmean(known) if known else None


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
