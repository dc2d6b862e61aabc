"""Forward passes with their commits, and the record of a run to compare states with."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_flashnext.model.flashnext import FlashNext, ForwardOutput
from mlx_flashnext.model.mtp import MtpCell
from mlx_flashnext.state import MtpState, SequenceState

Arrays = dict[str, mx.array]


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


def advance_cut(
    model: FlashNext, tokens: Sequence[int], state: SequenceState, kept: int, **options: Any
) -> ForwardOutput:
    """Run tokens as one block, read what came out as verification does, and keep the first `kept`."""
    with state.begin(len(tokens)) as block:
        output = model.forward(tokens, block, **options)
        mx.eval(output.stack if output.logits is None else output.logits)
        block.commit(kept)
    return output


def computed(state: SequenceState | MtpState) -> Arrays:
    """Return copies of everything a state means."""
    arrays = state.named_arrays()
    mx.eval(arrays)
    return arrays


def different(left: Arrays, right: Arrays) -> list[str]:
    """Return the names of what differs in any bit, shape or presence."""
    assert left.keys() == right.keys()
    is_equal = {name: mx.array_equal(array, right[name]) for name, array in left.items()}
    mx.eval(is_equal)
    return [name for name, equal in is_equal.items() if not equal.item()]


class Transcript:
    """A plain run, token by token from an empty state: the tokens, and everything carried after each."""

    def __init__(self, model: FlashNext, tokens: Sequence[int]) -> None:
        self.model = model
        self.tokens = list(tokens)
        state = model.new_state()
        self.after = [computed(state)]
        for token in tokens:
            mx.eval(advance(model, [token], state, logits="none").stack)
            self.after.append(computed(state))


def greedy_steps(model: FlashNext, state: SequenceState, first: int, count: int) -> tuple[list[int], Arrays]:
    """Return `count` tokens that follow `first`, one at a time, and everything carried at the end."""
    answer = [first]
    for _ in range(count):
        logits = advance(model, answer[-1:], state).logits
        assert logits is not None
        answer.append(int(mx.argmax(logits[-1]).item()))
    return answer[1:], computed(state)
