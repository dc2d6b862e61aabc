"""Products whose halves are computed on two streams: the same bits, wherever they are cut, in any thread."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.config import QuantSpec
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.machine import detect_machine, mac_of, usable_cpus
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.model import halves, quant
from mlx_flashnext.model.halves import LEAST_WORK, compute_in_halves
from mlx_flashnext.model.quant import SORT_PAIRS, ExpertBank, ExpertMatrix, QuantizedLinear, expert_glu
from mlx_flashnext.model.traced import replay_pieces, traced
from tests.tiny.engines import greedy

SLOTS, HIDDEN, WIDTH = 12, 64, 128
BLOCKS = [(1, 4), (1, 5), (2, 1), (7, 1), (3, 4), (40, 4), (SORT_PAIRS, 1)]


@pytest.fixture(autouse=True)
def _whole_again() -> Iterator[None]:
    yield
    compute_in_halves(False)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the pairs of every product that is described, halves apart, from now on; small ones are cut."""
    described: list[int] = []
    here = quant._glu_here

    def told(x: mx.array, bank: ExpertBank, slots: mx.array, *, is_sorted: bool) -> mx.array:
        described.append(slots.size)
        return here(x, bank, slots, is_sorted=is_sorted)

    monkeypatch.setattr(halves, "LEAST_WORK", 1)
    monkeypatch.setattr(quant, "_glu_here", told)
    return described


def matrix(rows: int, columns: int, seed: int, *, is_quantised: bool) -> ExpertMatrix:
    dense = mx.random.normal((SLOTS, rows, columns), key=mx.random.key(seed))
    if not is_quantised:
        return ExpertMatrix(dense)
    return ExpertMatrix(*mx.quantize(dense, group_size=64, bits=4), QuantSpec("affine", 4, 64))


def bank_of(*, is_quantised: bool = True, scales: mx.Dtype = mx.float32) -> ExpertBank:
    parts = [
        matrix(WIDTH, HIDDEN, 1, is_quantised=is_quantised),
        matrix(WIDTH, HIDDEN, 2, is_quantised=is_quantised),
        matrix(HIDDEN, WIDTH, 3, is_quantised=is_quantised),
    ]
    if scales != mx.float32:
        parts = [
            ExpertMatrix(m.weight, m.scales.astype(scales), m.biases.astype(scales), m.spec) for m in parts
        ]
    return ExpertBank(*parts)


def linear_of(out: int, mode: str) -> QuantizedLinear:
    dense = mx.random.normal((out, HIDDEN), key=mx.random.key(out))
    bits, group_size = (4, 64) if mode == "affine" else (8, 32)
    weight, scales, *biases = mx.quantize(dense, group_size=group_size, bits=bits, mode=mode)
    return QuantizedLinear(weight, scales, biases[0] if biases else None, QuantSpec(mode, bits, group_size))


class Twice:
    """An owner of weights with a method to be replayed."""

    def __init__(self, linear: QuantizedLinear) -> None:
        self.linear = linear

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) * 2


def pairs_of(rows: int, top_k: int) -> tuple[mx.array, mx.array]:
    slots = np.random.default_rng(rows).integers(0, SLOTS, (rows, top_k)).astype(np.uint32)
    return mx.random.normal((rows, HIDDEN), key=mx.random.key(rows)), mx.array(slots)


@pytest.mark.parametrize(("rows", "top_k"), BLOCKS)
@pytest.mark.parametrize("scales", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_halves_are_the_whole(places: list[int], rows: int, top_k: int, scales: mx.Dtype) -> None:
    bank, (x, slots) = bank_of(scales=scales), pairs_of(rows, top_k)
    compute_in_halves(False)
    whole = np.array(expert_glu(x, slots, bank))
    compute_in_halves(True)
    assert np.array_equal(np.array(expert_glu(x, slots, bank)), whole)
    assert len(places) == 3
    assert places[0] == rows * top_k == places[1] + places[2]
    assert abs(places[1] - places[2]) <= min(rows, top_k)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("out", [1, 2, 33])
@pytest.mark.parametrize("mode", ["affine", "mxfp8"])
def test_columns_of_a_product_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, rows: int, out: int, mode: str
) -> None:
    monkeypatch.setattr(halves, "LEAST_WORK", 1)
    linear, x = linear_of(out, mode), mx.random.normal((rows, HIDDEN), key=mx.random.key(rows))
    compute_in_halves(False)
    whole = np.array(linear(x))
    compute_in_halves(True)
    in_halves = np.array(linear(x))
    assert whole.shape == (rows, out)
    assert np.array_equal(in_halves, whole)


