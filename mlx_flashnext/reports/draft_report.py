"""What drafting costs and brings, held against plain decode: the figures of `flashnext bench --report draft`.

Entry points: `Visit` (one stay in one engine), `VariantReport`, `summarise`. `draft_report_run.py` measures.
All figures are served: tokens that an answer really had, cycles that really ran (FIELD P43).

Break-even in bytes: a block of B rows asks a layer for U_B distinct experts and commits tau tokens; tau plain
steps would ask for top_k x tau. So a drafter saves routed bytes if U_B < top_k x tau (METRICS.md).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from mlx_flashnext.engine.laps import LapsOfCycle

FORMAT: Final = "flashnext-draft-report"
VERSION: Final = 1
LEAST_CYCLES: Final = 3
"""Cycles of one number of rows below which nothing is said of what that many rows cost."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a drafter takes of the memory target.

    Attributes:
        planned_bytes: of the whole run.
        draft_bytes: of the plan's lines that are the drafter's own.
        slots: experts of each layer in memory, in these runs.
        slots_at_same_memory: experts of each layer that fit the memory of target-only beside it; None
            if not even the fewest do.
        slots_lost: those of target-only less these; None likewise.
    """

    planned_bytes: int
    draft_bytes: int
    slots: int
    slots_at_same_memory: int | None
    slots_lost: int | None


@dataclass(frozen=True, slots=True)
class RoutedCycle:
    """What one cycle asked the layers for: rows of its block, rows that stayed, distinct experts a layer."""

    num_rows: int
    num_kept: int
    unique: float


@dataclass(frozen=True, slots=True)
class Visit:
    """One stay in an engine: all prompts once, then a run with laps.

    Attributes:
        prompt_tokens, prefill_ns: tokens that were read, and for how long.
        output_tokens, cycles, decode_ns: said, in so many cycles, for so long.
        read_bytes: of experts while saying.
        exposed_wait_ns: that decode stood still for experts.
        num_proposed, num_accepted: tokens.
        proposed_by_slot, accepted_by_slot: cycles.
        failures: of the drafter.
        peak_array_bytes: the most that MLX's arrays took at a time.
        laps: of the run with laps.
        routed: cycles of the answer that does not count; none where every expert is resident.
    """

    prompt_tokens: int
    prefill_ns: int
    output_tokens: int
    cycles: int
    decode_ns: int
    read_bytes: int
    exposed_wait_ns: int
    num_proposed: int
    num_accepted: int
    proposed_by_slot: tuple[int, ...]
    accepted_by_slot: tuple[int, ...]
    failures: int
    peak_array_bytes: int
    laps: tuple[LapsOfCycle, ...]
    routed: tuple[RoutedCycle, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Return the rate of saying; zero where no time passed."""
        return self.output_tokens / self.decode_ns * 1e9 if self.decode_ns > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians over the cycles with laps; every phase waits for its own work (see `laps.py`).

    Attributes:
        draft_ns: of a proposal, of the cycles that had one; None if none had.
        verify_ns: of a block, by its rows.
        commit_ns: of a cycle that keeps its whole block.
        rollback_ns: of a commit that cuts rows; None if none was cut.
        observe_ns: of taking in what stays: features fused, keys and values made, an index extended.
        verify_ratio: of a block of the most rows that were common, over one row of target-only.
        verify_rows: how many those were; None if no block had more than one row.
    """

    draft_ns: float | None
    verify_ns: dict[int, float]
    commit_ns: float | None
    rollback_ns: float | None
    observe_ns: float
    verify_ratio: float | None
    verify_rows: int | None


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Whether blocks ask for fewer experts than the plain steps they replace; means over cycles and layers.

    Attributes:
        unique: U_B, distinct experts of a block in a layer.
        unique_by_rows: the same for blocks of so many rows.
        tokens_per_cycle: tau of the same cycles.
        plain: top_k x tau, what plain decode asks for to say as much.
        ratio: U_B / (top_k x tau), routed bytes a token against plain decode: below 1 saves some.
    """

    unique: float
    unique_by_rows: dict[int, float]
    tokens_per_cycle: float
    plain: float
    ratio: float


