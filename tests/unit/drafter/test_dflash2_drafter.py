"""The drafter around the network: one wait, real tokens, the law of its draws, no row lost or kept long."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from drafter.api import DraftSampling, Proposal
from drafter.config import DraftConfig, context_bytes
from drafter.dflash2 import Dflash2Drafter, Dflash2Options
from drafter.errors import DrafterError
from drafter.live import LiveCounts, check_live, idle_selector
from drafter.loading import load_parameters
from drafter.selector import candidates
from mlx_flashnext.engine.streams import draw_draft
from tests.arch.test_device_waits import ROOT, waits
from tests.tiny.drafts import draft_config, random_parameters

NUM_IDS, VOCAB, HIDDEN = 124, 128, 32
GREEDY, SEED = 0.0, 5


class Target:
    """A pretend target: fixed embedding and head, every wait counted."""

    def __init__(self, seed: int = 1) -> None:
        generator = np.random.default_rng(seed)
        self.table = mx.array(generator.standard_normal((VOCAB, HIDDEN)).astype(np.float32))
        self.matrix = mx.array(0.4 * generator.standard_normal((VOCAB, HIDDEN)).astype(np.float32))
        self.num_waits = 0
        self.head_rows: list[int] = []

    def embed(self, ids_T: mx.array) -> mx.array:
        return self.table[ids_T]

    def head(self, hidden_TD: mx.array) -> mx.array:
        self.head_rows.append(hidden_TD.shape[0])
        return hidden_TD @ self.matrix.T

    def to_host(self, array: mx.array) -> Any:
        self.num_waits += 1
        return array.tolist()


class Session:
    """A drafter and the text it is shown: row i has token i and fixed features."""

    def __init__(
        self,
        config: DraftConfig | None = None,
        *,
        params: dict[str, mx.array] | None = None,
        target: Target | None = None,
        **options: Any,
    ) -> None:
        self.config = config or draft_config()
        self.target = target or Target()
        self.options = Dflash2Options(**({"num_ids": NUM_IDS} | options))
        self.drafter = Dflash2Drafter(
            random_parameters(self.config) if params is None else params,
            self.config,
            self.target,
            draw_draft,
            dtype=mx.float32,
            contraction="mean",
            options=self.options,
            digest="d",
        )
        self.num_rows = 0

    def observe(self, num_rows: int, *, chunk: int = 1000, features: int | None = None) -> Session:
        """Show rows, in chunks; `features`: only of so many rows at the end of every chunk."""
        end = self.num_rows + num_rows
        while self.num_rows < end:
            rows = range(self.num_rows, min(self.num_rows + chunk, end))
            kept = rows if features is None else rows[len(rows) - features :]
            self.drafter.observe(
                [token(row) for row in rows],
                token(rows.stop),
                None,
                features_RF=features_of(kept, self.config.feature_width) if len(kept) else None,
            )
            self.num_rows = rows.stop
        return self

    def propose(self, k: int = 7, temperature: float = GREEDY, seed: int = SEED) -> Proposal:
        return self.drafter.propose(k, DraftSampling(temperature, seed, self.num_rows + 1))


def token(row: int) -> int:
    return (row * 37 + 11) % NUM_IDS


FEATURES = np.random.default_rng(7).standard_normal((600, 96)).astype(np.float32)


def features_of(rows: range, width: int) -> mx.array:
    return mx.array(FEATURES[rows.start : rows.stop, :width])


def values(proposal: Proposal) -> tuple[Any, ...]:
    arrays = (proposal.row_ids, proposal.row_probs)
    return (
        proposal.tokens,
        proposal.law,
        proposal.confidence,
        *(None if a is None else np.array(a).tolist() for a in arrays),
    )


def test_it_says_what_it_wants_of_the_target() -> None:
    drafter = Session().drafter
    assert (drafter.kind, drafter.needs_stack, drafter.max_proposals()) == ("dflash2", False, 7)
    request = drafter.feature_request
    assert (request.taps, request.contraction, request.last_rows) == ((1, 3, 6), "mean", 15)
    mixed = draft_config({"layer_types": ["sliding_attention", "full_attention"]})
    assert Session(mixed).drafter.feature_request.last_rows is None


def test_before_anything_is_seen_and_at_k_nought_nothing_is_proposed() -> None:
    session = Session()
    assert session.propose() == Proposal(())
    assert session.observe(3).propose(0) == Proposal(())
    assert session.target.num_waits == 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_proposal_waits_once_and_twice_asked_is_the_same(temperature: float) -> None:
    session = Session().observe(20)
    assert session.target.num_waits == 0
    first = session.propose(temperature=temperature)
    assert session.target.num_waits == 1
    assert len(first.tokens) == len(first.confidence) == 7
    assert all(0 < share <= 1 for share in first.confidence)
    assert values(session.propose(temperature=temperature)) == values(first)
    assert session.target.num_waits == 2


def test_greedy_is_a_point_and_sampled_is_drawn_from_its_rows() -> None:
    session = Session().observe(20)
    greedy = session.propose()
    assert (greedy.law, greedy.row_ids, greedy.row_probs) == ("point", None, None)
    sampled = session.propose(temperature=0.9)
    assert sampled.law == "rows"
    ids, probs = np.array(sampled.row_ids), np.array(sampled.row_probs)
    assert ids.shape == probs.shape == (7, 5)
    assert (probs.dtype, ids.dtype) == (np.float32, np.int32)
    assert np.abs(probs.sum(axis=1) - 1).max() < 1e-6
    assert all(token in row for token, row in zip(sampled.tokens, ids.tolist(), strict=True))


def test_every_token_is_drawn_from_its_row_with_a_key_of_its_own() -> None:
    """The row handed to the verifier is the softmax of exactly what was drawn from."""
    drawn: list[tuple[mx.array, int, int, mx.array]] = []

    def record(scores_K: mx.array, seed: int, position: int) -> mx.array:
        index = draw_draft(scores_K, seed, position)
        drawn.append((scores_K, seed, position, index))
        return index

    session = Session().observe(20)
    session.drafter._draw = record
    proposal = session.propose(temperature=2.5)
    assert [(seed, position) for _, seed, position, _ in drawn] == [(SEED, 21 + slot) for slot in range(7)]
    assert proposal.row_ids is not None
    assert proposal.row_probs is not None
    for slot, (scores, _, _, index) in enumerate(drawn):
        assert mx.array_equal(mx.softmax(scores), proposal.row_probs[slot])
        assert proposal.row_ids[slot][index].item() == proposal.tokens[slot]
    cold = session.propose(temperature=0.5)
    first = np.log(np.array(proposal.row_probs)[0]), np.log(np.array(cold.row_probs)[0])
    np.testing.assert_allclose(
        *((row - row[0]) * t for row, t in zip(first, (2.5, 0.5), strict=True)), atol=1e-3
    )
    assert len({session.propose(temperature=5.0, seed=seed).tokens for seed in range(8)}) > 4


def test_a_draft_temperature_of_its_own_is_in_the_law() -> None:
    params = random_parameters(draft_config())
    as_target = Session(params=params).observe(20).propose(temperature=0.5)
    own = Session(params=params, temperature=0.5).observe(20).propose(temperature=2.0)
    assert values(own) == values(as_target)
    assert Session(params=params, temperature=0.5).observe(20).propose(temperature=0.0).law == "point"
    assert Session(params=params, temperature=0.0).observe(20).propose(temperature=1.0).law == "point"


def test_fewer_proposals_are_the_beginning_of_all_and_the_head_runs_for_them_alone() -> None:
    session = Session().observe(20)
    whole = session.propose()
    for k in range(1, 8):
        assert session.propose(k).tokens == whole.tokens[:k]
        assert session.target.head_rows[-1] == k
    assert session.propose(100).tokens == whole.tokens


def test_a_short_block_sees_fewer_slots() -> None:
    params = random_parameters(draft_config())
    full = Session(params=params).observe(20)
    short = Session(params=params, full_block=False).observe(20)
    assert short.propose().tokens == full.propose().tokens  # k + 1 slots are all
    gaps = [
        np.abs(np.array(short.propose(k).confidence) - np.array(full.propose(k).confidence)).max()
        for k in range(1, 7)
    ]
    assert max(gaps) > 1e-3


def test_no_padding_row_and_no_mask_id_is_ever_proposed() -> None:
    target = Target()
    favoured = [*range(NUM_IDS, VOCAB), 7]
    boost = np.array(target.matrix)
    boost[favoured] *= 30
    target.matrix = mx.array(boost)
    mask = draft_config({"dflash_config.mask_token_id": 7})
    params = random_parameters(mask)
    rows = Session(mask, params=params, target=target).observe(20).propose(temperature=1.0)
    assert max(rows.tokens) < NUM_IDS
    assert 7 not in np.array(rows.row_ids)
    assert np.array(rows.row_ids).max() < NUM_IDS
    unmasked = Session(mask, params=params, target=target, num_ids=None).observe(20).propose()
    assert set(unmasked.tokens) & set(favoured)


def test_a_candidate_limit_of_the_draft_is_kept() -> None:
    limited = draft_config({"dflash_config.selector_vocab_size": 40})
    rows = Session(limited).observe(20).propose(temperature=1.0)
    assert np.array(rows.row_ids).max() < 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_proposal_ends_with_the_first_stop_id(temperature: float) -> None:
    params = random_parameters(draft_config())
    whole = Session(params=params).observe(20).propose(temperature=temperature)
    for slot, stop in enumerate(whole.tokens):
        cut = Session(params=params, stop_ids=(stop,)).observe(20).propose(temperature=temperature)
        wanted = whole.tokens.index(stop) + 1
        assert wanted <= slot + 1
        assert cut.tokens == whole.tokens[:wanted]
        assert len(cut.confidence) == wanted
        if temperature:
            assert np.array(cut.row_probs).tolist() == np.array(whole.row_probs)[:wanted].tolist()


@pytest.mark.parametrize("kinds", [["sliding_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_how_rows_arrive_does_not_show(kinds: list[str]) -> None:
    config = draft_config({"layer_types": kinds})
    params = random_parameters(config)
    at_once = Session(config, params=params).observe(90)
    for chunk in (1, 7, 16, 89):
        other = Session(config, params=params).observe(90, chunk=chunk)
        assert values(other.propose()) == values(at_once.propose())


def test_rows_beyond_the_window_are_not_needed_and_one_fewer_shows() -> None:
    params = random_parameters(draft_config())
    whole = Session(params=params, slack=0).observe(60).propose()
    enough = Session(params=params, slack=0).observe(60, features=15)
    assert enough.drafter.describe()["context_rows"] == 15
    assert values(enough.propose()) == values(whole)
    fewer = Session(params=params, slack=0).observe(60, features=14).propose()
    assert fewer.confidence != whole.confidence


def test_rows_without_features_leave_an_empty_context_at_the_right_distance() -> None:
    session = Session().observe(50, features=0)
    about = session.drafter.describe()
    assert (about["context_rows"], about["context_end"]) == (0, 50)
    assert len(session.propose().tokens) == 7
    session.observe(4)
    assert session.drafter.describe()["context_rows"] == 4
    late = Session(params=session.drafter._params).observe(54)
    late_confidence = late.propose().confidence
    assert session.propose().confidence != late_confidence


def test_features_of_the_rows_reach_the_proposal() -> None:
    params = random_parameters(draft_config())
    one, other = Session(params=params).observe(20), Session(params=params)
    other.observe(19)
    other.drafter.observe([token(19)], token(20), None, features_RF=mx.zeros((1, 96)))
    other.num_rows = 20
    assert one.propose().confidence != other.propose().confidence


def test_places_without_a_row_do_not_show_whatever_they_hold() -> None:
    """P38: unused places are poisoned."""
    session = Session().observe(9)
    before = values(session.propose())
    for ring in session.drafter._context._rings:
        empty = mx.array(ring._positions < 0)
        ring._arrays = [mx.where(empty[None, :, None], 1e4, array) for array in ring._arrays]
    assert values(session.propose()) == before


def test_the_law_it_declares_is_the_law_it_proposes_by() -> None:
    for temperature, law in ((None, "rows"), (0.7, "rows"), (0.0, "point")):
        session = Session(temperature=temperature).observe(20)
        assert session.drafter.law == law
        assert session.propose(temperature=1.0).law == law


def test_two_requests_share_nothing_the_second_shorter() -> None:
    params = random_parameters(draft_config())
    used = Session(params=params).observe(80)
    used.propose()
    used.drafter.reset()
    used.num_rows = 0
    assert used.propose() == Proposal(())
    fresh = Session(params=params)
    for session in (used, fresh):
        session.observe(9)
    assert values(used.propose()) == values(fresh.propose())


@pytest.mark.parametrize("kinds", [["sliding_attention"] * 2, ["full_attention"] * 2])
@pytest.mark.parametrize("rows", [1, 14, 40, 100])
def test_a_snapshot_brings_the_same_proposals_back_bit_for_bit(kinds: list[str], rows: int) -> None:
    config = draft_config({"layer_types": kinds})
    params = random_parameters(config)
    session = Session(config, params=params, slack=3).observe(rows)
    before, mark = values(session.propose()), session.drafter.snapshot()
    session.observe(60)
    after = values(session.propose())
    for other in (session, Session(config, params=params, slack=3)):
        other.drafter.restore(mark)
        other.num_rows = rows
        assert values(other.propose()) == before
        other.observe(60)
        assert values(other.propose()) == after


def test_a_snapshot_of_another_draft_is_refused_and_nothing_changes() -> None:
    session = Session().observe(20)
    before = values(session.propose())
    mark = session.drafter.snapshot()
    for wrong in (dataclasses.replace(mark, digest="e"), "text", None):
        with pytest.raises(DrafterError):
            session.drafter.restore(wrong)
    assert values(session.propose()) == before


def test_wrong_features_are_refused_and_nothing_changes() -> None:
    """P39: four streams instead of one contracted row, among others."""
    session = Session().observe(20)
    before = values(session.propose())
    for shape in ((1, 95), (1, 97), (2, 96), (1, 4, 96)):
        with pytest.raises(DrafterError):
            session.drafter.observe([1], 2, None, features_RF=mx.zeros(shape))
    assert values(session.propose()) == before


def test_a_row_lost_or_counted_twice_is_an_error() -> None:
    session = Session().observe(20)
    for position in (20, 22):
        with pytest.raises(DrafterError, match="anchor is at 20"):
            session.drafter.propose(3, DraftSampling(0.0, 0, position))


def test_more_than_the_planned_context_is_refused() -> None:
    config = draft_config({"layer_types": ["full_attention"] * 2})
    session = Session(config, capacity_tokens=32).observe(32)
    before = values(session.propose())
    with pytest.raises(DrafterError, match="32 that were planned"):
        session.observe(1)
    assert values(session.propose()) == before


def test_memory_is_bounded_by_the_window_and_never_more_than_planned() -> None:
    config = draft_config()
    sizes = set()
    session = Session(config)
    for _ in range(6):
        sizes.add(session.observe(90, chunk=64).drafter.num_bytes())
    assert len(sizes) == 1
    bound = context_bytes(config, 540, 4)
    snapshot = session.drafter.snapshot().context.num_bytes()
    assert sizes.pop() + snapshot <= bound
    mixed = draft_config({"layer_types": ["sliding_attention", "full_attention"]})
    session = Session(mixed, capacity_tokens=540)
    for _ in range(6):
        session.observe(90)
    held = session.drafter.num_bytes() + session.drafter.snapshot().context.num_bytes()
    assert held <= context_bytes(mixed, 540, 4)
    assert held > context_bytes(mixed, 400, 4)


def test_a_value_that_is_no_number_withholds_the_block_and_is_counted() -> None:
    def broken(name: str, place: Callable[[np.ndarray], None]) -> Session:
        params = random_parameters(draft_config())
        value = np.array(params[name])
        place(value)
        return Session(params=params | {name: mx.array(value)}).observe(20)

    def one_nan(value: np.ndarray) -> None:
        value.reshape(-1)[0] = np.nan

    def infinite(value: np.ndarray) -> None:
        value[:] = np.inf

    for name in (
        "norm.weight",
        "candidate_selector.hidden_projection.weight",
        "layers.1.mlp.down_proj.weight",
    ):
        for place in (one_nan, infinite):
            session = broken(name, place)
            assert session.propose() == Proposal(())
            assert session.drafter.counts.num_broken == 1
            assert [reason.code for reason in check_live(session.drafter.counts)] == ["G22"]
            session.drafter.reset()  # another answer of the same session
            session.num_rows = 0
            with pytest.raises(DrafterError, match="values that are no numbers"):
                session.observe(20).propose()


def test_what_was_proposed_and_kept_is_counted_by_cycle() -> None:
    session = Session().observe(30)
    assert session.drafter.counts == LiveCounts()
    for accepted in (0, 3, 7):
        session.propose()
        session.propose()  # asked twice is one cycle
        session.observe(accepted + 1)
    session.observe(5)  # no proposal: a plain cycle
    counts = session.drafter.counts
    assert (counts.num_cycles, counts.num_proposed, counts.num_accepted) == (3, 21, 10)
    assert counts.num_slots == 42
    assert 0 < counts.num_overrides < 42  # this random selector changes some slots, not all
    about = session.drafter.describe()
    assert (about["cycles"], about["accepted"]) == (3, 10)


def test_overrides_follow_the_emitted_path(caplog: pytest.LogCaptureFixture) -> None:
    config, params = draft_config(), random_parameters(draft_config())
    idle = params | {"candidate_selector.successor_codebook": mx.zeros((VOCAB, 8))}
    session = Session(config, params=idle).observe(30)
    while session.drafter.counts.num_slots < 200:
        session.propose()
        session.observe(1)
    session.propose()
    assert session.drafter.counts.num_overrides == 0
    assert [record.message[:4] for record in caplog.records] == ["G22:"], "said, and said once"
    warning = idle_selector(session.drafter.counts)
    assert warning is not None
    assert warning.consequence == "warn"
    assert idle_selector(dataclasses.replace(session.drafter.counts, num_overrides=1)) is None
    assert idle_selector(dataclasses.replace(session.drafter.counts, num_slots=199)) is None


def test_a_draft_that_is_never_right_is_disabled_and_a_hard_prompt_is_not() -> None:
    """P36, defect 2."""
    never = LiveCounts(num_cycles=200, num_proposed=1400, num_accepted=9)
    assert [reason.code for reason in check_live(never)] == ["G22"]
    assert check_live(dataclasses.replace(never, num_cycles=199)) == ()
    assert check_live(dataclasses.replace(never, num_accepted=10)) == ()
    session = Session().observe(30)
    session.drafter.counts = never
    with pytest.raises(DrafterError, match="a defect, not a hard prompt"):
        session.propose()


def test_without_its_selector_a_draft_proposes_the_best_logits() -> None:
    """What the selector is worth is measured against the same weights without it."""
    off, whole = Session(use_selector=False).observe(30), Session().observe(30)
    assert off.drafter.law == "point"
    greedy, warm = off.propose(), off.propose(temperature=1.0)
    assert values(greedy) == values(warm)
    assert greedy.tokens != whole.propose().tokens
    assert off.drafter.counts.num_overrides == 0
    flat = random_parameters(draft_config()) | {"candidate_selector.successor_codebook": mx.zeros((VOCAB, 8))}
    assert Session(params=flat).observe(30).propose().tokens == greedy.tokens


def test_version_one_proposes_the_best_logit_whatever_the_temperature() -> None:
    v1 = draft_config(
        {"architectures": ["DFlashDraftModel"]}
        | {
            f"dflash_config.{name}": ...
            for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        }
    )
    session = Session(v1).observe(20)
    assert session.drafter.kind == "dflash"
    greedy, warm = session.propose(), session.propose(temperature=1.0)
    assert values(greedy) == values(warm)
    assert greedy.law == "point"
    assert session.drafter.counts.num_overrides == 0
    assert len(greedy.tokens) == 7


def test_positions_beyond_the_trained_length_go_on() -> None:
    config = draft_config({"max_position_embeddings": 16})
    far = Session(config)
    far.drafter.observe([1] * 200_000, 2, None, features_RF=features_of(range(0, 15), 96))
    far.num_rows = 200_000
    near = Session(config, params=far.drafter._params).observe(15)
    near.drafter._anchor = 2
    np.testing.assert_allclose(far.propose().confidence, near.propose().confidence, atol=2e-3)


def test_in_half_precision_the_same_calls_work_and_scores_stay_single() -> None:
    config = draft_config()
    params = {name: value.astype(mx.bfloat16) for name, value in random_parameters(config).items()}
    target = Target()
    drafter = Dflash2Drafter(
        params,
        config,
        target,
        draw_draft,
        dtype=mx.bfloat16,
        contraction="mean",
        options=Dflash2Options(num_ids=NUM_IDS),
    )
    drafter.observe([1] * 20, 2, None, features_RF=features_of(range(20), 96))
    proposal = drafter.propose(7, DraftSampling(1.0, 3, 21))
    assert proposal.row_probs is not None
    assert proposal.row_probs.dtype == mx.float32
    assert drafter.num_bytes() < Session().observe(20).drafter.num_bytes()


def test_tensors_are_checked_again_as_they_are_loaded() -> None:
    config = draft_config()
    good = random_parameters(config)
    loaded = load_parameters(config, good.__getitem__, Target().to_host, dtype=mx.bfloat16)
    assert {value.dtype for value in loaded.values()} == {mx.bfloat16}
    assert loaded.keys() == good.keys()
    for bad in (mx.zeros((31,)), mx.full((32,), float("nan")), mx.full((32,), float("inf"))):
        with pytest.raises(DrafterError, match="hidden_norm"):
            load_parameters(
                config, (good | {"hidden_norm.weight": bad}).__getitem__, Target().to_host, dtype=mx.float32
            )


@pytest.mark.parametrize("name", ["block", "context", "dflash2", "fuse", "layers", "loading", "selector"])
def test_nothing_waits_for_the_device_but_through_the_target(name: str) -> None:
    assert waits((ROOT / "drafter" / f"{name}.py").read_text()) == []


@pytest.mark.parametrize("vocabulary", [5, 6, 1000, 2561, 9000, 9216])
def test_candidates_are_the_largest_logits_of_any_vocabulary(vocabulary: int) -> None:
    generator = np.random.default_rng(vocabulary)
    logits = generator.permuted(np.tile(np.arange(vocabulary, dtype=np.float32), (3, 1)), axis=1)
    logits[0, : vocabulary - 5] = -np.inf  # no more than five can be had
    found = candidates(mx.array(logits), 5)
    wanted = np.sort(np.argsort(logits, axis=1)[:, -5:], axis=1)
    assert np.array(found.ids).tolist() == wanted.tolist()
    assert np.array_equal(np.array(found.logits), np.take_along_axis(logits, wanted, axis=1))
