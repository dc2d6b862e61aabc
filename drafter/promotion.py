"""What the promotion ladder measured of a draft on one target build, as far as the gate asks.

Entry point: `read_promotion`.

The ladder (`flashnext draft promote`) drafts held-out text of the target with features made as the draft's
author declares. That is no comparison of contractions, which a calibration is; but a draft whose features
were made in another way than in training does not find the target's next token in more than half of all
positions, so it settles whether the author's word holds on this target.

Source: dflash2.md 1.14 (the figure and its bound).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from drafter.calibration import MIN_AGREEMENT, Share
from drafter.documents import DocumentRefused, check_version, parse_object

FORMAT = "flashnext-draft-promotion"
VERSION = 1
FILE = "flashnext-promotion.json"
SCHEMA, HELD_OUT = "schema", "held-out acceptance"


class _Figures(msgspec.Struct, frozen=True):
    best_logit_by_slot: Annotated[list[Share], msgspec.Meta(min_length=1, max_length=32)]
    tokens_per_cycle: Annotated[float, msgspec.Meta(ge=0, le=33)]


class _HeldOut(msgspec.Struct, frozen=True):
    all: _Figures


class _Row(msgspec.Struct, frozen=True):
    code: str
    compared: str
    draft: str


class _Gate(msgspec.Struct, frozen=True):
    reasons: Annotated[list[_Row], msgspec.Meta(max_length=256)]


class _Rung(msgspec.Struct, frozen=True):
    name: str
    outcome: Literal["passed", "failed", "not reached", "only target hardware", "not asked"]
    evidence: msgspec.Raw


_Evidence = TypeVar("_Evidence", _HeldOut, _Gate)


class Promotion(msgspec.Struct, frozen=True):
    """The document, without what only people read; see docs/FORMATS.md."""

    format: str
    version: int
    date: str
    draft_digest: str
    target_digest: str
    rungs: Annotated[list[_Rung], msgspec.Meta(max_length=64)]

    @property
    def contraction(self) -> str | None:
        """Return how features were made, as the gate saw it when the ladder was climbed."""
        seen = self._evidence(SCHEMA, _Gate)
        rows = () if seen is None else seen.reasons
        return next((row.draft for row in rows if (row.code, row.compared) == ("G14", "contraction")), None)

    @property
    def agreement(self) -> float | None:
        """Return how often the best logit of the first slot was the target's token; None: not passed."""
        found = self._evidence(HELD_OUT, _HeldOut)
        return None if found is None else found.all.best_logit_by_slot[0]

    @property
    def tokens_per_cycle(self) -> float | None:
        """Return what greedy service of held-out text would commit a cycle; None: not passed."""
        found = self._evidence(HELD_OUT, _HeldOut)
        return None if found is None else found.all.tokens_per_cycle

    def confirms(self, contraction: str, draft_digest: str, target_digest: str) -> bool:
        """Return whether this draft found its way on this very build, with features made in this way."""
        said = self.contraction, self.draft_digest, self.target_digest
        agreement = self.agreement
        is_of_this = said == (contraction, draft_digest, target_digest)
        return is_of_this and agreement is not None and agreement > MIN_AGREEMENT

    def _evidence(self, name: str, kind: type[_Evidence]) -> _Evidence | None:
        """Return the evidence of a rung that was passed; None if there is none of this form."""
        for rung in self.rungs:
            if rung.name == name and rung.outcome == "passed":
                try:
                    return msgspec.json.decode(rung.evidence, type=kind)
                except msgspec.MsgspecError:
                    return None
        return None


def read_promotion(data: bytes) -> Promotion:
    """Return the evidence of a file.

    Raises:
        DocumentRefused: it is no such document, or of another version.
    """
    parse_object(data, FILE)  # refuses what msgspec would take: keys listed twice, endless numbers
    try:
        found = msgspec.json.decode(data, type=Promotion)
    except msgspec.MsgspecError as error:
        raise DocumentRefused(f"{FILE} is no promotion record: {error}") from None
    check_version(FILE, (found.format, found.version), (FORMAT, VERSION))
    return found
