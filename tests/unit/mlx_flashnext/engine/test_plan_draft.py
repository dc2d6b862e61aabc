"""What drafters and snapshots cost in the plan: counted, monotone, refused before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.synth import PRESETS, build
from drafter.api import MAX_PROPOSALS
from drafter.lookup import LookupDrafter
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.engine.errors import BudgetTooSmall, InvalidRequest, MissingDrafter
from mlx_flashnext.engine.machine import GIB, MIB
from mlx_flashnext.engine.plan import DEFAULT_DRAFT_TOKENS, Plan, PlanRequest, make_plan
from mlx_flashnext.engine.rested import MOST_ROWS
from mlx_flashnext.engine.sizes import LOGITS_COPIES, DraftBytes
from mlx_flashnext.geometry import block_bytes, forward_workspace_bytes, qsa_layer_bytes, state_bytes
from tests.tiny.checkpoints import build_mlx
from tests.tiny.machines import linux, mac

DRAFTS = ("none", "lookup", "oracle", "mtp")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(build_mlx(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def without_mtp(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(build_mlx(tmp_path_factory.mktemp("plain"), mtp=False))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The full-size 4-bit layout with the MTP module kept, as sparse files: headers only."""
    directory: Path = tmp_path_factory.mktemp("real")
    build(replace(PRESETS["real-mlx4"], mtp=True), directory, sparse=True)
    return open_checkpoint(directory)


def line(plan: Plan, name: str) -> int:
    """Return the bytes of a line, 0 if there is none."""
    return sum(line.bytes for line in plan.lines if line.name == name)


def test_without_a_drafter_nothing_of_one_is_planned(tiny: Checkpoint) -> None:
    plan = make_plan(tiny, linux(), PlanRequest())
    assert (plan.draft, plan.num_draft_tokens, line(plan, "draft")) == ("none", 0, 0)
    assert all("draft" not in entry.name for entry in plan.lines)


def test_an_oracle_costs_the_rows_it_makes_the_target_verify_and_no_line(tiny: Checkpoint) -> None:
    request = PlanRequest(context_tokens=512, prefill_step=1)
    none = make_plan(tiny, mac(16), request)
    oracle = make_plan(tiny, mac(16), replace(request, draft="oracle"))
    assert line(oracle, "draft") == 0
    assert line(oracle, "workspace") >= line(none, "workspace")


def test_the_lines_of_lookup_and_mtp_are_what_they_take(real: Checkpoint) -> None:
    request = PlanRequest(memory_bytes=24 * GIB, context_tokens=20_000, slots_per_layer=40)
    lookup = make_plan(real, mac(64), replace(request, draft="lookup"))
    assert LookupDrafter(20_000).num_bytes() <= line(lookup, "draft") < 1 * MIB
    mtp = make_plan(real, mac(64), replace(request, draft="mtp"))
    layout = real.mtp_experts
    assert layout is not None
    weights = sum(tensor.loaded_bytes(2) for tensor in real.mtp.values())
    cache = qsa_layer_bytes(real.config, 20_224, 2)
    rested = 2 * MOST_ROWS * 4 * 2560 * 2  # rows of a rest: four streams, kept and once more together
    assert line(mtp, "draft") == weights + 40 * layout.record.record_bytes + cache + rested
    assert line(mtp, "trunk") == line(lookup, "trunk")
    assert line(mtp, "expert slots") == line(lookup, "expert slots")


def test_the_mtp_layer_counts_as_the_layer_after_the_last(tiny: Checkpoint) -> None:
    last = tiny.config.num_hidden_layers
    assert tiny.expert_layouts(mtp=True).keys() - tiny.expert_layouts(mtp=False).keys() == {last}
    assert tiny.expert_layouts(mtp=True)[last].record.layer == last


@pytest.mark.parametrize("draft", DRAFTS)
@given(total=st.integers(100, 1024), context=st.integers(1, 4096), k=st.integers(1, MAX_PROPOSALS))
def test_a_plan_with_any_drafter_sums_to_at_most_its_budget_or_is_refused(
    tiny: Checkpoint, draft: str, total: int, context: int, k: int
) -> None:
    request = PlanRequest(total * MIB, context, draft=draft, num_draft_tokens=k)
    try:
        plan = make_plan(tiny, mac(16), request)
    except BudgetTooSmall as refusal:
        enough = int(refusal.context["smallest_budget_bytes"])  # type: ignore[call-overload]
        assert make_plan(tiny, mac(16), replace(request, memory_bytes=enough)).total_bytes <= enough
        with pytest.raises(BudgetTooSmall):
            make_plan(tiny, mac(16), replace(request, memory_bytes=enough - 1))
        return
    assert plan.total_bytes == sum(entry.bytes for entry in plan.lines) <= plan.budget_bytes
    assert all(entry.bytes >= 0 and entry.reason for entry in plan.lines)
    assert plan.smallest_budget_bytes <= plan.total_bytes
    assert plan.draft == draft


