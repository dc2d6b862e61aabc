"""How often a forward pass waits for the device, and what it orders before it waits."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import mlx.core as mx
import pytest

from mlx_flashnext.errors import StateError
from mlx_flashnext.model import moe
from mlx_flashnext.model.host import HostSync, fence, to_host
from tests.tiny.checkpoints import build_hf
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel, TinyPending


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hf(tmp_path_factory.mktemp("waits"), tokenizer=False)


def test_one_wait_per_layer_when_experts_are_streamed(directory: Path) -> None:
    tiny = TinyModel.open(directory, resident=False)
    state = tiny.model.new_state()
    for block in ([1, 2, 3], [4]):
        before = tiny.sync.num_syncs
        advance(tiny.model, block, state)
        assert tiny.sync.num_syncs - before == tiny.config.num_hidden_layers


def test_no_wait_when_every_expert_is_resident(directory: Path) -> None:
    tiny = TinyModel.open(directory)
    submit = mx.async_eval
    with (
        mock.patch.object(mx, "eval", side_effect=AssertionError),
        mock.patch.object(mx, "async_eval", side_effect=submit) as submitted,
    ):
        advance(tiny.model, [1, 2, 3], tiny.model.new_state())
    assert tiny.sync.num_syncs == 0
    assert submitted.call_count == tiny.config.num_hidden_layers  # F3


def test_both_waits_are_counted() -> None:
    sync = HostSync()
    assert to_host(sync, mx.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    fence(sync, mx.zeros(3) + 1)
    assert sync.num_syncs == 2


def test_ids_are_submitted_alone_and_the_shared_expert_before_the_host_waits(directory: Path) -> None:
    tiny = TinyModel.open(directory, resident=False)
    events: list[str] = []
    submit, wait = mx.async_eval, moe.to_host
    with (
        mock.patch.object(mx, "async_eval", lambda *a: (events.append(f"submit {len(a)}"), submit(*a))),
        mock.patch.object(moe, "to_host", lambda *a: (events.append("wait"), wait(*a))[1]),
    ):
        advance(tiny.model, [1], tiny.model.new_state())
    # Ids, shared expert, the wait for the ids; then the layer's end, while the next one is built (F3).
    assert events == ["submit 1", "submit 1", "wait", "submit 1"] * tiny.config.num_hidden_layers


def test_rows_are_requested_before_the_first_layer_and_awaited_at_theirs(directory: Path) -> None:
    tiny = TinyModel.open(directory)
    events: list[str] = []
    issue, run = tiny.rows.issue, tiny.experts.run

    class Pending:
        def __init__(self, inner: TinyPending) -> None:
            self.inner = inner

        def wait(self) -> mx.array:
            events.append("wait")
            return self.inner.wait()

    def issued(rows):
        events.append("issue")
        return Pending(issue(rows))

    def ran(layer, x, ids):
        events.append(f"layer {layer}")
        return run(layer, x, ids)

    with mock.patch.object(tiny.rows, "issue", issued), mock.patch.object(tiny.experts, "run", ran):
        advance(tiny.model, [1, 2], tiny.model.new_state())
    assert events == ["issue", "layer 0", "wait", "layer 1", "layer 2", "layer 3"]


@pytest.mark.parametrize(("tokens", "value"), [([], "at least one"), ([5, 128], "128"), ([-1, 5], "-1")])
def test_tokens_outside_the_vocabulary_are_refused(directory: Path, tokens: list[int], value: str) -> None:
    tiny = TinyModel.open(directory)
    state = tiny.model.new_state()
    with pytest.raises(StateError, match=value) as caught:
        advance(tiny.model, tokens, state)
    assert caught.value.hint
    assert state.num_tokens == 0


def test_the_logits_of_the_last_position_are_those_of_all(directory: Path) -> None:
    tiny = TinyModel.open(directory)
    every = advance(tiny.model, [3, 1, 4], tiny.model.new_state(), logits="all")
    last = advance(tiny.model, [3, 1, 4], tiny.model.new_state())
    none = advance(tiny.model, [3, 1, 4], tiny.model.new_state(), logits="none", taps=[3])
    assert every.logits is not None
    assert last.logits is not None
    assert none.logits is None
    assert mx.array_equal(every.logits[-1:], last.logits).item()
    assert mx.array_equal(none.stack, every.stack).item()
    assert mx.array_equal(none.taps[3], none.stack).item()
