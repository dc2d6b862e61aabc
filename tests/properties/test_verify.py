"""Blocks of any logits, parameters, histories and proposals choose what one token at a time would choose."""

import math
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.api import Proposal
from mlx_flashnext.engine.sampler import Sampler, SamplingParams, processed
from mlx_flashnext.engine.verify import Rule, Verdict, verify, verify_blocks
from mlx_flashnext.model.host import HostSync

VOCAB = 13
tokens = st.integers(0, VOCAB - 1)
seeds = st.integers(0, 2**64 - 1)
params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 4, VOCAB, 50]),
    top_p=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    seed=seeds,
    logit_bias=st.sampled_from([{}, {3: 2.5, 11: -math.inf}]),
    penalty_context=st.sampled_from([1, 3, 20]),
)
drawn_params = params_of.filter(lambda params: not params.is_greedy)


@st.composite
def rows_of_logits(draw, rows: int, *, broken: bool = False) -> mx.array:
    """Draw logits [rows, V]: smooth, with ties or forbidden tokens; `broken`: perhaps a row without a law."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = draw(st.sampled_from([0.0, 0.5, 3.0, 30.0])) * rng.standard_normal((rows, VOCAB))
    if draw(st.booleans()):
        values = np.round(values)
    if draw(st.booleans()):
        values[:, rng.integers(0, VOCAB, 6)] = -np.inf
    if broken:
        row = values[draw(st.integers(0, rows - 1))]
        row[:] = draw(st.sampled_from([np.nan, -np.inf, np.inf])) if draw(st.booleans()) else row
        row[int(rng.integers(VOCAB))] = np.nan
    return mx.array(values, draw(st.sampled_from([mx.float32, mx.bfloat16])))


@st.composite
def proposals(draw, said: tuple[int, ...], rule: Rule) -> Proposal:
    """Draw a proposal that is partly what the target says; for `sampled` perhaps with rows."""
    k = len(said)
    drafted = tuple(draw(st.one_of(st.just(token), tokens)) for token in said)
    if rule != "sampled" or draw(st.booleans()) or not k:
        return Proposal(drafted)
    width = draw(st.integers(1, VOCAB))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = np.stack([rng.permutation(VOCAB)[:width] for _ in range(k)])
    for row, token in zip(ids, drafted, strict=True):
        if token not in row:
            row[0] = token
    return Proposal(drafted, "rows", mx.array(ids), mx.array(rng.dirichlet(np.ones(width), k), mx.float32))


def one_at_a_time(
    logits_TV: mx.array, params: SamplingParams, history: list[int], told: tuple[int, ...]
) -> list:
    """Return what plain decoding would choose after the history and every prefix of `told`."""
    sampler, chosen = Sampler(params, history), []
    for row in range(logits_TV.shape[0]):
        chosen.append(int(sampler.sample(logits_TV[row])))
        if row < len(told):
            sampler.observe(told[row])
    return chosen


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 6), params_of, st.lists(tokens, max_size=30), st.booleans())
def test_a_coupled_block_is_plain_decoding(data, k, params, history, broken):
    """Bitwise, rows without a law included: the same token in every row, so the same text for any drafter."""
    block = data.draw(rows_of_logits(k + 1, broken=broken))
    # What plain decoding says of its own: proposals agree with it for a while.
    sampler, said = Sampler(params, history), []
    for row in range(k):
        said.append(int(sampler.sample(block[row])))
        sampler.observe(said[-1])
    proposal = data.draw(proposals(tuple(said), "coupled"))
    verdict = verify(block, proposal, Sampler(params, history), "coupled", HostSync())
    plain = one_at_a_time(block, params, history, proposal.tokens)
    agreeing = [y == d for y, d in zip(plain, proposal.tokens, strict=False)]
    accepted = agreeing.index(False) if False in agreeing else k
    assert verdict == Verdict(accepted, tuple(plain[: accepted + 1]))
    if accepted == k:
        assert list(verdict.tokens[:k]) == said


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["delta", "sampled"]), st.integers(0, 5), drawn_params, st.lists(tokens))
def test_a_block_says_only_what_the_target_may_say(data, rule, k, params, history):
    block = data.draw(rows_of_logits(k + 1))
    # Likely tokens among them: those are rejected now and then, and must not be drawn again.
    proposal = data.draw(proposals(tuple(mx.argmax(block, axis=-1).tolist()[:k]), rule))
    verdict = verify(block, proposal, Sampler(params, history), rule, HostSync())
    assert len(verdict.tokens) == verdict.accepted + 1 <= k + 1
    assert verdict.tokens[:-1] == proposal.tokens[: verdict.accepted]
    scores = processed(block[None], [Sampler(params, history)], [proposal.tokens])
    chances = np.array(mx.softmax(scores, axis=-1))
    assert all(chances[row, token] > 0 for row, token in enumerate(verdict.tokens))
    if verdict.accepted == k:
        assert verdict.tokens[-1] == one_at_a_time(block, params, history, proposal.tokens)[-1]
    elif proposal.law == "point" and np.count_nonzero(chances[verdict.accepted]) > 1:
        assert verdict.tokens[-1] != proposal.tokens[verdict.accepted]


@settings(max_examples=60, deadline=None)
@given(
    st.data(), st.sampled_from(["coupled", "delta", "sampled"]), params_of, st.lists(tokens), st.booleans()
)
def test_no_proposals_is_the_plain_step(data, rule, params, history, broken):
    row = data.draw(rows_of_logits(1, broken=broken))
    verdict = verify(row, Proposal(()), Sampler(params, history), rule, HostSync())
    assert verdict == Verdict(0, (int(Sampler(params, history).sample(row[0])),))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["delta", "sampled"]), drawn_params, st.lists(tokens))
def test_a_row_without_a_law_ends_the_block_in_an_id(data, rule, params, history):
    """As in plain decoding such a row yields some id; what its proposal was does not matter."""
    block = data.draw(rows_of_logits(4, broken=True))
    proposal = data.draw(proposals((1, 2, 3), rule))
    verdict = verify(block, proposal, Sampler(params, history), rule, HostSync())
    scores = np.array(processed(block[None], [Sampler(params, history)], [proposal.tokens]))
    lawless = [row for row in range(4) if np.isnan(scores[row]).any()]
    assert lawless
    assert verdict.accepted <= lawless[0]
    assert 0 <= verdict.tokens[-1] < VOCAB


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["coupled", "delta", "sampled"]), st.integers(1, 4), params_of)
def test_several_sequences_at_once_are_judged_as_each_alone(data, rule, k, params):
    """What statistics of many sequences say holds for one."""
    histories = data.draw(st.lists(st.lists(tokens, max_size=25), min_size=1, max_size=4))
    blocks = [data.draw(rows_of_logits(k + 1)).astype(mx.float32) for _ in histories]
    drafts = [Proposal(tuple(data.draw(st.lists(tokens, min_size=k, max_size=k)))) for _ in histories]
    together = verify_blocks(
        mx.stack(blocks), drafts, [Sampler(params, history) for history in histories], rule, HostSync()
    )
    for block, draft, history, verdict in zip(blocks, drafts, histories, together, strict=True):
        assert verify(block, draft, Sampler(params, history), rule, HostSync()) == verdict


@settings(max_examples=60, deadline=None)
@given(st.lists(tokens, max_size=30), st.lists(tokens, max_size=8), st.integers(1, 6))
def test_counts_of_every_row_are_those_of_its_own_history(history, drafted, context):
    params = SamplingParams(presence_penalty=1.0, penalty_context=context, seed=1)
    rows = list(Sampler(params, history).recent_counts(drafted))
    for row, counts in enumerate(rows):
        recent = [*history, *drafted[:row]][-context:]
        assert counts == {token: recent.count(token) for token in set(recent)}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda self, drafted: [next(real_counts(self, ()))] * (len(drafted) + 1),
        lambda self, drafted: [{}, *list(real_counts(self, drafted))[:-1]],
    ],
    ids=["committed tokens only", "one row late"],
)
def test_wrong_histories_are_seen(wrong):
    params = SamplingParams(temperature=0.0, presence_penalty=50.0)
    block = mx.broadcast_to(mx.arange(VOCAB, dtype=mx.float32), (4, VOCAB))
    drafted = (12, 11, 10)
    assert one_at_a_time(block, params, [0], drafted) == [12, 11, 10, 9]
    assert verify(block, Proposal(drafted), Sampler(params, [0]), "coupled", HostSync()).accepted == 3
    with mock.patch.object(Sampler, "recent_counts", wrong):
        assert verify(block, Proposal(drafted), Sampler(params, [0]), "coupled", HostSync()).accepted < 3


real_counts = Sampler.recent_counts
