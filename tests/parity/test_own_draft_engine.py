"""A draft of one's own in the engine: plain decode's answer, the gate's decision, nothing shared."""

import json
import shutil
from pathlib import Path

import pytest

from drafter import contract
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import IncompatibleDrafter, MissingDrafter
from mlx_flashnext.engine.plan import PlanRequest
from tests.parity.test_speculative_equals_plain import NUM_TOKENS, SAMPLINGS, answer, assert_same_state, plain
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of
from tests.tiny.own_drafts import write_draft


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    return write_draft(tmp_path_factory.mktemp("drafts") / "own", tiny_dir)


def drafting(tiny_dir: Path, draft: Path | None, *, kind: str = "dflash2", step: int | None = None) -> Engine:
    return Engine.open(
        tiny_dir,
        PlanRequest(
            context_tokens=512,
            slots_per_layer=6,
            prefill_step=step,
            draft=kind,
            draft_directory=draft,
        ),
    )


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("step", [7, 512])
def test_text_and_state_are_those_of_plain_decode(
    tiny_dir: Path, draft_dir: Path, sampling: str, step: int
) -> None:
    params, prompt = SAMPLINGS[sampling], prompt_of(30)
    with open_tiny(tiny_dir, slots=6, step=step) as engine:
        expected, before = plain(engine, prompt, params)
        with drafting(tiny_dir, draft_dir, step=step) as drafted:
            session = drafted.session(is_guarded=False)
            got = answer(session, prompt, params, rule="coupled")
            assert (got.tokens, got.text) == (expected.tokens, expected.text)
            assert_same_state(session, before)
            draft = got.end.statistics.draft
            assert (draft.drafter, draft.used, draft.reason) == ("dflash2", "dflash2", None)
            assert draft.num_proposed > NUM_TOKENS
            assert [line.name for line in drafted.plan.lines if "draft" in line.name] == [
                f"draft {part}" for part in ("weights", "context", "features", "candidates", "scratch")
            ]


def test_a_second_request_starts_with_nothing_of_the_first(tiny_dir: Path, draft_dir: Path) -> None:
    """Defect 12: two requests, the second shorter."""
    with drafting(tiny_dir, draft_dir) as engine:
        fresh = answer(engine.session(is_guarded=False), prompt_of(9, seed=3), SAMPLINGS["greedy"])
        session = engine.session(is_guarded=False)
        answer(session, prompt_of(60), SAMPLINGS["greedy"])
        again = answer(session, prompt_of(9, seed=3), SAMPLINGS["greedy"])
        assert again.tokens == fresh.tokens
        assert again.end.statistics.draft == fresh.end.statistics.draft


@pytest.mark.parametrize("length", range(40, 48))
def test_after_a_prefix_hit_proposals_are_those_of_a_fresh_run(
    tiny_dir: Path, draft_dir: Path, length: int
) -> None:
    """P33, defects 14 to 16."""
    prompt = prompt_of(length)
    with drafting(tiny_dir, draft_dir) as engine:
        session = engine.session(is_guarded=False)
        first = answer(session, prompt, SAMPLINGS["greedy"], max_tokens=8)
        second = [*prompt[: length - 5], *first.tokens[3:], *prompt_of(21, seed=9)]
        again = answer(session, second, SAMPLINGS["greedy"])
        fresh = answer(engine.session(is_guarded=False), second, SAMPLINGS["greedy"])
        assert again.end.statistics.reused_tokens > 0
        assert again.tokens == fresh.tokens
        assert again.end.statistics.draft == fresh.end.statistics.draft


def test_a_draft_beside_the_model_is_found_and_auto_prefers_it(
    tmp_path: Path, tiny_dir: Path, draft_dir: Path
) -> None:
    """The directory's own name is nobody's identity: a copied checkpoint keeps its draft."""
    copied = tmp_path / "elsewhere"
    shutil.copytree(tiny_dir, copied)
    with drafting(copied, None, kind="auto") as engine:
        assert engine.plan.draft == "mtp"
        assert "no draft lies beside" in engine.plan.draft_reason
    with pytest.raises(MissingDrafter) as missing:
        drafting(copied, None)
    assert "--draft-model" in missing.value.hint
    shutil.copytree(draft_dir, copied / "draft")
    for kind in ("auto", "dflash2"):
        with drafting(copied, None, kind=kind) as engine:
            assert engine.plan.draft == "dflash2"


def test_another_build_of_the_target_is_said(tmp_path: Path, draft_dir: Path) -> None:
    """G19: the same geometry with other weights."""
    other = build_mlx(tmp_path / "other", seed=5)
    with drafting(other, draft_dir) as engine:
        assert any(notice.startswith("G19") for notice in engine.notices)


def test_the_gate_keeps_out_what_does_not_fit_and_auto_goes_on_without(
    tmp_path: Path, tiny_dir: Path, draft_dir: Path
) -> None:
    copied, broken = tmp_path / "elsewhere", tmp_path / "broken"
    shutil.copytree(tiny_dir, copied)
    shutil.copytree(draft_dir, broken)
    config = json.loads((broken / "config.json").read_text())
    config["hidden_size"] += 32
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(IncompatibleDrafter, match=r"G\d\d") as refused:
        drafting(copied, broken)
    assert refused.value.hint
    assert refused.value.context["reasons"]
    shutil.copytree(broken, copied / "draft")
    with drafting(copied, None, kind="auto") as engine:
        assert engine.plan.draft == "mtp"
        assert "refused" in engine.plan.draft_reason


def test_without_a_contract_the_draft_is_refused_with_what_to_run(
    tmp_path: Path, tiny_dir: Path, draft_dir: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(draft_dir, bare)
    (bare / contract.FILE).unlink()
    with pytest.raises(IncompatibleDrafter) as refused:
        drafting(tiny_dir, bare)
    assert "flashnext draft calibrate" in refused.value.hint
