"""The official FP8 layout runs as it is: the logits of its values spelled out in float32, bit for bit."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.config import Fp8Blocks
from mlx_flashnext.model import quant
from mlx_flashnext.model.quant import decode_blocks
from mlx_flashnext.stored_numbers import e4m3_values
from tests.parity.test_streamed_equals_resident import resident_model, run
from tests.tiny.engines import open_tiny, prompt_of
from tests.tiny.fp8 import build_fp8, e4m3
from tests.tiny.weights import TinyModel

BLOCKS = [(32, 16), (128, 128), (48, 40)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("trunk", [False, True])
def test_streamed_fp8_gives_the_logits_of_its_values(
    tmp_path: Path, block: tuple[int, int], trunk: bool
) -> None:
    directory = build_fp8(tmp_path / "fp8", tmp_path / "twin", block=block, trunk=trunk)
    tokens = prompt_of(44)
    expected, state = run(TinyModel.open(tmp_path / "twin").model, tokens, 7)
    with open_tiny(directory, slots=5) as engine:
        for size in (1, 40):
            got, arrays = run(engine.target.model, tokens, size, engine.target.experts)
            assert mx.array_equal(got, expected)
            assert all(mx.array_equal(arrays[name], state[name]) for name in state)


def test_resident_fp8_gives_the_logits_of_its_values(tmp_path: Path) -> None:
    directory = build_fp8(tmp_path / "fp8", tmp_path / "twin")
    tokens = prompt_of(30)
    expected, _ = run(TinyModel.open(tmp_path / "twin").model, tokens, 30)
    with open_tiny(directory) as engine:
        assert engine.plan.is_resident
        assert mx.array_equal(run(engine.target.model, tokens, 30, engine.target.experts)[0], expected)
    twin = resident_model(open_checkpoint(tmp_path / "twin"))
    assert mx.array_equal(run(twin, tokens, 1)[0], expected)


@pytest.mark.parametrize("fault", ["block scales", "table scale", "transposed blocks"])
def test_a_wrong_scale_changes_the_logits(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: each of these once shipped somewhere, gave plausible shapes, and wrong text."""
    directory = build_fp8(tmp_path / "fp8", tmp_path / "twin", block=(16, 16))
    tokens = prompt_of(12)
    expected, _ = run(TinyModel.open(tmp_path / "twin").model, tokens, 12)
    if fault == "table scale":
        monkeypatch.setattr("mlx_flashnext.weights.CheckpointWeights.ngram_scale", lambda self: 1.0)
    else:
        honest = quant.decode_blocks

        def faulty(codes: mx.array, scales: mx.array, blocks: Fp8Blocks, dtype: mx.Dtype) -> mx.array:
            wrong = mx.ones_like(scales) if fault == "block scales" else scales.swapaxes(-1, -2)
            return honest(codes, wrong, blocks, dtype)

        monkeypatch.setattr(quant, "decode_blocks", faulty)
    with open_tiny(directory, slots=5) as engine:
        assert not mx.array_equal(run(engine.target.model, tokens, 12, engine.target.experts)[0], expected)


def test_both_decoders_agree_with_the_definition_on_every_code() -> None:
    expected = np.array([e4m3(code) if code & 127 != 127 else np.nan for code in range(256)], np.float32)
    codes = mx.arange(256).astype(mx.uint8).reshape(1, 256)
    decoded = decode_blocks(codes, mx.ones((1, 1), mx.bfloat16), Fp8Blocks(128, 256), mx.float32)
    np.testing.assert_array_equal(np.array(decoded)[0], expected)
    np.testing.assert_array_equal(e4m3_values(), expected)


def test_every_tensor_of_the_fp8_layout_is_accounted_for_once(tmp_path: Path) -> None:
    """P41: experts of the MTP module are FP8 too, and known as such."""
    checkpoint = open_checkpoint(build_fp8(tmp_path / "fp8", tmp_path / "twin"))
    names = [name for line in checkpoint.account() for name in line.names]
    assert sorted(names) == sorted(checkpoint.table.tensors)
    assert checkpoint.mtp_experts is not None
    assert set(checkpoint.mtp_experts.specs.values()) == {Fp8Blocks(32, 16)}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_decoded_value_is_rounded_once(dtype: mx.Dtype) -> None:
    codes = mx.random.randint(0, 127, (3, 40, 24), key=mx.random.key(3)).astype(mx.uint8)
    scales = mx.random.normal((3, 5, 2), key=mx.random.key(4)).astype(mx.bfloat16)
    exact = e4m3_values().astype(np.float64)[np.array(codes)]
    wide = np.repeat(np.repeat(np.array(scales.astype(mx.float32)), 8, 1), 16, 2)[:, :, :24]
    expected = mx.array((exact * wide).astype(np.float32)).astype(dtype)
    assert mx.array_equal(decode_blocks(codes, scales, Fp8Blocks(8, 16), dtype), expected)
