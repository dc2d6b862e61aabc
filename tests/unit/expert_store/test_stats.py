"""Statistics: their bins, and that every word they use is in METRICS.md."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_store.books import Ledger
from expert_store.keys import ReadClass, WaitCause
from expert_store.stats import NUM_BINS, Fate, LatencyStatistics, bin_of
from expert_store.ticket import Ticket

METRICS = (pathlib.Path(__file__).resolve().parents[3] / "docs/METRICS.md").read_text()


def latencies(durations):
    bins = [0] * NUM_BINS
    for duration in durations:
        bins[bin_of(duration)] += 1
    return LatencyStatistics(len(durations), sum(durations), max(durations), tuple(bins))


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=50), st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_never_below_the_true_one_and_at_most_an_eighth_above(durations, share):
    true = sorted(durations)[max(0, -(-int(share * 1000) * len(durations) // 1000) - 1)]
    got = latencies(durations).quantile_ns(share)
    assert true <= got <= true * 1.125 + 1


def test_bins_are_in_order_and_within_bounds():
    places = [bin_of(duration) for duration in [*range(5000), *(2**k for k in range(13, 63))]]
    assert places == sorted(places)
    assert places[-1] < NUM_BINS


@pytest.mark.parametrize("word", [*Fate, *WaitCause])
def test_every_fate_and_cause_is_explained_in_metrics(word):
    name = word.name.lower().replace("_", " ")
    marks = (f"| {name} |", f"*{name}*")
    assert any(mark in METRICS for mark in marks)


def test_a_second_fate_of_a_ticket_is_stopped_where_it_happens():
    ledger = Ledger()
    ticket = Ticket((0, 1), slot=0, num_bytes=5, read_class=ReadClass.NEAR)
    ledger.close(ticket, Fate.STALE)
    with pytest.raises(AssertionError, match="second fate"):
        ledger.close(ticket, Fate.IN_TIME)
    assert [ledger.classes[ReadClass.NEAR].fate_nums[fate] for fate in (Fate.STALE, Fate.IN_TIME)] == [1, 0]
