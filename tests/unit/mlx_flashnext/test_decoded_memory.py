"""Decoding FP8 and BF16 experts takes no more memory than the plan's line says."""

import mlx.core as mx
import pytest

from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.config import Fp8Blocks
from mlx_flashnext.engine.sizes import _widened_pairs_bytes
from mlx_flashnext.model.quant import ExpertBank, ExpertMatrix, expert_glu
from tests.tiny.checkpoints import build_hf
from tests.tiny.fp8 import build_fp8

HIDDEN = WIDTH = 256
OVERRIDES = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_hidden_layers": 2}


def matrix(kind: str) -> ExpertMatrix:
    if kind == "fp8":
        codes = mx.random.randint(0, 120, (16, WIDTH, HIDDEN)).astype(mx.uint8)
        return ExpertMatrix(codes, mx.ones((16, 2, 2), mx.bfloat16), spec=Fp8Blocks(128, 128))
    return ExpertMatrix(mx.random.normal((16, WIDTH, HIDDEN)).astype(mx.bfloat16))


@pytest.mark.parametrize("kind", ["fp8", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 40])
def test_decoding_stays_within_the_plan(tmp_path, kind, rows):
    if kind == "fp8":
        directory = build_fp8(tmp_path / "m", tmp_path / "t", block=(128, 128), overrides=OVERRIDES)
    else:
        directory = build_hf(tmp_path / "m", dtype="bfloat16", overrides=OVERRIDES)
    planned = _widened_pairs_bytes(open_checkpoint(directory).experts[0], 4)
    bank = ExpertBank(matrix(kind), matrix(kind), matrix(kind))
    x_TD = mx.random.normal((rows, HIDDEN))
    slots_TK = mx.random.randint(0, 16, (rows, 4)).astype(mx.uint32)
    mx.eval(x_TD, slots_TK, *(part for m in (bank.gate, bank.up, bank.down) for part in (m.weight,)))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(expert_glu(x_TD, slots_TK, bank))
    activations = 12 * rows * 4 * (HIDDEN + WIDTH) * 4
    taken = mx.get_peak_memory() - before
    assert planned / 8 < taken <= planned + activations, (taken, planned, activations)
