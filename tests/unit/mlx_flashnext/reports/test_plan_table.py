"""Plans for machines that are not here: imagined builds are like real ones, and every cell is arithmetic."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench.synth import PRESETS, build
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.checkpoint.imagined import BUILDS, Build, imagine, real_config
from mlx_flashnext.config import QuantSpec
from mlx_flashnext.engine.machine import GIB, mac_of
from mlx_flashnext.engine.plan import PlanRequest, make_plan
from mlx_flashnext.engine.sizes import Sizes
from mlx_flashnext.reports import expectation
from mlx_flashnext.reports.expectation import expect, published_hits
from mlx_flashnext.reports.plan_table import CONTEXTS, DRAFTERS, MEMORY_GIB, plan_table
from tests.tiny.checkpoints import build_mlx

NAMED = {build.name: build for build in BUILDS}
FEWER = {
    "num_hidden_layers": 4,
    "num_experts": 24,
    "vocab_size": 8192,
    "ngram_vocab_size_base": 20_000,
    "split_ngram_parts": 8,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
KNOWN_4_BIT = Build(
    "known",
    "the known pack: group 32 everywhere, routers 8-bit",
    "mlx",
    QuantSpec("affine", 4, 32),
    QuantSpec("affine", 4, 32),
    QuantSpec("affine", 8, 64),
    QuantSpec("affine", 4, 32),
    "U32",
)


@pytest.fixture(scope="module")
def imagined() -> dict[str, Checkpoint]:
    config = real_config()
    return {build.name: imagine(config, build) for build in BUILDS}


def sizes(checkpoint: Checkpoint, draft: str = "none") -> Sizes:
    return Sizes(checkpoint, mac_of(64), prefill_step=None, draft=draft, num_draft_tokens=0)


@pytest.mark.parametrize(
    ("preset", "wanted"),
    [("real-bf16", NAMED["BF16"]), ("real-fp8", NAMED["FP8"]), ("real-mlx4", KNOWN_4_BIT)],
)
def test_an_imagined_build_takes_what_a_real_one_takes(preset: str, wanted: Build, tmp_path: Path) -> None:
    """Written in real widths but for fewer layers and experts, opened from headers: sizes are the same."""
    build(dataclasses.replace(PRESETS[preset], overrides=FEWER, is_real_size=False), tmp_path, sparse=True)
    real = open_checkpoint(tmp_path)
    ours = imagine(real.config, wanted)
    assert ours.experts[0].record.record_bytes == real.experts[0].record.record_bytes
    assert sorted(ours.experts[0].record.component_lengths) == sorted(
        real.experts[0].record.component_lengths
    )
    assert ours.ngram.record_bytes == real.ngram.record_bytes
    assert {name: tensor.loaded_bytes(2) for name, tensor in ours.tensors.items()} == {
        name: tensor.loaded_bytes(2) for name, tensor in real.tensors.items()
    }
    drafts = ("none", "mtp") if real.mtp else ("none",)
    for draft in drafts:
        lines = [
            {line.name: line.bytes for line in sizes(one, draft).lines(32_768, 40, 4)} for one in (ours, real)
        ]
        index = [one.pop("index") for one in lines]
        reserve = [one.pop("reserve") for one in lines]
        assert lines[0] == lines[1]
        # The table's parts and vision are tensors too; what differs is a thousand header entries at most.
        assert abs(index[0] - index[1]) < 2 << 20
        assert abs(reserve[0] - reserve[1]) < 1 << 20


def test_records_have_the_sizes_that_are_published(imagined: dict[str, Checkpoint]) -> None:
    """qwen4exp.md 3.6: an expert at 4, 3 and 2 bits in groups of 64, official FP8 and BF16."""
    found = {name: one.experts[7].record.record_bytes for name, one in imagined.items()}
    assert found == {
        "4-bit": 2_764_800, "3-bit": 2_150_400, "2-bit": 1_536_000, "FP8": 4_915_800, "BF16": 9_830_400
    }  # fmt: skip


def test_every_cell_of_the_issue_is_there_and_is_a_plan_that_a_run_would_get(
    imagined: dict[str, Checkpoint],
) -> None:
    builds = ("4-bit", "FP8")
    memory, contexts = (16, 128), (8192, 262_144)
    cells = list(
        plan_table([(name, imagined[name]) for name in builds], memory_gib=memory, contexts=contexts)
    )
    assert len(cells) == len(builds) * len(memory) * len(contexts) * len(DRAFTERS)
    assert (min(MEMORY_GIB), max(MEMORY_GIB)) == (16, 128)
    assert (min(CONTEXTS), max(CONTEXTS)) == (8 << 10, 256 << 10)
    for cell in cells:
        request = PlanRequest(context_tokens=cell.context_tokens, draft=cell.draft)
        if cell.plan is not None and cell.draft != "dflash2":
            assert cell.plan == make_plan(imagined[cell.build], mac_of(cell.memory_bytes // GIB), request)
        assert (cell.plan is None) == bool(cell.refusal) == (cell.expected is None)
        if cell.smallest_bytes is not None:
            assert cell.smallest_bytes > mac_of(cell.memory_bytes // GIB).ceiling_bytes()
    fits = {
        (cell.memory_bytes // GIB, cell.build, cell.context_tokens): cell
        for cell in cells
        if cell.draft == "none"
    }
    assert fits[16, "4-bit", 8192].plan is not None
    assert fits[16, "FP8", 8192].plan is None
    assert fits[128, "4-bit", 8192].plan is not None
    assert fits[128, "4-bit", 8192].plan.is_resident


def test_more_memory_never_means_fewer_slots_and_a_drafter_never_more(
    imagined: dict[str, Checkpoint],
) -> None:
    checkpoints = [("3-bit", imagined["3-bit"])]
    found = {
        (cell.memory_bytes // GIB, cell.draft): cell.plan.slots_per_layer
        for cell in plan_table(checkpoints, contexts=(32_768,))
        if cell.plan is not None
    }
    for draft in DRAFTERS:
        slots = [found[memory, draft] for memory in MEMORY_GIB if (memory, draft) in found]
        assert slots == sorted(slots)
    assert all(found[memory, draft] <= found[memory, "none"] for memory, draft in found)


def test_the_arithmetic_can_be_done_again(imagined: dict[str, Checkpoint]) -> None:
    checkpoint = imagined["4-bit"]
    plan = make_plan(checkpoint, mac_of(32), PlanRequest(context_tokens=32_768))
    told = expect(checkpoint, plan, bytes_per_s=6.5e9, resident_tokens_per_s=40.0)
    share = plan.slots_per_layer / 512
    routed, table = 48 * 10 * 2_764_800, 16 * 3 * 4096  # a row is in three places
    assert told.hit_rate.worse == share
    assert told.token_bytes.worse == pytest.approx(routed * (1 - share) + table)
    assert told.token_bytes.better == pytest.approx(routed * (1 - published_hits(share)) + table)
    assert told.storage_s is not None
    assert told.tokens_per_s is not None
    assert told.storage_s.worse == pytest.approx(told.token_bytes.worse / 6.5e9)
    waits = 48 * 0.38e-3 + 480 * (1 - share) * 0.21e-3
    assert 1 / told.tokens_per_s.worse == pytest.approx(told.storage_s.worse + 1 / 40 + waits)
    assert 1 / told.tokens_per_s.better == pytest.approx(max(told.storage_s.better, 1 / 40))
    text = "\n".join(told.steps)
    assert f"{plan.slots_per_layer} of 512" in text
    assert "6.500 GB/s" in text
    assert "25.0 ms computed" in text


def test_the_break_even_of_a_draft_is_in_the_arithmetic(imagined: dict[str, Checkpoint]) -> None:
    """U_B < top_k x tau: 4 rows ask for 10 x 4^0.73 = 27.5 experts, so 2.05 tokens a cycle save no byte."""
    checkpoint = imagined["4-bit"]
    for draft, is_told in (("mtp", True), ("none", False)):
        plan = make_plan(checkpoint, mac_of(32), PlanRequest(context_tokens=8192, draft=draft))
        text = "\n".join(expect(checkpoint, plan).steps)
        assert ("U_B = 10 x 4^0.73 = 27.5 experts" in text) == is_told
        assert ("top_k x tau, 20.5 at the best tau of 2.05: it saves some from 2.75" in text) == is_told


def test_without_a_rate_there_is_no_speed(imagined: dict[str, Checkpoint]) -> None:
    plan = make_plan(imagined["2-bit"], mac_of(24), PlanRequest(context_tokens=8192))
    told = expect(imagined["2-bit"], plan)
    assert told.storage_s is told.token_s is told.tokens_per_s is None
    assert told.token_bytes.worse > told.token_bytes.better > 0


def test_hit_rates_rise_with_the_share_and_pass_through_what_was_published() -> None:
    shares = [step / 100 for step in range(101)]
    rates = [published_hits(share) for share in shares]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0.0, 1.0)
    assert published_hits(0.25) == pytest.approx(0.827)


def test_public_measurements_lie_within_the_ranges(imagined: dict[str, Checkpoint]) -> None:
    """FIELD B.2: slotstream on a MacBook M5 Pro 48: 4-bit, 20 and 22 GB targets, 13.47 and 15.86 tok/s with a
    drive of 17.3 GB/s; Sushi at 2 bits with a budget of 20 GB: 17.4 to 18 tok/s."""
    for name, total, budget, drive, measured in (
        ("4-bit", 48, 20, 17.3e9, 13.47), ("4-bit", 48, 22, 17.3e9, 15.86), ("2-bit", 32, 20, 5e9, 17.4)
    ):  # fmt: skip
        request = PlanRequest(memory_bytes=budget * 10**9, context_tokens=8192)
        plan = make_plan(imagined[name], mac_of(total), request)
        told = expect(imagined[name], plan, bytes_per_s=drive).tokens_per_s
        assert told is not None
        assert told.worse < measured < told.better, (name, told)


def test_a_drafter_that_costs_more_bytes_than_it_brings_promises_none(
    imagined: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = imagined["4-bit"]
    plan = make_plan(checkpoint, mac_of(64), PlanRequest(context_tokens=8192, draft="mtp"))
    bare = dataclasses.replace(plan, draft="none")
    assert expect(checkpoint, plan).token_bytes == expect(checkpoint, bare).token_bytes
    monkeypatch.setitem(expectation.BEST_TOKENS, "mtp", (4, 3.5))
    fewer = expect(checkpoint, plan).token_bytes
    assert fewer.worse == expect(checkpoint, bare).token_bytes.worse
    assert fewer.better < expect(checkpoint, bare).token_bytes.better


def test_the_table_of_a_small_model_leaves_out_what_it_has_no_positions_for(tmp_path: Path) -> None:
    tiny = open_checkpoint(build_mlx(tmp_path / "tiny", overrides={"max_position_embeddings": 9000}))
    found = {cell.context_tokens for cell in plan_table([("here", tiny)], memory_gib=(16,))}
    assert found == {8192}


def test_the_official_config_is_the_official_one() -> None:
    import hashlib

    from mlx_flashnext.checkpoint.imagined import REAL_CONFIG_PATH

    raw = REAL_CONFIG_PATH.read_bytes()
    assert (
        hashlib.sha256(raw).hexdigest() == "889658f2508e8c61d409b02e70e0d78d8d4452ec65aaafbe129805d213d2e74b"
    )
    assert json.loads(raw)["text_config"]["num_experts"] == 512


def test_earlier_runs_say_what_the_most_used_experts_would_have_served(
    imagined: dict[str, Checkpoint],
) -> None:
    checkpoint = imagined["4-bit"]
    plan = make_plan(checkpoint, mac_of(32), PlanRequest(context_tokens=8192, slots_per_layer=100))
    skewed = {layer: [9.0] * 50 + [1.0] * 462 for layer in range(48)}
    told = expect(checkpoint, plan, demands=skewed)
    assert told.popular_share == pytest.approx((50 * 9 + 50) / (50 * 9 + 462))
    assert any(f"{told.popular_share:.3f} of what they asked for" in step for step in told.steps)
    assert expect(checkpoint, plan, demands={0: [0.0] * 512}).popular_share is None
    assert expect(checkpoint, plan).popular_share is None
