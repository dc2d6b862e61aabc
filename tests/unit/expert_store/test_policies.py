"""Eviction policies: their contract, and what sets them apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_store.policy.lru import LeastRecentlyUsed
from expert_store.policy.slru import SegmentedLru
from expert_store.store import POLICIES


def anybody(expert: int) -> bool:
    return True


def run(policy_name: str, num_slots: int, demands) -> tuple[int, set[int]]:
    """Serve demands of one expert each; return the hits and what is held in the end."""
    policy, held, hits = POLICIES[policy_name](num_slots), set(), 0
    for expert in demands:
        if expert in held:
            policy.touch([expert])
            hits += 1
            continue
        if len(held) == num_slots:
            held.remove(policy.evict(anybody))
        policy.admit(expert)
        held.add(expert)
    return hits, held


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_a_policy_evicts_only_what_it_holds_and_what_can_leave(name, data):
    num_slots = data.draw(st.integers(1, 6))
    policy, held = POLICIES[name](num_slots), []
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["admit", "touch", "evict", "remove"]))
        if action == "admit" and len(held) < num_slots:
            expert = data.draw(st.integers(0, 9).filter(lambda e: e not in held))
            policy.admit(expert)
            held.append(expert)
        elif action == "touch" and held:
            policy.touch(data.draw(st.lists(st.sampled_from(held), unique=True)))
        elif action == "remove" and held:
            expert = data.draw(st.sampled_from(held))
            policy.remove(expert)
            held.remove(expert)
        elif action == "evict":
            free = set(data.draw(st.lists(st.sampled_from(held), unique=True))) if held else set()
            victim = policy.evict(free.__contains__)
            assert (victim is None) == (not free)
            if victim is not None:
                assert victim in free
                held.remove(victim)
    for _ in list(held):
        held.remove(policy.evict(anybody))
    assert policy.evict(anybody) is None


def test_lru_sends_away_what_was_used_longest_ago():
    policy = LeastRecentlyUsed(4)
    for expert in (1, 2, 3, 4):
        policy.admit(expert)
    policy.touch([2, 1])
    assert [policy.evict(anybody) for _ in range(4)] == [3, 4, 2, 1]


def test_slru_keeps_what_was_used_twice_and_demotes_the_oldest_of_it():
    policy = SegmentedLru(5)  # four may be protected
    for expert in (1, 2, 3, 4, 5):
        policy.admit(expert)
    policy.touch([5, 4, 3, 2, 1])  # the fifth pushes 5 back to probation
    assert [policy.evict(anybody) for _ in range(5)] == [5, 4, 3, 2, 1]


def test_a_sweep_flushes_lru_and_not_slru():
    working_set = [0, 1, 2, 3]
    demands = working_set * 3 + list(range(100, 160)) + working_set
    assert run("lru", 8, demands)[0] == 8
    assert run("slru", 8, demands)[0] == 12


def test_lru_follows_a_working_set_that_moves():
    demands = [e for start in range(0, 40, 4) for e in [*range(start, start + 4)] * 2]
    assert run("lru", 4, demands)[0] == 40
    assert run("slru", 4, demands)[0] < 40


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_history_gives_the_same_victims(name):
    demands = [(7 * i * i + 3 * i) % 23 for i in range(500)]
    assert run(name, 9, demands) == run(name, 9, demands)
