"""One forward pass and its commit, for tests that are not about the transaction."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_flashnext.model.flashnext import FlashNext, ForwardOutput
from mlx_flashnext.model.mtp import MtpCell
from mlx_flashnext.state import MtpState, SequenceState


def advance(model: FlashNext, tokens: Sequence[int], state: SequenceState, **options: Any) -> ForwardOutput:
    """Run tokens as one block and keep all of them."""
    with state.begin(len(tokens), revocable=False) as block:
        output = model.forward(tokens, block, **options)
        block.commit()
    return output


def advance_cells(
    mtp: MtpCell, stack_TGD: mx.array, next_tokens: Sequence[int], state: MtpState
) -> tuple[mx.array, mx.array]:
    """Run MTP cells as one block and keep all of them."""
    with state.begin(len(next_tokens), revocable=False) as block:
        output = mtp.forward(stack_TGD, next_tokens, block)
        block.commit()
    return output
