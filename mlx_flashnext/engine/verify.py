"""Which proposals are accepted, and the token after them: exact for any drafter.

Entry points: `resolve_rule` (once a request), `draft_sampling` and `check_proposal` (before a block is run),
`verify` (after it).

Lossless means: the emitted tokens have exactly the distribution of sampling one token at a time.

    coupled   every row draws its own token with the draw that plain decoding would make there; accepted while
              they agree with the proposals. The text is the same with every drafter and with none.
    delta     a proposal is accepted with its probability p(d); else the target draws anew without it.
    sampled   a proposal drawn from a known q is accepted with min(1, p(d) / q(d)); else the target draws from
              max(p - q, 0). Delta is this with a point mass for q.

Invariants:
1. One wait for the device per verification, whatever the rule and the number of proposals: the device decides
   for every row as if it were reached, the host walks the decisions up to the first rejection.
2. p is the distribution after all processing, from one softmax in float32, for acceptance and residual alike.
3. Drawing, accepting and replacing use numbers of separate streams; see `streams.py`.

There is no cut of a block by the probability of a sampled token: it would bias the answer, so nothing here
takes one. A drafter may shorten its proposal by the shape of q or by earlier tokens.

Source: dflash2.md 3.2 to 3.5.
"""

# Shapes: N sequences, k proposals, T = k + 1 rows, V vocabulary, K candidates of a proposal.

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, get_args

import mlx.core as mx

from drafter.api import DraftSampling, Law, Proposal
from drafter.errors import DrafterError
from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.sampler import Sampler, SamplingParams, choose, processed
from mlx_flashnext.engine.streams import Purpose, draw, stream_keys, uniform
from mlx_flashnext.model.host import HostSync, to_host

_MOST_MASS = 1.01
"""A row of probabilities adds up to less, whatever its rounding."""

