"""Token by token, any chunking and one block give the same bits, in logits and states (CPU backend)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import mlx.core as mx
import pytest

from mlx_flashnext.state import SequenceState
from tests.parity.golden.cases import CASES
from tests.parity.goldens import checkpoint_dir
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel

# Budget 16, blocks of 4: dense up to 19 visible tokens. The edges fall before, on and after that border.
EDGES = range(15, 25)


def run(tiny: TinyModel, tokens: Sequence[int], sizes: Iterable[int]) -> tuple[mx.array, SequenceState]:
    """Run tokens in blocks of the given sizes, the last size repeating, waiting after each block."""
    state, parts, at = tiny.model.new_state(), [], 0
    for size in itertools.chain(sizes, itertools.repeat(len(tokens))):
        if at >= len(tokens):
            break
        out = advance(tiny.model, tokens[at : at + size], state, logits="all")
        assert out.logits is not None
        mx.eval(out.logits)
        parts.append(out.logits)
        at += size
    return mx.concatenate(parts), state


def differences(left: tuple[mx.array, SequenceState], right: tuple[mx.array, SequenceState]) -> list[str]:
    """Return the names of what differs in any bit."""
    ours, theirs = left[1].named_arrays(), right[1].named_arrays()
    assert ours.keys() == theirs.keys()
    found = [name for name, array in ours.items() if not mx.array_equal(array, theirs[name]).item()]
    return found + ([] if mx.array_equal(left[0], right[0]).item() else ["logits"])


@pytest.mark.parametrize("layout", ["hf", "mlx"])
@pytest.mark.parametrize("name", ["default", "odd", "separators"])
def test_any_chunking_equals_token_by_token(name: str, layout: str) -> None:
    tiny, tokens = TinyModel.open(checkpoint_dir(name, layout)), CASES[name].tokens
    stepped = run(tiny, tokens, itertools.repeat(1))
    for size in (2, 3, 5, 7, 16, 17, len(tokens)):
        assert differences(stepped, run(tiny, tokens, itertools.repeat(size))) == [], size


def test_a_split_at_every_edge_of_the_sparse_border_changes_nothing() -> None:
    tiny, tokens = TinyModel.open(checkpoint_dir("default")), CASES["default"].tokens[:30]
    whole = run(tiny, tokens, [])
    for edge in EDGES:
        assert differences(whole, run(tiny, tokens, [edge])) == [], edge
        assert differences(whole, run(tiny, tokens, [edge, 1])) == [], edge


def test_blocks_beyond_every_sub_block_size_change_nothing() -> None:
    # 300 rows span several sub-blocks of the convolution, the recurrence, dense and sparse attention, and KV
    # steps.
    tiny = TinyModel.open(checkpoint_dir("default"))
    tokens = [(7 * i * i + 3 * i) % 118 for i in range(300)]
    whole = run(tiny, tokens, [])
    assert differences(whole, run(tiny, tokens, [1, 129, 70, 33, 1, 1])) == []


def test_reading_ids_back_changes_nothing() -> None:
    tokens = CASES["default"].tokens
    resident = TinyModel.open(checkpoint_dir("default"))
    streamed = TinyModel.open(checkpoint_dir("default"), resident=False)
    assert differences(run(resident, tokens, [40]), run(streamed, tokens, [1, 2, 30])) == []


def test_bfloat16_activations_are_block_invariant_too() -> None:
    tiny, tokens = (
        TinyModel.open(checkpoint_dir("default", "mlx"), dtype=mx.bfloat16),
        CASES["default"].tokens[:34],
    )
    assert differences(run(tiny, tokens, itertools.repeat(1)), run(tiny, tokens, [13, 8])) == []


def test_a_preallocated_state_gives_the_bits_of_a_growing_one() -> None:
    tiny, tokens = TinyModel.open(checkpoint_dir("default")), CASES["default"].tokens
    fixed = tiny.model.new_state(len(tokens))
    out = advance(tiny.model, tokens, fixed, logits="all")
    assert out.logits is not None
    assert differences((out.logits, fixed), run(tiny, tokens, [9])) == []