@pytest.mark.parametrize("draft", DRAFTS)
def test_more_memory_never_gives_fewer_slots_or_snapshots(real: Checkpoint, draft: str) -> None:
    """Steps of 64 MiB, finer than a snapshot and than a slot of every layer."""
    request = PlanRequest(context_tokens=8192, draft=draft)
    smallest = make_plan(real, mac(64), replace(request, slots_per_layer=10)).smallest_budget_bytes
    plans = [
        make_plan(real, mac(64), replace(request, memory_bytes=smallest + step * 64 * MIB))
        for step in range(24)
    ]
    slots = [plan.slots_per_layer for plan in plans]
    snapshots = [plan.num_snapshots for plan in plans]
    assert slots == sorted(slots)
    assert snapshots == sorted(snapshots)
    assert (snapshots[0], snapshots[-1]) == (0, 4)
    assert slots[0] < slots[-1]


def test_a_dearer_drafter_never_leaves_more_slots(real: Checkpoint) -> None:
    slots = [
        make_plan(real, mac(64), PlanRequest(20 * GIB, 32_768, draft=draft)).slots_per_layer
        for draft in ("none", "lookup", "mtp")
    ]
    assert slots == sorted(slots, reverse=True)
    assert slots[0] > slots[-1]


def test_every_verified_row_has_logits_in_the_plan(real: Checkpoint) -> None:
    """With short prefill chunks the block of anchor and proposals is the largest that runs."""
    request = PlanRequest(20 * GIB, 8192, 40, prefill_step=1, draft="lookup")
    plan = make_plan(real, mac(64), replace(request, num_draft_tokens=8))
    computed = forward_workspace_bytes(real.config, 9, 8192, 2)
    kept = block_bytes(real.config, 9, 2, revocable=True)
    sampled = 9 * LOGITS_COPIES * real.config.vocab_size * 4
    assert line(plan, "workspace") == computed + kept + sampled
    assert plan.rows_per_buffer == 9 * real.ngram.num_heads


def test_the_state_before_a_block_stays_until_it_is_committed(real: Checkpoint) -> None:
    plan = make_plan(real, mac(64), PlanRequest(20 * GIB, 8192, 40))
    assert line(plan, "workspace") >= state_bytes(real.config, 8192, 2).recurrent


def test_a_snapshot_is_what_the_state_rewrites(real: Checkpoint) -> None:
    plan = make_plan(real, mac(64), PlanRequest(20 * GIB, 8192, num_snapshots=3))
    state = state_bytes(real.config, 8192, 2)
    assert plan.num_snapshots == 3
    assert line(plan, "snapshots") == 3 * (state.recurrent + state.ple)
    none = make_plan(real, mac(64), PlanRequest(20 * GIB, 8192, num_snapshots=0))
    assert line(none, "snapshots") == none.num_snapshots == 0


OWN = DraftBytes(
    weights=1_200_000_000,
    context=60_000_000,
    feature_width=5 * 2560,
    max_proposals=7,
    context_per_token=4096,
    snapshot=10_000_000,
    snapshot_per_token=100,
    candidates=30_000_000,
    scratch=1_000_000,
    scratch_per_token=50,
    scratch_per_row=3_000,
)


def test_every_use_of_a_draft_of_ones_own_has_a_line(real: Checkpoint) -> None:
    request = PlanRequest(20 * GIB, 8192, draft="dflash2", prefill_step=512)
    plan = make_plan(real, mac(64), request, OWN)
    assert line(plan, "draft weights") == 1_200_000_000
    assert line(plan, "draft context") == 60_000_000 + 8192 * 4096
    assert line(plan, "draft features") == 2 * 512 * 5 * 2560 * 2
    assert line(plan, "draft candidates") == 30_000_000
    assert line(plan, "draft scratch") == max(1_000_000 + 8192 * 50, 512 * 3_000)
    none = make_plan(real, mac(64), replace(request, draft="none"))
    assert plan.num_snapshots == none.num_snapshots == 4
    drafted = 10_000_000 + 8192 * 100
    assert line(plan, "snapshots") == line(none, "snapshots") + 4 * drafted, "each holds the draft's rows too"
    assert plan.slots_per_layer < none.slots_per_layer


