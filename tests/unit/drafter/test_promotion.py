"""What the ladder measured counts for the author's contraction where it is of this draft on this build."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from drafter.compat import Verdict, check_draft
from drafter.facts import TargetFacts
from tests.tiny.drafts import contract, listing, target_facts

Change = Callable[[dict[str, Any]], None]


def promotion() -> dict[str, Any]:
    """A record as `draft promote` writes it, of the tiny draft on the tiny target."""
    figures = {"best_logit_by_slot": [0.9, 0.8, 0.7], "tokens_per_cycle": 4.25, "num_positions": 100}
    row = {"code": "G14", "compared": "contraction", "draft": "mean", "consequence": "warn", "message": ""}
    return {
        "format": "flashnext-draft-promotion",
        "version": 1,
        "date": "2026-11-30",
        "draft_digest": "d" * 64,
        "target_digest": target_facts().digest,
        "runtime_version": "0.1.0",
        "is_promoted": True,
        "rungs": [
            {"name": "schema", "outcome": "passed", "why": "", "evidence": {"reasons": [row]}},
            {"name": "training", "outcome": "not asked", "why": "", "evidence": {}},
            {"name": "held-out acceptance", "outcome": "passed", "why": "", "evidence": {"all": figures}},
        ],
    }


def judged(evidence: dict[str, Any] | bytes, target: TargetFacts | None = None) -> Verdict:
    data = evidence if isinstance(evidence, bytes) else json.dumps(evidence).encode()
    draft = dataclasses.replace(listing(contract=contract(), record=None), promotion=data)
    return check_draft(draft, target_facts() if target is None else target)


def g14(verdict: Verdict) -> list[tuple[str, str]]:
    return [(one.compared, one.consequence) for one in verdict.reasons if one.code == "G14"]


def test_a_promotion_on_this_build_is_a_measurement() -> None:
    verdict = judged(promotion())
    assert g14(verdict) == [("contraction", "info")]
    assert verdict.contraction == "mean"
    said = next(one.message for one in verdict.reasons if one.code == "G14")
    assert "4.25 tokens a cycle of held-out text, 2026-11-30" in said


def put(*path: str | int, value: object) -> Change:
    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value

    return change


NO_EVIDENCE: dict[str, Change] = {
    "of another draft": put("draft_digest", value="e" * 64),
    "on another build": put("target_digest", value="e" * 64),
    "with another contraction": put("rungs", 0, "evidence", "reasons", 0, "draft", value="final_mix"),
    "with a contraction nobody wrote down": put("rungs", 0, "evidence", value={"reasons": []}),
    "not let in": put("rungs", 0, "outcome", value="failed"),
    "not passed": put("rungs", 2, "outcome", value="failed"),
    "not reached": lambda document: document["rungs"].pop(),
    "lost at the first slot": put("rungs", 2, "evidence", "all", "best_logit_by_slot", value=[0.5, 0.9]),
    "without figures": put("rungs", 2, "evidence", value={}),
    "with figures that cannot be": put("rungs", 2, "evidence", "all", "best_logit_by_slot", value=[1.5]),
}


@pytest.mark.parametrize("name", NO_EVIDENCE)
def test_one_that_does_not_settle_it_leaves_the_authors_word(name: str) -> None:
    document = copy.deepcopy(promotion())
    NO_EVIDENCE[name](document)
    verdict = judged(document)
    assert g14(verdict) == [("contraction", "warn")]
    assert verdict.refusals == ()
    hint = next(one.hint for one in verdict.reasons if one.code == "G14")
    assert "flashnext draft calibrate" in hint


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"[" * 100_000, b'{"format": "x"}', b"x" * (2 << 20)],
)
def test_a_damaged_one_is_said_and_refuses_nothing(data: bytes) -> None:
    verdict = judged(data)
    assert g14(verdict) == [("promotion", "warn"), ("contraction", "warn")]
    assert verdict.refusals == ()


@pytest.mark.parametrize("field", [("version", 2), ("format", "flashnext-draft-calibration"), ("rungs", {})])
def test_another_document_is_none(field: tuple[str, object]) -> None:
    assert g14(judged(promotion() | dict([field])))[0] == ("promotion", "warn")
