"""Proposals of a recorded run of another drafter, at the same committed lengths.

Entry points: `ReplayDrafter`, `recorded_proposals`. A change of rule, governor or schedule can be compared on
identical proposals, without the draft's weights.

A recorded token is fixed before the target draws, whatever it was drawn from then; so its law is `point`
unless the run that is replayed is the recorded one itself (same seed, same rule), where the recorded rows are
the ones the tokens were drawn from.

Source: dflash2.md 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlx.core as mx

from drafter.api import DraftSampling, FeatureRequest, Law, Proposal
from drafter.counted_rows import CountedRows
from drafter.record import Cycle, Line


def recorded_proposals(lines: Iterable[Line], *, keeps_law: bool = False) -> dict[int, Proposal]:
    """Return what was proposed, by position of the anchor; of a position that was drafted twice, the later.

    Args:
        lines: of a trace that was checked.
        keeps_law: hand over candidates, and the rows that tokens were drawn from; see the module.
    """
    return {
        line.sequence_position: _proposal(line, keeps_law=keeps_law)
        for line in lines
        if isinstance(line, Cycle) and line.candidate_token_ids
    }


def _proposal(line: Cycle, *, keeps_law: bool) -> Proposal:
    if not keeps_law:
        return Proposal(line.proposal)
    ids = mx.array(line.candidate_token_ids, mx.int32)
    values = mx.array(line.candidate_probabilities_or_logits, mx.float32)
    return Proposal(line.proposal, line.proposal_law, ids, values)


class ReplayDrafter(CountedRows):
    """Proposes what a recorded run proposed where the sequence had the same length.

    Args:
        proposals: by position of the anchor, from `recorded_proposals`.
        law: of them.
        request: features to ask of the target, if somebody wants to see them handed over.
        needs_stack: as `request`, for the last stack.

    Attributes:
        num_missing: times that it was asked where nothing is recorded.
    """

    kind = "replay"

    def __init__(
        self,
        proposals: Mapping[int, Proposal],
        *,
        law: Law = "point",
        request: FeatureRequest | None = None,
        needs_stack: bool = False,
    ) -> None:
        super().__init__()
        self.law: Law = law
        self.needs_stack = needs_stack
        self.feature_request = request
        self.num_missing = 0
        self._proposals = dict(proposals)

    def max_proposals(self) -> int:
        """Return the length of the longest recorded proposal."""
        return max((len(proposal.tokens) for proposal in self._proposals.values()), default=0)

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Return the first `k` tokens recorded at this length; none where nothing was. See `Drafter`."""
        del sampling
        recorded = self._proposals.get(self._num_rows)
        if recorded is None:
            self.num_missing += 1
            return Proposal(())
        ids, values = (None if each is None else each[:k] for each in (recorded.row_ids, recorded.row_probs))
        return Proposal(recorded.tokens[:k], recorded.law, ids, values)

    def describe(self) -> dict[str, object]:
        """Return kind and counts."""
        return {"kind": self.kind, "num_recorded": len(self._proposals), "num_missing": self.num_missing}
