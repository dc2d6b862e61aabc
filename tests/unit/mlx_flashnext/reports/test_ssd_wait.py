"""What a report makes of counts: recall, calibration, books, and the notes that a reader needs."""

from dataclasses import replace

import pytest

from cli.ssd_wait_output import notes
from expert_store.keys import ReadClass
from expert_store.stats import Fate, FateCount, RowStatistics
from mlx_flashnext.engine.deltas import plus
from mlx_flashnext.engine.predictors import Guess
from mlx_flashnext.engine.routes import Pass
from mlx_flashnext.reports.prediction import Prediction, score
from mlx_flashnext.reports.ssd_wait import Bounds, Run, Variant, VariantReport, summarise
from mlx_flashnext.reports.ticket_books import Books, Tickets
from tests.unit.expert_store.rig import make_rig


def test_recall_counts_the_surest_guesses_of_every_row_and_layer():
    guesses = [Guess(0, 1, 0.9), Guess(0, 2, 0.8), Guess(0, 3, 0.1), Guess(1, 7)]
    one = Pass(0, 1, 1, {0: [[1, 3]], 1: [[5, 6]]}, [guesses])
    found = score([one])
    assert found.num_places == 2
    assert found.recall == pytest.approx((1 / 2 + 0) / 2), "3 was named, but as the third of two"
    assert found.num_guesses == 4
    assert found.correct_share == 0.5


def test_a_guess_for_the_next_pass_is_held_against_the_next_pass():
    ahead = [Guess(0, 4, 1.0, passes_ahead=1)]
    first, second = Pass(0, 1, 1, {0: [[1]]}, [ahead]), Pass(1, 1, 1, {0: [[4]]})
    assert score([first, second]).recall == 0.5
    assert score([first]).num_guesses == 0, "nobody knows what comes after the last"


def test_a_guess_named_twice_counts_once_at_its_surest():
    twice = [[Guess(0, 4, 0.2)], [Guess(0, 4, 1.0)]]
    found = score([Pass(0, 1, 1, {0: [[4]]}, twice)])
    assert (found.num_guesses, found.calibration_error) == (1, 0.0)


@pytest.mark.parametrize(("confidence", "right", "error"), [(1.0, 10, 0.0), (0.5, 5, 0.0), (0.9, 0, 0.9)])
def test_calibration_is_the_distance_of_confidence_from_truth(confidence, right, error):
    guesses = [Guess(0, expert, confidence) for expert in range(10)]
    found = score([Pass(0, 1, 1, {0: [list(range(right)) or [99]]}, [guesses])])
    assert found.calibration_error == pytest.approx(error)


def test_errors_of_different_bins_do_not_make_up_for_each_other():
    """Half is named at 0.3 and always right, half at 0.7 and never: on average well calibrated."""
    low = [Guess(0, expert, 0.3) for expert in range(5)]
    high = [Guess(0, expert, 0.7) for expert in range(5, 10)]
    found = score([Pass(0, 1, 1, {0: [list(range(5))]}, [low, high])])
    assert found.correct_share == 0.5
    assert found.calibration_error == pytest.approx(0.7)


def test_sums_of_two_runs_are_those_of_one_long_run():
    passes = [
        Pass(0, 1, 1, {0: [[1]]}, [[Guess(0, 1, 0.4)]]),
        Pass(1, 1, 1, {0: [[2]]}, [[Guess(0, 3, 0.8)]]),
    ]
    assert plus(score(passes[:1]), score(passes[1:])) == score(passes)
    assert Prediction().recall is Prediction().calibration_error is None


def books(**changed: FateCount) -> Books:
    none = {fate.name.lower(): FateCount(0, 0) for fate in Fate}
    classes = {kind.name.lower(): Tickets(FateCount(0, 0), none) for kind in ReadClass}
    classes["exact"] = Tickets(FateCount(2, 20), none | {"late": FateCount(2, 20)})
    classes["near"] = Tickets(FateCount(3, 30), none | {"in_time": FateCount(2, 20), **changed})
    return Books(classes, FateCount(0, 0))


def test_books_add_up_in_records_and_in_bytes():
    assert books(stale=FateCount(1, 10)).add_up
    assert not books().add_up, "a ticket without a fate"
    assert not books(stale=FateCount(2, 10)).add_up, "two fates"
    assert not books(stale=FateCount(1, 9)).add_up, "bytes that got lost"
    assert replace(books(), unused=FateCount(1, 10)).add_up
    swapped = books(stale=FateCount(1, 10))
    exact = Tickets(FateCount(3, 30), swapped.classes["exact"].fates)
    near = Tickets(FateCount(2, 20), swapped.classes["near"].fates)
    assert not Books({**swapped.classes, "exact": exact, "near": near}, FateCount(0, 0)).add_up


def report(
    slots: int, low_ms: float, high_ms: float, hints: str = "off", num_hints: int = 0
) -> VariantReport:
    """Return the report of two repetitions of ten tokens, of a store that was asked for nothing."""
    rig = make_rig()
    nothing = rig.store.statistics()
    rig.store.close()
    runs = [
        Run(
            variant=Variant(slots, "none", 0, hints),
            output_tokens=10,
            cycles=10,
            wall_ns=round(10 * each * 1e6),
            token_ns=(each * 1e6,) * 10,
            store=nothing,
            rows=RowStatistics(0, 0, 0, 0, 0, 0, 0),
            num_hints=num_hints,
        )
        for each in (low_ms, high_ms)
    ]
    return summarise(runs, Bounds(1e6, None, None), 10.0, 2)


def test_more_memory_that_is_slower_beyond_noise_is_advised_against():
    """P03: the larger cache was slower, and nobody said so."""
    (note,) = notes([report(16, 10, 11), report(32, 12, 14)])
    assert "32 experts a layer" in note
    assert "--slots 16" in note
    assert notes([report(16, 10, 13), report(32, 12, 14)]) == [], "within noise"
    assert notes([report(32, 10, 11), report(16, 12, 14)]) == [], "faster, as it should be"
    assert notes([report(16, 10, 11), report(32, 12, 14, hints="random")]) == [], "not the same work"


def test_guesses_that_lead_to_no_read_are_told():
    """P15: a guard dropped every speculative load, and that looked like success."""
    (note,) = notes([report(16, 10, 11, "near-gate", num_hints=50)])
    assert "no guess led to a read" in note
