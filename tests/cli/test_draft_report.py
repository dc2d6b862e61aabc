"""`flashnext bench --report draft` on a tiny checkpoint: same answers, figures that fit together."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.engine.errors import BudgetTooSmall
from mlx_flashnext.engine.plan import PlanRequest, make_plan
from mlx_flashnext.reports import draft_report_run
from mlx_flashnext.reports.draft_report_run import Asked
from mlx_flashnext.reports.ssd_wait_run import DifferentText
from tests.tiny.checkpoints import build_mlx
from tests.tiny.machines import linux
from tests.tiny.own_drafts import write_draft

SMALL = ("--report", "draft", "-r", "2", "-n", "10", "--prompts", "1", "--slots", "12")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("drafts") / "model")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return write_draft(tmp_path_factory.mktemp("drafts") / "draft", model)


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


@pytest.fixture(scope="module")
def document(model: Path, draft: Path) -> dict:
    words = ("--drafts", "dflash2,oracle:3", "--draft-model", draft, "--json")
    result = flashnext("bench", "--model", model, *SMALL, *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def variant(document: dict, draft: str) -> dict:
    (found,) = [one for one in document["variants"] if one["draft"] == draft]
    return found


def test_target_only_comes_first_though_nobody_asked_for_it(document):
    assert document["format"] == "flashnext-draft-report"
    assert [one["draft"] for one in document["variants"]] == ["none", "dflash2", "oracle"]
    assert document["conditions"]["sampling"] == "greedy, stop tokens end an answer"
    assert document["left_out"] == []
    assert variant(document, "none")["ratios"] == [1.0, 1.0]


def test_figures_are_those_of_service_and_fit_together(document):
    """P43: committed tokens over cycles that were served."""
    plain, own, oracle = document["variants"]
    for one in document["variants"]:
        assert one["repetitions"] == len(one["ratios"]) == 2
        assert one["tokens_per_s_range"][0] <= one["tokens_per_s"] <= one["tokens_per_s_range"][1]
        assert one["failures"] == 0
        assert one["peak_array_bytes"] > 0
    assert (plain["tokens_per_cycle"], plain["proposing_share"], plain["accepted_share"]) == (1, 0, None)
    assert oracle["tokens_per_cycle"] == 10 / 3  # 4, 4 and what is left
    assert oracle["accepted_share"] == oracle["proposing_share"] == 1
    assert oracle["acceptance_by_slot"] == [1, 1, 1]
    assert own["num_draft_tokens"] == 7
    assert own["tokens_per_cycle"] < 1.5, "weights are random"


def test_phases_are_told_apart(document):
    plain, own, oracle = (one["costs"] for one in document["variants"])
    assert plain["draft_ns"] is plain["rollback_ns"] is plain["verify_ratio"] is None
    assert list(plain["verify_ns"]) == ["1"]
    assert own["draft_ns"] > 0
    assert own["rollback_ns"] > 0
    assert own["observe_ns"] > plain["observe_ns"]
    assert own["verify_rows"] is not None
    ratio = own["verify_ns"][str(own["verify_rows"])] / plain["verify_ns"]["1"]
    assert own["verify_ratio"] == pytest.approx(ratio)
    assert oracle["rollback_ns"] is None, "everything is kept"


def test_break_even_is_told_from_what_was_routed(document):
    """U_B < top_k x tau: a plain step asks for its top_k, a block for no more than all its rows do."""
    plain, own, oracle = (one["break_even"] for one in document["variants"])
    top_k = 4
    assert plain == {
        "unique": top_k, "unique_by_rows": {"1": top_k}, "tokens_per_cycle": 1, "plain": top_k, "ratio": 1,
    }  # fmt: skip
    for one in (own, oracle):
        assert one["plain"] == top_k * one["tokens_per_cycle"]
        assert one["ratio"] == pytest.approx(one["unique"] / one["plain"])
        for rows, unique in one["unique_by_rows"].items():
            assert top_k <= unique <= min(16, top_k * int(rows))
    assert oracle["tokens_per_cycle"] == 10 / 3
    assert oracle["ratio"] <= 1, "rows that are all kept share some experts"
    assert own["ratio"] > 1, "most rows of a draft with random weights are asked for in vain"


def test_what_a_draft_takes_is_told_in_experts(document):
    plain, own, oracle = (one["budget"] for one in document["variants"])
    assert (plain["draft_bytes"], plain["slots_lost"]) == (0, 0)
    assert own["draft_bytes"] > 0
    assert own["planned_bytes"] >= plain["planned_bytes"] + own["draft_bytes"]
    assert own["slots"] == plain["slots"] == 12, "--slots holds for every drafter"
    assert own["slots_lost"] == 12 - own["slots_at_same_memory"] > 0
    assert oracle["draft_bytes"] == 0


def test_under_a_memory_target_the_draft_is_paid_in_slots(model, draft):
    """P22: with a draft on the plan stays within the target, or is refused."""
    machine, checkpoint = linux(), open_checkpoint(model)
    request = PlanRequest(context_tokens=256, slots_per_layer=12)
    memory = make_plan(checkpoint, machine, request).total_bytes
    request = PlanRequest(context_tokens=256, memory_bytes=memory, draft_directory=draft)
    asked = Asked(model, "tiny", request, [("dflash2", 0), ("lookup", 4)], False, [[1]], "one", 4, 1, "as-is")
    variants, left_out, notices = draft_report_run._variants(asked, checkpoint, machine)
    plain, own, lookup = (one.budget for one in variants)
    assert (plain.slots, lookup.draft_bytes > 0, left_out) == (12, True, [])
    assert own.slots == own.slots_at_same_memory == plain.slots - own.slots_lost
    assert own.slots_lost > 0
    assert max(one.planned_bytes for one in (plain, own, lookup)) <= memory
    assert any(notice.startswith("G14") for notice in notices)
    tight = dataclasses.replace(request, memory_bytes=memory // 2)
    with pytest.raises(BudgetTooSmall):
        draft_report_run._variants(
            dataclasses.replace(asked, request=dataclasses.replace(tight, slots_per_layer=8)),
            checkpoint,
            machine,
        )


def test_people_see_the_same_and_what_is_missing_is_said(tmp_path, model):
    """A checkpoint with nothing beside it: what nobody named is left out by name."""
    words = ("--report", "draft", "-r", "1", "-n", "3", "--prompts", "1", "--slots", "12")
    result = flashnext("bench", "--model", model, *words)
    assert result.exit_code == 0, result.output
    headings = (
        "what is said",
        "kept of what is proposed",
        "phases of a cycle",
        "experts lost",
        "top_k x tau",
    )
    for heading in headings:
        assert heading in result.stdout
    assert "left out: dflash2: No draft there" in result.stdout
    for label in ("target-only", "mtp 2", "lookup 4", "oracle 4"):
        assert label in result.stdout
    assert "governor is off" in result.stdout


def test_a_drafter_that_was_named_must_be_there(tmp_path, model, draft):
    missing = flashnext("bench", "--model", model, *SMALL, "--drafts", "dflash2")
    assert missing.exit_code == 3
    assert "--draft-model" in missing.stderr
    broken = tmp_path / "broken"
    shutil.copytree(draft, broken)
    (broken / "config.json").write_text("{}")
    refused = flashnext("bench", "--model", model, *SMALL, "--draft-model", broken)
    assert refused.exit_code == 3, refused.output
    unread = flashnext("bench", "--model", model, *SMALL, "--drafts", "mtp", "--draft-model", draft)
    assert unread.exit_code == 2
    assert "Nothing reads --draft-model" in unread.stderr


def test_figures_of_another_text_are_refused(model, monkeypatch):
    honest = draft_report_run._answer

    def altered(engine, prompt, num_tokens, drafter=None, *others):
        said, figures = honest(engine, prompt, num_tokens, drafter, *others)
        return ([*said[:-1], said[-1] ^ 1] if drafter is not None else said), figures

    monkeypatch.setattr(draft_report_run, "_answer", altered)
    result = flashnext("bench", "--model", model, *SMALL, "--drafts", "oracle:2")
    assert result.exit_code == 1
    assert DifferentText.__name__ in result.stderr


def test_plain_bench_rows_take_a_draft_too(model, draft):
    words = ("-p", "0", "-n", "4", "-r", "1", "--slots", "8", "--drafts", "dflash2", "--draft-model", draft)
    result = flashnext("bench", "--model", model, *words, "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert (row["draft"], row["num_draft_tokens"]) == ("dflash2", 7)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--report", "draft", "--budgets", "zz"], "Nothing reads --budgets with --report draft: zz"),
        (["--report", "draft", "--hints", "off"], "Nothing reads --hints with --report draft: off"),
        (["--report", "verify", "--drafts", "mtp"], "Nothing reads --drafts with --report verify: mtp"),
        (["--report", "verify", "-n", "0"], "Nothing reads --n-gen with --report verify: 0"),
        (["--report", "warm-start", "--prompts", "3"], "Nothing reads --prompts with --report warm-start: 3"),
        (["--report", "ssd-wait", "-p", "64"], "Nothing reads --n-prompt with --report ssd-wait: 64"),
        (["--budgets", "10%"], "Nothing reads --budgets without --report: 10%"),
        (["--report", "draft", "--drafts", "dflash2:999"], "At most 16 tokens are drafted at a time"),
    ],
)
def test_what_a_report_does_not_read_is_refused_before_anything_is_opened(flags, said):
    refused = flashnext("bench", *flags)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert "hint:" in refused.stderr
