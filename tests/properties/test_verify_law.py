"""The joint law of what verified blocks say is the target's, and wrong rules are told from it."""

import numpy as np
import pytest

from bench.studies.verify_law import (
    BOUND_20K,
    DRAWN,
    EXACT,
    GRID,
    TOP_P,
    WRONG,
    Toy,
    fit,
    judge,
    row_law,
)
from mlx_flashnext.engine.sampler import SamplingParams

# Four tokens take between two and three cycles: 20,000 cycles and more, which every test checks.
SEQUENCES = 10_500


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_rule_has_the_law_of_the_target(name):
    rule, path = EXACT[name]
    found, run = judge(rule, path, TOP_P, SEQUENCES, seed=1)
    assert run.num_cycles >= 20_000
    assert found.num_cells > 200
    assert found.is_within(BOUND_20K), found


@pytest.mark.parametrize("grid", [grid for grid in GRID if GRID[grid] is not TOP_P])
def test_the_law_holds_for_other_sampling(grid):
    found, _ = judge("sampled", DRAWN, GRID[grid], SEQUENCES // 2, seed=2)
    assert found.is_within(BOUND_20K), found


@pytest.mark.parametrize("name", [name for name in WRONG if not WRONG[name].sequences])
def test_a_wrong_rule_is_told_from_the_law(name):
    wrong = WRONG[name]
    with wrong.planted():
        found, _ = judge(wrong.rule, wrong.path, wrong.params, SEQUENCES // 2, seed=1)
    assert not found.is_within(BOUND_20K), found


def test_sampled_rows_accept_more_than_point_masses_here():
    """The drafter knows something, and the rule makes use of it."""
    rates = {
        name: (run := judge(*EXACT[name], TOP_P, 500, seed=3)[1]).num_accepted / run.num_cycles
        for name in ("delta, best path", "sampled, rows")
    }
    assert rates["sampled, rows"] > 1.3 * rates["delta, best path"] > 0.3


def test_the_exact_law_and_the_distance_are_themselves_right():
    law = Toy().law(TOP_P)
    assert abs(law.sum() - 1) < 1e-12
    first = row_law(Toy().logits[7], [], TOP_P)
    assert np.allclose(law.sum(axis=(1, 2, 3)), first)
    assert np.allclose(
        row_law(np.log([0.5, 0.3, 0.2]), [], SamplingParams(temperature=0.5)), [25 / 38, 9 / 38, 4 / 38]
    )
    rng = np.random.default_rng(1)
    cells = rng.choice(law.size, 20_000, p=law.ravel())
    tokens = np.stack(np.unravel_index(cells, law.shape), axis=1)
    good = fit(tokens, law)
    assert good.is_within(1.2)
    assert good.chi2 > 0.8
    tokens[0] = np.unravel_index(int(np.flatnonzero(law.ravel() == 0)[0]), law.shape)
    assert not fit(tokens, law).is_within(1.2)
