"""I2: whatever is begun, kept, rolled back, remembered or broken off, a state is that of a fresh replay."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from expert_store.errors import StoreError
from mlx_flashnext.errors import StateError
from mlx_flashnext.layer_state import PleState, RowBuffer
from mlx_flashnext.model.gdn import GdnJournal
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.model.ple import PleJournal
from mlx_flashnext.state import Carried, SequenceState, Snapshot, TransactionalState
from tests.parity.golden.cases import CASES
from tests.parity.goldens import checkpoint_dir
from tests.tiny.checkpoints import build_hf
from tests.tiny.engines import open_tiny
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

    def has_room(self) -> bool:
        return len(self.tokens) < LONGEST

    @precondition(has_room)
    @rule(text=TOKENS, cut=st.integers(0, 8), revocable=st.booleans(), remember=st.booleans())
    def keep(self, text: list[int], cut: int, revocable: bool, remember: bool) -> None:
        text = text[: LONGEST - len(self.tokens)]
        rows = 1 + cut % len(text)
        if remember:
            self.kept.append((self.state.snapshot(), tuple(self.tokens)))
        block = self.state.begin(len(text), revocable=revocable)
        self.nothing_else_can_be_done()
        mx.eval(tiny().model.forward(text, block).logits)
        self.nothing_else_can_be_done()
        if rows < len(text) and not revocable:
            with pytest.raises(StateError, match="not revocable"):
                block.commit(rows)
            rows = len(text)
        block.commit(rows)
        self.tokens += text[:rows]
        self.it_is_a_fresh_replay()

    @precondition(has_room)
    @rule(text=TOKENS, how=st.sampled_from(["before the run", "after the run", "broken off", "dropped"]))
    def give_up(self, text: list[int], how: str) -> None:
        text = text[: LONGEST - len(self.tokens)]
        block = self.state.begin(len(text))
        if how == "broken off":
            broken = mock.patch.object(tiny().experts, "run", side_effect=KeyboardInterrupt)
            with broken, pytest.raises(KeyboardInterrupt), block:
                tiny().model.forward(text, block)
        elif how != "before the run":
            mx.eval(tiny().model.forward(text, block).logits)
        if how != "dropped":
            block.rollback()
        del block
        self.it_is_a_fresh_replay()

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 8))
    def go_back(self, which: int) -> None:
        snapshot, tokens = self.kept[which % len(self.kept)]
        self.state.restore(snapshot)
        self.tokens = list(tokens)
        for later, consumed in self.kept:
            if len(consumed) > len(tokens):
                with pytest.raises(StateError, match="no longer fits"):
                    self.state.restore(later)
        self.kept = [each for each in self.kept if len(each[1]) <= len(tokens)]
        self.it_is_a_fresh_replay()

    def nothing_else_can_be_done(self) -> None:
        for act in (self.state.snapshot, lambda: self.state.begin(1)):
            with pytest.raises(StateError, match="open"):
                act()
        for snapshot, _ in self.kept[:1]:
            with pytest.raises(StateError, match="open"):
                self.state.restore(snapshot)

    def it_is_a_fresh_replay(self) -> None:
        assert self.state.num_tokens == len(self.tokens)
        assert different(computed(self.state), replayed(tuple(self.tokens))) == []


Transactions.TestCase.settings = settings(max_examples=30, stateful_step_count=12)
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


def test_a_store_that_cannot_read_in_any_layer_changes_nothing(tmp_path: Path) -> None:
    """The rest of the broken pass may still run later, over slots that hold other experts by then."""
    case = CASES["default"]
    directory = build_hf(tmp_path / "model", seed=case.seed, overrides=case.overrides)
    with open_tiny(directory, slots=4) as engine:
        model, experts = engine.target.model, engine.target.experts
        for layer in range(4):
            state = model.new_state()
            mx.eval(advance(model, TEXT[:START], state, logits="last").logits)
            experts.device_idle()
            error = StoreError("the drive is gone", hint="look at it")
            faulty = failing_at(layer, experts.run, error)
            block = state.begin(ROWS)
            with mock.patch.object(experts, "run", faulty), pytest.raises(StoreError), block:
                model.forward(TEXT[START : START + ROWS], block)
            experts.device_idle()
            before, after, _ = undisturbed()
            assert different(computed(state), before) == []
            advance_cut(model, TEXT[START : START + ROWS], state, KEPT)
            experts.device_idle()
            assert different(computed(state), after) == []


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


def interrupted(places: Iterable[int]) -> set[int]:
    """Interrupt a block at each of some lines, check what is left, and return the numbers of tokens left."""
    ends = set()
    for place in sorted(places):
        state = prepared()
        with pytest.raises(KeyboardInterrupt):
            lines_run(functools.partial(run_block, state), place)
        ends.add(state.num_tokens)
        check_whole(state)
    return ends


def test_an_interrupt_at_any_line_leaves_the_state_before_or_the_state_after() -> None:
    block = prepared()
    end = lines_run(lambda: run_block(block))
    # All over the pass, closer in the commit, and every line around the moment of the change.
    places = {*range(1, end, end // 16), *range(end - 130, end - 14, 9), *range(end - 14, end + 1)}
    assert interrupted(places) == {START, START + KEPT}


# Planted faults: the tests above would notice.


def test_a_change_in_two_steps_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed()

    def torn(self: TransactionalState, carried: Carried) -> None:
        self._carried = dataclasses.replace(self._carried, num_tokens=carried.num_tokens)
        self.check_room(0)  # any line of the package between the two
        self._carried = carried

    monkeypatch.setattr(TransactionalState, "replace", torn)
    block = prepared()
    end = lines_run(lambda: run_block(block))
    with pytest.raises(AssertionError):
        interrupted(range(end - 14, end))


def test_a_pass_that_writes_where_tokens_are_is_seen() -> None:
    honest = RowBuffer.write

    def one_row_early(self: RowBuffer, rows: mx.array, start: int) -> mx.array:
        honest(self, rows, max(0, start - 1))
        return honest(self, rows, start)

    undisturbed()
    with mock.patch.object(RowBuffer, "write", one_row_early), pytest.raises(AssertionError):
        test_an_error_in_any_layer_changes_nothing(3, KeyboardInterrupt())


def no_snapshot_is_ever_lost(self: TransactionalState, snapshot: Snapshot) -> None:
    self._check_closed("restored")
    self.replace(snapshot.carried)


def blocks_may_overlap(self: TransactionalState, verb: str) -> None:
    del self, verb


def last_token_forgotten(self: PleJournal, rows: int) -> PleState:
    history = self.window.shape[0] - self.num_rows
    return PleState(
        self.line[rows - 1 :][: len(self.line) - self.num_rows], self.window[rows : rows + history]
    )


@pytest.mark.parametrize(
    ("target", "name", "fault"),
    [
        (TransactionalState, "restore", no_snapshot_is_ever_lost),
        (TransactionalState, "_check_closed", blocks_may_overlap),
        (PleJournal, "state_after", last_token_forgotten),
    ],
    ids=["snapshots of overwritten rows accepted", "blocks may overlap", "history one token late"],
)
def test_the_random_runs_notice(target: type, name: str, fault: Callable[..., Any]) -> None:
    brief = settings(max_examples=30, stateful_step_count=12, phases=[Phase.generate], database=None)
    with (
        mock.patch.object(target, name, fault),
        pytest.raises((AssertionError, StateError, pytest.fail.Exception)),
    ):
        run_state_machine_as_test(Transactions, settings=brief)
