"""Pieces of a pass that are replayed: the bits of their description, described once, gone with the model."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.machine import FUSE_VARIABLE, detect_machine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.geometry import TRACED_ROWS
from mlx_flashnext.model import gdn, traced
from mlx_flashnext.model.traced import replay_pieces
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.engines import greedy
from tests.tiny.stepping import advance, computed
from tests.tiny.weights import TinyModel

TOKENS = [7, 3, 99, 41, 3, 3, 64, 12, 80, 33, 5, 21, 90, 2, 17, 55, 8, 61, 120, 44]


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let pieces be replayed, with a compiler of C++ as fused kernels, which are gone with the test run."""
    kernels = tmp_path_factory.getbasetemp() / "kernels"
    kernels.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(kernels))
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    yield
    replay_pieces(False)


@pytest.fixture
def replaying(_allowed: None) -> None:
    """Replay."""
    replay_pieces(True)


def outcome(directory: Path, sizes: list[int], dtype: mx.Dtype = mx.float32) -> dict[str, np.ndarray]:
    """Return logits of every token and all that a sequence carries, after blocks of some sizes."""
    tiny = TinyModel.open(directory, dtype=dtype)
    state, at, logits = tiny.model.new_state(), 0, []
    for size in sizes:
        out = advance(tiny.model, TOKENS[at : at + size], state, logits="all")
        assert out.logits is not None
        logits.append(np.array(out.logits.astype(mx.float32)))
        at += size
    found = {"logits": np.concatenate(logits)}
    return {**found, **{name: np.array(array.astype(mx.float32)) for name, array in computed(state).items()}}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("sizes", [[1] * 20, [5, 3, 1, 8, 2, 1], [TRACED_ROWS + 1, 3]], ids=str)
def test_a_replay_gives_the_bits_of_the_description(tmp_path: Path, sizes: list[int]) -> None:
    directory = build_hf(tmp_path, tokenizer=False)
    described = outcome(directory, sizes)
    replay_pieces(True)
    assert same(described, outcome(directory, sizes))


def test_it_does_in_bfloat16_too(tmp_path: Path) -> None:
    """Metal's type: a fused kernel must round after every step, as steps of their own do."""
    directory = build_mlx(tmp_path, tokenizer=False)
    described = outcome(directory, [1, 1, 3], mx.bfloat16)
    replay_pieces(True)
    assert same(described, outcome(directory, [1, 1, 3], mx.bfloat16))


def test_a_piece_that_reads_what_changes_would_show(tmp_path: Path) -> None:
    """Replayed, it goes on with what it read when it was described (R1)."""
    directory, mix, steps = build_hf(tmp_path, tokenizer=False), gdn.GatedDeltaNet.mix, [0]

    def counts(self, x, *rest):
        steps[0] += 1
        return mix(self, x + 0.01 * steps[0], *rest)

    found = []
    for is_on in (False, True):
        replay_pieces(is_on)
        steps[0] = 0
        with mock.patch.object(gdn.GatedDeltaNet, "mix", counts):
            found.append(outcome(directory, [1] * 20))
    assert not same(*found)


def test_a_piece_is_described_once_for_each_number_of_rows(tmp_path: Path, replaying: None) -> None:
    tiny = TinyModel.open(build_hf(tmp_path, tokenizer=False))
    mix, rows = gdn.GatedDeltaNet.mix, []

    def counted(self, x, *rest):
        rows.append(x.shape[0])
        return mix(self, x, *rest)

    with mock.patch.object(gdn.GatedDeltaNet, "mix", counted):
        tiny = TinyModel.open(build_hf(tmp_path / "again", tokenizer=False))
        state = tiny.model.new_state()
        for size in (1, 1, 3, 1, 3, 1, 1):
            mx.eval(advance(tiny.model, TOKENS[:size], state, logits="none").stack)
        num_layers = tiny.config.layer_kinds.count("gdn")
        assert sorted(rows) == [1, 3]  # for all layers
        for _ in range(2):  # too long to be kept: described each time
            mx.eval(advance(tiny.model, [5] * (TRACED_ROWS + 1), state, logits="none").stack)
        assert rows.count(TRACED_ROWS + 1) == 2 * num_layers


def test_a_model_that_was_replayed_goes_with_its_last_name(tmp_path: Path, replaying: None) -> None:
    """A piece that knew its layer would keep the weights of every closed engine until a collection (R3)."""
    tiny = TinyModel.open(build_hf(tmp_path, tokenizer=False))
    mx.eval(advance(tiny.model, [5], tiny.model.new_state()).stack)
    layers = [weakref.ref(layer) for layer in tiny.model._layers]
    parts = [weakref.ref(layer._gdn or layer._qsa) for layer in tiny.model._layers]
    gc.disable()
    try:
        del tiny
        assert not any(each() for each in [*layers, *parts])
    finally:
        gc.enable()


def test_a_streamed_speculative_answer_is_the_same(replaying: None) -> None:
    machine = detect_machine()
    answers = []
    for replays in (True, False):
        replay_pieces(replays)
        with Engine.open(
            demo_dir(),
            PlanRequest(context_tokens=256, slots_per_layer=24, draft="dflash2", hints="both"),
            machine=dataclasses.replace(machine, replays=replays),
        ) as engine:
            answers.append(greedy(engine, [17, 300, 41, 9, 260, 77], 24))
    assert answers[0] == answers[1]


def test_long_blocks_are_not_replayed(replaying: None) -> None:
    called: list[str] = []

    def compiled(describe):
        return lambda *args: called.append("replay") or describe(*args)

    with mock.patch.object(traced.mx, "compile", compiled):
        double = traced.traced(lambda x: x + x)
    for rows, expected in ((TRACED_ROWS, ["replay"]), (TRACED_ROWS + 1, [])):
        called.clear()
        assert mx.array_equal(double(mx.ones((rows, 2))), 2 * mx.ones((rows, 2))).item()
        assert called == expected


def test_an_owner_that_hides_weights_is_refused() -> None:
    """What is no known constant might hold weights: they would be those of the first layer in every layer."""

    class Hides:
        def __init__(self) -> None:
            self.weights = (mx.ones(3),)

        def times(self, x: mx.array) -> mx.array:
            return x * self.weights[0]

    with pytest.raises(TypeError, match=r"Hides\.weights"):
        traced.traced(Hides().times)


def test_the_environment_may_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    monkeypatch.setenv(FUSE_VARIABLE, "1")
    assert not detect_machine().replays
    replay_pieces(True)
    assert not traced._is_on
    monkeypatch.delenv("MLX_DISABLE_COMPILE")
    assert detect_machine().replays
    monkeypatch.delenv(FUSE_VARIABLE)
    assert detect_machine().replays == (detect_machine().backend == "metal")
