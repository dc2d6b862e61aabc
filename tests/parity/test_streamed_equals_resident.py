"""Streamed = resident, bit for bit: any number of slots, any block, both layouts, 4-bit and float32 (I1,
B4)."""

from pathlib import Path

import mlx.core as mx
import pytest

from expert_store.source import FileSource
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.experts import ResidentExperts, StreamedExperts
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.weights import CheckpointWeights
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.engines import open_tiny, prompt_of
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel

EXPERTS, TOP_K = 16, 4

Reference = tuple[list[int], mx.array, dict[str, mx.array]]


@pytest.fixture(scope="module", params=["hf-float32", "mlx-float32", "mlx-4bit"])
def checkpoint_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "hf-float32":
        return build_hf(directory)
    return build_mlx(directory, bits=4 if request.param == "mlx-4bit" else None)


def resident_model(checkpoint: Checkpoint) -> FlashNext:
    """Return the network over the product's resident experts: no slot, ticket or thread."""
    source = FileSource(checkpoint.table.files)
    try:
        experts = ResidentExperts(checkpoint.experts, source)
        weights = CheckpointWeights(checkpoint, source, compute_dtype=mx.float32)
        rows = TinyModel.open(checkpoint.directory).rows
        return FlashNext(checkpoint.config, weights, experts, rows, HostSync(), compute_dtype=mx.float32)
    finally:
        source.close()


def run(
    model: FlashNext, tokens: list[int], block: int, experts: StreamedExperts | None = None
) -> tuple[mx.array, dict[str, mx.array]]:
    """Return all logits and the final state of a run in blocks."""
    state = model.new_state()
    logits = []
    for start in range(0, len(tokens), block):
        output = advance(model, tokens[start : start + block], state, logits="all")
        mx.eval(output.logits)
        logits.append(output.logits)
        if experts is not None:
            experts.device_idle()
    return mx.concatenate(logits), state.named_arrays()


@pytest.fixture(scope="module")
def reference(checkpoint_dir: Path) -> Reference:
    tokens = prompt_of(44)
    return tokens, *run(TinyModel.open(checkpoint_dir).model, tokens, 1)


@pytest.mark.parametrize("slots", range(TOP_K, EXPERTS + 1))
def test_any_number_of_slots_gives_the_resident_logits_and_state(
    checkpoint_dir: Path, reference: Reference, slots: int
) -> None:
    tokens, logits, arrays = reference
    # Every block length would take minutes for every S: a stride that meets all lengths over all S.
    blocks = sorted({1, 2, 40, 3 + 3 * (slots - TOP_K) % 38})
    with open_tiny(checkpoint_dir, slots=slots) as engine:
        for block in blocks:
            got, state = run(engine.target.model, tokens, block, engine.target.experts)
            assert mx.array_equal(got, logits), f"S={slots} block={block}: logits differ"
            assert state.keys() == arrays.keys()
            unequal = [name for name in state if not mx.array_equal(state[name], arrays[name])]
            assert unequal == [], f"S={slots} block={block}"


def test_every_block_length_with_the_fewest_slots(checkpoint_dir: Path, reference: Reference) -> None:
    tokens, logits, _ = reference
    with open_tiny(checkpoint_dir, slots=TOP_K) as engine:
        for block in range(1, 41):
            got, _ = run(engine.target.model, tokens, block, engine.target.experts)
            assert mx.array_equal(got, logits), f"block={block}"


def test_a_block_wider_than_the_slots_reads_the_routed_union_and_nothing_else(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P07: prefill reads each routed record once, not twice, and none that was not routed."""
    routed: dict[int, set[int]] = {}
    honest = StreamedExperts.run

    def noted(self: StreamedExperts, layer: int, x_TD: mx.array, ids_TK: list[list[int]]) -> mx.array:
        routed.setdefault(layer, set()).update(expert for row in ids_TK for expert in row)
        return honest(self, layer, x_TD, ids_TK)

    monkeypatch.setattr(StreamedExperts, "run", noted)
    tokens = prompt_of(40)
    with open_tiny(checkpoint_dir, slots=TOP_K) as engine:
        run(engine.target.model, tokens, len(tokens), engine.target.experts)
        statistics = engine.target.store.statistics()
        record = engine.checkpoint.experts[0].record.record_bytes
    union = sum(len(experts) for experts in routed.values())
    assert any(len(experts) > TOP_K for experts in routed.values())
    assert statistics.num_misses == union
    assert statistics.physical_bytes == union * record


def test_resident_experts_equal_the_independent_reference(checkpoint_dir: Path, reference: Reference) -> None:
    tokens, logits, _ = reference
    model = resident_model(open_checkpoint(checkpoint_dir))
    for block in (1, 7, len(tokens)):
        assert mx.array_equal(run(model, tokens, block)[0], logits)
