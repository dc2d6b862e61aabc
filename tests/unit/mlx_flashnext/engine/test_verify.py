"""Verification: rules resolved, one wait, what is refused, the edges where exactness breaks."""

import math
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
import pytest

from drafter.api import Proposal
from drafter.errors import DrafterError
from mlx_flashnext.engine import sampler as sampler_module
from mlx_flashnext.engine import verify as verify_module
from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.sampler import Sampler, SamplingParams
from mlx_flashnext.engine.sizes import LOGITS_COPIES
from mlx_flashnext.engine.streams import Purpose
from mlx_flashnext.engine.verify import Verdict, check_proposal, draft_sampling, resolve_rule, verify
from mlx_flashnext.model.host import HostSync

VOCAB = 12
RULES = ("coupled", "delta", "sampled")
SEEDED = SamplingParams(seed=4)
GREEDY = SamplingParams(temperature=0.0)


def logits(rows: int, seed: int = 1) -> mx.array:
    return 2 * mx.random.normal((rows, VOCAB), key=mx.random.key(seed))


def rows_of(tokens: tuple[int, ...], candidates: int = 3) -> Proposal:
    """Return a proposal whose rows hold the token and its successors, alike likely."""
    ids = [[(token + step) % VOCAB for step in range(candidates)] for token in tokens]
    return Proposal(tokens, "rows", mx.array(ids), mx.full((len(tokens), candidates), 1 / candidates))


def judged(
    logits_TV: mx.array, proposal: Proposal, rule: str, params: SamplingParams = SEEDED, **sampler: object
) -> Verdict:
    return verify(logits_TV, proposal, Sampler(params, [1, 2], **sampler), rule, HostSync())  # type: ignore[arg-type]


@pytest.fixture
def rejecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_accepts", lambda u, p, q: mx.zeros(u.shape, mx.bool_))


# ---------------------------------------------------------------- which rule
@pytest.mark.parametrize(
    ("asked", "seed", "law", "rule"),
    [
        ("auto", None, "rows", "sampled"),
        ("auto", None, "point", "coupled"),
        ("auto", 3, "rows", "coupled"),
        ("auto", 3, "point", "coupled"),
        ("auto", 0, "rows", "coupled"),
        ("sampled", 3, "rows", "sampled"),
        ("sampled", 3, "point", "delta"),
        ("delta", None, "rows", "delta"),
        ("coupled", None, "rows", "coupled"),
    ],
)
def test_a_seed_means_coupled_and_a_named_rule_is_kept(asked, seed, law, rule):
    assert resolve_rule(asked, SamplingParams(seed=seed), law) == rule


@pytest.mark.parametrize("asked", ["auto", *RULES])
def test_a_greedy_target_compares_with_the_largest_logit(asked):
    assert resolve_rule(asked, GREEDY, "rows") == "coupled"


def test_an_unknown_rule_is_refused_with_its_name():
    with pytest.raises(InvalidRequest, match="typical"):
        resolve_rule("typical", SEEDED, "rows")  # type: ignore[arg-type]


def test_a_drafter_draws_only_where_its_rows_are_judged():
    sampler = Sampler(SamplingParams(temperature=0.7, seed=5), [1, 2, 3])
    drawn = draft_sampling(sampler, "sampled")
    assert (drawn.temperature, drawn.seed, drawn.position) == (0.7, 5, 3)
    assert draft_sampling(sampler, "coupled").temperature == 0
    assert draft_sampling(sampler, "delta").temperature == 0


# ---------------------------------------------------------------- waits
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_one_wait_whatever_the_rule_and_the_width(rule, k, monkeypatch):
    sync, reads = HostSync(), list[int]()
    monkeypatch.setattr(verify_module, "to_host", lambda sync, array: _counted(sync, array, reads))
    params = SamplingParams(seed=1, top_k=5, top_p=0.9, min_p=0.01, presence_penalty=0.5)
    verify(logits(k + 1), rows_of(tuple(range(k))), Sampler(params, [1]), rule, sync)
    assert sync.num_syncs == 1
    assert reads == [k + 1 if rule == "coupled" or k == 0 else 2 * (k + 1)]


def _counted(sync: HostSync, array: mx.array, reads: list[int]) -> object:
    sync.num_syncs += 1
    reads.append(array.size)
    return array.tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("top_k", [0, 20])
