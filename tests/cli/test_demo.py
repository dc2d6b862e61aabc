"""The demo as a newcomer meets it: it streams, it stays within its plan, and it is small enough to ship."""

from pathlib import Path

import pytest

from bench.studies.plan_vs_peak import measure
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.demo import DEMO_SLOTS, demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.machine import MIB
from mlx_flashnext.engine.plan import PlanRequest
from tests.tiny.engines import greedy

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_has_every_part_of_the_architecture() -> None:
    checkpoint = open_checkpoint(demo_dir())
    config = checkpoint.config
    assert config.qsa_layers
    assert config.gdn_layers
    assert config.indexer_budget <= 256
    assert config.hc_count == 4
    assert checkpoint.ngram.num_rows
    assert checkpoint.mtp
    assert checkpoint.mtp_experts is not None
    assert {
        spec.bits for layout in checkpoint.experts.values() for spec in layout.specs.values() if spec
    } == {4}


def test_the_demo_is_small_enough_to_ship() -> None:
    files = [path for path in demo_dir().rglob("*") if path.is_file() and path.suffix != ".pyc"]
    own = sum(path.stat().st_size for path in files if path.parent == demo_dir())
    assert own <= 20 * MIB
    assert sum(path.stat().st_size for path in files) <= 26 * MIB  # with its draft and its route hints


def test_the_demos_route_hints_belong_to_it_and_to_its_draft() -> None:
    request = PlanRequest(context_tokens=256, slots_per_layer=DEMO_SLOTS, draft="dflash2", hints="both")
    with Engine.open(demo_dir(), request) as engine:
        assert engine.routes.notices == ()
        assert engine.routes.near is not None
        assert engine.routes.sidecar is not None


def test_the_demo_streams_its_experts_by_default() -> None:
    with Engine.open(demo_dir(), PlanRequest(slots_per_layer=DEMO_SLOTS)) as engine:
        slots = next(line.bytes for line in engine.plan.lines if line.name == "expert slots")
        record = engine.checkpoint.experts[0].record
        assert slots < len(engine.checkpoint.experts) * record.num_experts * record.record_bytes
        greedy(engine, engine.tokenizer.encode("Tom has 3 apples."), 20)
        statistics = engine.target.store.statistics()
    assert statistics.num_misses > 0
    assert statistics.physical_bytes == statistics.num_misses * record.record_bytes


@pytest.mark.parametrize("slots", [DEMO_SLOTS, 64])
def test_a_run_of_two_hundred_tokens_stays_within_the_plan(slots: int) -> None:
    """P01, P02, P56: the resident size stays within 5 % or 16 MiB of the plan, on either side."""
    ballast = bytearray(256 * MIB)  # a child's peak must not be what its parent had when it forked
    found = measure(demo_dir(), slots=slots, tokens=200)
    assert len(ballast) == 256 * MIB
    tolerance = found["allowed_bytes"] - found["plan_bytes"]
    assert abs(found["peak_bytes"] - found["plan_bytes"]) <= tolerance
