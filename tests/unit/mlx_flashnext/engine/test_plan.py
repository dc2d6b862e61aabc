"""The plan: sums, monotonicity, refusal before allocation, on machines that are not here (I6)."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.synth import PRESETS, build
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.engine.errors import BudgetTooLarge, BudgetTooSmall, ContextTooLong, InvalidRequest
from mlx_flashnext.engine.machine import GIB, MIB
from mlx_flashnext.engine.plan import PlanRequest, make_plan
from mlx_flashnext.geometry import qsa_layer_bytes, state_bytes
from tests.tiny.checkpoints import build_mlx
from tests.tiny.machines import linux, mac


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(build_mlx(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The full-size 4-bit layout as sparse files: headers only."""
    directory: Path = tmp_path_factory.mktemp("real")
    build(PRESETS["real-mlx4"], directory, sparse=True)
    return open_checkpoint(directory)


@given(total=st.integers(200, 4096), context=st.integers(1, 4096))
def test_a_plan_sums_to_at_most_its_budget_or_is_refused(tiny: Checkpoint, total: int, context: int) -> None:
    request = PlanRequest(memory_bytes=total * MIB, context_tokens=context)
    try:
        plan = make_plan(tiny, mac(16), request)
    except BudgetTooSmall as refusal:
        enough = PlanRequest(
            memory_bytes=int(refusal.context["smallest_budget_bytes"]), context_tokens=context
        )  # type: ignore[call-overload]
        assert make_plan(tiny, mac(16), enough).slots_per_layer >= tiny.config.num_experts_per_tok
        short = PlanRequest(memory_bytes=enough.memory_bytes - 1, context_tokens=context)  # type: ignore[operator]
        with pytest.raises(BudgetTooSmall):
            make_plan(tiny, mac(16), short)
        return
    assert plan.total_bytes == sum(line.bytes for line in plan.lines) <= plan.budget_bytes
    assert all(line.bytes >= 0 and line.reason for line in plan.lines)
    assert plan.max_context_tokens >= context
    assert plan.longest_context_tokens >= plan.max_context_tokens
    if plan.slots_per_layer < plan.num_experts:
        with pytest.raises(BudgetTooSmall):
            make_plan(tiny, mac(16), PlanRequest(total * MIB, context, plan.slots_per_layer + 1))


@pytest.mark.parametrize("total_gib", [16, 24, 32, 36, 48, 64, 96, 128])
def test_every_mac_from_16_gb_gets_a_plan_that_leaves_the_machine_alive(
    real: Checkpoint, total_gib: int
) -> None:
    """P51, P52: the trunk always fits, and at least 35 % or 8 GiB stay free."""
    machine = mac(total_gib)
    plan = make_plan(real, machine, PlanRequest())
    assert plan.total_bytes <= machine.total_bytes - min(int(0.35 * machine.total_bytes), 8 * GIB)
    assert plan.total_bytes <= 0.9 * (machine.recommended_bytes or 0)
    assert plan.slots_per_layer >= real.config.num_experts_per_tok
    assert not plan.is_resident or total_gib >= 96


def test_an_eight_gb_mac_is_told_what_this_model_takes(real: Checkpoint) -> None:
    with pytest.raises(BudgetTooSmall) as refusal:
        make_plan(real, mac(8), PlanRequest())
    assert "takes" in refusal.value.message
    assert refusal.value.hint.startswith("--memory")


def test_no_budget_is_advised_that_the_machine_does_not_have(tiny: Checkpoint) -> None:
    with pytest.raises(BudgetTooSmall) as refusal:
        make_plan(tiny, mac(16), PlanRequest(prefill_step=10_000_000))
    assert int(refusal.value.context["smallest_budget_bytes"]) > 16 * GIB  # type: ignore[call-overload]
    assert "--memory" not in refusal.value.hint
    assert "16.00 GiB" in refusal.value.hint


def test_more_memory_never_gives_fewer_slots(real: Checkpoint) -> None:
    slots = [
        make_plan(real, mac(64), PlanRequest(gib * GIB, 8192)).slots_per_layer for gib in range(8, 57, 4)
    ]
    assert slots == sorted(slots)
    assert slots[0] < slots[-1]


def test_a_longer_context_never_gives_more_slots(real: Checkpoint) -> None:
    slots = [
        make_plan(real, mac(64), PlanRequest(24 * GIB, context)).slots_per_layer
        for context in (2048, 8192, 32768, 131072, 262144)
    ]
    assert slots == sorted(slots, reverse=True)
    assert slots[0] > slots[-1]


