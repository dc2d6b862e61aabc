"""The arithmetic of Metal, bfloat16 activations, run on the CPU backend: types, sanity, streamed = resident.

Slow here, so small. What Metal's kernels make of it only a Mac can show.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.machine import Machine, detect_machine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.model.quant import QuantizedLinear
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import prompt_of
from tests.tiny.stepping import advance

EXPERTS, TOP_K = 16, 4
FLOAT32_STATES = ("recurrent", "pooled")
COUNTS = ("num_tokens", "ple.history")

PACKS: dict[str, Callable[[Path], Path]] = {
    "float32 scales": build_mlx,
    "bfloat16 scales": lambda directory: build_mlx(directory, scale_dtype="bfloat16"),
    "nvfp4": lambda directory: build_mlx(directory, mode="nvfp4", group_size=16, scale_dtype="bfloat16"),
}


@pytest.fixture(scope="module", params=PACKS)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return PACKS[request.param](tmp_path_factory.mktemp("pack"))


def metal() -> Machine:
    """Return this machine as if it computed like Metal."""
    return replace(detect_machine(), backend="metal")


def run(
    directory: Path, tokens: list[int], *, slots: int, block: int, machine: Machine | None = None
) -> tuple[mx.array, dict[str, mx.array]]:
    """Return all logits and the final state of a run in blocks."""
    request = PlanRequest(context_tokens=256, slots_per_layer=slots)
    with Engine.open(directory, request, machine=machine or metal()) as engine:
        model, parts = engine.target.model, list[mx.array]()
        state = model.new_state()
        for start in range(0, len(tokens), block):
            output = advance(model, tokens[start : start + block], state, logits="all")
            assert output.logits is not None
            mx.eval(output.logits)
            engine.target.experts.device_idle()
            parts.append(output.logits)
        return mx.concatenate(parts), state.named_arrays()


def test_streamed_equals_resident(pack: Path) -> None:
    tokens = prompt_of(44)
    logits, arrays = run(pack, tokens, slots=EXPERTS, block=1)
    for slots, block in ((TOP_K, 1), (TOP_K, 40), (7, 3)):
        got, state = run(pack, tokens, slots=slots, block=block)
        assert mx.array_equal(got, logits), f"S={slots} block={block}: logits differ"
        unequal = [name for name in state if not mx.array_equal(state[name], arrays[name])]
        assert unequal == [], f"S={slots} block={block}"


def test_nothing_is_promoted_to_float32_unasked(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every matrix of the trunk sees what came before it: one promotion anywhere shows in an input.
    seen: set[tuple[mx.Dtype, ...]] = set()
    plain = QuantizedLinear.__call__

    def recording(self: QuantizedLinear, x: mx.array) -> mx.array:
        y = plain(self, x)
        seen.add((x.dtype, y.dtype, self.scales.dtype))
        return y

    monkeypatch.setattr(QuantizedLinear, "__call__", recording)
    logits, state = run(pack, prompt_of(30), slots=6, block=10)
    assert {pair[:2] for pair in seen} == {(mx.bfloat16, mx.bfloat16)}
    assert {scales for *_, scales in seen} <= {mx.bfloat16, mx.uint8}  # coded scales stay codes
    assert logits.dtype == mx.bfloat16
    for name, array in state.items():
        wide = name.endswith(FLOAT32_STATES)
        assert name in COUNTS or array.dtype == (mx.float32 if wide else mx.bfloat16), name


def test_the_demo_says_nearly_the_same_as_in_float32() -> None:
    tokens = [(17 * position + 3) % 2000 for position in range(24)]
    wide, _ = run(demo_dir(), tokens, slots=24, block=24, machine=detect_machine())
    narrow, _ = run(demo_dir(), tokens, slots=24, block=24)
    pairs = zip(np.array(wide), np.array(narrow.astype(mx.float32)), strict=True)
    alike = [float(np.corrcoef(ours, theirs)[0, 1]) for ours, theirs in pairs]
    # One expert chosen otherwise moves a row that far; a wrong type or a lost rounding moves all of them.
    assert np.median(alike) > 0.99, alike
    assert min(alike) > 0.8, alike
