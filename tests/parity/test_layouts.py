"""Every layout that opens gives the tokens its values say: 32 greedy tokens and all logits, bit for bit
(P61).

The reference reads the same files with `mx.load`, maps names by itself, and knows no store, slot or plan.
"""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.model.flashnext import FlashNext
from tests.parity.test_streamed_equals_resident import run
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.engines import greedy, open_tiny, prompt_of
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel

SIX_BITS = {"bits": 6, "group_size": 32, "mode": "affine"}
EIGHT_BITS = {"bits": 8, "group_size": 64, "mode": "affine"}

LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "hf float32": build_hf,
    "hf float32, one file": lambda directory: build_hf(directory, shards=1),
    "hf bfloat16": lambda directory: build_hf(directory, dtype="bfloat16"),
    "hf with vision": lambda directory: build_hf(directory, vision=True),
    "mlx float32": lambda directory: build_mlx(directory, bits=None),
    "mlx without mtp": lambda directory: build_mlx(directory, mtp=False),
    "mlx bfloat16 scales": lambda directory: build_mlx(directory, scale_dtype="bfloat16"),
    "mlx mxfp4": lambda directory: build_mlx(directory, mode="mxfp4", bits=4, group_size=32),
    "mlx mxfp8": lambda directory: build_mlx(directory, mode="mxfp8", bits=8, group_size=32),
    "mlx nvfp4": lambda directory: build_mlx(directory, mode="nvfp4", bits=4, group_size=16),
    "mlx overrides": lambda directory: build_mlx(
        directory,
        quant_overrides={
            "layers.0.mlp.switch_mlp.down_proj": SIX_BITS,
            "layers.2.mlp.switch_mlp.gate_proj": EIGHT_BITS,
            "layers.3.mlp.switch_mlp.up_proj": False,
            "layers.1.linear_attn.out_proj": False,
            "lm_head": EIGHT_BITS,
        },
    ),
    **{
        f"mlx affine {bits} bits, group {group}": (
            lambda directory, bits=bits, group=group: build_mlx(directory, bits=bits, group_size=group)
        )
        for bits, group in ((2, 32), (3, 32), (4, 32), (4, 64), (5, 64), (6, 32), (8, 64))
    },
}


def reference_greedy(model: FlashNext, prompt: list[int], count: int) -> list[int]:
    """Return greedy tokens, one at a time; of equal logits the lowest id wins."""
    state, answer = model.new_state(), []
    output = advance(model, prompt, state)
    for _ in range(count):
        answer.append(int(mx.argmax(output.logits[-1]).item()))
        output = advance(model, answer[-1:], state)
    return answer


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_streamed_answer_is_the_one_the_values_give(tmp_path: Path, name: str) -> None:
    directory = LAYOUTS[name](tmp_path / "model")
    prompt = prompt_of(24)
    expected = reference_greedy(TinyModel.open(directory).model, prompt, 32)
    with open_tiny(directory, slots=6) as engine:
        assert greedy(engine, prompt, 32) == expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_streamed_logits_are_the_resident_ones_and_every_tensor_has_one_place(
    tmp_path: Path, name: str
) -> None:
    directory, tokens = LAYOUTS[name](tmp_path / "model"), prompt_of(18)
    checkpoint = open_checkpoint(directory)
    names = [tensor for line in checkpoint.account() for tensor in line.names]
    assert sorted(names) == sorted(checkpoint.table.tensors)
    expected, state = run(TinyModel.open(directory).model, tokens, 18)
    with open_tiny(directory, slots=5) as engine:
        got, arrays = run(engine.target.model, tokens, 7, engine.target.experts)
    assert mx.array_equal(got, expected)
    assert all(mx.array_equal(arrays[part], state[part]) for part in state)
