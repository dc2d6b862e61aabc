"""P31, defect 17: whatever part of a block is kept, the state is that of a run that never saw the rest.

Bitwise, on the CPU backend, for every block of 1 to 9 rows and every number of rows kept, after a chunked
prefill and across the border where QSA turns sparse; then plain steps say the same (P62).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from bench.studies.fuzz_exact import GEOMETRIES
from mlx_flashnext.errors import StateError
from mlx_flashnext.layer_state import QsaState
from mlx_flashnext.state import MtpState, SequenceState
from tests.parity.golden.cases import CASES, random_tokens
from tests.parity.goldens import checkpoint_dir
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.stepping import (
    Transcript,
    advance,
    advance_cells,
    advance_cut,
    computed,
    different,
    greedy_steps,
)
from tests.tiny.weights import TinyModel

MOST_ROWS = 9
PLAIN_STEPS = 32
# Never part of the text: two separators and the turn end are among them.
JUNK = (3, 120, 120, 77, 126, 5, 120, 99)


@functools.cache
def opened(name: str, resident: bool = True) -> TinyModel:
    return TinyModel.open(checkpoint_dir(name), resident=resident)


@functools.cache
def transcript(name: str) -> Transcript:
    return Transcript(opened(name).model, CASES[name].tokens[:36])


def prefilled(tiny: TinyModel, tokens: list[int]) -> SequenceState:
    """Return a state that has consumed tokens in chunks that fit neither groups nor blocks."""
    state = tiny.model.new_state()
    for first in range(0, len(tokens), 5):
        advance(tiny.model, tokens[first : first + 5], state, logits="none")
    mx.eval(state.arrays())
    return state


def cut_differences(tiny: TinyModel, plain: Transcript, start: int, sizes: range | tuple[int, ...]) -> list:
    """Return (rows, kept, names that differ) of every cut of every block after `start` tokens."""
    state = prefilled(tiny, plain.tokens[:start])
    before, found = state.snapshot(), []
    for rows in sizes:
        for kept in range(1, rows + 1):
            text = [*plain.tokens[start : start + kept], *JUNK[: rows - kept]]
            advance_cut(tiny.model, text, state, kept, logits="none")
            if names := different(computed(state), plain.after[start + kept]):
                found.append((rows, kept, names))
            state.restore(before)
    return found


# From five before the budget to the longest block after the border: commits end on every edge of it, among
# them the scaled forms of 2047, 2048, 2049, 2051 and 2052.
@pytest.mark.parametrize("offset", ["start", -5, -1, 3])
@pytest.mark.parametrize("name", ["default", "odd"])
def test_every_cut_of_every_block_is_a_fresh_run(name: str, offset: int | str) -> None:
    tiny = opened(name)
    start = 0 if isinstance(offset, str) else tiny.config.indexer_budget + offset
    assert cut_differences(tiny, transcript(name), start, range(1, MOST_ROWS + 1)) == []


@pytest.mark.parametrize("geometry", GEOMETRIES[1:], ids=str)
def test_cuts_in_every_geometry(tmp_path: Path, geometry: dict[str, Any]) -> None:
    tiny = TinyModel.open(build_hf(tmp_path, seed=4, overrides=geometry, tokenizer=False))
    config = tiny.config
    plain = Transcript(tiny.model, random_tokens(23, config.indexer_budget + 14, (6, 13)))
    start = config.indexer_budget + config.indexer_compress_ratio - 6
    assert cut_differences(tiny, plain, start, (2, 6, 9)) == []
    if tiny.mtp is not None:
        assert cell_differences(tiny, plain.tokens, start - 1, (2, 6, 9)) == []


def test_cuts_in_bfloat16(tmp_path: Path) -> None:
    tiny = TinyModel.open(build_mlx(tmp_path, tokenizer=False), dtype=mx.bfloat16)
    plain = Transcript(tiny.model, random_tokens(29, 30, (9,)))
    assert cut_differences(tiny, plain, 14, (3, 5, 9)) == []


@pytest.mark.parametrize(("rows", "kept"), [(9, kept) for kept in range(1, 10)] + [(4, 3), (1, 1), (5, 4)])
@pytest.mark.parametrize("name", ["default", "odd"])
def test_plain_steps_after_a_cut_say_the_same(name: str, rows: int, kept: int) -> None:
    """What a cut leaves beyond its rows is never read: poison there changes nothing (P38, defect 19)."""
    tiny, plain = opened(name), transcript(name)
    start = tiny.config.indexer_budget - 3
    fresh = prefilled(tiny, plain.tokens[: start + kept])
    state = prefilled(tiny, plain.tokens[:start])
    text = [*plain.tokens[start : start + kept], *JUNK[: rows - kept]]
    advance_cut(tiny.model, text, state, kept)
    poison(state)
    wanted, got = (greedy_steps(tiny.model, each, 8, PLAIN_STEPS) for each in (fresh, state))
    assert got[0] == wanted[0]
    assert different(got[1], wanted[1]) == []


def poison(state: SequenceState) -> None:
    """Put NaN into every cached row that belongs to no token."""
    for layer in state.layers:
        if isinstance(layer, QsaState):
            pooled = layer.pooled.array.shape[0] * state.num_tokens // layer.keys.array.shape[1]
            for buffer, axis, used in (
                (layer.keys, 1, state.num_tokens),
                (layer.values, 1, state.num_tokens),
                (layer.pooled, 0, pooled),
            ):
                rows = np.array(buffer.array)
                np.moveaxis(rows, axis, 0)[used:] = np.nan
                buffer.array = mx.array(rows)


def test_a_revocable_block_says_what_a_plain_one_says() -> None:
    tiny, tokens = opened("default"), CASES["default"].tokens[:40]
    states = [tiny.model.new_state() for _ in range(2)]
    for first in range(0, 40, MOST_ROWS):
        chunk = tokens[first : first + MOST_ROWS]
        plain = advance(tiny.model, chunk, states[0], logits="all").logits
        cut = advance_cut(tiny.model, chunk, states[1], len(chunk), logits="all").logits
        assert plain is not None
        assert cut is not None
        assert mx.array_equal(plain, cut).item()
    assert different(computed(states[0]), computed(states[1])) == []


def test_a_sequence_of_cuts_is_a_fresh_run() -> None:
    """P62: greedy text does not depend on blocks: random ones, cut at random, over a whole transcript."""
    tiny, plain = opened("separators"), transcript("separators")
    rng = np.random.default_rng(5)
    for _ in range(6):
        state = tiny.model.new_state()
        while (start := state.num_tokens) < 36:
            rows = int(rng.integers(1, MOST_ROWS + 1))
            kept = int(rng.integers(1, min(rows, 36 - start) + 1))
            text = [*plain.tokens[start : start + kept], *JUNK[: rows - kept]]
            advance_cut(tiny.model, text, state, kept)
            assert different(computed(state), plain.after[start + kept]) == []


def test_two_sequences_do_not_touch_each_other() -> None:
    """P32: blocks of two sequences in turns, open at the same time."""
    tiny, plain = opened("default"), transcript("default")
    states = [prefilled(tiny, plain.tokens[:12]) for _ in range(2)]
    with states[0].begin(5) as left, states[1].begin(4) as right:
        tiny.model.forward(plain.tokens[12:17], left)
        tiny.model.forward([*plain.tokens[12:14], 9, 9], right)
        left.commit(5)
        right.commit(2)
    assert different(computed(states[0]), plain.after[17]) == []
    assert different(computed(states[1]), plain.after[14]) == []


def test_a_commit_neither_waits_nor_computes_what_a_block_did() -> None:
    tiny = opened("default", resident=False)
    tokens = CASES["default"].tokens
    state = prefilled(tiny, list(tokens[:14]))
    with state.begin(7) as block:
        out = tiny.model.forward(tokens[14:21], block, logits="all")
        mx.eval(out.logits)
        before = tiny.sync.num_syncs
        with (
            mock.patch.object(mx, "eval", side_effect=AssertionError),
            mock.patch.object(mx, "quantized_matmul", side_effect=AssertionError),
            mock.patch.object(mx.array, "__matmul__", side_effect=AssertionError),
            mock.patch.object(tiny.experts, "run", side_effect=AssertionError),
        ):
            block.commit(4)
    assert tiny.sync.num_syncs == before
    assert state.num_tokens == 18


# The MTP module: the same over its cells.


def cell_differences(tiny: TinyModel, tokens: list[int], start: int, sizes: range | tuple[int, ...]) -> list:
    """Return (rows, kept, names that differ) of every cut of every block of cells after `start` cells."""
    assert tiny.mtp is not None
    stack = advance(tiny.model, tokens, tiny.model.new_state(), logits="none").stack
    junk = mx.random.normal((MOST_ROWS, *stack.shape[1:]), key=mx.random.key(3))
    plain, after = MtpState(tiny.config, compute_dtype=mx.float32), []
    for cell, token in enumerate(tokens[1 : start + MOST_ROWS + 1]):
        after.append(computed(plain))
        advance_cells(tiny.mtp, stack[cell : cell + 1], [token], plain)
    after.append(computed(plain))
    state, found = MtpState(tiny.config, compute_dtype=mx.float32), []
    advance_cells(tiny.mtp, stack[:start], tokens[1 : start + 1], state)
    before = state.snapshot()
    for rows in sizes:
        for kept in range(1, rows + 1):
            with state.begin(rows) as block:
                text = [*tokens[start + 1 : start + 1 + kept], *JUNK[: rows - kept]]
                cells = mx.concatenate([stack[start : start + kept], junk[: rows - kept]])
                mx.eval(tiny.mtp.forward(cells, text, block))
                block.commit(kept)
            if names := different(computed(state), after[start + kept]):
                found.append((rows, kept, names))
            state.restore(before)
    return found


@pytest.mark.parametrize("name", ["default", "odd"])
def test_every_cut_of_every_block_of_cells_is_a_fresh_run(name: str) -> None:
    tiny = opened(name)
    start = tiny.config.indexer_budget - 3
    assert cell_differences(tiny, list(CASES[name].tokens[:30]), start, range(1, MOST_ROWS + 1)) == []


@pytest.mark.parametrize("boundary", range(9, 17))
def test_a_prefix_taken_up_again_drafts_as_if_it_had_been_read(boundary: int) -> None:
    """P33: trunk and MTP cache go back together, at every boundary modulo 8."""
    tiny, tokens = opened("default"), list(CASES["default"].tokens[:24])
    assert tiny.mtp is not None
    drafts = []
    for detour in (0, 6):
        state, cells = tiny.model.new_state(), MtpState(tiny.config, compute_dtype=mx.float32)
        stack = advance(tiny.model, tokens[:boundary], state).stack
        advance_cells(tiny.mtp, stack[:-1], tokens[1:boundary], cells)
        kept = state.snapshot(), cells.snapshot()
        if detour:
            other = advance(tiny.model, [7] * detour, state).stack
            mx.eval(advance_cells(tiny.mtp, other, [7] * detour, cells))
            state.restore(kept[0])
            cells.restore(kept[1])
        out = advance(tiny.model, tokens[boundary:], state).stack
        joined = mx.concatenate([stack[-1:], out[:-1]])
        logits, _ = advance_cells(tiny.mtp, joined, tokens[boundary:], cells)
        drafts.append((logits, computed(cells), computed(state)))
    assert mx.array_equal(drafts[0][0], drafts[1][0]).item()
    assert different(drafts[0][1], drafts[1][1]) == []
    assert different(drafts[0][2], drafts[1][2]) == []


def test_a_tap_is_the_whole_stack_and_a_contracted_one_is_refused() -> None:
    """P39: the module reads four streams of 2,560, not their contraction."""
    tiny = opened("default")
    assert tiny.mtp is not None
    config = tiny.config
    out = advance(tiny.model, [1, 2, 3], tiny.model.new_state(), taps=range(config.num_hidden_layers))
    shape = (3, config.hc_count, config.hidden_size)
    assert out.stack.shape == shape
    assert {tap.shape for tap in out.taps.values()} == {shape}
    cells = MtpState(config, compute_dtype=mx.float32)
    for wrong in (out.stack.mean(axis=1), out.stack[:, :1], out.stack.reshape(3, -1)):
        with cells.begin(3) as block, pytest.raises(StateError, match="stack"):
            tiny.mtp.forward(wrong, [2, 3, 4], block)
    assert cells.num_cells == 0


def test_the_module_borrows_the_vocabulary_of_the_model() -> None:
    """Defect 27: one instance of the target, whoever drafts."""
    tiny = opened("default")
    assert tiny.mtp is not None
    assert tiny.mtp._embed is tiny.model._embed
    assert tiny.mtp._head is tiny.model._head
