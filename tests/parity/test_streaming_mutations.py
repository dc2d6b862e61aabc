"""Planted faults of the streaming path: each must change the logits, or the equality tests prove nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from expert_store.layout import ReadOp, RecordLayout
from mlx_flashnext import experts
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.experts import StreamedExperts
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of
from tests.tiny.stepping import advance

SLOTS = 4


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("tiny"))


@contextmanager
def opened(directory: Path) -> Iterator[Engine]:
    with open_tiny(directory, slots=SLOTS) as engine:
        yield engine


def logits(engine: Engine, block: int) -> mx.array:
    """Return all logits of a 40-token prompt in blocks."""
    model, tokens = engine.target.model, prompt_of(40)
    state, parts = model.new_state(), []
    for start in range(0, len(tokens), block):
        parts.append(advance(model, tokens[start : start + block], state, logits="all").logits)
        mx.eval(parts[-1])
        engine.target.experts.device_idle()
    return mx.concatenate(parts)


@pytest.fixture(scope="module")
def right(tiny_dir: Path) -> mx.array:
    with opened(tiny_dir) as engine:
        found = logits(engine, 40)
        assert mx.array_equal(found, logits(engine, 1))
        return found


def test_a_removed_fence_is_caught_by_a_block(
    tiny_dir: Path, right: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the wait a group's graph runs after its slots were refilled; kept lazy, it does so every time.
    monkeypatch.setattr(experts, "fence", lambda *_: None)
    monkeypatch.setattr(experts.mx, "async_eval", lambda *_: None)
    with opened(tiny_dir) as engine:
        assert not mx.array_equal(logits(engine, 40), right)


def test_a_neighbouring_expert_is_caught(
    tiny_dir: Path, right: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = RecordLayout.reads

    def neighbour(self: RecordLayout, expert: int) -> tuple[ReadOp, ...]:
        moved = (expert + 1) % self.num_experts if self.layer == 2 else expert
        return honest(self, moved)

    monkeypatch.setattr(RecordLayout, "reads", neighbour)
    with opened(tiny_dir) as engine:
        assert not mx.array_equal(logits(engine, 1), right)


def test_a_slot_refilled_before_its_graph_ran_is_caught(
    tiny_dir: Path, right: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = StreamedExperts.run

    def early(self: StreamedExperts, layer: int, x_TD: mx.array, ids_TK: list[list[int]]) -> mx.array:
        y_TKD = honest(self, layer, x_TD, ids_TK)
        self.device_idle()  # ends the lease while the graph is still to run ...
        others = [expert for expert in range(16) if expert not in ids_TK[0]][:SLOTS]
        self._store.acquire(layer, others).release()  # ... and another demand takes the slots
        return y_TKD

    monkeypatch.setattr(StreamedExperts, "run", early)
    with opened(tiny_dir) as engine:
        assert not mx.array_equal(logits(engine, 1), right)


def test_experts_summed_in_order_of_arrival_are_caught(
    tiny_dir: Path, right: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = StreamedExperts.run

    def swapped(self: StreamedExperts, layer: int, x_TD: mx.array, ids_TK: list[list[int]]) -> mx.array:
        return honest(self, layer, x_TD, ids_TK)[:, ::-1]

    monkeypatch.setattr(StreamedExperts, "run", swapped)
    with opened(tiny_dir) as engine:
        assert not mx.array_equal(logits(engine, 1), right)