def test_judging_a_block_holds_no_more_rows_than_the_plan_counts(rule, top_k):
    rows, vocab = 9, 50_000
    block = mx.random.normal((rows, vocab), key=mx.random.key(1))
    proposal = rows_of(tuple(range(rows - 1)))
    mx.eval(block, proposal.row_ids, proposal.row_probs)
    params = SamplingParams(seed=1, top_k=top_k, top_p=0.95, min_p=0.01, presence_penalty=0.5)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    verify(block, proposal, Sampler(params, [1, 2]), rule, HostSync())
    copies = (mx.get_peak_memory() - before) / (rows * vocab * 4)
    assert 3 < copies <= LOGITS_COPIES


# ---------------------------------------------------------------- what is chosen
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", [SEEDED, GREEDY], ids=["seeded", "greedy"])
def test_without_proposals_it_is_the_plain_step(rule, params):
    for seed in range(20):
        row = logits(1, seed)
        verdict = judged(row, Proposal(()), rule, params)
        assert verdict == Verdict(0, (int(Sampler(params, [1, 2]).sample(row[0])),))


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_block_follows_the_largest_logits_whatever_the_rule(rule):
    best = [int(token) for token in mx.argmax(logits(4), axis=-1).tolist()]
    wrong = (best[1] + 1) % VOCAB
    assert judged(logits(4), rows_of(tuple(best[:3])), rule, GREEDY) == Verdict(3, tuple(best))
    assert judged(logits(4), rows_of((best[0], wrong, best[2])), rule, GREEDY) == Verdict(1, tuple(best[:2]))
    assert judged(logits(4), rows_of(((best[0] + 1) % VOCAB,) * 3), rule, GREEDY) == Verdict(0, (best[0],))


def test_equal_logits_accept_the_lowest_id_only():
    row = mx.array([[0.0, 2.0, 2.0], [0.0, 0.0, 1.0]])
    assert judged(row, Proposal((1,)), "coupled", GREEDY) == Verdict(1, (1, 2))
    assert judged(row, Proposal((2,)), "coupled", GREEDY) == Verdict(0, (1,))


def test_acceptance_is_strict():
    """Not even a random number of 0 accepts what the target never says."""
    u, p, q = (
        mx.array([0.0, 0.0, 0.5, 0.5]),
        mx.array([0.0, 1e-30, 0.25, 0.26]),
        mx.array([1.0, 1.0, 0.5, 0.5]),
    )
    assert verify_module._accepts(u, p, q).tolist() == [False, True, False, True]


@pytest.mark.parametrize("rule", ["delta", "sampled"])
def test_a_filtered_token_is_never_accepted_nor_drawn_again(rule):
    params = SamplingParams(top_k=3)
    for seed in range(30):
        block = logits(2, seed)
        order = [int(token) for token in mx.argsort(-block[0]).tolist()]
        verdict = judged(block, rows_of((order[3],)), rule, params)
        assert verdict.accepted == 0
        assert verdict.tokens[0] in order[:3]


def test_a_certain_token_is_always_accepted():
    certain = mx.full((2, VOCAB), -mx.inf)
    certain[:, 5] = 0.0
    for seed in range(50):
        assert judged(certain, Proposal((5,)), "delta", SamplingParams(seed=seed)) == Verdict(1, (5, 5))


@pytest.mark.usefixtures("rejecting")
def test_where_nothing_is_left_over_the_target_draws_from_p():
    """P and q are equal up to rounding, and rounding rejected: dflash2.md 3.4, point 5."""
    certain = mx.full((2, VOCAB), -mx.inf)
    certain[:, 5] = 0.0
    assert judged(certain, Proposal((5,)), "delta") == Verdict(0, (5,))
    rows = Proposal((5,), "rows", mx.array([[2, 5]]), mx.array([[0.0, 1.0]]))
    assert judged(certain, rows, "sampled") == Verdict(0, (5,))


@pytest.mark.usefixtures("rejecting")
def test_a_rejected_token_is_replaced_from_what_is_left_over():
    likely = int(mx.argmax(logits(1)[0]))
    for seed in range(40):
        params = SamplingParams(seed=seed, temperature=0.3)
        assert judged(logits(2), Proposal((likely,)), "delta", params).tokens != (likely,)
        # The other candidate has more of q than of p, so it is not left over either.
        least = int(mx.argmin(logits(1)[0]))
        rows = Proposal((likely,), "rows", mx.array([[least, likely]]), mx.array([[0.05, 0.95]]))
        assert judged(logits(2), rows, "sampled", params).tokens[0] not in {likely, least}


