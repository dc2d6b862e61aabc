"""P70 and the sequence state: all or nothing, snapshots by reference, no trimming, bytes as planned."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import mlx.core as mx
import pytest

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.errors import StateError
from mlx_flashnext.geometry import block_bytes, forward_workspace_bytes, state_bytes
from mlx_flashnext.layer_state import QsaState
from mlx_flashnext.state import MtpState, SequenceState
from tests.tiny.checkpoints import build_hf
from tests.tiny.stepping import advance, advance_cut
from tests.tiny.weights import TinyModel

TOKENS = [(5 * i * i + i) % 118 for i in range(60)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.open(build_hf(tmp_path_factory.mktemp("state"), tokenizer=False))


def logits(tiny: TinyModel, tokens: list[int], state: SequenceState) -> mx.array:
    out = advance(tiny.model, tokens, state, logits="all").logits
    assert out is not None
    mx.eval(out)
    return out


def test_trimming_is_refused_and_changes_nothing(tiny: TinyModel) -> None:
    state = tiny.model.new_state()
    logits(tiny, TOKENS[:30], state)
    before = state.named_arrays()
    for num_tokens in (0, 29, 31):
        with pytest.raises(StateError, match=f"cannot be trimmed to {num_tokens}") as caught:
            state.trim(num_tokens)
        assert "snapshot" in caught.value.hint
    state.trim(30)
    after = state.named_arrays()
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)


@pytest.mark.parametrize("cut", [1, 15, 16, 19, 20, 23, 33])
def test_a_restored_snapshot_continues_as_if_nothing_had_followed(tiny: TinyModel, cut: int) -> None:
    straight, state = tiny.model.new_state(), tiny.model.new_state()
    logits(tiny, TOKENS[:cut], straight)
    logits(tiny, TOKENS[:cut], state)
    kept = state.snapshot()
    logits(tiny, [7] * 21, state)
    state.restore(kept)
    assert state.num_tokens == cut
    rest = [logits(tiny, TOKENS[cut:], each) for each in (straight, state)]
    assert mx.array_equal(*rest).item()
    left, right = straight.named_arrays(), state.named_arrays()
    assert all(mx.array_equal(left[name], right[name]).item() for name in left)


def test_a_snapshot_survives_more_tokens_and_growing_buffers(tiny: TinyModel) -> None:
    state = tiny.model.new_state()
    logits(tiny, TOKENS, state)
    kept = state.snapshot()
    expected = logits(tiny, [1, 2, 3], state)
    state.restore(kept)
    logits(tiny, TOKENS * 5, state)
    state.restore(kept)
    assert mx.array_equal(logits(tiny, [1, 2, 3], state), expected).item()


def test_a_snapshot_of_overwritten_tokens_is_refused(tiny: TinyModel) -> None:
    state = tiny.model.new_state()
    logits(tiny, TOKENS[:10], state)
    short = state.snapshot()
    logits(tiny, TOKENS[10:20], state)
    long = state.snapshot()
    state.restore(short)
    with pytest.raises(StateError, match="20 tokens"):
        state.restore(long)
    state.restore(short)
    other = tiny.model.new_state()
    with pytest.raises(StateError):
        other.restore(short)


@pytest.mark.parametrize("failing_layer", range(4))
def test_a_failed_pass_leaves_the_state_as_it_was(tiny: TinyModel, failing_layer: int) -> None:
    straight, state = tiny.model.new_state(), tiny.model.new_state()
    logits(tiny, TOKENS[:22], straight)
    logits(tiny, TOKENS[:22], state)
    run = tiny.experts.run

    def breaks(layer, x, ids):
        if layer == failing_layer:
            raise OSError("the drive is gone")
        return run(layer, x, ids)

    with mock.patch.object(tiny.experts, "run", breaks), pytest.raises(OSError, match="gone"):
        advance(tiny.model, [9, 9, 9, 9, 9], state)
    assert state.num_tokens == 22
    again = [logits(tiny, TOKENS[22:], each) for each in (straight, state)]
    assert mx.array_equal(*again).item()


def test_a_full_state_refuses_before_computing(tiny: TinyModel) -> None:
    state = tiny.model.new_state(24)
    logits(tiny, TOKENS[:20], state)
    with pytest.raises(StateError, match=r"20 \+ 5 tokens") as caught:
        advance(tiny.model, TOKENS[20:25], state)
    assert caught.value.context == {"num_tokens": 25, "capacity_tokens": 24}
    logits(tiny, TOKENS[20:24], state)


@pytest.mark.parametrize("capacity", [None, 64])
def test_bytes_held_are_the_bytes_planned(tiny: TinyModel, capacity: int | None) -> None:
    state = tiny.model.new_state(capacity)
    logits(tiny, TOKENS[:47], state)  # three raw index keys are open: the most there can be
    planned = state_bytes(tiny.config, 47, 4, capacity_tokens=capacity)
    assert state.num_bytes() == planned.total
    held = mx.get_array_buffer_size(state.arrays()) if hasattr(mx, "get_array_buffer_size") else planned.total
    assert held <= planned.total + 64 * 1024
    mtp = MtpState(tiny.config, compute_dtype=mx.float32, capacity_tokens=capacity)
    with_mtp = state_bytes(tiny.config, 47, 4, capacity_tokens=capacity, mtp=True)
    assert with_mtp.kv > planned.kv
    assert mtp.num_cells == 0


def test_a_step_updates_key_buffers_in_place(tiny: TinyModel) -> None:
    logits(tiny, TOKENS, tiny.model.new_state())  # so that every weight is in memory
    before = mx.get_active_memory()
    state = tiny.model.new_state(40_000)
    logits(tiny, TOKENS, state)
    mx.reset_peak_memory()
    logits(tiny, [5], state)
    # A copy of the keys or of the values alone would add almost half.
    assert mx.get_peak_memory() - before < 1.2 * state.num_bytes()


def test_blocks_kept_cut_and_rolled_back_update_key_buffers_in_place(tiny: TinyModel) -> None:
    """A copy of a long cache per step is what a transaction must never cost: not even after a snapshot."""
    state = tiny.model.new_state(40_000)
    logits(tiny, TOKENS, state)
    remembered = state.snapshot()
    buffers = [layer.keys for layer in state.layers if isinstance(layer, QsaState)]
    for kept in (5, 2, 0, 1, 5):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with state.begin(5) as block:
            out = tiny.model.forward(TOKENS[:5], block, logits="all").logits
            mx.eval(out)
            if kept:
                block.commit(kept)
        del out, block
        mx.eval(state.arrays())
        # The keys or the values alone of one layer are half of what a copy would add.
        assert mx.get_peak_memory() - before < buffers[0].array.nbytes / 2, kept
    state.restore(remembered)
    assert all(old is new.keys for old, new in zip(buffers, qsa_layers(state), strict=True))


def qsa_layers(state: SequenceState) -> list[QsaState]:
    return [layer for layer in state.layers if isinstance(layer, QsaState)]


@pytest.mark.parametrize("capacity", [512, 40_000])
def test_a_cut_costs_the_same_at_any_context(tiny: TinyModel, capacity: int) -> None:
    state = tiny.model.new_state(capacity)
    logits(tiny, TOKENS, state)
    with state.begin(7) as block:
        mx.eval(tiny.model.forward(TOKENS[:7], block).logits)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        block.commit(3)
        mx.eval(state.arrays())
        used = mx.get_peak_memory() - before
    # The states of the whole block make room for those of the cut: the plan counts either.
    assert used < block_bytes(tiny.config, 7, 4, revocable=True)


@pytest.mark.parametrize(("rows", "revocable"), [(1, True), (40, False), (2, True), (4, True), (9, True)])
def test_a_block_holds_what_is_planned_for_it(tiny: TinyModel, rows: int, revocable: bool) -> None:
    state = tiny.model.new_state(128)
    logits(tiny, TOKENS[:20], state)
    before = mx.get_active_memory()
    with state.begin(rows, revocable=revocable) as block:
        mx.eval(tiny.model.forward(TOKENS[:rows], block, logits="none").stack)
        held = mx.get_active_memory() - before
        planned = block_bytes(tiny.config, rows, 4, revocable=revocable)
        # Arrays take whole pages.
        assert held <= planned + 32 * 1024
        assert held >= 0.8 * planned
        del block
    assert mx.get_active_memory() - before < 32 * 1024


def test_a_block_of_one_row_keeps_no_journal(tiny: TinyModel) -> None:
    """Plain decoding is a block of one row: it pays nothing for being revocable."""
    state = tiny.model.new_state()
    for rows, revocable in ((1, True), (5, False)):
        with state.begin(rows, revocable=revocable) as block:
            tiny.model.forward(TOKENS[:rows], block)
            assert block._layers is not None
            assert block._ple is not None
            assert [each.journal for each in (*block._layers, block._ple)] == [None] * 5
            with mock.patch.object(mx, "async_eval", side_effect=AssertionError):
                block.commit()


@pytest.mark.parametrize("rows", [0, 6, -1])
def test_a_number_of_rows_that_cannot_be_kept_is_refused_and_the_block_stays_open(
    tiny: TinyModel, rows: int
) -> None:
    state = tiny.model.new_state()
    with state.begin(5) as block:
        tiny.model.forward(TOKENS[:5], block)
        with pytest.raises(StateError, match=f"{rows} rows of a block of 5"):
            block.commit(rows)
        block.commit(5)
    assert state.num_tokens == 5


def test_a_block_is_run_once_and_closed_once(tiny: TinyModel) -> None:
    state = tiny.model.new_state()
    block = state.begin(3)
    with pytest.raises(StateError, match="not been run"):
        block.commit()
    with pytest.raises(StateError, match="2 rows for a block of 3"):
        tiny.model.forward(TOKENS[:2], block)
    tiny.model.forward(TOKENS[:3], block)
    with pytest.raises(StateError, match="has been run"):
        tiny.model.forward(TOKENS[:3], block)
    block.commit(2)
    assert not block.is_open
    for act in (block.commit, lambda: tiny.model.forward(TOKENS[:3], block)):
        with pytest.raises(StateError, match="closed"):
            act()
    block.rollback()
    assert state.num_tokens == 2
    with state.begin(2) as block:
        tiny.model.forward(TOKENS[2:4], block)
    with pytest.raises(StateError, match="closed"):
        block.commit()
    assert state.num_tokens == 2


def test_a_snapshot_is_forgotten_with_its_last_reference(tiny: TinyModel) -> None:
    """Going back once a cycle, as a drafter does, must not leave anything behind."""
    state = tiny.model.new_state()
    for token in TOKENS[:20]:
        kept = state.snapshot()
        advance_cut(tiny.model, [token, 9], state, 1)
        state.restore(kept)
        advance(tiny.model, [token], state)
    assert len(state._snapshots) == 1
    assert state.num_tokens == 20


def test_one_wait_for_the_logits_completes_the_state(tiny: TinyModel) -> None:
    state = tiny.model.new_state()
    logits(tiny, TOKENS[:9], state)  # dense: no attention output needs the pooled index keys yet
    before = mx.get_active_memory()
    mx.eval(*state.arrays())
    assert mx.get_active_memory() == before


@pytest.mark.parametrize(("rows", "context"), [(1, 300), (64, 300), (200, 512)])
def test_a_block_stays_within_the_planned_workspace(tiny: TinyModel, rows: int, context: int) -> None:
    state = tiny.model.new_state(context)
    tokens = (TOKENS * 9)[:context]
    logits(tiny, tokens[: context - rows], state)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(advance(tiny.model, tokens[context - rows :], state).logits)
    used = mx.get_peak_memory() - before
    assert used <= forward_workspace_bytes(tiny.config, rows, context, 4)


def test_real_sizes_are_those_of_the_specification() -> None:
    path = Path(__file__).parents[3] / "mlx_flashnext/checkpoint/qwen3.8-flash-next.config.json"
    real = ModelConfig.from_dict(json.loads(path.read_text()))
    sizes = state_bytes(real, 1000, 2, capacity_tokens=1000)
    assert sizes.recurrent == 36 * (3_145_728 + 61_440)
    assert sizes.ple == 184_320
    # Keys and values 24,576 a token; pooled keys in float32, 128 a token and layer; three raw index keys.
    assert sizes.kv == 1000 * (24_576 + 12 * 128) + 12 * 3 * 256
