"""The page of simulated laptops: its arithmetic, and that it says what it is."""

from pathlib import Path

import pytest

from bench.studies.simulated_laptops import (
    EFFICIENCY_FROM,
    LAPTOPS,
    PAGE,
    imagined,
    machine_of,
    slots_of,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model():
    return imagined()


def test_a_machine_is_its_memorys_rate_and_the_models_bytes(model):
    assert model.record_bytes == 2_764_800
    rate, memory = EFFICIENCY_FROM
    efficiency = rate * model.token_bytes / memory
    laptop = next(one for one in LAPTOPS if one.memory_rate == memory)
    compute = machine_of(laptop, model, 0, efficiency).compute
    layers, top_k = len(model.layouts), model.checkpoint.config.num_experts_per_tok
    assert isinstance(compute.layer_ns, int)
    token_ns = compute.pass_ns + layers * (compute.layer_ns + top_k * compute.expert_ns)
    # With every expert in memory and no wait for the device, that machine does what it was published with.
    assert 1e9 / token_ns == pytest.approx(rate, rel=1e-3)
    half = machine_of(laptop, model, 0, efficiency / 2).compute
    assert half.expert_ns == pytest.approx(2 * compute.expert_ns, rel=1e-3)


def test_more_memory_never_has_fewer_slots(model):
    slots = [slots_of(laptop, model) or 0 for laptop in sorted(LAPTOPS, key=lambda one: one.memory_gib)]
    assert slots == sorted(slots)
    assert slots[0] < slots[-1] < model.checkpoint.config.num_experts


def test_the_page_was_made_by_its_command_and_says_that_it_is_simulated():
    page = (ROOT / "docs" / "SIMULATED.md").read_text()
    template = PAGE.read_text()
    assert page.startswith(template[: template.index("{")])
    assert "Nothing on this page was measured on a Mac" in page
    assert "| SIMULATED |" in page
    for laptop in LAPTOPS:
        assert page.count(f"| {laptop.name} |") in (0, 2)  # inputs and results, or it does not fit
    fixed = [part for part in template.split("\n") if "{" not in part and len(part) > 40]
    assert [line for line in fixed if line not in page] == []
