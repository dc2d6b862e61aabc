"""P70 and the sequence state: all or nothing, snapshots by reference, no trimming, bytes as planned."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import mlx.core as mx
import pytest

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.errors import StateError
from mlx_flashnext.geometry import forward_workspace_bytes, state_bytes
from mlx_flashnext.state import MtpState, SequenceState
from tests.tiny.checkpoints import build_hf
from tests.tiny.stepping import advance
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
    path = Path(__file__).parents[3] / "bench/synth/data/qwen3.8-flash-next.config.json"
    real = ModelConfig.from_dict(json.loads(path.read_text()))
    sizes = state_bytes(real, 1000, 2, capacity_tokens=1000)
    assert sizes.recurrent == 36 * (3_145_728 + 61_440)
    assert sizes.ple == 184_320
    # Keys and values 24,576 a token; pooled keys in float32, 128 a token and layer; three raw index keys.
    assert sizes.kv == 1000 * (24_576 + 12 * 128) + 12 * 3 * 256
