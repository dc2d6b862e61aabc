"""Who leaves first: cold records, the policy's choice, live ones; and what a guess may send away."""

from array import array
from collections import Counter

import pytest

from expert_store.policy.lru import LeastRecentlyUsed
from expert_store.policy.slru import SegmentedLru
from expert_store.ranking import Ranking


class Guess:
    def __init__(self, *, is_due=False, confidence=1.0):
        self.is_due, self.confidence = is_due, confidence
        self.told = Counter()

    def used(self):
        self.told["used"] += 1

    def evicted(self):
        self.told["evicted"] += 1


def anybody(expert):
    return True


def sent_away(ranking, number, confidence=1.0):
    """Return what so many guesses of an expert without a slot send away, of a layer of eight."""
    return [ranking.evict_for(7, Guess(confidence=confidence), anybody) for _ in range(number)]


def filled(policy=LeastRecentlyUsed, max_expected=1):
    """Demanded: 0, 1. Cold: 2 (a guess), 3 (of a rejected row). Live: 4 (a guess), 5 (of an open block)."""
    ranking = Ranking(policy(8), 8, max_expected)
    guesses = {2: Guess(), 4: Guess()}
    ranking.miss(0, is_committed=True)
    ranking.miss(1, is_committed=True)
    ranking.expect(2, guesses[2])
    ranking.miss(3, is_committed=False)
    ranking.doubt(2)
    ranking.reject([3])
    ranking.expect(4, guesses[4])
    ranking.miss(5, is_committed=False)
    ranking.check(set(range(6)))
    return ranking, guesses


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, SegmentedLru])
def test_exact_demand_sends_away_cold_then_demanded_then_live(policy):
    ranking, guesses = filled(policy)
    assert [ranking.evict(anybody) for _ in range(7)] == [2, 3, 0, 1, 4, 5, None]
    assert [guess.told for guess in guesses.values()] == [{"evicted": 1}, {"evicted": 1}]


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, SegmentedLru])
def test_a_guess_never_sends_away_a_live_record_and_demanded_ones_only_while_few_are_expected(policy):
    ranking, _ = filled(policy, max_expected=1)
    assert sent_away(ranking, 3) == [2, 3, None]
    ranking, _ = filled(policy, max_expected=2)
    assert sent_away(ranking, 5) == [2, 3, 0, 1, None]


def who_guesses_send_away():
    """Two demanded records, the older one named by a hint; what four guesses send away, and then a demand."""
    ranking, _ = filled(max_expected=9)
    ranking.want(0, 1.0)
    return sent_away(ranking, 4), ranking.evict(anybody)


def test_a_guess_never_sends_away_what_a_hint_as_sure_has_named_and_a_demand_does():
    assert who_guesses_send_away() == ([2, 3, 1, None], 0)


def test_planted_a_hint_that_keeps_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(Ranking, "want", lambda self, expert, confidence: None)
    assert who_guesses_send_away() != ([2, 3, 1, None], 0)


def test_what_a_hint_has_named_is_kept_until_the_next_demand_only():
    ranking, _ = filled(max_expected=9)
    ranking.want(0, 1.0)
    ranking.hit([1], is_committed=True)
    assert 0 in sent_away(ranking, 3)


def test_a_surer_guess_sends_away_what_was_named_and_equal_ones_do_not():
    for confidence, left in ((0.8, 0), (0.7, None), (0.6, None)):
        ranking, _ = filled(max_expected=9)
        ranking.want(0, 0.7)
        assert sent_away(ranking, 4, confidence) == [2, 3, 1, left]


def foreseen(chances, max_expected=9):
    ranking, _ = filled(max_expected=max_expected)
    ranking.foresee(memoryview(array("f", chances)))
    return ranking


