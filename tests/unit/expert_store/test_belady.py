"""Belady's eviction is the best there is: no policy has more hits on the same demands."""

import itertools
import random
from collections.abc import Sequence

import pytest

from expert_store.policy.belady import best_hits
from expert_store.policy.lru import LeastRecentlyUsed
from expert_store.policy.slru import SegmentedLru


def best_of_all(demands: Sequence[Sequence[int]], num_slots: int) -> int:
    """Return the most hits of any choice of who leaves, by trying all of them."""
    hits_of = {frozenset[int](): 0}
    for wanted in map(frozenset, demands):
        found: dict[frozenset[int], int] = {}
        for resident, hits in hits_of.items():
            others = sorted(resident - wanted)
            for kept in itertools.combinations(others, min(num_slots - len(wanted), len(others))):
                after = wanted | frozenset(kept)
                found[after] = max(found.get(after, -1), hits + len(wanted & resident))
        hits_of = found
    return max(hits_of.values())


def random_demands(chance: random.Random, num_experts: int, widest: int, length: int) -> list[list[int]]:
    return [
        sorted(chance.sample(range(num_experts), chance.randint(1, min(widest, num_experts))))
        for _ in range(length)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_without_a_policy_no_choice_has_more_hits(seed):
    chance = random.Random(seed)
    num_experts, num_slots = chance.randint(3, 6), chance.randint(2, 4)
    demands = random_demands(chance, num_experts, min(num_slots, 3), 9)
    found = best_hits(demands, num_slots)
    assert found.num_hits == best_of_all(demands, num_slots)
    assert found.num_demands == sum(map(len, demands))
    for policy in (LeastRecentlyUsed, SegmentedLru):
        assert best_hits(demands, num_slots, policy).num_hits <= found.num_hits


def test_a_set_wider_than_the_slots_is_visited_in_halves():
    found = best_hits([range(8), range(8)], 4)
    # Six, seven, and four more of the first sweep lie in slots when the second begins: four are hits at best.
    assert (found.num_demands, found.num_misses) == (16, 16 - found.num_hits)
    assert 0 < found.num_hits <= 4


def test_what_only_fills_the_slots_need_not_count():
    found = best_hits([[1, 2], [1, 2], [1, 3]], 2, is_measured=[False, True, True])
    assert (found.num_demands, found.num_hits, found.hit_rate) == (4, 3, 0.75)
    assert best_hits([], 2).hit_rate is None
