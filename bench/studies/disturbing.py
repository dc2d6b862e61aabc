"""What disturbs the conversations of `fuzz_speculation`: reads that fail, and a drafter of every vice."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from drafter.api import DraftSampling, Law, Proposal
from expert_store.errors import StoreError
from expert_store.source import ByteSource

VOCAB = 128
TOO_MANY = 16


class Broken(Exception):
    """What a drafter or a caller raises here."""


class BreakableSource:
    """Files of which every read may fail from a chosen one on, for a while."""

    def __init__(self, inner: ByteSource) -> None:
        self._inner = inner
        self.reads_left: int | None = None

    def read_into(self, *arguments: Any) -> Any:
        """Read, or fail."""
        self._may_fail()
        return self._inner.read_into(*arguments)

    def read_runs(self, *arguments: Any) -> Any:
        """Read, or fail."""
        self._may_fail()
        return self._inner.read_runs(*arguments)

    def _may_fail(self) -> None:
        if self.reads_left is not None:
            self.reads_left -= 1
            if self.reads_left < 0:
                raise StoreError("a read failed on purpose")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass
class Told:
    """A drafter that is told the answer and proposes it, spoiled; it notes what the engine does wrong."""

    rng: random.Random
    error_rate: float
    fault_rate: float
    needs_stack: bool
    truth: list[int] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    kind: str = "told"
    law: Law = "point"
    _rows: list[int] | None = field(default_factory=list)
    _anchor: int | None = None
    _num_faults: int = 0

    def max_proposals(self) -> int:
        """Return the most tokens of one proposal."""
        return TOO_MANY

    def reset(self) -> None:
        """Forget the sequence."""
        self._rows, self._anchor = [], None

    def observe(self, tokens: Sequence[int], next_token: int, stack_TGD: mx.array | None = None) -> None:
        """Take rows, and complain if they are not the next ones."""
        self._may_fail()
        if self._anchor is not None and tokens[0] != self._anchor and not self._is_prompt_changed(tokens):
            self.complaints.append(f"{tokens} after an anchor of {self._anchor}")
        if self.needs_stack and (stack_TGD is None or stack_TGD.shape[0] != len(tokens)):
            self.complaints.append(f"no stack for every one of {len(tokens)} rows")
        if self._rows is not None:
            self._rows.extend(tokens)
        self._anchor = next_token

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Propose what is right, spoiled, or nonsense."""
        self._may_fail()
        if self.rng.random() < self.fault_rate:
            self._num_faults += 1
            return self.rng.choice(
                (Proposal((10**9,)), Proposal((-1,)), Proposal((1,) * (k + 1)), Proposal((1.5,)), None)  # type: ignore[arg-type]
            )
        length = self.rng.choice((0, k, k, k, self.rng.randint(0, k)))
        true = self.truth[sampling.position : sampling.position + length]
        guesses = [t if self.rng.random() >= self.error_rate else self.rng.randrange(VOCAB) for t in true]
        return Proposal(tuple(guesses))

    def snapshot(self) -> object:
        """Return rows and anchor."""
        return (list(self._rows or ()), self._anchor)

    def restore(self, snapshot: object) -> None:
        """Go back."""
        self._may_fail()
        assert isinstance(snapshot, tuple)
        self._rows, self._anchor = list(snapshot[0]), snapshot[1]

    def num_bytes(self) -> int:
        """Return nothing worth speaking of."""
        return 0

    def describe(self) -> dict[str, object]:
        """Return the kind."""
        return {"kind": self.kind}

    def _may_fail(self) -> None:
        if self.rng.random() < self.fault_rate:
            self._num_faults += 1
            raise Broken("on purpose")

    def _is_prompt_changed(self, tokens: Sequence[int]) -> bool:
        return not self.truth or tokens[0] not in self.truth