def test_candidates_beyond_the_vocabulary_touch_nothing():
    inside = Proposal((3, 4), "rows", mx.array([[3, 0], [4, 0]]), mx.array([[0.6, 0.0], [0.7, 0.0]]))
    outside = Proposal(
        (3, 4), "rows", mx.array([[3, 2**31 - 1], [4, -(2**31)]]), mx.array([[0.6, 0.4], [0.7, 0.3]])
    )
    ids, probs = verify_module._draft_rows([outside], "sampled", VOCAB)
    assert mx.all((ids >= 0) & (ids < VOCAB)).item()
    assert probs[0, :, 1].tolist() == [0.0, 0.0]
    for seed in range(10):
        params = SamplingParams(seed=seed)
        assert judged(logits(3), outside, "sampled", params) == judged(logits(3), inside, "sampled", params)


def test_a_padded_row_counts_a_candidate_once():
    plain = Proposal((3,), "rows", mx.array([[3, 7]]), mx.array([[0.6, 0.4]]))
    padded = Proposal((3,), "rows", mx.array([[3, 7, 3, 7]]), mx.array([[0.6, 0.0, 0.0, 0.4]]))
    for seed in range(30):
        params = SamplingParams(seed=seed)
        assert judged(logits(2), padded, "sampled", params) == judged(logits(2), plain, "sampled", params)


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        ([5, 6], [0.5, 0.5]),  # the token is not among them
        ([3, 6], [0.0, 1.0]),
        ([3, 6], [math.nan, 0.5]),
        ([3, 6], [0.5, math.nan]),
        ([3, 6], [-1.0, 0.5]),
        ([3, 6], [0.5, -1.0]),
        ([3, 6], [math.inf, 0.0]),
        ([3, 6], [0.9, 0.9]),
    ],
)
def test_a_row_that_its_token_cannot_come_from_is_judged_as_a_point_mass(ids, probs):
    """What a drafter claims wrongly must not change what the target says."""
    faulty = Proposal((3,), "rows", mx.array([ids]), mx.array([probs]))
    for seed in range(20):
        params = SamplingParams(seed=seed)
        delta = judged(logits(2), Proposal((3,)), "delta", params)
        assert judged(logits(2), faulty, "sampled", params) == delta


def test_point_masses_are_their_own_rows():
    ones = Proposal((3, 4), "rows", mx.array([[3], [4]]), mx.ones((2, 1)))
    for seed in range(30):
        params = SamplingParams(seed=seed)
        delta = judged(logits(3), Proposal((3, 4)), "delta", params)
        assert judged(logits(3), Proposal((3, 4)), "sampled", params) == delta
        assert judged(logits(3), ones, "sampled", params) == delta


@pytest.mark.parametrize("rule", RULES)
def test_an_id_that_only_fills_blocks_is_kept_only_if_the_target_says_it(rule):
    """Defect 37: a mask id is a token like any other to verification."""
    mask = VOCAB - 1
    never, always = mx.zeros((2, VOCAB)), mx.zeros((2, VOCAB))
    never[:, mask], always[:, mask] = -mx.inf, 100.0
    for seed in range(20):
        assert mask not in judged(never, rows_of((mask,)), rule, SamplingParams(seed=seed)).tokens
        assert judged(always, rows_of((mask,), 1), rule, SamplingParams(seed=seed)).tokens == (mask, mask)


@pytest.mark.parametrize("rule", RULES)
def test_every_filter_holds_inside_a_block(rule):
    """Defects 22 and 41: top-k, top-p and min-p of a speculated answer."""
    block = mx.broadcast_to(mx.log(mx.array([0.5, 0.3, 0.15, 0.04, 0.01])), (3, 5))
    for params, kept in (
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_p=0.75), {0, 1}),
        (SamplingParams(min_p=0.2), {0, 1, 2}),
    ):
        verdicts = [
            verify(block, rows_of((2, 3)), Sampler(params, [0] * at), rule, HostSync()) for at in range(60)
        ]
        assert {token for verdict in verdicts for token in verdict.tokens} == kept


# ---------------------------------------------------------------- keys
@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, Purpose]]:
    asked: list[tuple[int, int, Purpose]] = []
    for module in (verify_module, sampler_module):
        keys = module.stream_keys

        def recorded(places: Iterator, keys: Callable = keys) -> mx.array:
            listed = list(places)
            asked.extend(listed)
            return keys(listed)

        monkeypatch.setattr(module, "stream_keys", recorded)
    return asked


