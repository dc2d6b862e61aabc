"""The MTP drafter on a tiny model: its proposals against an independent recomputation, its cache against one
built fresh, its waits counted.
"""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from drafter.api import DraftSampling, Proposal
from drafter.errors import DrafterError
from drafter.mtp import NUM_CANDIDATES, MtpDrafter
from mlx_flashnext.engine.mtp_view import MtpView
from mlx_flashnext.engine.streams import draw_draft
from mlx_flashnext.model.mtp import MtpCell
from mlx_flashnext.state import MtpState
from tests.parity.oracle import Ref
from tests.tiny.checkpoints import build_hf
from tests.tiny.stepping import advance, advance_cells
from tests.tiny.weights import TinyModel

# Budget 8 and groups of 2: from the tenth row on a cell chooses what it attends to.
GEOMETRY = {"indexer_budget": 8, "indexer_compress_ratio": 2}
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 118, 60)]
GREEDY = DraftSampling(temperature=0.0, seed=0, position=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hf(tmp_path_factory.mktemp("mtp"), seed=3, overrides=GEOMETRY, tokenizer=False)


@pytest.fixture(scope="module")
def tiny(directory: Path) -> TinyModel:
    return TinyModel.open(directory)


@pytest.fixture(scope="module")
def stacks(tiny: TinyModel) -> mx.array:
    """The target's stack of every row of `TOKENS`."""
    return advance(tiny.model, TOKENS, tiny.model.new_state(), logits="none").stack


class Rig:
    """A drafter over a tiny model, with its waits counted."""

    def __init__(self, tiny: TinyModel, *, draw: bool = False) -> None:
        assert tiny.mtp is not None
        self.sync = tiny.sync
        self.drafter = MtpDrafter(MtpView(tiny.mtp, tiny.sync, mx.float32), draw_draft if draw else None)

    @property
    def cache(self) -> MtpState:
        cache = self.drafter._cache
        assert isinstance(cache, MtpState)
        return cache

    def feed(self, stacks: mx.array, first: int, end: int) -> None:
        """Hand over rows `first` to `end` of `TOKENS`."""
        self.drafter.observe(TOKENS[first:end], TOKENS[end], stacks[first:end])


def recomputed(cell: MtpCell, stacks: mx.array, num_rows: int, k: int) -> list[int]:
    """Return the greedy proposals after `num_rows` rows, every cell of every step run anew in one block.

    Nothing is shared with the drafter: no cache, no state from step to step.
    """
    followers, inputs = list(TOKENS[1 : num_rows + 1]), stacks[:num_rows]
    proposed: list[int] = []
    for _ in range(k):
        state = MtpState(cell.config, compute_dtype=mx.float32)
        logits, outputs = advance_cells(cell, inputs, followers, state)
        proposed.append(int(mx.argmax(logits[-1]).item()))
        inputs = mx.concatenate([inputs, outputs[-1:]])
        followers.append(proposed[-1])
    return proposed


def same_cache(one: MtpState, other: MtpState) -> bool:
    left, right = one.named_arrays(), other.named_arrays()
    return left.keys() == right.keys() and all(
        np.array_equal(np.array(left[name]), np.array(right[name])) for name in left
    )


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 23, 59])
def test_proposals_equal_a_recomputation_without_any_cache(
    tiny: TinyModel, stacks: mx.array, num_rows: int, k: int
) -> None:
    assert tiny.mtp is not None
    rig = Rig(tiny)
    rig.feed(stacks, 0, num_rows)
    expected = recomputed(tiny.mtp, stacks, num_rows, k)
    assert list(rig.drafter.propose(k, GREEDY).tokens) == expected
    assert list(rig.drafter.propose(k, GREEDY).tokens) == expected  # leaves no trace


@pytest.mark.parametrize("num_rows", [3, 30])
def test_proposals_equal_the_oracle_script(
    directory: Path, tiny: TinyModel, stacks: mx.array, num_rows: int
) -> None:
    """The numpy script runs trunk and cells itself, from the equations, in float64."""
    oracle, state, cells = Ref(directory), None, {"first_pos": 0}
    state = oracle.start()
    stack, logits = None, None
    for position in range(num_rows):
        _, stack, _ = oracle.token(TOKENS[position], position, state)
        logits, output, _ = oracle.mtp(stack, TOKENS[position + 1], position, cells)
    expected = []
    for step in range(4):
        assert logits is not None
        top = np.sort(logits)[-2:]
        assert top[1] - top[0] > 1e-3, "a tie would say nothing"
        expected.append(int(logits.argmax()))
        logits, output, _ = oracle.mtp(output, expected[-1], num_rows + step, cells)
    rig = Rig(tiny)
    rig.feed(stacks, 0, num_rows)
    assert list(rig.drafter.propose(4, GREEDY).tokens) == expected


