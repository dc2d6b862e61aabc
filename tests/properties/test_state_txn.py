"""I2: whatever is begun, kept, rolled back, remembered or broken off, a state is that of a fresh replay."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expert_store.errors import StoreError
from mlx_flashnext.errors import StateError
from mlx_flashnext.model.gdn import GdnJournal
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.state import Block, SequenceState, Snapshot
from tests.parity.goldens import checkpoint_dir
from tests.tiny.stepping import Arrays, advance, advance_cut, computed, different
from tests.tiny.weights import TinyModel, TinyPending

# Few ids, the separator 120 among them, so that replays are often the same.
TOKENS = st.lists(st.sampled_from([3, 7, 120]), min_size=1, max_size=9)
LONGEST = 28
PACKAGE = "/mlx_flashnext"


@functools.cache
def tiny() -> TinyModel:
    return TinyModel.open(checkpoint_dir("default"))


@functools.lru_cache(maxsize=4096)
def replayed(tokens: tuple[int, ...]) -> Arrays:
    """Return everything carried after a fresh run over tokens, as one block."""
    state = tiny().model.new_state()
    if tokens:
        mx.eval(advance(tiny().model, tokens, state, logits="none").stack)
    return computed(state)


class Transactions(RuleBasedStateMachine):
    """A state beside the list of the tokens it should have consumed."""

    @initialize(capacity=st.sampled_from([None, LONGEST]))
    def start(self, capacity: int | None) -> None:
        self.state = tiny().model.new_state(capacity)
        self.tokens: list[int] = []
        self.kept: list[tuple[Snapshot, tuple[int, ...]]] = []
        self.block: Block | None = None
        self.text: list[int] = []
        self.touched = False

    @precondition(lambda self: self.block is None and len(self.tokens) < LONGEST)
    @rule(text=TOKENS, revocable=st.booleans())
    def begin(self, text: list[int], revocable: bool) -> None:
        self.text = text[: LONGEST - len(self.tokens)]
        self.block = self.state.begin(len(self.text), revocable=revocable)
        assert self.block.position == len(self.tokens)

    @precondition(lambda self: self.block is not None)
    @rule(wants_all=st.booleans(), data=st.data())
    def run_and_commit(self, wants_all: bool, data: st.DataObject) -> None:
        assert self.block is not None
        output = tiny().model.forward(self.text, self.block)
        mx.eval(output.logits)
        most = len(self.text)
        rows = most if wants_all else data.draw(st.integers(1, most))
        if rows < most and not self.block.is_revocable:
            with pytest.raises(StateError, match="not revocable"):
                self.block.commit(rows)
            rows = most
        self.block.commit(rows)
        self.tokens += self.text[:rows]
        self.block, self.touched = None, True

    @precondition(lambda self: self.block is not None)
    @rule(how=st.sampled_from(["at once", "after the run", "broken off", "forgotten"]))
    def give_up(self, how: str) -> None:
        assert self.block is not None
        if how == "after the run":
            mx.eval(tiny().model.forward(self.text, self.block).logits)
        if how == "broken off":
            broken = mock.patch.object(tiny().experts, "run", side_effect=KeyboardInterrupt)
            with broken, pytest.raises(KeyboardInterrupt), self.block:
                tiny().model.forward(self.text, self.block)
        elif how != "forgotten":
            self.block.rollback()
        self.block, self.touched = None, True

    @precondition(lambda self: self.block is not None)
    @rule()
    def an_open_block_excludes_everything_else(self) -> None:
        for act in (self.state.snapshot, lambda: self.state.begin(1)):
            with pytest.raises(StateError, match="open"):
                act()
        for snapshot, _ in self.kept:
            with pytest.raises(StateError, match="open"):
                self.state.restore(snapshot)

    @precondition(lambda self: self.block is None)
    @rule()
    def remember(self) -> None:
        self.kept.append((self.state.snapshot(), tuple(self.tokens)))

    @precondition(lambda self: self.block is None and self.kept)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        snapshot, tokens = data.draw(st.sampled_from(self.kept))
        self.state.restore(snapshot)
        self.tokens = list(tokens)
        for later, consumed in self.kept:
            if len(consumed) > len(tokens):
                with pytest.raises(StateError, match="no longer fits"):
                    self.state.restore(later)
        self.kept = [each for each in self.kept if len(each[1]) <= len(tokens)]
        self.touched = True

    @invariant()
    def it_is_a_fresh_replay(self) -> None:
        assert self.state.num_tokens == len(self.tokens)
        if self.touched:
            self.touched = False
            assert different(computed(self.state), replayed(tuple(self.tokens))) == []


Transactions.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
TestTransactions = Transactions.TestCase


# Faults: the state before is valid, and goes on as if nothing had happened.

TEXT = [(5 * i * i + i) % 118 for i in range(40)]
START, ROWS, KEPT = 14, 7, 4


def prepared() -> SequenceState:
    state = tiny().model.new_state()
    mx.eval(advance(tiny().model, TEXT[:START], state).logits)
    return state


@functools.cache
def undisturbed() -> tuple[Arrays, Arrays, Arrays]:
    """Return what is carried without faults: before the block, after its commit, after more tokens."""
    state = prepared()
    before = computed(state)
    advance_cut(tiny().model, TEXT[START : START + ROWS], state, KEPT)
    after = computed(state)
    return before, after, computed(continued(state))


def continued(state: SequenceState) -> SequenceState:
    """Go on to the same place from before or after the block."""
    if state.num_tokens == START:
        advance_cut(tiny().model, TEXT[START : START + ROWS], state, KEPT)
    advance_cut(tiny().model, TEXT[START + KEPT : START + KEPT + 9], state, 8)
    return state


def run_block(state: SequenceState) -> None:
    with state.begin(ROWS) as block:
        mx.eval(tiny().model.forward(TEXT[START : START + ROWS], block).logits)
        block.commit(KEPT)


def check_whole(state: SequenceState) -> None:
    """Check that a state is the one before or the one after the commit, and that it goes on."""
    before, after, end = undisturbed()
    assert different(computed(state), before if state.num_tokens == START else after) == []
    assert different(computed(continued(state)), end) == []


def check_broken_off(error: type[BaseException], target: object, name: str, faulty: Any) -> None:
    """Break a block off; the state before must be there, go on, and be there again for a snapshot of it."""
    state = prepared()
    kept = state.snapshot()
    with mock.patch.object(target, name, faulty), pytest.raises(error):
        run_block(state)
    assert state.num_tokens == START
    check_whole(state)
    state.restore(kept)
    check_whole(state)


def failing_at(call: int, honest: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """Return a function that does its work and then fails, at its `call`th call."""
    calls = iter(range(call + 1))

    def breaks(*inputs: Any, **options: Any) -> Any:
        result = honest(*inputs, **options)
        if next(calls, None) == call:
            raise error
        return result

    return breaks


@pytest.mark.parametrize(
    "error", [StoreError("the drive is gone", hint="look at it"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("layer", range(4))
def test_an_error_in_any_layer_changes_nothing(layer: int, error: BaseException) -> None:
    experts = tiny().experts
    check_broken_off(type(error), experts, "run", failing_at(layer, experts.run, error))
    check_broken_off(type(error), DecoderLayer, "_mix", failing_at(layer, DecoderLayer._mix, error))


def test_an_error_of_the_table_rows_changes_nothing() -> None:
    error = StoreError("a row is short", hint="look at it")
    rows = tiny().rows
    check_broken_off(StoreError, rows, "issue", failing_at(0, rows.issue, error))
    check_broken_off(StoreError, TinyPending, "wait", failing_at(0, TinyPending.wait, error))


def test_an_error_while_the_rows_kept_are_run_again_changes_nothing() -> None:
    for call in range(3):
        honest = GdnJournal.state_after
        check_broken_off(MemoryError, GdnJournal, "state_after", failing_at(call, honest, MemoryError()))
    check_broken_off(MemoryError, mx, "async_eval", failing_at(0, mx.async_eval, MemoryError()))


def lines_run(act: Callable[[], None], stop_at: int = 0) -> int:
    """Return how many lines of the package `act` runs, raising KeyboardInterrupt at one of them."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if f"{PACKAGE}/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == stop_at:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(previous)
    return count


def test_an_interrupt_at_any_line_leaves_the_state_before_or_the_state_after() -> None:
    block = prepared()
    num_lines = lines_run(lambda: run_block(block))
    # All over the pass, closer in the commit, and every line around the moment of the change.
    places = {*range(1, num_lines, num_lines // 16), *range(num_lines - 130, num_lines - 14, 9)}
    ends = set()
    for place in sorted(places | set(range(num_lines - 14, num_lines + 1))):
        state = prepared()
        with pytest.raises(KeyboardInterrupt):
            lines_run(functools.partial(run_block, state), place)
        ends.add(state.num_tokens)
        check_whole(state)
    assert ends == {START, START + KEPT}
