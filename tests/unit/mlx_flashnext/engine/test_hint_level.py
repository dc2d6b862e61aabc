"""How freely hints are read ahead follows from what cycles take: the best level is found, at little cost."""

import random

import pytest

from mlx_flashnext.engine import hint_level
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.hint_level import LEVELS, NOTHING, OPENING_CYCLES, SPAN, USUAL, HintLevel

GENEROUS = LEVELS[2]
PLAIN_NS = 1_000_000


def run(
    costs: dict[float, float], num_cycles: int, *, seed: int = 0, noise: float = 0.1
) -> tuple[float, float]:
    """Return the mean cost of a cycle, and the share of the last half that ran at the cheapest level.

    Args:
        costs: of a cycle by level.
        num_cycles: of the session.
        seed: of the clock's noise.
        noise: its relative spread.
    """
    rng, level, spent, at_best = random.Random(seed), HintLevel(), 0.0, 0
    cheapest = min(costs, key=lambda one: costs[one])
    for number in range(num_cycles):
        cost = costs[level.least_right] * rng.lognormvariate(0, noise)
        at_best += number >= num_cycles // 2 and level.least_right == cheapest
        level.count(cost)
        spent += cost
    return spent / num_cycles, 2 * at_best / num_cycles


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "costs",
    [
        {NOTHING: 1.0, USUAL: 0.75, GENEROUS: 0.9},  # a busy drive: wrong guesses cost
        {NOTHING: 1.0, USUAL: 1.25, GENEROUS: 1.6},  # no drive to wait for: asking costs
        {NOTHING: 1.0, USUAL: 0.9, GENEROUS: 0.8},  # an idle drive: more guesses hide more
    ],
)
def test_the_best_level_is_found_and_kept(costs, seed):
    mean, at_best = run(costs, 3000, seed=seed)
    assert at_best > 0.85
    assert mean < 1.05 * min(costs.values())
    assert max(costs.values()) > 1.2 * min(costs.values()), "the control: a wrong level costs far more"


def changes_of_mind(seed: int) -> int:
    """Return how often the best level changes in 3,000 cycles where all are alike."""
    level, rng, changes = HintLevel(), random.Random(seed), 0
    best = level._best
    for _ in range(3000):
        level.count(rng.lognormvariate(0, 0.1))
        changes += level._best != best
        best = level._best
    return changes


def test_noise_is_no_reason_to_change(monkeypatch):
    """Hysteresis; without it, the control, the level follows every span's luck."""
    steady = sum(changes_of_mind(seed) for seed in range(5))
    monkeypatch.setattr(hint_level, "WORTH", 0.0)
    monkeypatch.setattr(hint_level, "_SIGMAS", 0.0)
    assert sum(changes_of_mind(seed) for seed in range(5)) > 5 * max(1, steady)
    assert steady <= 15


def test_a_short_answer_is_never_experimented_on():
    level = HintLevel()
    for _ in range(OPENING_CYCLES - 1):
        level.count(1.0)
        assert level.least_right == USUAL


def test_what_stops_paying_is_given_up():
    """Re-probing: the text, or what is resident, has changed."""
    level, rng = HintLevel(), random.Random(1)
    for _ in range(1000):
        level.count({NOTHING: 1.0, USUAL: 0.8, GENEROUS: 1.0}[level.least_right] * rng.lognormvariate(0, 0.1))
    at_nothing = 0
    for _ in range(2000):
        level.count({NOTHING: 1.0, USUAL: 1.4, GENEROUS: 1.7}[level.least_right] * rng.lognormvariate(0, 0.1))
        at_nothing += level.least_right == NOTHING
    assert at_nothing > 1000


def test_the_first_cycles_of_a_span_are_not_counted_for_it():
    """They live on what the span before has read ahead."""
    level = HintLevel()
    for number in range(1200):
        level.count(5.0 if number % SPAN < 2 else 1.0)
    assert all(set(took) <= {1.0} for took in level._took.values() if took)


def test_a_guarded_governor_has_a_level_and_an_unguarded_one_the_usual():
    """Cycles are compared with others of their own width: a wide block is no reason to ask for less."""
    guarded, plain, rng = Governor(2), Governor(2, is_guarded=False), random.Random(0)
    levels: set[float] = set()
    for number in range(600):
        for governor in (guarded, plain):
            width = 2 * (number % 2)
            cost = 3 if width else 1
            hurt = 1.3 if governor.least_right == USUAL else 1.0
            governor.count(width, width, width + 1, int(PLAIN_NS * cost * hurt * rng.lognormvariate(0, 0.05)))
        levels.add(guarded.least_right)
        assert plain.least_right == USUAL
    assert levels == set(LEVELS)
    assert guarded.least_right != USUAL
