"""The verification report: a sound engine meets every criterion, a planted fault breaks its own."""

import dataclasses

import mlx.core as mx
import pytest

from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.reports import verify_report as report_module
from mlx_flashnext.reports.verify_report import PROMPTS, TITLE, verify_report
from mlx_flashnext.state import Block
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny

SHORT = ("the cat sat on the mat",)
ALL = {
    "a row of a block chooses what it chooses alone",
    "accepted lengths are those planned",
    "nothing rejected stays committed",
    "the continuation is the reference's",
    "next logits are within the tolerance",
    "every logit is finite",
    "positions and cache lengths agree",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    with open_tiny(build_mlx(tmp_path_factory.mktemp("tiny")), slots=6, draft_tokens=2) as opened:
        yield opened


def unmet(engine) -> set[str]:
    criteria = verify_report(engine, None, SHORT).criteria
    return {criterion.name for criterion in criteria if not criterion.is_met}


def test_a_sound_engine_meets_every_criterion_on_the_three_prompts(engine):
    told: list[tuple[str, int, int]] = []
    report = verify_report(engine, lambda *progress: told.append(progress))
    assert report.is_passed
    assert {criterion.name for criterion in report.criteria} == ALL
    assert report.title == TITLE
    assert "not a draft's quality or speed" in TITLE
    assert len(PROMPTS) == len(report.prompt_tokens) == 3
    assert max(report.prompt_tokens) <= 128
    assert told[0] == ("one row against several", 1, 12)  # the relation comes before any block
    assert told[-1] == ("blocks", 12, 12)
    # One row and several are the same bits on the CPU backend; so nothing at all is allowed to differ.
    assert (report.row_difference, report.tolerance, report.state_tolerance) == (0, 0, 0)
    assert [(block.prompt, block.accepted) for block in report.blocks] == [
        (prompt, accepted) for prompt in range(3) for accepted in (2, 1, 0)
    ]
    for block in report.blocks:
        assert block.num_tokens == block.position + block.accepted + 1
        assert block.next_token == block.reference_token == block.continued[0]
        assert block.journal_bytes > 0
        assert block.verify_ns > 0 < block.rollback_ns


def test_a_wrong_token_is_neither_the_targets_nor_a_special_one(engine):
    special = engine.tokenizer.special_ids
    for block in verify_report(engine, None, SHORT).blocks:
        if block.accepted < 2:
            wrong = block.proposed[block.accepted]
            assert wrong not in special
            assert wrong != block.committed[-1]


def keep_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Block.commit
    monkeypatch.setattr(Block, "commit", lambda self, rows=None: commit(self))


def accept_one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    real = report_module.verify

    def verify(*arguments):
        verdict = real(*arguments)
        accepted = max(0, verdict.accepted - 1)
        return dataclasses.replace(verdict, accepted=accepted, tokens=verdict.tokens[: accepted + 1])

    monkeypatch.setattr(report_module, "verify", verify)


def change_logits(monkeypatch: pytest.MonkeyPatch, change) -> None:
    forward = FlashNext.forward

    def changed(self, tokens, *arguments, **named):
        output = forward(self, tokens, *arguments, **named)
        if output.logits is not None and len(tokens) > 1:
            return dataclasses.replace(output, logits=change(output.logits))
        return output

    monkeypatch.setattr(FlashNext, "forward", changed)


def round_blocks_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    change_logits(monkeypatch, lambda logits: mx.roll(logits, 1, axis=-1))


def lose_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    change_logits(monkeypatch, lambda logits: mx.where(mx.arange(logits.shape[-1]) == 3, mx.nan, logits))


@pytest.mark.parametrize(
    ("plant", "criteria"),
    [
        (keep_all_rows, {"nothing rejected stays committed", "positions and cache lengths agree"}),
        (accept_one_less, {"accepted lengths are those planned"}),
        (round_blocks_otherwise, {"a row of a block chooses what it chooses alone"}),
        (lose_a_number, {"every logit is finite"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_breaks_its_criterion(engine, plant, criteria, monkeypatch):
    plant(monkeypatch)
    assert criteria <= unmet(engine)


def test_a_prompt_without_a_row_before_the_anchor_is_refused(engine):
    with pytest.raises(InvalidRequest, match="at least two tokens"):
        verify_report(engine, None, ("a",))
