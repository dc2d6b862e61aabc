"""The draft network equals the reference in every variant and round, however its context was filled."""

import hashlib

import mlx.core as mx
import numpy as np
import pytest

from drafter.context import DraftContext
from tests.parity.dflash2_goldens import GOLDEN_DIR, META, VARIANTS, load_variant, replay


@pytest.mark.parametrize("slack", [0, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_round_equals_the_reference(variant: str, slack: int) -> None:
    found = replay(variant, slack=slack)
    assert found.agrees, (found.worst, found.wrong)


@pytest.mark.parametrize("variant", VARIANTS)
def test_how_rows_arrived_does_not_show(variant: str) -> None:
    at_once: list[np.ndarray] = []
    singly: list[np.ndarray] = []
    replay(variant, slack=0, hidden_out=at_once)
    assert replay(variant, slack=0, one_by_one=True, hidden_out=singly).agrees
    for a, b in zip(at_once, singly, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("slack", [0, 64])
def test_a_snapshot_between_rounds_does_not_show(variant: str, slack: int) -> None:
    config, params = load_variant(variant)

    def renewed(context: DraftContext) -> DraftContext:
        other = DraftContext(params, config, mx.float32, slack=slack)
        other.restore(context.snapshot())
        return other

    straight: list[np.ndarray] = []
    interrupted: list[np.ndarray] = []
    replay(variant, slack=slack, hidden_out=straight)
    found = replay(variant, slack=slack, between=renewed, hidden_out=interrupted)
    assert found.agrees, (found.worst, found.wrong)
    for a, b in zip(straight, interrupted, strict=True):
        assert np.array_equal(a, b)


def test_the_goldens_are_the_ones_that_were_recorded() -> None:
    for name, digest in META["sha256"].items():
        assert hashlib.sha256((GOLDEN_DIR / name).read_bytes()).hexdigest() == digest, name