Rule = Literal["coupled", "delta", "sampled"]
Asked = Literal["auto", "coupled", "delta", "sampled"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a cycle commits.

    Attributes:
        accepted: how many proposals were accepted.
        tokens: these proposals, then one token of the target: the correction of the first proposal that was
            not accepted, or what follows all of them.
        scores: log-probabilities of every row as they were judged, [T, V] on the device; see `processed`.
    """

    accepted: int
    tokens: tuple[int, ...]
    scores: mx.array | None = field(default=None, compare=False, repr=False)


def resolve_rule(asked: Asked, params: SamplingParams, law: Law) -> Rule:
    """Return the rule of a request.

    `auto` keeps a seeded answer the same with every drafter and with none, and else takes what accepts most.
    A greedy target compares with the largest logit, which is `coupled`, whatever was asked.

    Args:
        asked: the wish.
        params: of the request.
        law: of the drafter's proposals.

    Raises:
        InvalidRequest: there is no such rule.
    """
    if asked not in get_args(Asked):
        raise InvalidRequest(
            f"verify.rule must be one of {', '.join(get_args(Asked))}: {asked}", hint="leave it out"
        )
    if params.is_greedy:
        return "coupled"
    if asked == "auto":
        return "sampled" if law == "rows" and params.seed is None else "coupled"
    # A point mass is its own q: the two rules are one there, and this is its name.
    return "delta" if asked == "sampled" and law == "point" else asked


def draft_sampling(sampler: Sampler, rule: Rule) -> DraftSampling:
    """Return how a drafter should choose its next proposal: drawn for `sampled`, its best path otherwise."""
    temperature = sampler.params.temperature if rule == "sampled" else 0.0
    return DraftSampling(temperature, sampler.seed, sampler.position)


def check_proposal(proposal: Proposal, max_proposals: int, vocab_size: int) -> None:
    """Refuse a proposal that neither the target nor verification could use; waits for nothing.

    Args:
        proposal: from a drafter.
        max_proposals: what it was asked for.
        vocab_size: ids are below it.

    Raises:
        DrafterError: says what is wrong; the drafter is faulty.
    """
    k = len(proposal.tokens)
    # Numbers of other kinds would reach the model, and the answer.
    wrong = [token for token in proposal.tokens if type(token) is not int or not 0 <= token < vocab_size]
    if k > max_proposals or wrong:
        fault = f"ids that do not exist: {wrong}" if wrong else f"{k} tokens where {max_proposals} were asked"
        raise DrafterError(f"The drafter proposed {fault}", hint="the answer goes on without it")
    if proposal.law == "point" or not k:
        return
    shapes = [None if rows is None else tuple(rows.shape) for rows in (proposal.row_ids, proposal.row_probs)]
    if (
        shapes[0] != shapes[1]
        or shapes[0] is None
        or len(shapes[0]) != 2
        or shapes[0][0] != k
        or 0 in shapes[0]
    ):
        raise DrafterError(
            f"The drafter gave rows of shapes {shapes[0]} and {shapes[1]} for {k} tokens",
            hint="the answer goes on without it",
        )


def verify(logits_TV: mx.array, proposal: Proposal, sampler: Sampler, rule: Rule, sync: HostSync) -> Verdict:
    """Judge a block; without proposals this is the plain step, and chooses what `Sampler.sample` chooses.

    Args:
        logits_TV: of the anchor and every proposal.
        proposal: T - 1 tokens.
        sampler: has seen every committed token, the anchor included; it learns nothing here.
        rule: from `resolve_rule`. A point-mass proposal under `sampled` is judged as its own q.
        sync: counts the one wait.

    Raises:
        DrafterError: the proposal does not fit; see `check_proposal`.
        ValueError: the number of rows is not that of the proposal, or the sampler takes no proposals.
    """
    return verify_blocks(logits_TV[None], [proposal], [sampler], rule, sync)[0]


def verify_blocks(
    logits_NTV: mx.array,
    proposals: Sequence[Proposal],
    samplers: Sequence[Sampler],
    rule: Rule,
    sync: HostSync,
) -> list[Verdict]:
    """Judge one block of each of several sequences at once; see `verify`.

    Args:
        logits_NTV: of every sequence's anchor and proposals.
        proposals: T - 1 tokens each, of one law.
        samplers: with the same parameters.
        rule: of all.
        sync: counts the one wait.
    """
    num_sequences, num_rows, vocab_size = logits_NTV.shape
    for proposal, sampler in zip(proposals, samplers, strict=True):
        if len(proposal.tokens) != num_rows - 1:
            raise ValueError(f"{num_rows} rows of logits for {len(proposal.tokens)} proposals")
        if len(proposal.tokens) > sampler.max_proposals:
            raise ValueError(sampler.refusal)
        check_proposal(proposal, num_rows - 1, vocab_size)
    tokens = [proposal.tokens for proposal in proposals]
    scores_RV = processed(logits_NTV, samplers, tokens)
    if rule == "coupled" or samplers[0].params.is_greedy or num_rows == 1:
        choices = to_host(sync, mx.unflatten(choose(scores_RV, samplers), 0, (num_sequences, num_rows)))
        walks = [
            ([y == d for y, d in zip(chosen, drafted, strict=False)], chosen)
            for drafted, chosen in zip(tokens, choices, strict=True)
        ]
    else:
        ids_NkK, probs_NkK = _draft_rows(proposals, rule, vocab_size)
        scores_NTV = mx.unflatten(scores_RV, 0, (num_sequences, num_rows))
        walks = to_host(sync, _judge(scores_NTV, mx.array(tokens), ids_NkK, probs_NkK, samplers))
    starts = range(0, num_sequences * num_rows, num_rows)
    return [
        replace(_walk(drafted, accepts, ends), scores=scores_RV[start : start + num_rows])
        for drafted, (accepts, ends), start in zip(tokens, walks, starts, strict=True)
    ]


def _judge(
    scores_NTV: mx.array,
    drafted_Nk: mx.array,
    ids_NkK: mx.array,
    probs_NkK: mx.array,
    samplers: Sequence[Sampler],
) -> mx.array:
    """Return, [N, 2, T], whether each proposal is accepted, and the token emitted if the walk ends there."""
    N, T, _ = scores_NTV.shape
    k = T - 1
    keys = stream_keys((s.seed, s.position + row, Purpose.ACCEPT) for s in samplers for row in range(k))
    u_Nk = mx.unflatten(uniform(keys), 0, (N, k))
    p_NkV = mx.softmax(scores_NTV[:, :k], axis=-1)
    p_of_Nk = mx.take_along_axis(p_NkV, drafted_Nk[..., None], axis=-1).squeeze(-1)
    ids_NkK, probs_NkK = _possible(ids_NkK, probs_NkK, drafted_Nk)
    q_of_Nk = mx.where(ids_NkK == drafted_Nk[..., None], probs_NkK, 0.0).sum(axis=-1)
    accept_Nk = _accepts(u_Nk, p_of_Nk, q_of_Nk)
    rest_NkV = _residual(p_NkV, ids_NkK, probs_NkK)
    # Where rounding leaves nothing over, p and q are the same.
    is_left = mx.any(rest_NkV > 0, axis=-1, keepdims=True)
    rest_NkV = mx.where(is_left, mx.log(rest_NkV), scores_NTV[:, :k])
    ends_NTV = mx.concatenate([rest_NkV, scores_NTV[:, k:]], axis=1)
    keys = stream_keys(
        (s.seed, s.position + row, Purpose.RESIDUAL if row < k else Purpose.DRAW)
        for s in samplers
        for row in range(T)
    )
    ends_NT = mx.unflatten(draw(mx.flatten(ends_NTV, 0, 1), keys), 0, (N, T))
    bits_NT = mx.concatenate([accept_Nk, mx.zeros((N, 1), mx.bool_)], axis=1)
    return mx.stack([bits_NT.astype(mx.uint32), ends_NT], axis=1)


def _possible(ids_NkK: mx.array, probs_NkK: mx.array, drafted_Nk: mx.array) -> tuple[mx.array, mx.array]:
    """Return the rows, but a point mass for a token that cannot have been drawn from its row.

    A faulty drafter may claim anything. A token of no probability would always be accepted; a point mass is
    exact for any token, however it came about.
    """
    drafted_Nk1 = drafted_Nk[..., None].astype(ids_NkK.dtype)
    q_Nk1 = mx.where(ids_NkK == drafted_Nk1, probs_NkK, 0.0).sum(axis=-1, keepdims=True)
    # Not a number compares false.
    is_law_Nk1 = mx.all(probs_NkK >= 0, axis=-1, keepdims=True) & (q_Nk1 > 0)
    is_law_Nk1 = is_law_Nk1 & (probs_NkK.sum(axis=-1, keepdims=True) < _MOST_MASS)
    point_K = (mx.arange(ids_NkK.shape[-1]) == 0).astype(mx.float32)
    return mx.where(is_law_Nk1, ids_NkK, drafted_Nk1), mx.where(is_law_Nk1, probs_NkK, point_K)


def _accepts(u: mx.array, p: mx.array, q: mx.array) -> mx.array:
    """Return whether a proposal of probability p is accepted that was drawn with probability q."""
    # Strictly: u may be 0, and what the target never says is never accepted.
    return u * q < p


def _residual(p_NkV: mx.array, ids_NkK: mx.array, probs_NkK: mx.array) -> mx.array:
    """Return max(p - q, 0), the weights of the token that replaces a rejected one."""
    N, k, V = p_NkV.shape
    first_Nk1 = mx.unflatten(mx.arange(0, N * k * V, V, dtype=mx.int32), 0, (N, k, 1))
    left = mx.flatten(p_NkV).at[first_Nk1 + ids_NkK]
    rest: mx.array = left.add(-probs_NkK)  # pyright: ignore[reportUnknownMemberType]  (half typed stubs)
    return mx.unflatten(mx.maximum(rest, 0.0), 0, (N, k, V))


def _draft_rows(proposals: Sequence[Proposal], rule: Rule, vocab_size: int) -> tuple[mx.array, mx.array]:
    """Return candidate ids [N, k, K], int32, and the probability with which each was proposed."""
    if rule == "sampled" and proposals[0].law == "rows":
        ids, probs = ([getattr(p, name) for p in proposals] for name in ("row_ids", "row_probs"))
        ids_NkK, probs_NkK = mx.stack(ids).astype(mx.int32), mx.stack(probs).astype(mx.float32)
        # MLX would write beyond the probabilities for an id that the target does not have.
        is_id = (ids_NkK >= 0) & (ids_NkK < vocab_size)
        return mx.where(is_id, ids_NkK, 0), mx.where(is_id, probs_NkK, 0.0)
    ids_Nk1 = mx.array([proposal.tokens for proposal in proposals], dtype=mx.int32)[..., None]
    return ids_Nk1, mx.ones(ids_Nk1.shape)


def _walk(drafted: Sequence[int], accepts: Sequence[Any], ends: Sequence[int]) -> Verdict:
    """Return the verdict of one block: what comes after the first rejection was never there."""
    accepted = sum(1 for _ in takewhile(bool, accepts[: len(drafted)]))
    return Verdict(accepted, (*drafted[:accepted], ends[accepted]))
