"""Differences of snapshots: counts are subtracted, levels and largest values are not."""

from types import MappingProxyType

from expert_store.stats import LatencyStatistics
from mlx_flashnext.engine.deltas import plus, since
from tests.unit.expert_store.rig import make_rig


def test_levels_stay_and_counts_do_not():
    then = LatencyStatistics(2, 30, 20, (1, 1))
    now = LatencyStatistics(5, 90, 25, (1, 4))
    assert since(now, then) == LatencyStatistics(3, 60, 25, (0, 3))
    assert plus(then, since(now, then)) == now


def test_mappings_and_tuples_are_taken_part_by_part():
    then = MappingProxyType({"a": (1, 2), "b": (0, 0)})
    now = MappingProxyType({"a": (4, 2), "b": (1, 0)})
    assert dict(since(now, then)) == {"a": (3, 0), "b": (1, 0)}


def test_two_stretches_of_a_store_are_the_whole():
    rig = make_rig()
    with rig.store:
        start = rig.store.statistics()
        rig.load(0, [0, 1])
        middle = rig.store.statistics()
        rig.load(0, [1, 2])
        end = rig.store.statistics()
    first, second = since(middle, start), since(end, middle)
    assert (first.num_demands, second.num_demands) == (2, 2)
    assert (second.num_hits, second.num_misses) == (1, 1)
    assert second.exact_bytes * 2 == first.exact_bytes
    assert plus(first, second) == since(end, start)
    assert second.layers[0].num_slots == end.layers[0].num_slots
