"""Proposals from a recorded run, spoiled at a chosen rate: for tests and benches.

Entry point: `OracleDrafter`. At rate 0 every proposal is right (the upper bound of any drafter), at rate 1
every one is wrong: full, partial and no acceptance without any weights.

Source: dflash2.md 4.3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from drafter.api import MAX_PROPOSALS, DraftSampling, Law, Proposal
from drafter.counted_rows import CountedRows
from drafter.errors import DrafterError


class OracleDrafter(CountedRows):
    """Proposes what a recorded run said at the same positions.

    Args:
        recorded: the whole sequence of the run, prompt and answer.
        vocab_size: ids are below it; a spoiled token is any other id.
        error_rate: how likely a token is spoiled; decided by seed and position alone.
        seed: of the spoiling.
    """

    kind = "oracle"
    law: Law = "point"
    needs_stack = False

    def __init__(
        self, recorded: Sequence[int], vocab_size: int, *, error_rate: float = 0.0, seed: int = 0
    ) -> None:
        if not 0 <= error_rate <= 1 or vocab_size < 2:
            raise DrafterError(
                f"An error rate of {error_rate} in a vocabulary of {vocab_size} cannot be had",
                hint="give a rate from 0 to 1 and at least two ids",
            )
        super().__init__()
        self._recorded = tuple(recorded)
        self._vocab_size = vocab_size
        self._error_rate = error_rate
        self._seed = seed

    def max_proposals(self) -> int:
        """Return the most tokens that one proposal may have."""
        return MAX_PROPOSALS

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Return up to `k` recorded tokens after the anchor, some of them spoiled; see `Drafter`."""
        del sampling
        first = self._num_rows + 1
        last = min(first + min(k, MAX_PROPOSALS), len(self._recorded))
        return Proposal(tuple(self._token(position) for position in range(first, last)))

    def describe(self) -> dict[str, object]:
        """Return kind, rate and seed."""
        return {"kind": self.kind, "error_rate": self._error_rate, "seed": self._seed}

    def _token(self, position: int) -> int:
        true = self._recorded[position]
        digest = hashlib.blake2b(f"{self._seed} {position}".encode(), digest_size=16).digest()
        if int.from_bytes(digest[:8]) >= int(self._error_rate * (1 << 64)):
            return true
        return (true + 1 + int.from_bytes(digest[8:]) % (self._vocab_size - 1)) % self._vocab_size
