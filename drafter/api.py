"""What a drafter is: the words between a source of proposals and the engine that verifies them.

The engine owns budget, stop ids, verification and rollback. A drafter only guesses: nothing it returns, and
no fault of it, changes what the target says.

Words: *committed* tokens are final. The *anchor* is the last committed token, which the target has not
consumed. A *row* is one token position in a forward pass of the target; its stack is what the last layer left
there.

Source: dflash2.md 4.2 (protocol), 3.3 (laws of a proposal).
"""

# Shapes: T rows, G streams, D hidden, k proposals, K candidates of a proposal, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Law = Literal["point", "rows"]

# The most any drafter proposes at a time: beyond it every row verified reads more experts than a token saves.
MAX_PROPOSALS = 16


@dataclass(frozen=True, slots=True, eq=False)
class RouteHints:
    """What a drafter says of the experts that its proposal's rows will want. Moves bytes, decides nothing.

    Attributes:
        codes: float32 [k + 1, r], one for the anchor and every proposed token; `drafter.sidecar.RouteHead`
            reads experts and confidences out of them. Early ones are [1, r], of the anchor's row alone.
    """

    codes: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guessed tokens, and the distribution each was drawn from.

    Attributes:
        tokens: ids that may follow the anchor, in order; may be empty.
        law: `point`: every token was chosen, not drawn. `rows`: token j was drawn from row j.
        row_ids: candidate ids [k, K], int32; for point masses None, or what they were chosen from.
        row_probs: for `rows` their probabilities [k, K], float32, each row summing to 1; for point masses
            None, or scores of any scale, the token's the best. Verification looks at those of `rows` alone.
        confidence: for every token how likely it seems to be accepted, or empty.
        routes: which experts the rows will want, from a drafter that can tell and was asked to.
    """

    tokens: tuple[int, ...]
    law: Law = "point"
    row_ids: mx.array | None = None
    row_probs: mx.array | None = None
    confidence: tuple[float, ...] = ()
    routes: RouteHints | None = None


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the target will choose, for a drafter that draws its proposals.

    Attributes:
        temperature: of the target; 0 is greedy.
        seed: of the answer; draws are keyed by it and their position.
        position: of the first proposed token, counted from the start of the sequence.
    """

    temperature: float
    seed: int
    position: int


