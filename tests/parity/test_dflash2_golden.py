"""The draft network equals the reference in every variant and round, however its context was filled."""

import hashlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from drafter.api import DraftSampling
from drafter.context import DraftContext
from drafter.dflash2 import Dflash2Drafter, Dflash2Options
from tests.parity.dflash2_goldens import (
    GOLDEN_DIR,
    META,
    VARIANTS,
    arrays,
    embed,
    head,
    load_variant,
    replay,
)


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_half_precision_it_is_as_far_off_as_the_reference_is(variant: str) -> None:
    """Hidden states only: ids of a random draft flip, in the reference too."""
    hidden: list[np.ndarray] = []
    replay(variant, dtype=mx.bfloat16, hidden_out=hidden)
    rounds = META["variants"][variant]["rounds"]
    gaps = [
        np.abs(got - np.array(arrays("goldens")[f"{variant}.r{number}.hidden"])).max()
        for number, got in enumerate(hidden)
    ]
    assert min(gaps) > 0
    assert max(gaps) < 2 * max(about["bf16_hidden_err"] for about in rounds)


class GoldenTarget:
    """Embedding and head of the pretend target."""

    def embed(self, ids_T: mx.array) -> mx.array:
        return embed(ids_T)

    def head(self, hidden_TD: mx.array) -> mx.array:
        return head(hidden_TD)

    def to_host(self, array: mx.array) -> Any:
        return array.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_drafter_proposes_the_recorded_paths(variant: str) -> None:
    """P37: the block starts at the anchor, whose slot proposes nothing."""
    config, params = load_variant(variant)
    num_slots = 0

    def draw(scores_K: mx.array, seed: int, position: int) -> mx.array:
        raise AssertionError("the best path is not drawn")

    drafter = Dflash2Drafter(
        params,
        config,
        GoldenTarget(),
        draw,
        dtype=mx.float32,
        contraction="none",
        options=Dflash2Options(full_block=False),
    )
    features, tokens = arrays("goldens")["features"], arrays("goldens")["tokens"].tolist()
    for about in META["variants"][variant]["rounds"]:
        done, start = about["context_from"], about["start"]
        drafter.observe(tokens[done:start], tokens[start], None, features_RF=features[done:start])
        wanted = about["path"]
        proposal = drafter.propose(len(wanted), DraftSampling(0.0, 0, start + 1))
        assert list(proposal.tokens) == wanted
        num_slots += len(wanted)
    assert num_slots == 5 * 7 + 3
    if config.has_selector:
        assert drafter.counts.num_overrides == sum(
            about["selector_changed"] for about in META["variants"][variant]["rounds"]
        )


def test_the_goldens_are_the_ones_that_were_recorded() -> None:
    for name, digest in META["sha256"].items():
        assert hashlib.sha256((GOLDEN_DIR / name).read_bytes()).hexdigest() == digest, name
