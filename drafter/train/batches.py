"""From captured documents to what one step looks at: anchors, the tokens after them, and the rows before.

Entry points: `Blocks`, `StepSampler`. Only numpy: trainers of any framework see the same batches. What a
step looks at follows from seed and step number alone, so that a run that was resumed is the run that was
not.

Source: dflash2.md 5.2.
"""

# Shapes: R rows of context, F features side by side, A anchors, B slots.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError
from drafter.train.captures import CapturedDocument


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some blocks of one document, and the context that they share.

    Attributes:
        first: position of the first context row.
        features: float32 [R, F] of rows `first`, `first + 1`, ...; a block sees those before its anchor.
        starts: positions of the anchors, ascending.
        anchors: int32 [A], their tokens.
        targets: int32 [A, B - 1], the tokens after each.
    """

    first: int
    features: NDArray[np.float32]
    starts: tuple[int, ...]
    anchors: NDArray[np.int32]
    targets: NDArray[np.int32]

    @property
    def predecessors(self) -> NDArray[np.int32]:
        """Return, [A, B - 1], the token before each target."""
        return np.concatenate([self.anchors[:, None], self.targets[:, :-1]], axis=1)


def anchor_places(document: CapturedDocument, block_size: int) -> range:
    """Return the positions that a block may begin at: its targets are of the answer, and all there."""
    return range(max(1, document.num_prompt - 1), len(document.tokens) - block_size + 1)


def blocks_at(
    document: CapturedDocument, starts: Sequence[int], block_size: int, max_rows: int | None = None
) -> Blocks:
    """Return the blocks of a document that begin at some positions.

    Args:
        document: that they are of.
        starts: ascending positions with `block_size - 1` tokens after each.
        block_size: B.
        max_rows: rows of context before the first anchor that are kept; None keeps all.
    """
    first = 0 if max_rows is None else max(0, starts[0] - max_rows)
    places = np.asarray(starts)[:, None] + np.arange(1, block_size)
    return Blocks(
        first,
        document.features[first : starts[-1]],
        tuple(int(start) for start in starts),
        document.tokens[np.asarray(starts)],
        document.tokens[places],
    )


class StepSampler:
    """Says which blocks each step looks at.

    Args:
        documents: of the training split, those without room for a block left out.
        block_size: B.
        num_documents: of a step.
        num_anchors: of a document; fewer where there is no room.
        max_rows: rows of context of a document: with its anchors a window of the document.
        seed: of the run.

    Raises:
        DrafterError: no document has room for a block.
    """

    def __init__(
        self,
        documents: Sequence[CapturedDocument],
        block_size: int,
        *,
        num_documents: int,
        num_anchors: int,
        max_rows: int,
        seed: int,
    ) -> None:
        self._documents = [one for one in documents if anchor_places(one, block_size)]
        if not self._documents:
            raise DrafterError(
                f"No document has room for a block of {block_size}", hint="capture longer answers"
            )
        self._block_size, self._num_documents = block_size, num_documents
        self._num_anchors, self._max_rows, self._seed = num_anchors, max_rows, seed

    def step(self, number: int) -> list[Blocks]:
        """Return the blocks of a step: documents come in a new order every time all have been seen."""
        total = len(self._documents)
        first = number * self._num_documents
        found: list[Blocks] = []
        for place in range(first, first + self._num_documents):
            epoch, offset = divmod(place, total)
            order = np.random.default_rng((self._seed, 1, epoch)).permutation(total)
            document = self._documents[int(order[offset])]
            found.append(self._sample(document, np.random.default_rng((self._seed, 2, place))))
        return found

    def _sample(self, document: CapturedDocument, generator: np.random.Generator) -> Blocks:
        """Draw anchors from one window of the document."""
        places = anchor_places(document, self._block_size)
        begin = places.start
        if len(places) > self._max_rows:
            begin = int(generator.integers(places.start, places.stop - self._max_rows + 1))
        end = min(places.stop, begin + self._max_rows)
        count = min(self._num_anchors, end - begin)
        starts = np.sort(generator.choice(np.arange(begin, end), count, replace=False))
        return blocks_at(document, starts.tolist(), self._block_size, self._max_rows)
