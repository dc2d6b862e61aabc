"""Proposals from the text so far: what followed the last time that its latest tokens occurred.

Entry point: `LookupDrafter`. Prompt and answer are one text (an index of the prompt alone never matches in a
chat, and was a defect elsewhere).

The index is a chained hash table, as in LZ77 compressors: `_heads` has the last place of every hash of
`MIN_MATCH` tokens, `_links` leads from each place to the one before it with the same hash. Appending a token
is one entry; so is taking it back, so that any prefix can be returned to exactly.

Invariants:
L1. `_text[:-1]` are the rows the target keeps, `_text[-1]` is the anchor.
L2. Every place p of the text with `MIN_MATCH` tokens up to it is the head of its chain or linked from a later
    place; no chain leads beyond the text.
L3. Memory is allocated once, `BYTES_PER_TOKEN` for every token of the context.

Source: dflash2.md 4.3.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from drafter.api import MAX_PROPOSALS, DraftSampling, Law, Proposal
from drafter.errors import DrafterError

# Fewer agree by chance. Over 1575 tokens of the demo's answers, two matched tokens propose in 21 % of cycles
# and are right in 35 %, three in 12 % and 47 %, four in 9 % and 48 %. Where a further row costs a quarter of
# a step, three gain most (9.4 %); at half a step three to six are even with no drafter, and two lose 9 %.
# `python -m bench.studies.lookup_match`
MIN_MATCH = 3
# A match longer than this decides as well as a longer one.
LONG_MATCH = 32
# Places looked at for one proposal, latest first: bounds the work where a text repeats itself without end.
MAX_CANDIDATES = 64
# Token, link, and one to two heads.
BYTES_PER_TOKEN = 16

_NOWHERE = -1
_MULTIPLIER = 0x9E3779B1
_MASK32 = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class LookupSnapshot:
    """Rows, the anchor after them (None before the first row), and how many returns came before."""

    num_rows: int
    anchor: int | None
    num_returns: int


class LookupDrafter:
    """Proposes what followed the longest match of the text's end; the latest one among equals.

    Args:
        capacity_tokens: tokens that a sequence may have.
        min_match: tokens that must agree before anything is proposed.

    Attributes:
        num_hits: proposals made from a match.
        num_misses: times that nothing matched.
    """

    kind = "lookup"
    law: Law = "point"
    needs_stack = False

    def __init__(self, capacity_tokens: int, *, min_match: int = MIN_MATCH) -> None:
        self._min_match = min_match
        self._capacity = capacity_tokens + 1  # the anchor may stand beyond the last row
        self._num_heads = 1 << self._capacity.bit_length()
        self._heads = array("i", [_NOWHERE]) * self._num_heads
        self._links = array("i", [_NOWHERE]) * self._capacity
        self._text = array("i", [0]) * self._capacity
        self._length = 0
        self._returns: list[int] = []
        self.num_hits = 0
        self.num_misses = 0

    def max_proposals(self) -> int:
        """Return the most tokens that one proposal may have."""
        return MAX_PROPOSALS

    def reset(self) -> None:
        """Forget the sequence."""
        self._return_to(0)

    def observe(self, tokens: Sequence[int], next_token: int, stack_TGD: mx.array | None = None) -> None:
        """Append rows and the token after them; see `Drafter`.

        Raises:
            DrafterError: more tokens than the capacity.
        """
        del stack_TGD
        num_rows = self.num_rows
        if num_rows + len(tokens) + 1 > self._capacity:
            raise DrafterError(
                f"A text of {num_rows + len(tokens) + 1} tokens does not fit an index of {self._capacity}",
                hint="plan a longer context",
            )
        self._cut(num_rows)  # after a return another token may have come than the anchor then
        for token in (*tokens, next_token):
            self._append(token)

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Return up to `k` tokens that followed the longest match, or none; see `Drafter`."""
        del sampling
        place, length = self.longest_match()
        if not length:
            self.num_misses += 1
            return Proposal(())
        self.num_hits += 1
        proposed: list[int] = []
        for index in range(place + 1, place + 1 + min(k, MAX_PROPOSALS)):
            # A match that reaches the end of the text goes on in what it proposes: a period repeats.
            proposed.append(self._text[index] if index < self._length else proposed[index - self._length])
        return Proposal(tuple(proposed))

    def longest_match(self) -> tuple[int, int]:
        """Return where the text's end occurred before (the place of its last token) and how much agrees.

        Returns:
            Place and length, at most `LONG_MATCH`; (-1, 0) if less than `min_match` tokens agree anywhere.
        """
        end = self._length - 1
        best_place, best_length = _NOWHERE, 0
        place = self._links[end] if end >= self._min_match - 1 else _NOWHERE
        for _ in range(MAX_CANDIDATES):
            if place == _NOWHERE:
                break
            length = self._agreement(place, end)
            if length > best_length:
                best_place, best_length = place, length
            if length >= LONG_MATCH:
                break
            place = self._links[place]
        return (best_place, best_length) if best_length >= self._min_match else (_NOWHERE, 0)

    @property
    def num_rows(self) -> int:
        """Return the rows taken note of."""
        return max(0, self._length - 1)

    def snapshot(self) -> LookupSnapshot:
        """Return the place in the text; nothing is copied."""
        anchor = self._text[self._length - 1] if self._length else None
        return LookupSnapshot(self.num_rows, anchor, len(self._returns))

    def restore(self, snapshot: object) -> None:
        """Go back to an earlier point of this text.

        Raises:
            DrafterError: a return to less has replaced the rows since, or the snapshot is of something else.
        """
        if not isinstance(snapshot, LookupSnapshot) or snapshot.num_rows > min(
            (self.num_rows, *self._returns[snapshot.num_returns :])
        ):
            raise DrafterError("The text of this snapshot is gone", hint="observe the text from the start")
        self._return_to(snapshot.num_rows)
        if snapshot.anchor is not None:
            self._append(snapshot.anchor)

    def num_bytes(self) -> int:
        """Return the bytes of the index."""
        return sum(part.itemsize * len(part) for part in (self._heads, self._links, self._text))

    def describe(self) -> dict[str, object]:
        """Return kind, counters and sizes."""
        return {
            "kind": self.kind,
            "min_match": self._min_match,
            "tokens": self._length,
            "hits": self.num_hits,
            "misses": self.num_misses,
        }

    def _append(self, token: int) -> None:
        place = self._length
        self._text[place] = token
        self._length += 1
        if place >= self._min_match - 1:
            head = self._hash(place)
            self._links[place] = self._heads[head]
            self._heads[head] = place

    def _return_to(self, num_rows: int) -> None:
        self._cut(num_rows)
        self._returns.append(num_rows)

    def _cut(self, length: int) -> None:
        """Take back tokens, latest first, so that every chain is what it was at that length."""
        for place in range(self._length - 1, max(length, self._min_match - 1) - 1, -1):
            self._heads[self._hash(place)] = self._links[place]
        self._length = min(self._length, length)

    def _agreement(self, place: int, end: int) -> int:
        text, length = self._text, 0
        most = min(LONG_MATCH, place + 1)
        while length < most and text[place - length] == text[end - length]:
            length += 1
        return length

    def _hash(self, place: int) -> int:
        value = 0
        for token in self._text[place - self._min_match + 1 : place + 1]:
            value = ((value ^ token) * _MULTIPLIER) & _MASK32
        return (value ^ (value >> 15)) % self._num_heads
