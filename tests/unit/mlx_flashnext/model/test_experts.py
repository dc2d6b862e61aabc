"""Gathered experts: a pair's result depends on its row and expert alone; the router's sum has one order."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.config import QuantSpec
from mlx_flashnext.model.moe import MixtureOfExperts
from mlx_flashnext.model.quant import SORT_PAIRS, ExpertBank, ExpertMatrix, expert_glu
from tests.tiny.checkpoints import build_hf
from tests.tiny.weights import TinyModel

SLOTS, HIDDEN, WIDTH = 11, 64, 96
MODES = {
    "affine4": QuantSpec("affine", 4, 32),
    "affine3": QuantSpec("affine", 3, 32),
    "mxfp4": QuantSpec("mxfp4", 4, 32),
    "mxfp8": QuantSpec("mxfp8", 8, 32),
    "nvfp4": QuantSpec("nvfp4", 4, 16),
}


def dense_bank(dtype: mx.Dtype = mx.float32) -> ExpertBank:
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return ExpertBank(
        *(
            ExpertMatrix((mx.random.normal((SLOTS, *shape), key=mx.random.key(i)) / 8).astype(dtype))
            for i, shape in enumerate(shapes)
        )
    )


def quantised_bank(spec: QuantSpec) -> ExpertBank:
    matrices = []
    dense = dense_bank()
    for matrix in (dense.gate, dense.up, dense.down):
        parts = mx.quantize(matrix.weight, group_size=spec.group_size, bits=spec.bits, mode=spec.mode)
        matrices.append(ExpertMatrix(*parts, **({"biases": None} if len(parts) == 2 else {}), spec=spec))
    return ExpertBank(*matrices)


def bank_of(kind: str) -> ExpertBank:
    if kind in MODES:
        return quantised_bank(MODES[kind])
    return dense_bank(mx.bfloat16 if kind == "widened" else mx.float32)


def take(bank: ExpertBank, slots: list[int]) -> ExpertBank:
    index = mx.array(slots)
    return ExpertBank(
        *(
            ExpertMatrix(
                m.weight[index],
                None if m.scales is None else m.scales[index],
                None if m.biases is None else m.biases[index],
                m.spec,
            )
            for m in (bank.gate, bank.up, bank.down)
        )
    )


def as_numbers(bank: ExpertBank) -> list[np.ndarray]:
    out = []
    for m in (bank.gate, bank.up, bank.down):
        weight = m.weight
        if m.spec is not None:
            assert m.scales is not None
            weight = mx.dequantize(
                weight, m.scales, m.biases, group_size=m.spec.group_size, bits=m.spec.bits, mode=m.spec.mode
            )
        out.append(np.array(weight.astype(mx.float32), np.float64))
    return out


KINDS = ["dense", "widened", *MODES]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_every_pair_equals_its_matrices_product(kind: str, rows: int) -> None:
    bank, top_k = bank_of(kind), 4
    x = mx.random.normal((rows, HIDDEN), key=mx.random.key(8))
    slots = np.random.default_rng(rows).integers(0, SLOTS, (rows, top_k))
    assert (rows * top_k >= SORT_PAIRS) == (rows == 40)
    y = np.array(expert_glu(x, mx.array(slots), bank))
    gate, up, down = as_numbers(bank)
    wide = np.array(x, np.float64)
    for row in range(rows):
        for rank, slot in enumerate(slots[row]):
            g = gate[slot] @ wide[row]
            wanted = down[slot] @ (g / (1 + np.exp(-g)) * (up[slot] @ wide[row]))
            assert np.abs(y[row, rank] - wanted).max() < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_neither_slots_nor_other_pairs_nor_sorting_change_a_bit(kind: str) -> None:
    bank, top_k, rows = bank_of(kind), 4, 40
    x = mx.random.normal((rows, HIDDEN), key=mx.random.key(8))
    slots = np.random.default_rng(5).integers(0, SLOTS, (rows, top_k))
    whole = expert_glu(x, mx.array(slots), bank)
    alone = mx.concatenate([expert_glu(x[i : i + 1], mx.array(slots[i : i + 1]), bank) for i in range(rows)])
    assert mx.array_equal(whole, alone).item()
    order = np.random.default_rng(6).permutation(SLOTS)
    moved = expert_glu(x, mx.array(np.argsort(order)[slots]), take(bank, order.tolist()))
    assert mx.array_equal(whole, moved).item()
    one_slot = expert_glu(x[:1], mx.array([[0]]), take(bank, [int(slots[0, 0])]))
    assert mx.array_equal(whole[0, 0], one_slot[0, 0]).item()


def test_rows_of_zeros_pad_experts_without_effect() -> None:
    """P66: 640 is no multiple of 256, so some packs pad the expert width."""
    bank = dense_bank()
    pad = lambda m, axis: mx.pad(m.weight, [(0, 32 if i == axis else 0) for i in range(3)])  # noqa: E731
    padded = ExpertBank(
        ExpertMatrix(pad(bank.gate, 1)), ExpertMatrix(pad(bank.up, 1)), ExpertMatrix(pad(bank.down, 2))
    )
    x, slots = (
        mx.random.normal((5, HIDDEN), key=mx.random.key(4)),
        mx.array([[1, 2], [3, 4], [0, 9], [7, 7], [5, 6]]),
    )
    assert mx.array_equal(expert_glu(x, slots, bank), expert_glu(x, slots, padded)).item()


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    return TinyModel.open(build_hf(tmp_path, tokenizer=False))


def test_tied_probabilities_go_to_the_smaller_id(tiny: TinyModel) -> None:
    moe = MixtureOfExperts(tiny.config, tiny.weights, "layers.0.mlp", 0, tiny.experts, tiny.sync)
    tied = mx.zeros((2, tiny.config.num_experts)).at[0, mx.array([3, 9])].add(1.0)
    moe._router._logits = lambda x: tied  # type: ignore[method-assign]
    ids, weights = moe.route(mx.zeros((2, tiny.config.hidden_size)))
    assert ids.tolist() == [[0, 1, 3, 9], [0, 1, 2, 3]]
    assert np.allclose(np.array(weights).sum(-1), 1)
    assert weights[0, 2].item() == weights[0, 3].item() > weights[0, 0].item()


def test_the_weighted_sum_does_not_depend_on_residency(tiny: TinyModel) -> None:
    x = mx.random.normal((7, tiny.config.hidden_size), key=mx.random.key(2))
    outputs = []
    for resident in (True, False):
        tiny.experts._resident = resident
        moe = MixtureOfExperts(tiny.config, tiny.weights, "layers.0.mlp", 0, tiny.experts, tiny.sync)
        outputs.append(moe(x))
    assert mx.array_equal(*outputs).item()
