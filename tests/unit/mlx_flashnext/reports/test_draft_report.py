"""The arithmetic of the draft report, and the clock of laps, on figures made by hand."""

import dataclasses

import mlx.core as mx
import pytest

from mlx_flashnext.engine.laps import LapsOfCycle, MeasuredLaps
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.reports.draft_report import (
    BreakEven,
    Budget,
    RoutedCycle,
    Visit,
    break_even_of,
    costs_of,
    summarise,
)

BUDGET = Budget(1000, 10, 8, 6, 2)


def lap(rows: int, kept: int, verify: int, **other: int) -> LapsOfCycle:
    took = {"draft_ns": 5, "commit_ns": 2, "observe_ns": 1, **other}
    return LapsOfCycle(rows, kept, verify_ns=verify, **took)


def visit(**changes: object) -> Visit:
    plain = Visit(11, 1100, 40, 40, 4000, 80, 8, 0, 0, (), (), 0, 100, (lap(1, 1, 100),))
    return dataclasses.replace(plain, **changes)


PLAIN = [visit(), visit(decode_ns=2000)]
DRAFTED = [
    visit(
        cycles=20,
        decode_ns=2000,
        num_proposed=36,
        num_accepted=20,
        proposed_by_slot=(18, 18),
        accepted_by_slot=(15, 5),
        laps=tuple(lap(3, kept, 150, commit_ns=2 if kept == 3 else 9) for kept in (1, 3, 3)),
    ),
    visit(
        cycles=20,
        decode_ns=1000,
        num_proposed=14,
        num_accepted=10,
        proposed_by_slot=(14,),
        accepted_by_slot=(10,),
        failures=1,
        peak_array_bytes=300,
        laps=(lap(9, 2, 700), lap(1, 1, 110, draft_ns=0)),
    ),
]


def test_rates_are_compared_repetition_by_repetition():
    """A machine that was twice as fast the second time is no gain of the drafter."""
    report = summarise("own", 2, BUDGET, DRAFTED, PLAIN)
    assert report.ratios == (2.0, 2.0)
    assert report.tokens_per_s_range == (40 / 2000 * 1e9, 40 / 1000 * 1e9)


def test_acceptance_is_pooled_over_what_was_served():
    report = summarise("own", 2, BUDGET, DRAFTED, PLAIN)
    assert report.tokens_per_cycle == 80 / 40
    assert report.accepted_share == 30 / 50
    assert report.proposing_share == 32 / 40
    assert report.acceptance_by_slot == (25 / 32, 5 / 18)
    assert (report.failures, report.peak_array_bytes) == (1, 300)
    none = summarise("none", 0, BUDGET, PLAIN, PLAIN)
    assert (none.accepted_share, none.acceptance_by_slot, none.proposing_share) == (None, (), 0)


def test_a_cut_is_no_commit_and_a_rare_width_says_nothing():
    costs = summarise("own", 2, BUDGET, DRAFTED, PLAIN).costs
    assert costs.verify_ns == {1: 110, 3: 150, 9: 700}
    assert (costs.verify_rows, costs.verify_ratio) == (3, 1.5)
    assert (costs.rollback_ns, costs.commit_ns) == (5.5, 2)
    assert costs.draft_ns == 5, "cycles without a proposal are no drafts"


def test_without_laps_of_one_row_there_is_no_ratio():
    assert costs_of([lap(3, 3, 150)] * 3, None).verify_ratio is None
    assert costs_of([], 100).observe_ns == 0


def test_a_block_breaks_even_where_it_asks_for_top_k_times_what_it_says():
    """Blocks of 1 and 3 rows: U_B = (10 + 22 + 24) / 3, tau = (1 + 1 + 3) / 3, plain asks for 10 x tau."""
    cycles = [RoutedCycle(1, 1, 10.0), RoutedCycle(3, 1, 22.0), RoutedCycle(3, 3, 24.0)]
    found = break_even_of(cycles, 10)
    assert found == BreakEven(56 / 3, {1: 10.0, 3: 23.0}, 5 / 3, pytest.approx(50 / 3), pytest.approx(1.12))
    assert break_even_of([RoutedCycle(3, 3, 30.0)], 10).ratio == 1.0, "nothing shared, everything kept"
    assert break_even_of([], 10) is None
    report = summarise("own", 2, BUDGET, [visit(routed=tuple(cycles))], [visit()], 10)
    assert report.break_even == found
    assert summarise("own", 2, BUDGET, [visit()], [visit()], 10).break_even is None


def test_laps_wait_for_what_a_phase_made_and_count_every_wait():
    sync, times = HostSync(), iter([0, 10, 13, 20, 26, 30, 31, 40, 48, 60])
    laps = MeasuredLaps(sync, lambda: next(times))
    made = mx.zeros(4) + 1
    laps.begin()  # at 10
    laps.end("draft")  # 13
    laps.end("verify", lambda: [made])  # 20
    laps.begin()  # 26
    laps.end("commit")  # 30
    laps.begin()  # 31
    laps.end("observe")  # 40
    laps.cycle(3, 2)
    assert laps.cycles == [LapsOfCycle(3, 2, draft_ns=3, verify_ns=7, commit_ns=4, observe_ns=9)]
    assert sync.num_syncs == 4


def test_a_cycle_without_all_its_phases_is_a_fault():
    laps = MeasuredLaps(HostSync())
    laps.end("draft")
    with pytest.raises(KeyError):
        laps.cycle(1, 1)