def test_a_replayed_product_is_computed_in_halves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "LEAST_WORK", 1)
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    linear, x = linear_of(33, "affine"), mx.random.normal((2, HIDDEN), key=mx.random.key(1))
    whole = np.array(linear(x))
    compute_in_halves(True)
    replay_pieces(True)
    try:
        replayed = traced(Twice(linear).__call__)
        assert np.array_equal(np.array(replayed(x)), 2 * whole)
        assert np.array_equal(np.array(replayed(x + x)), 4 * whole)
    finally:
        replay_pieces(False)


def test_narrow_scales_are_widened_once(places: list[int]) -> None:
    """MLX widens the scales of all slots for every product: two halves would do it twice, beside the plan."""
    num_slots, width = 64, 256
    kept = []
    for seed in (1, 2, 3):
        dense = mx.random.normal((num_slots, width, width), key=mx.random.key(seed))
        weight, scales, biases = mx.quantize(dense, group_size=64, bits=4)
        kept.append((weight, scales.astype(mx.bfloat16), biases.astype(mx.bfloat16)))
    bank = ExpertBank(*(ExpertMatrix(*parts, QuantSpec("affine", 4, 64)) for parts in kept))
    x, slots = mx.random.normal((1, width)), mx.array([[1, 5, 9, 60]], mx.uint32)
    mx.eval(x, slots, kept)
    widened = sum(4 * part.size for _, *narrow in kept for part in narrow)
    taken = []
    for in_halves in (False, True):
        compute_in_halves(in_halves)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(expert_glu(x, slots, bank))
        taken.append(mx.get_peak_memory() - before)
    assert all(widened / 4 < each <= 1.1 * widened for each in taken), (taken, widened)


def test_one_pair_and_decoded_matrices_stay_whole(places: list[int]) -> None:
    """Decoding makes copies, whose number at a time the plan counts on."""
    compute_in_halves(True)
    expert_glu(*pairs_of(1, 1), bank_of())
    expert_glu(*pairs_of(1, 4), bank_of(is_quantised=False))
    assert places == [1, 4]


def test_small_products_stay_whole() -> None:
    compute_in_halves(True)
    assert halves.second_stream(LEAST_WORK - 1) is None
    assert halves.second_stream(LEAST_WORK) is not None


def test_half_is_computed_on_another_stream(places: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits alone would not tell: on one stream the halves follow each other, and nothing is gained."""
    entered: list[object] = []
    stream = mx.stream
    monkeypatch.setattr(quant.mx, "stream", lambda place: entered.append(place) or stream(place))
    compute_in_halves(True)
    mx.eval(expert_glu(*pairs_of(1, 4), bank_of()))
    assert entered == [halves.second_stream(1)]
    assert isinstance(entered[0], mx.ThreadLocalStream)


def test_any_thread_may_compute(places: list[int]) -> None:
    """Streams belong to threads: another one has a second stream of its own."""
    compute_in_halves(True)
    answers: list[np.ndarray] = []

    def compute() -> None:
        bank, (x, slots) = bank_of(), pairs_of(3, 4)
        answers.append(np.array(expert_glu(x, slots, bank)))

    def compute_and_end() -> None:
        compute()
        mx.clear_streams()  # else the process may abort at its end

    compute()
    thread = threading.Thread(target=compute_and_end)
    thread.start()
    thread.join()
    assert np.array_equal(*answers)


def test_an_answer_is_the_same(places: list[int]) -> None:
    """Streamed in few slots, so that prompts go in groups, with a draft's blocks; and resident."""
    machine, answers = detect_machine(), []
    for in_halves in (False, True):
        for slots, draft in ((8, "none"), (24, "dflash2"), (64, "none")):
            request = PlanRequest(context_tokens=256, slots_per_layer=slots, draft=draft)
            here = dataclasses.replace(machine, halves=in_halves)
            with Engine.open(demo_dir(), request, machine=here) as engine:
                places.clear()
                answers.append(greedy(engine, list(range(20, 70)), 12))
                assert places
    assert all(answer == answers[0] for answer in answers)


def test_what_a_machine_does_follows_from_its_backend() -> None:
    machine = detect_machine()
    assert machine.halves == (machine.backend == "cpu" and usable_cpus() > 1)
    assert not mac_of(32).halves