@dataclass(frozen=True, slots=True)
class VariantReport:
    """One drafter.

    Attributes:
        draft: who proposes; `none` is target-only.
        num_draft_tokens: most proposals of a cycle.
        tokens_per_s: the median over repetitions; `tokens_per_s_range` the least and the greatest.
        ratios: to target-only, repetition by repetition.
        tokens_per_cycle: committed tokens over cycles, pooled.
        accepted_share: of the proposed tokens; None if none was proposed.
        proposing_share: of the cycles.
        acceptance_by_slot: of the cycles with a first, second, ... proposal, those that kept it.
        prefill_ns_per_token: the median, capture of features included.
        read_bytes_per_token, exposed_wait_ns_per_token: medians.
        peak_array_bytes: the greatest.
        failures: of the drafter, in all.
        budget: what it takes.
        costs: of its phases.
        break_even: in routed bytes; None where every expert is resident, so that none is routed to a slot.
    """

    draft: str
    num_draft_tokens: int
    repetitions: int
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    ratios: tuple[float, ...]
    tokens_per_cycle: float
    accepted_share: float | None
    proposing_share: float
    acceptance_by_slot: tuple[float, ...]
    prefill_ns_per_token: float
    read_bytes_per_token: float
    exposed_wait_ns_per_token: float
    peak_array_bytes: int
    failures: int
    budget: Budget
    costs: Costs
    break_even: BreakEven | None = None

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values: bytes, nanoseconds, shares."""
        return asdict(self)


def summarise(
    draft: str,
    num_draft_tokens: int,
    budget: Budget,
    visits: Sequence[Visit],
    plain: Sequence[Visit],
    top_k: int = 1,
) -> VariantReport:
    """Return the report of a drafter.

    Args:
        draft: who proposes.
        num_draft_tokens: most proposals of a cycle.
        budget: what it takes.
        visits: of it, one a repetition.
        plain: those of target-only, of the same repetitions.
        top_k: experts of a row in a layer.
    """
    rates = [visit.tokens_per_s for visit in visits]
    proposed, cycles = sum(visit.num_proposed for visit in visits), sum(visit.cycles for visit in visits)
    laps = [lap for visit in visits for lap in visit.laps]
    one_row = median_of([lap.verify_ns for visit in plain for lap in visit.laps if lap.num_rows == 1])
    return VariantReport(
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        repetitions=len(visits),
        tokens_per_s=statistics.median(rates),
        tokens_per_s_range=(min(rates), max(rates)),
        ratios=tuple(mine.tokens_per_s / base.tokens_per_s for mine, base in zip(visits, plain, strict=True)),
        tokens_per_cycle=sum(visit.output_tokens for visit in visits) / max(1, cycles),
        accepted_share=sum(visit.num_accepted for visit in visits) / proposed if proposed else None,
        proposing_share=sum(max(visit.proposed_by_slot, default=0) for visit in visits) / max(1, cycles),
        acceptance_by_slot=_by_slot(visits),
        prefill_ns_per_token=statistics.median(v.prefill_ns / max(1, v.prompt_tokens) for v in visits),
        read_bytes_per_token=statistics.median(v.read_bytes / max(1, v.output_tokens) for v in visits),
        exposed_wait_ns_per_token=statistics.median(
            v.exposed_wait_ns / max(1, v.output_tokens) for v in visits
        ),
        peak_array_bytes=max(visit.peak_array_bytes for visit in visits),
        failures=sum(visit.failures for visit in visits),
        budget=budget,
        costs=costs_of(laps, one_row),
        break_even=break_even_of([cycle for visit in visits for cycle in visit.routed], top_k),
    )


def break_even_of(cycles: Sequence[RoutedCycle], top_k: int) -> BreakEven | None:
    """Return U_B against top_k x tau; None without cycles.

    Args:
        cycles: of the blocks that were served, plain steps among them.
        top_k: experts of a row in a layer.
    """
    if not cycles:
        return None
    by_rows: dict[int, list[float]] = defaultdict(list)
    for cycle in cycles:
        by_rows[cycle.num_rows].append(cycle.unique)
    unique = statistics.fmean(cycle.unique for cycle in cycles)
    tokens = statistics.fmean(cycle.num_kept for cycle in cycles)
    plain = top_k * tokens
    means = {rows: statistics.fmean(found) for rows, found in sorted(by_rows.items())}
    return BreakEven(unique, means, tokens, plain, unique / plain)


def costs_of(laps: Sequence[LapsOfCycle], one_row_ns: float | None) -> Costs:
    """Return medians of phases.

    Args:
        laps: of every cycle.
        one_row_ns: what target-only takes to verify one row, None if that is not known.
    """
    by_rows: dict[int, list[int]] = defaultdict(list)
    for lap in laps:
        by_rows[lap.num_rows].append(lap.verify_ns)
    verify = {rows: statistics.median(took) for rows, took in sorted(by_rows.items())}
    common = [rows for rows, took in by_rows.items() if rows > 1 and len(took) >= LEAST_CYCLES]
    widest = max(common, default=None)
    return Costs(
        draft_ns=median_of([lap.draft_ns for lap in laps if lap.num_rows > 1]),
        verify_ns=verify,
        commit_ns=median_of([lap.commit_ns for lap in laps if lap.num_kept == lap.num_rows]),
        rollback_ns=median_of([lap.commit_ns for lap in laps if lap.num_kept < lap.num_rows]),
        observe_ns=median_of([lap.observe_ns for lap in laps]) or 0.0,
        verify_ratio=verify[widest] / one_row_ns if widest is not None and one_row_ns else None,
        verify_rows=widest,
    )


def median_of(values: Sequence[int]) -> float | None:
    """Return the median, None of nothing."""
    return statistics.median(values) if values else None


def _by_slot(visits: Sequence[Visit]) -> tuple[float, ...]:
    width = max((len(visit.proposed_by_slot) for visit in visits), default=0)
    found: list[float] = []
    for slot in range(width):
        deep = [visit for visit in visits if len(visit.proposed_by_slot) > slot]
        tried = sum(visit.proposed_by_slot[slot] for visit in deep)
        found.append(sum(visit.accepted_by_slot[slot] for visit in deep) / max(1, tried))
    return tuple(found)