class Drafter(Protocol):
    """A source of proposals for one sequence at a time. Every call on the inference thread.

    Attributes:
        kind: what it is called in statistics: `lookup`, `mtp`, `oracle`.
        law: of its proposals.
        needs_stack: whether `observe` wants the target's stack rows.
    """

    kind: str
    law: Law
    needs_stack: bool

    def max_proposals(self) -> int:
        """Return the most tokens that one proposal may have."""
        ...

    def reset(self) -> None:
        """Forget the sequence: the next `observe` is of position 0."""
        ...

    def observe(self, tokens: Sequence[int], next_token: int, stack_TGD: mx.array | None) -> None:
        """Take note of rows that the target has consumed and keeps.

        Called for every prefill chunk and after every cycle, in order, without gap or overlap. Rows that
        verification rejected are never handed over.

        Args:
            tokens: of the rows; at least one.
            next_token: the committed token after them: the next row's token, or the new anchor.
            stack_TGD: stack of every row; None unless `needs_stack`.

        Raises:
            DrafterError: rows are missing or of the wrong shape; the sequence cannot go on with this drafter.
        """
        ...

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Guess what follows the anchor, which is the last `next_token`.

        Leaves no trace but counters: called twice it returns the same.

        Args:
            k: most tokens wanted; 0 or more.
            sampling: how the target will choose.

        Returns:
            At most `min(k, max_proposals())` tokens.
        """
        ...

    def snapshot(self) -> object:
        """Return what `restore` needs to come back to this point; cheap."""
        ...

    def restore(self, snapshot: object) -> None:
        """Go back to a snapshot of this sequence, all or nothing.

        Raises:
            DrafterError: the snapshot is not of this sequence, or later rows have replaced its own.
        """
        ...

    def num_bytes(self) -> int:
        """Return the bytes that the sequence holds here."""
        ...

    def describe(self) -> dict[str, object]:
        """Return what it is and what it counted, as plain values, for statistics and diagnostics."""
        ...


class CellCache(Protocol):
    """Cache of an MTP module for one sequence; only `TargetView` looks inside."""

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        ...


class TargetView(Protocol):
    """What the `mtp` drafter may do with the target: run cells of its module, and read values.

    A cell for position i takes the stack of row i and the token at i + 1, and tells of the token at i + 2.
    """

    def new_cache(self) -> CellCache:
        """Return the cache of an empty sequence."""
        ...

    def extend(self, stack_TGD: mx.array, next_tokens: Sequence[int], cache: CellCache) -> None:
        """Append cells of consecutive positions for later cells to look at; submitted, not waited for.

        Args:
            stack_TGD: the target's stack of every position.
            next_tokens: the token after every position.
            cache: cells of all positions before; unchanged if this raises.
        """
        ...

    def run_cell(
        self, stack_1GD: mx.array, next_token: Sequence[int] | mx.array, cache: CellCache
    ) -> tuple[mx.array, mx.array]:
        """Append one cell and return its logits [1, V] and its stack [1, G, D], lazy.

        Args:
            stack_1GD: the target's stack of the position, or the stack of the cell before.
            next_token: the token after it, on the host, or a lazy int32 [1].
            cache: cells of all positions before; unchanged if this raises.
        """
        ...

    def mark(self, cache: CellCache) -> object:
        """Return what `rewind` needs to come back to this point; nothing is copied."""
        ...

    def rewind(self, cache: CellCache, mark: object) -> None:
        """Drop the cells appended since `mark`; they leave no trace in what is kept.

        Raises:
            DrafterError: the mark is not of this cache, or later cells have replaced its own.
        """
        ...

    def to_host(self, array: mx.array) -> Any:
        """Wait for `array` and return its values as a number or nested lists; the wait is counted."""
        ...


class Draw(Protocol):
    """Draws a candidate: the key law of the engine's own sampler, for proposals."""

    def __call__(self, scores_K: mx.array, seed: int, position: int, /) -> mx.array:
        """Return a lazy index into `scores_K`, log-probabilities up to a constant."""
        ...


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """Which values of the target's layers a drafter wants of every row that stays.

    Attributes:
        taps: 0-based layers, in the order in which their outputs are to stand side by side. The output is the
            stack after the layer, its pending writes applied.
        contraction: how the streams of a stack [T, G, D] become [T, D]: `mean`, `next_attn_mix`, `final_mix`
            or `stream0`.
        last_rows: rows at the end of a prompt that are enough; None: all are wanted.
    """

    taps: tuple[int, ...]
    contraction: str
    last_rows: int | None


class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads layers of the target. An engine finds it by its `feature_request`.

    The rows of a pass are handed over as soon as verification has said which stay, and may be forgotten then:
    `observe` fuses them at once and waits for nothing.
    """

    feature_request: FeatureRequest

    def observe(
        self,
        tokens: Sequence[int],
        next_token: int,
        stack_TGD: mx.array | None,
        *,
        features_RF: mx.array | None = None,
    ) -> None:
        """Take note of rows; see `Drafter.observe`.

        Args:
            tokens: of the rows.
            next_token: the committed token after them.
            stack_TGD: not looked at.
            features_RF: of the last R of these rows, F = taps * D wide. Fewer rows than tokens, or None, say
                that the rows before have none: the context then begins at the first row that has.
        """
        ...


class RouteDrafter(Drafter, Protocol):
    """A drafter that can say which experts its proposals will want. An engine finds it by `tells_routes`.

    Attributes:
        tells_routes: whether somebody reads them; proposals carry none while it is False.
        hears_early: told what the anchor's row will want before the drafter's own pass, if it knows so early;
            None for nobody. Costs one more read-back, of something that is there by then.
    """

    tells_routes: bool
    hears_early: Callable[[RouteHints], None] | None


class HeadView(Protocol):
    """What a drafter without embedding and head of its own borrows of the target. It frees nothing."""

    def embed(self, ids_T: mx.array) -> mx.array:
        """Return the raw embedding rows [T, D] of int32 ids, lazy; padding rows included."""
        ...

    def head(self, hidden_TD: mx.array) -> mx.array:
        """Return logits [T, V], lazy: the output head alone, without final norm or terminal mixer."""
        ...

    def to_host(self, array: mx.array) -> Any:
        """Wait for `array` and return its values as nested lists; the wait is counted."""
        ...