@pytest.mark.parametrize("seed", range(6))
def test_after_random_accepted_lengths_the_cache_is_one_built_fresh(
    tiny: TinyModel, stacks: mx.array, seed: int
) -> None:
    """Defect 19: neither rejected steps nor the module's own approximations are ever kept."""
    rng, rig = random.Random(seed), Rig(tiny)
    rows = rng.randrange(1, 12)
    rig.feed(stacks, 0, rows)
    while rows + 5 < len(TOKENS):
        rig.drafter.propose(rng.randrange(0, 5), GREEDY)
        accepted = rng.randrange(0, 5)
        rig.feed(stacks, rows, rows + accepted + 1)
        rows += accepted + 1
        if rng.random() < 0.3:
            rig.drafter.propose(4, GREEDY)
    fresh = Rig(tiny)
    fresh.feed(stacks, 0, rows)
    assert rig.cache.num_cells == rows - 1
    assert same_cache(rig.cache, fresh.cache)
    assert rig.drafter.propose(4, GREEDY) == fresh.drafter.propose(4, GREEDY)


def test_cells_without_attention_and_experts_leave_the_same_cache_as_whole_ones(
    tiny: TinyModel, stacks: mx.array
) -> None:
    assert tiny.mtp is not None
    rig, whole = Rig(tiny), MtpState(tiny.config, compute_dtype=mx.float32)
    rig.feed(stacks, 0, 40)
    advance_cells(tiny.mtp, stacks[:39], TOKENS[1:40], whole)
    assert same_cache(rig.cache, whole)


def test_the_last_row_is_cached_with_the_token_that_really_came(tiny: TinyModel, stacks: mx.array) -> None:
    """After a return to an earlier turn another token may follow than the anchor then."""
    rig, fresh = Rig(tiny), Rig(tiny)
    rig.drafter.observe(TOKENS[:20], 7, stacks[:20])
    mark = rig.drafter.snapshot()
    rig.drafter.observe([7], 8, stacks[30:31])
    rig.drafter.propose(3, GREEDY)
    rig.drafter.restore(mark)
    rig.feed(stacks, 20, 33)
    fresh.feed(stacks, 0, 33)
    assert same_cache(rig.cache, fresh.cache)
    assert rig.drafter.propose(4, GREEDY) == fresh.drafter.propose(4, GREEDY)


def test_a_snapshot_that_later_rows_have_replaced_is_refused(tiny: TinyModel, stacks: mx.array) -> None:
    rig = Rig(tiny)
    empty = rig.drafter.snapshot()
    rig.feed(stacks, 0, 9)
    late = rig.drafter.snapshot()
    rig.drafter.restore(empty)
    assert rig.drafter.propose(3, GREEDY).tokens == ()
    rig.feed(stacks, 0, 5)
    with pytest.raises(DrafterError):
        rig.drafter.restore(late)
    rig.drafter.reset()
    with pytest.raises(DrafterError):
        rig.drafter.restore(empty)  # of the sequence before


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_waits_of_a_proposal_are_counted(directory: Path, stacks: mx.array, resident: bool, k: int) -> None:
    """Observing never waits; k cells wait k times for a streamed layer's ids, and once for the tokens."""
    tiny = TinyModel.open(directory, resident=resident)
    rig = Rig(tiny)
    before = rig.sync.num_syncs
    rig.feed(stacks, 0, 20)
    rig.feed(stacks, 20, 23)
    assert rig.sync.num_syncs == before
    assert not tiny.experts.calls, "keys and values need no experts"
    rig.drafter.propose(k, GREEDY)
    assert rig.sync.num_syncs - before == (1 if resident else k + 1)
    assert len(tiny.experts.calls) == k
    assert all(layer == tiny.config.num_hidden_layers for layer, _ in tiny.experts.calls)