@pytest.mark.parametrize("rule", RULES)
def test_no_number_serves_twice_and_none_is_the_drafters(rule, places):
    judged(logits(5), rows_of((1, 2, 3, 4)), rule)
    assert len(set(places)) == len(places)
    assert {purpose for *_, purpose in places} <= set(Purpose) - {Purpose.DRAFT}
    assert {position for _, position, _ in places} == set(range(2, 7))
    assert (4, 6, Purpose.DRAW) in places


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("proposal", "fault"),
    [
        (Proposal((1, VOCAB)), str(VOCAB)),
        (Proposal((-1, 2)), "-1"),
        (Proposal((1, 2, 3)), "3 tokens where 2"),
        (Proposal((1, 2.0)), "2.0"),  # type: ignore[arg-type]
        (Proposal((1, True)), "True"),
        (Proposal((np.int64(1),)), "1"),  # type: ignore[arg-type]
        (Proposal((1,), "rows", mx.zeros((1, 0), mx.int32), mx.zeros((1, 0))), r"\(1, 0\)"),
        (Proposal((1, 2), "rows"), "None"),
        (Proposal((1, 2), "rows", mx.zeros((2, 3), mx.int32), mx.zeros((2, 4))), r"\(2, 4\)"),
        (Proposal((1, 2), "rows", mx.zeros((1, 3), mx.int32), mx.zeros((1, 3))), r"\(1, 3\)"),
        (Proposal((1, 2), "rows", mx.zeros((2,), mx.int32), mx.zeros((2,))), r"\(2,\)"),
    ],
)
def test_a_faulty_proposal_is_the_drafters_error(proposal, fault):
    with pytest.raises(DrafterError, match=fault):
        check_proposal(proposal, 2, VOCAB)


def test_a_good_proposal_passes():
    check_proposal(rows_of((1, 2)), 2, VOCAB)
    check_proposal(Proposal((0, VOCAB - 1)), 8, VOCAB)
    check_proposal(Proposal((), "rows"), 0, VOCAB)


def test_rows_and_proposals_must_match():
    with pytest.raises(ValueError, match="3 rows of logits for 3 proposals"):
        judged(logits(3), Proposal((1, 2, 3)), "coupled")


class Banned:
    """Forbids what the history says; remembers what it was asked."""

    is_pure = True

    def __init__(self) -> None:
        self.histories: list[tuple[int, ...]] = []

    def __call__(self, history, logits_V):
        self.histories.append(tuple(history))
        logits_V[history[-1]] = -math.inf
        return logits_V


class Counting(Banned):
    is_pure = False


class Silent:
    def __call__(self, history, logits_V):
        return logits_V


@pytest.mark.parametrize("rule", RULES)
def test_a_pure_processor_sees_the_history_of_every_row(rule):
    banned = Banned()
    sampler = Sampler(SamplingParams(seed=1, penalty_context=2), [5, 6, 7, 8], [banned])
    assert (sampler.max_proposals > 100, sampler.refusal) == (True, "")
    verify(logits(3), Proposal((1, 2)), sampler, rule, HostSync())
    assert banned.histories == [(5, 6, 7, 8), (5, 6, 7, 8, 1), (5, 6, 7, 8, 1, 2)]
    sampler.observe(9)
    sampler.sample(logits(1)[0])
    assert banned.histories[-1] == (5, 6, 7, 8, 9)


def test_a_pure_processor_changes_what_a_block_says():
    same = mx.zeros((3, VOCAB))
    same[:, 4] = 50.0
    assert judged(same, Proposal((4, 4)), "coupled").tokens == (4, 4, 4)
    verdict = judged(same, Proposal((4, 4)), "coupled", processors=[Banned()])
    assert verdict.accepted == 1
    assert verdict.tokens[1] != 4


@pytest.mark.parametrize("processor", [Counting(), Silent()], ids=["impure", "says nothing"])
def test_a_processor_that_cannot_look_ahead_forbids_proposals_with_a_reason(processor):
    sampler = Sampler(SEEDED, [1, 2], [Banned(), processor])
    assert sampler.max_proposals == 0
    assert type(processor).__name__ in sampler.refusal
    with pytest.raises(ValueError, match=type(processor).__name__):
        verify(logits(2), Proposal((1,)), sampler, "coupled", HostSync())
    plain = verify(logits(1), Proposal(()), sampler, "sampled", HostSync())
    assert plain.tokens == (int(Sampler(SEEDED, [1, 2], [Banned(), processor]).sample(logits(1)[0])),)
