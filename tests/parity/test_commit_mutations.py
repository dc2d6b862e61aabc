"""Each way a rollback has been got wrong elsewhere, planted here, must be seen by the comparison of states.

`test_commits.py` proves nothing unless each of these fails it (defects 17 to 19 of the specification's list).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from unittest import mock

import mlx.core as mx
import pytest

from mlx_flashnext import layer_state, state
from mlx_flashnext.model import gdn, ple, qsa
from tests.parity.test_commits import JUNK, cut_differences, opened, prefilled, transcript
from tests.tiny.stepping import advance, advance_cut, computed, different

# One before the budget of 16: the block crosses the border, and its cuts fall into every place of a group.
START = 15
Patch = tuple[object, str, Callable[..., object]]


def journal_patch(journal: type, change: Callable[..., object]) -> Patch:
    honest = journal.state_after
    return journal, "state_after", lambda self, rows: change(self, rows, honest)


def conv_tail_late(self, rows, honest):
    return dataclasses.replace(honest(self, rows), conv_window=honest(self, rows + 1).conv_window)


def recurrent_of_the_block(self, rows, honest):
    everything = honest(self, self.inputs[0].shape[0] - 1)
    return dataclasses.replace(honest(self, rows), recurrent=everything.recurrent)


def state_before_the_block(self, rows, honest):
    return dataclasses.replace(honest(self, rows), recurrent=self.starts[0])


def open_group_of_the_block(self, rows, honest):
    del rows, honest
    return self.final


def group_off_by_one(self, rows, honest):
    end = self.window.shape[0] - self.num_rows + rows
    size = honest(self, rows).open_keys.shape[0]
    return dataclasses.replace(self.final, open_keys=self.window[end - size + 1 : end + 1])


def history_of_the_block(self, rows, honest):
    return dataclasses.replace(honest(self, rows), history=self.line[self.num_rows :])


def ple_rows_of_the_block(self, rows, honest):
    history = self.window.shape[0] - self.num_rows
    return dataclasses.replace(honest(self, rows), conv_rows=self.window[-history:])


FAULTS: MappingProxyType[str, Patch] = MappingProxyType(
    {
        "convolution tail one row late": journal_patch(gdn.GdnJournal, conv_tail_late),
        "recurrent state of the whole block": journal_patch(gdn.GdnJournal, recurrent_of_the_block),
        "recurrent state before the block": journal_patch(gdn.GdnJournal, state_before_the_block),
        "open group not cut": journal_patch(qsa.QsaJournal, open_group_of_the_block),
        "open group cut one row late": journal_patch(qsa.QsaJournal, group_off_by_one),
        "n-gram history not cut": journal_patch(ple.PleJournal, history_of_the_block),
        "n-gram rows not cut": journal_patch(ple.PleJournal, ple_rows_of_the_block),
    }
)


@contextmanager
def planted(*patches: Patch) -> Iterator[None]:
    """Plant faults, and silence the assertion that would notice some of them at once."""
    with ExitStack() as stack:
        for target, name, replacement in patches:
            stack.enter_context(mock.patch.object(target, name, replacement))
        silent = mock.patch.object(state.TransactionalState, "check_consistent", return_value=None)
        stack.enter_context(silent)
        yield


def seen() -> list:
    return cut_differences(opened("default"), transcript("default"), START, (6,))


def test_without_a_fault_nothing_is_seen() -> None:
    with planted():
        assert seen() == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_is_not_cut_right_is_seen(fault: str) -> None:
    transcript("default")
    with planted(FAULTS[fault]):
        assert seen() != []
    assert seen() == []


def test_positions_not_cut_are_seen() -> None:
    transcript("default")
    built = state.Carried

    def whole(num_tokens, layers, ple):
        return built(num_tokens if num_tokens <= START else START + 6, layers, ple)

    with planted((state, "Carried", whole)):
        found = seen()
    assert {kept for _, kept, names in found if "num_tokens" in names} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("which", ["keys", "values", "pooled"])
def test_rows_of_rejected_tokens_kept_are_seen(which: str) -> None:
    """Phantom rows (defect 19): a buffer that appends instead of overwriting keeps what was rejected."""
    tiny, plain = opened("default"), transcript("default")
    highest: dict[int, int] = {}
    honest = layer_state.RowBuffer.write

    def keeping(self, rows, start):
        axis, done = self._axis, highest.get(id(self), 0)
        highest[id(self)] = max(done, start + rows.shape[axis])
        fresh = max(0, min(done - start, rows.shape[axis]))
        if id(self) not in chosen or not fresh:
            return honest(self, rows, start)
        if fresh == rows.shape[axis]:
            return self.array
        return honest(self, mx.split(rows, [fresh], axis=axis)[1], start + fresh)

    sequence = prefilled(tiny, plain.tokens[:START])
    chosen = {id(getattr(layer, which)) for layer in sequence.layers if hasattr(layer, which)}
    with mock.patch.object(layer_state.RowBuffer, "write", keeping):
        advance_cut(tiny.model, [plain.tokens[START], *JUNK[:6]], sequence, 1)
        # What is kept so far is right; the next tokens find the rows of the rejected ones in their places.
        assert different(computed(sequence), plain.after[START + 1]) == []
        mx.eval(advance(tiny.model, plain.tokens[START + 1 : START + 7], sequence).logits)
    names = different(computed(sequence), plain.after[START + 7])
    assert any(name.endswith(which) for name in names)


def test_a_pooled_row_of_a_rejected_group_that_is_read_is_seen() -> None:
    """The index may rank only groups of committed tokens: one more, left by a rejected block, shows."""
    tiny, plain = opened("default"), transcript("default")
    sequence = prefilled(tiny, plain.tokens[:20])
    advance_cut(tiny.model, [plain.tokens[20], *JUNK], sequence, 1)
    before = sequence.snapshot()
    token = plain.tokens[21:22]
    honest = advance(tiny.model, token, sequence).logits
    sequence.restore(before)
    top = qsa.select_top

    def with_one_more(scores, count):
        return top(mx.concatenate([scores, mx.full((scores.shape[0], 1), 1e9)], axis=1), count)

    with mock.patch.object(qsa, "select_top", with_one_more):
        wrong = advance(tiny.model, token, sequence).logits
    assert honest is not None
    assert wrong is not None
    assert not mx.array_equal(honest, wrong).item()