def test_a_cell_that_fails_leaves_the_drafter_as_it_was(
    tiny: TinyModel, stacks: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tiny)
    rig.feed(stacks, 0, 12)
    expected = rig.drafter.propose(4, GREEDY)
    calls = 0
    run = MtpCell.forward

    def failing(self: MtpCell, *arguments: object) -> tuple[mx.array, mx.array]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("the drive is gone")
        return run(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(MtpCell, "forward", failing)
        with pytest.raises(OSError, match="drive"):
            rig.drafter.propose(4, GREEDY)
    assert rig.drafter.propose(4, GREEDY) == expected
    assert rig.cache.num_cells == 11


@pytest.mark.parametrize("given", [None, 2, 4])
def test_rows_without_their_stacks_are_refused(tiny: TinyModel, stacks: mx.array, given: int | None) -> None:
    rig = Rig(tiny)
    with pytest.raises(DrafterError, match="3 rows"):
        rig.drafter.observe(TOKENS[:3], TOKENS[3], None if given is None else stacks[:given])
    assert rig.drafter.propose(2, GREEDY) == Proposal(())


def test_drawn_proposals_come_from_the_rows_they_name(tiny: TinyModel, stacks: mx.array) -> None:
    """q is the distribution that each token was really drawn from, keyed by seed and position."""
    rig, temperature = Rig(tiny, draw=True), 0.3
    rig.feed(stacks, 0, 17)
    counts: dict[int, int] = {}
    num_draws = 400
    for seed in range(num_draws):
        proposal = rig.drafter.propose(1, DraftSampling(temperature, seed, 18))
        counts[proposal.tokens[0]] = counts.get(proposal.tokens[0], 0) + 1
    assert proposal.law == "rows"
    assert proposal.row_ids is not None
    assert proposal.row_probs is not None
    assert proposal.row_probs.shape == (1, NUM_CANDIDATES)
    q = dict(zip(proposal.row_ids[0].tolist(), proposal.row_probs[0].tolist(), strict=True))
    assert sum(q.values()) == pytest.approx(1)
    assert counts.keys() <= q.keys()
    # Candidates that are expected less than five times count as one.
    cells = {one: (counts.get(one, 0), num_draws * p) for one, p in q.items()}
    rare = [cell for cell in cells.values() if cell[1] < 5]
    common = [cell for cell in cells.values() if cell[1] >= 5]
    together = [tuple(map(sum, zip(*rare, strict=True)))] if rare else []
    chi_squared = sum((seen - expected) ** 2 / expected for seen, expected in common + together)
    assert len(common) > 3
    assert chi_squared < 43.8  # one in a thousand at 19 degrees of freedom


def test_every_draw_has_the_key_of_its_own_position(tiny: TinyModel, stacks: mx.array) -> None:
    keys: list[tuple[int, int]] = []

    def draw(scores: mx.array, seed: int, position: int) -> mx.array:
        keys.append((seed, position))
        return draw_draft(scores, seed, position)

    rig = Rig(tiny)
    rig.drafter._draw = draw
    rig.feed(stacks, 0, 17)
    sampling = DraftSampling(temperature=0.8, seed=5, position=18)
    assert rig.drafter.propose(3, sampling).tokens == rig.drafter.propose(3, sampling).tokens
    assert keys == [(5, 18), (5, 19), (5, 20)] * 2


def test_for_a_greedy_target_nothing_is_drawn(tiny: TinyModel, stacks: mx.array) -> None:
    drawing, plain = Rig(tiny, draw=True), Rig(tiny)
    for rig in (drawing, plain):
        rig.feed(stacks, 0, 17)
    assert drawing.drafter.propose(3, GREEDY) == plain.drafter.propose(3, GREEDY)


@pytest.mark.parametrize(
    "fault", ["phantom rows kept", "own stack instead of the target's", "anchor repeated"]
)
def test_the_checks_above_see_a_broken_drafter(
    tiny: TinyModel, stacks: mx.array, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, fresh = Rig(tiny), Rig(tiny)
    fresh.feed(stacks, 0, 15)
    if fault == "phantom rows kept":
        monkeypatch.setattr(MtpView, "rewind", lambda self, cache, mark: None)
        rig.feed(stacks, 0, 14)
        rig.drafter.propose(2, GREEDY)
        rig.feed(stacks, 14, 15)
    elif fault == "own stack instead of the target's":
        assert tiny.mtp is not None
        _, own = advance_cells(
            tiny.mtp, stacks[:14], TOKENS[1:15], MtpState(tiny.config, compute_dtype=mx.float32)
        )
        rig.drafter.observe(TOKENS[:15], TOKENS[15], mx.concatenate([stacks[:13], own[-1:], stacks[14:15]]))
    else:
        rig.drafter.observe(TOKENS[:15], TOKENS[15], stacks[:15])
        rig.drafter._cache = rig.drafter._target.new_cache()
        rig.drafter._target.extend(stacks[:14], TOKENS[:14], rig.drafter._cache)
    assert not same_cache(rig.cache, fresh.cache)
