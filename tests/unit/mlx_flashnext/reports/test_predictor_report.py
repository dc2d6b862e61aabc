"""The predictor report's sums by hand, and the whole of it on a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_flashnext.engine.machine import detect_machine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.reports.predictor_report import PredictorFigures, Scoring, Served, judge
from mlx_flashnext.reports.predictor_report_run import (
    PredictorsAsked,
    Priors,
    TimedDrafter,
    measure_predictors,
)
from mlx_flashnext.reports.ssd_wait_run import Asked
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import prompt_of
from tests.tiny.own_drafts import write_draft
from tests.tiny.route_hints import write_near, write_sidecar

LOW = -np.inf


def test_recall_and_precision_are_those_of_two_rows_done_by_hand():
    scoring = Scoring((0, 1), 8, 2, 3)
    truth = np.zeros((2, 2, 8), np.float32)
    truth[0, 0, [0, 1]] = truth[0, 1, [2, 3]] = truth[1, 0, [4, 5]] = truth[1, 1, [6, 7]] = 1
    scores = np.full((2, 2, 8), LOW, np.float32)
    scores[0, 0, [0, 3, 1]] = [3, 2, 1]  # one of two among the first two and three, both among four
    scores[0, 1, [2]] = 1  # names one expert only, and it is right
    scores[1, 0, :] = np.arange(8)  # both stand third and fourth
    scoring.add({"previous": scores}, truth, num_kept=1)
    (found,) = scoring.results()
    assert scoring.sizes == (2, 3, 4, 6)
    # Rows and layers: (0,0) 1/2 2/2 2/2 2/2; (0,1) 1/2 throughout; (1,0) 0 1/2 2/2 2/2; (1,1) nothing.
    assert found.recall == pytest.approx((0.25, 0.5, 0.625, 0.625))
    assert found.by_layer == pytest.approx((1.0, 0.25))
    assert found.by_row[:2] == pytest.approx((0.75, 0.5))
    assert found.precision == pytest.approx(5 / 8)
    assert found.calibration_error is None
    assert scoring.num_rows.tolist() == [1, 1, 0]
    assert scoring.num_kept.tolist() == [1, 0, 0]


def test_what_is_asked_of_the_anchor_alone_is_held_to_no_other_row():
    scoring = Scoring((0,), 4, 1, 3)
    truth = np.zeros((3, 1, 4), np.float32)
    truth[0, 0, 2] = truth[1, 0, 1] = truth[2, 0, 0] = 1
    scores = np.array([[[0.0, 1.0, 2.0, -1.0]]], np.float32)  # right of the anchor, wrong of the others
    for num_kept in (3, 1):
        whole = np.repeat(scores, 3, axis=0)
        scoring.add({"sidecar-early": scores, "sidecar": whole}, truth, num_kept)
    early, proposed = scoring.results()
    assert (early.recall, early.by_layer, early.by_row) == ((1.0,) * 4, (1.0,), (1.0, None, None))
    assert proposed.recall == pytest.approx((1 / 3, 1 / 3, 2 / 3, 1.0))
    assert proposed.by_row == (1.0, 1.0, 0.0)


def test_confidence_that_is_said_and_not_kept_is_an_error():
    scoring = Scoring((0,), 4, 1, 1)
    truth = np.array([[[1.0, 0, 0, 0]]], np.float32)
    honest = np.log(np.array([[[0.5, 0.5, 1e-6, 1e-6]]]) / (1 - np.array([[[0.5, 0.5, 1e-6, 1e-6]]])))
    sure = np.array([[[-9.0, 9.0, -9.0, -9.0]]])
    scoring.add({"sidecar": honest.astype(np.float32), "both": sure.astype(np.float32)}, truth, 1)
    by_name = {one.name: one for one in scoring.results()}
    assert by_name["sidecar"].calibration_error == pytest.approx(0.0, abs=1e-5)
    assert by_name["both"].calibration_error == pytest.approx(0.5, abs=1e-3)


def test_a_token_that_was_never_counted_has_the_layers_frequency():
    priors = Priors((0,), 4, 1, 10)
    priors.add([3, 3, 5], np.array([[[1]], [[1]], [[2]]]))
    often, by_token = priors.scores([3, 9])
    assert by_token[1].argmax() == often[1].argmax() == 1
    assert by_token[0, 0, 1] > often[0, 0, 1]
    assert by_token[0, 0, 2] < often[0, 0, 2]
    assert np.allclose(by_token[1], often[1], atol=1e-5)


def figures(name: str, *by_layer: float) -> PredictorFigures:
    mean = sum(by_layer) / len(by_layer)
    return PredictorFigures(name, (0.0, 0.0, mean, 0.0), by_layer, (), None, None)


def in_service(slots: int, near: float, sidecar: float, both: float) -> list[Served]:
    timely = {"near-linear": near, "sidecar": sidecar, "both": both}
    return [Served(slots, name, value, 0.0, 0, 0, 0, 0, None) for name, value in timely.items()]


def test_both_must_be_above_either_under_every_budget_and_not_of_another():
    better, worse = in_service(6, 0.3, 0.4, 0.5), in_service(12, 0.1, 0.2, 0.15)
    assert judge([], better).both_over_either is True
    assert judge([], [*better, *worse]).both_over_either is False
    assert judge([], [*better[:2], worse[2]]).both_over_either is None
    assert judge([], [*better, *worse[:2]]).both_over_either is True, "one budget has all three"


def test_bars_stand_or_fall_by_their_own_figures():
    served = in_service(6, 0.3, 0.4, 0.5)
    bars = judge(
        [figures("sidecar", 0.6, 0.5), figures("frequency", 0.2, 0.1), figures("previous", 0.3)], served
    )
    assert bars.gap_closed == pytest.approx((0.55 - 0.15) / 0.85)
    assert (bars.above_frequency, bars.above_previous, bars.both_over_either) == ((2, 2), True, True)
    bars = judge(
        [figures("sidecar", 0.6, 0.1), figures("frequency", 0.2, 0.1), figures("previous", 0.9)], served[:2]
    )
    assert (bars.above_frequency, bars.above_previous, bars.both_over_either) == ((1, 2), False, None)
    assert judge([], []).gap_closed is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    tiny = build_mlx(tmp_path_factory.mktemp("tiny"))
    draft = write_draft(tmp_path_factory.mktemp("drafts") / "own", tiny, contraction="mean")
    write_near(tiny)
    write_sidecar(draft, tiny)
    return tiny, draft


def asked_of(tiny: Path, draft: Path | None, kind: str, slots: tuple[int, ...] = (6,)) -> PredictorsAsked:
    request = PlanRequest(context_tokens=128, draft_directory=draft)
    return PredictorsAsked(
        Asked(
            directory=tiny,
            label="tiny",
            request=request,
            slots=slots,
            drafts=[(kind, 0)],
            hints=[],
            prompts=[prompt_of(12)],
            prompt_set="one prompt",
            num_tokens=6,
            repetitions=1,
            page_cache="as-is",
        )
    )


def test_every_predictor_is_scored_and_every_source_served(whole):
    tiny, draft = whole
    report = measure_predictors(asked_of(tiny, draft, "dflash2", (6, 9)), detect_machine())
    assert [one.name for one in report.figures] == [
        "random", "frequency", "token-frequency", "previous", "near-gate", "near-linear",
        "sidecar-early", "sidecar", "sidecar-refreshed", "both", "oracle",
    ]  # fmt: skip
    by_name = {one.name: one for one in report.figures}
    assert by_name["oracle"].recall == (1.0, 1.0, 1.0, 1.0)
    assert by_name["near-gate"].by_layer[0] == 0
    assert by_name["near-linear"].by_layer[:2] == (0, 0)
    assert all(0 <= recall <= 1 for one in report.figures for recall in one.recall)
    assert all(list(one.recall) == sorted(one.recall) for one in report.figures)
    early = by_name["sidecar-early"].by_row
    assert early[0] is not None
    assert early[0] > 0, "heard before every proposal"
    assert set(early[1:]) == {None}
    sources = ("off", "frequency", "previous", "random", "near-gate", "near-linear", "sidecar", "both",
               "oracle-draft")  # fmt: skip
    assert [(one.slots, one.hints) for one in report.served] == [
        (slots, hints) for slots in (6, 9) for hints in sources
    ]
    assert report.wait is not None
    assert len(report.wait.variants) == len(report.served)
    assert not any(one.stopped for one in report.served)
    assert report.num_rows[0] >= 2
    assert report.draft_ns is not None
    assert report.head_ns is not None
    assert report.to_dict()["format"] == "flashnext-predictors"


def test_without_files_the_rest_is_scored_and_the_absence_said(tmp_path):
    bare = build_mlx(tmp_path / "bare")
    report = measure_predictors(asked_of(bare, None, "none"), detect_machine())
    assert {"near-linear", "sidecar", "both"}.isdisjoint(one.name for one in report.figures)
    assert {"near-linear", "sidecar", "both"}.isdisjoint(one.hints for one in report.served)
    assert "there is no near map" in " ".join(report.notices)
    assert report.draft_ns is None
    assert report.bars.gap_closed is None


def test_timing_a_drafter_changes_nothing_of_it():
    class Inner:
        kind, tells_routes = "inner", False

        def propose(self, k, sampling):
            return k, self.tells_routes

    timed = TimedDrafter(Inner())  # type: ignore[arg-type]
    assert timed.kind == "inner"
    assert timed.propose(3, None) == (3, False)  # type: ignore[arg-type]
    timed.tells_routes = True
    assert timed.propose(3, None) == (3, True)  # type: ignore[arg-type]
    assert len(timed.times) == 2