def test_a_guess_sends_away_what_is_least_likely_whatever_the_order():
    # cold: 2, 3; demanded: 0, 1; live, and never sent away by a guess: 4, 5; the guess itself: 7
    assert sent_away(foreseen([0.3, 0.1, 0.5, 0.2, 0.0, 0.0, 0.0, 0.4]), 4) == [1, 3, 0, None]
    # What is hardly wanted is all the same: the cold ones first, then the policy's order.
    assert sent_away(foreseen([0.01, 0.0, 0.015, 0.5, 0.0, 0.0, 0.0, 0.4]), 4) == [2, 0, 1, None]


def test_what_was_said_last_of_a_guess_counts_and_not_what_its_hint_said():
    assert sent_away(foreseen([0.3, 0.3, 0.3, 0.3, 0.0, 0.0, 0.0, 0.1]), 1, confidence=1.0) == [None]


def test_where_all_chances_are_told_they_bound_the_guesses_and_no_number_does():
    assert sent_away(foreseen([0.1] * 7 + [0.9], max_expected=0), 5) == [2, 3, 0, 1, None]
    assert foreseen([0.1] * 8, max_expected=0).room_for_guesses > 2
    ranking = foreseen([0.1] * 8, max_expected=0)
    ranking.hit([0], is_committed=True)
    assert ranking.room_for_guesses == 2  # the cold ones: what was told has had its demand


def test_planted_chances_that_are_forgotten_are_seen(monkeypatch):
    monkeypatch.setattr(Ranking, "foresee", lambda self, chances: None)
    assert sent_away(foreseen([0.3, 0.1, 0.5, 0.2, 0.0, 0.0, 0.0, 0.4]), 4) != [1, 3, 0, None]


def test_only_what_can_leave_is_sent_away():
    ranking, guesses = filled()
    assert ranking.evict(lambda expert: expert in (1, 4)) == 1
    assert ranking.evict(lambda expert: expert == 4) == 4
    assert ranking.evict(lambda expert: False) is None
    assert guesses[2].told == {}


@pytest.mark.parametrize("expert", [2, 4])
def test_a_demand_of_a_guess_uses_it_once_and_makes_it_like_any_other(expert):
    ranking, guesses = filled()
    for _ in range(2):
        ranking.hit([expert], is_committed=True)
    assert guesses[expert].told == {"used": 1}
    assert ranking.counts[expert] == 2
    left = [ranking.evict(anybody) for _ in range(6)]
    assert left.index(expert) > left.index(1)


def test_an_uncommitted_demand_of_a_guess_uses_it_but_leaves_no_trace_in_the_order():
    ranking, guesses = filled()
    ranking.hit([4, 0], is_committed=False)
    assert guesses[4].told == {"used": 1}
    assert (ranking.counts[4], ranking.counts[0]) == (0, 1)
    ranking.reject([4, 0])
    assert [ranking.evict(anybody) for _ in range(4)] == [2, 3, 4, 0]


def test_a_confirmed_demand_enters_in_its_order_and_once_in_a_segmented_policy():
    ranking, _ = filled(SegmentedLru)
    ranking.confirm([5, 0])
    # 0 was demanded a second time and is protected; 5 was demanded once, by whatever way it came
    assert [ranking.evict(anybody) for _ in range(5)] == [2, 3, 1, 5, 0]


def test_a_guess_that_was_due_at_a_demand_and_not_in_it_turns_cold():
    ranking = Ranking(LeastRecentlyUsed(8), 8, 4)
    due, later = Guess(is_due=True), Guess()
    ranking.expect(1, due)
    ranking.expect(2, later)
    ranking.miss(0, is_committed=True)
    ranking.hit([], is_committed=True)
    assert ranking.num_expected == 1
    assert [ranking.evict(anybody) for _ in range(3)] == [1, 0, 2]


def test_what_failed_is_forgotten_wherever_it_stood():
    ranking, guesses = filled()
    for expert in range(6):
        ranking.remove(expert)
    assert ranking.evict(anybody) is None
    assert ranking.num_expected == 0
    assert not guesses[2].told
    assert not guesses[4].told