def test_free_memory_bounds_the_default_target(real: Checkpoint) -> None:
    free = make_plan(real, mac(64), PlanRequest())
    busy = make_plan(real, mac(64, available_gib=20), PlanRequest())
    assert busy.total_bytes <= 20 * GIB + mac(64).imports_bytes < free.total_bytes


@pytest.mark.parametrize(
    ("request_", "error", "named"),
    [
        (PlanRequest(memory_bytes=0), InvalidRequest, "0"),
        (PlanRequest(memory_bytes=-5), InvalidRequest, "-5"),
        (PlanRequest(memory_bytes=25 * GIB), BudgetTooLarge, "25.00 GiB"),
        (PlanRequest(memory_bytes=1 * MIB), BudgetTooSmall, "1 MiB"),
        (PlanRequest(context_tokens=0), InvalidRequest, "0"),
        (PlanRequest(context_tokens=4097), ContextTooLong, "4097"),
        (PlanRequest(slots_per_layer=3), InvalidRequest, "3"),
        (PlanRequest(slots_per_layer=17), InvalidRequest, "17"),
        (PlanRequest(prefill_step=0), InvalidRequest, "0"),
        (PlanRequest(num_readers=0), InvalidRequest, "0"),
        (PlanRequest(num_readers=1_000_000), InvalidRequest, "1000000"),
    ],
)
def test_a_request_no_run_could_honour_is_refused_with_its_value(
    tiny: Checkpoint, request_: PlanRequest, error: type[Exception], named: str
) -> None:
    with pytest.raises(error) as refusal:
        make_plan(tiny, linux(), request_)
    assert named in str(refusal.value)
    assert refusal.value.hint  # type: ignore[attr-defined]


def test_every_flag_shows_in_the_effective_plan(tiny: Checkpoint) -> None:
    """P04, P14, P56: no option is parsed and forgotten, the context's included."""
    asked = PlanRequest(2 * GIB, 1000, 7, 64, "lru", 3)
    plan = make_plan(tiny, linux(), asked).to_dict()
    assert plan["budget_bytes"] == 2 * GIB
    assert plan["context_tokens"] == 1000
    assert plan["slots_per_layer"] == 7
    assert plan["prefill_step"] == 64
    assert plan["policy"] == "lru"
    assert plan["num_readers"] == 3


def test_scales_of_a_third_type_are_widened_on_a_mac_too(tiny: Checkpoint) -> None:
    # float16 and bfloat16 meet in float32; bfloat16 scales and float32 scales cost nothing there.
    def widened(dtype: str) -> int:
        layouts = {
            layer: replace(
                layout,
                components=tuple(
                    replace(part, dtype=dtype) if part.dtype == "F32" else part for part in layout.components
                ),
            )
            for layer, layout in tiny.experts.items()
        }
        plan = make_plan(replace(tiny, experts=layouts), mac(16), PlanRequest(slots_per_layer=8))
        return sum(line.bytes for line in plan.lines if line.name == "widening")

    assert (widened("F32"), widened("BF16")) == (0, 0)
    assert widened("F16") > 0


def test_the_state_leaves_room_for_a_layer_that_is_being_copied(real: Checkpoint) -> None:
    plan = make_plan(real, mac(64), PlanRequest(context_tokens=100_000))
    state = next(line.bytes for line in plan.lines if line.name == "state")
    one_layer = qsa_layer_bytes(real.config, 100_096, 2)
    assert state == state_bytes(real.config, 100_000, 2).total + one_layer


def test_no_slot_tensor_passes_the_largest_buffer_of_the_machine(real: Checkpoint) -> None:
    largest = max(real.experts[0].record.component_lengths)
    machine = replace(mac(128), max_buffer_bytes=100 * largest)
    assert make_plan(real, machine, PlanRequest()).slots_per_layer == 99
    with pytest.raises(InvalidRequest, match="99"):
        make_plan(real, machine, PlanRequest(slots_per_layer=100))


@pytest.mark.parametrize(("preset", "slots"), [("real-bf16", range(50, 100)), ("real-fp8", range(100, 200))])
def test_the_official_layouts_get_a_plan_from_their_headers(
    tmp_path: Path, preset: str, slots: range
) -> None:
    checkpoint = open_checkpoint(build(PRESETS[preset], tmp_path, sparse=True))
    plan = make_plan(checkpoint, mac(64), PlanRequest())
    assert plan.slots_per_layer in slots
    assert plan.total_bytes <= 44 * GIB