def test_a_draft_never_raises_the_plan_above_its_budget(real: Checkpoint) -> None:
    """P22: what does not fit beside the fewest experts is refused, with both numbers."""
    least = make_plan(real, mac(64), PlanRequest(context_tokens=8192)).smallest_budget_bytes
    with pytest.raises(BudgetTooSmall) as refusal:
        make_plan(real, mac(64), PlanRequest(least, 8192, draft="dflash2"), OWN)
    enough = int(refusal.value.context["smallest_budget_bytes"])  # type: ignore[call-overload]
    plan = make_plan(real, mac(64), PlanRequest(enough, 8192, draft="dflash2"), OWN)
    assert plan.total_bytes <= enough
    assert enough - least > OWN.weights


def test_slots_asked_for_come_before_snapshots(real: Checkpoint) -> None:
    with_slots = PlanRequest(context_tokens=8192, slots_per_layer=50)
    full = make_plan(real, mac(64), with_slots)
    bare = full.total_bytes - line(full, "snapshots")
    # The reserve is a share of the rest, so a little more than the difference goes.
    tight = make_plan(real, mac(64), replace(with_slots, memory_bytes=bare))
    assert tight.slots_per_layer == 50
    assert tight.num_snapshots < 4


def test_auto_takes_the_best_that_is_there_and_says_why(
    tiny: Checkpoint, without_mtp: Checkpoint, real: Checkpoint
) -> None:
    assert make_plan(tiny, linux(), PlanRequest(draft="auto")).draft == "mtp"
    plan = make_plan(without_mtp, linux(), PlanRequest(draft="auto"))
    assert plan.draft == "lookup"
    assert "mtp" in plan.draft_reason
    smallest = make_plan(real, mac(64), PlanRequest(context_tokens=8192, draft="lookup"))
    tight = PlanRequest(smallest.smallest_budget_bytes, 8192, draft="auto")
    plan = make_plan(real, mac(64), tight)
    assert plan.draft == "lookup"
    assert "does not fit" in plan.draft_reason
    with pytest.raises(BudgetTooSmall):
        make_plan(real, mac(64), replace(tight, draft="mtp"))


def test_a_module_that_is_not_there_is_a_refusal_naming_it(without_mtp: Checkpoint) -> None:
    with pytest.raises(MissingDrafter, match=r"mtp\.\*") as refusal:
        make_plan(without_mtp, linux(), PlanRequest(draft="mtp"))
    assert "--draft lookup" in refusal.value.hint
    config = replace(without_mtp.config, num_mtp_layers=0)
    with pytest.raises(MissingDrafter, match="mtp_num_hidden_layers"):
        make_plan(replace(without_mtp, config=config), linux(), PlanRequest(draft="mtp"))


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (PlanRequest(draft="eagle"), "eagle"),
        (PlanRequest(draft="lookup", num_draft_tokens=0), "0"),
        (PlanRequest(draft="lookup", num_draft_tokens=MAX_PROPOSALS + 1), str(MAX_PROPOSALS + 1)),
        (PlanRequest(num_snapshots=-1), "-1"),
        (PlanRequest(num_snapshots=65), "65"),
    ],
)
def test_a_request_no_drafter_could_honour_is_refused(
    tiny: Checkpoint, request_: PlanRequest, named: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        make_plan(tiny, linux(), request_)
    assert named in str(refusal.value)
    assert refusal.value.hint


def test_the_effective_plan_names_the_drafter(tiny: Checkpoint) -> None:
    asked = make_plan(tiny, linux(), PlanRequest(draft="lookup", num_draft_tokens=7)).to_dict()
    assert (asked["draft"], asked["num_draft_tokens"]) == ("lookup", 7)
    assert make_plan(tiny, linux(), PlanRequest(draft="mtp")).num_draft_tokens == DEFAULT_DRAFT_TOKENS["mtp"]
    assert make_plan(tiny, linux(), PlanRequest(num_draft_tokens=7)).num_draft_tokens == 0
