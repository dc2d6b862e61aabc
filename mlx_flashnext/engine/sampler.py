"""From logits to a token: penalties, filters, temperature, one seeded draw; for one row or a block of rows.

Entry points: `SamplingParams` (what was asked, validated), `Sampler` (one answer's chooser), and what
verification shares with it: `processed` (a block's distributions) and `choose` (a draw from each).

Invariants:
1. The draw at a position depends on seed, position, logits and history alone: not on chunking, blocks or
   other draws. A row of a block is processed and drawn exactly as if it came alone.
2. Nothing here waits for the device; the returned tokens are lazy.
3. Temperature 0 is greedy: the largest logit, the lowest id among equals.

Source: order and semantics of mlx-lm 0.32 `sample_utils` (bias, repetition, presence, frequency, further
processors, then top-p, min-p, top-k on the temperature-1 distribution, then temperature), compared with it in
the tests. Equal logits at the edge of top-k are the one difference: all of them stay.
"""

# Shapes: N sequences, T rows of a block, R = N * T, V vocabulary. Row 0 of a block follows the committed
# tokens, every other row one proposal more.

import math
import secrets
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.streams import Purpose, draw, stream_keys

PENALTY_CONTEXT = 20
# Logits are float32: what is finer than this, or stronger than that, leaves their range.
GREEDY_BELOW = 1e-6
STRONGEST = 1e6
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an answer's tokens are chosen. The values given here change nothing.

    Attributes:
        temperature: 0 is greedy, and so is what differs from it by less than the logits are exact.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens whose mass reaches p; 1 (or 0, as in mlx-lm) keeps all.
        min_p: drop tokens less likely than this share of the most likely one; 0 keeps all.
        repetition_penalty: divide positive and multiply negative logits of recent tokens; 1 keeps them.
        presence_penalty: subtract from the logits of recent tokens.
        frequency_penalty: subtract for every time a recent token occurred.
        seed: of the draws; None draws one.
        logit_bias: added to the logits of these ids.
        penalty_context: how many recent tokens the penalties look at.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    penalty_context: int = PENALTY_CONTEXT

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "temperature must be 0 or more", self.temperature)
        _require(self.top_k >= 0, "top_k must be 0 or more", self.top_k)
        _require(0 <= self.top_p <= 1, "top_p must be from 0 to 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p must be from 0 to 1", self.min_p)
        _require(
            1 / STRONGEST <= self.repetition_penalty <= STRONGEST,
            f"repetition_penalty must be positive, from {1 / STRONGEST:g} to {STRONGEST:g}",
            self.repetition_penalty,
        )
        _require(
            abs(self.presence_penalty) <= STRONGEST,
            f"presence_penalty must be from -{STRONGEST:g} to {STRONGEST:g}",
            self.presence_penalty,
        )
        _require(
            abs(self.frequency_penalty) <= STRONGEST,
            f"frequency_penalty must be from -{STRONGEST:g} to {STRONGEST:g}",
            self.frequency_penalty,
        )
        _require(self.seed is None or 0 <= self.seed <= _MASK64, "seed must be from 0 to 2^64 - 1", self.seed)
        _require(self.penalty_context >= 1, "penalty_context must be 1 or more", self.penalty_context)
        for token, bias in self.logit_bias.items():
            rule = f"logit_bias must map ids to numbers of at most {STRONGEST:g}"
            _require(token >= 0 and bias <= STRONGEST, rule, {token: bias})

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a bias of a token that the model does not have: MLX would write beyond the logits.

        Raises:
            InvalidRequest: names the token.
        """
        largest = max(self.logit_bias, default=-1)
        _require(largest < vocab_size, f"logit_bias must name ids below {vocab_size}", largest)

    @property
    def has_penalties(self) -> bool:
        """Return whether recent tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class LogitsProcessor(Protocol):
    """Changes the logits of one position, after bias and penalties and before the filters.

    Attributes:
        is_pure: whether the result depends on the arguments alone. Verification asks for rows of tokens that
            may never be committed; a processor that keeps count of its calls must say False, and then nothing
            is proposed.
    """

    is_pure: bool

    def __call__(self, history: Sequence[int], logits_V: mx.array) -> mx.array:
        """Return the new logits [V].

        Args:
            history: every token before the position.
            logits_V: float32.
        """
        ...


class Sampler:
    """Chooses the tokens of one answer.

    Not thread-safe; every call on the inference thread.

    Attributes:
        params: how to choose.
        seed: of the draws.
        processors: further changes of the logits.
        max_proposals: most proposals that a block may hold; 0 if a processor cannot honour any.
        refusal: why it is 0, one line for the user; empty if it is not.
    """

    def __init__(
        self,
        params: SamplingParams,
        history: Sequence[int] = (),
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """Start an answer.

        Args:
            params: how to choose.
            history: every token before the answer, oldest first.
            processors: applied in this order.
        """
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.processors = tuple(processors)
        # One that does not say is none of ours: it may keep a state of its own.
        impure = [type(each).__name__ for each in processors if not getattr(each, "is_pure", False)]
        self.max_proposals = 0 if impure else sys.maxsize
        self.refusal = f"nothing is proposed: {impure[0]} cannot look ahead" if impure else ""
        self._history = deque(history, None if processors else params.penalty_context)
        self._position = len(history)

    @property
    def position(self) -> int:
        """Return the position of the next token, counted from the start of the sequence."""
        return self._position

    def observe(self, token: int) -> None:
        """Record a committed token: it is history for the next draw."""
        self._position += 1
        self._history.append(token)

    def sample(self, logits_V: mx.array) -> mx.array:
        """Choose the token that follows the tokens observed so far.

        Args:
            logits_V: of one position.

        Returns:
            A lazy uint32 scalar.
        """
        return choose(processed(logits_V[None, None], [self], [()]), [self])[0]

    def histories(self, proposals: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the whole history of every row of a block; only if there are processors."""
        history = list(self._history)
        yield tuple(history)
        for token in proposals:
            history.append(token)
            yield tuple(history)

    def recent_counts(self, proposals: Sequence[int]) -> Iterator[dict[int, int]]:
        """Yield how often each recent token occurs before every row of a block: one more, one less a row."""
        context = self.params.penalty_context
        window = deque(self._history, context)
        counts: dict[int, int] = {}
        for token in window:
            counts[token] = counts.get(token, 0) + 1
        yield dict(counts)
        for token in proposals:
            if len(window) == context:
                counts[window[0]] -= 1
                if not counts[window[0]]:
                    del counts[window[0]]
            window.append(token)
            counts[token] = counts.get(token, 0) + 1
            yield dict(counts)


def processed(
    logits_NTV: mx.array, samplers: Sequence[Sampler], proposals: Sequence[Sequence[int]]
) -> mx.array:
    """Return the distribution that every row of some blocks is drawn from, after everything that was asked.

    Args:
        logits_NTV: of every row.
        samplers: of every sequence, with the same parameters; they have seen every committed token.
        proposals: of every sequence, T - 1 each: row j follows the first j of them.

    Returns:
        Log-probabilities [N * T, V], float32, up to a constant per row; minus infinity is never drawn. If the
        parameters are greedy: penalised logits, of which the largest is taken.
    """
    params = samplers[0].params
    scores_RV = mx.flatten(logits_NTV, 0, 1).astype(mx.float32)
    blocks = tuple(zip(samplers, proposals, strict=True))
    counts = (
        [row for sampler, tokens in blocks for row in sampler.recent_counts(tokens)]
        if params.has_penalties
        else ()
    )
    scores_RV = penalised(scores_RV, counts, params)
    if any(sampler.processors for sampler in samplers):
        rows = [(sampler, history) for sampler, tokens in blocks for history in sampler.histories(tokens)]
        scores_RV = mx.stack(
            [
                _through(sampler.processors, history, scores_RV[row])
                for row, (sampler, history) in enumerate(rows)
            ]
        )
    if params.is_greedy:
        return scores_RV
    logprobs_RV = scores_RV - mx.logsumexp(scores_RV, axis=-1, keepdims=True)
    return filtered(logprobs_RV, params) * (1.0 / params.temperature)


def choose(scores_RV: mx.array, samplers: Sequence[Sampler]) -> mx.array:
    """Return the token that every row's own draw chooses, lazy uint32 [R].

    Args:
        scores_RV: from `processed`, of as many rows for every sampler.
        samplers: of every sequence.
    """
    if samplers[0].params.is_greedy:
        return mx.argmax(scores_RV, axis=-1)
    rows = range(scores_RV.shape[0] // len(samplers))
    return draw(
        scores_RV, stream_keys((s.seed, s.position + row, Purpose.DRAW) for s in samplers for row in rows)
    )


def penalised(logits_RV: mx.array, counts: Sequence[Mapping[int, int]], params: SamplingParams) -> mx.array:
    """Return logits with bias and penalties applied.

    Args:
        logits_RV: float32.
        counts: for every row how often each token occurs that the penalties look at; none without penalties.
        params: their strengths.
    """
    if params.logit_bias:
        ids, values = mx.array(list(params.logit_bias)), mx.array(list(params.logit_bias.values()))
        biased = logits_RV[:, ids] + values
        logits_RV = mx.put_along_axis(logits_RV, mx.broadcast_to(ids, biased.shape), biased, axis=-1)
    vocab_size = logits_RV.shape[-1]
    places = [row * vocab_size + token for row, tokens in enumerate(counts) for token in tokens]
    if not places:
        return logits_RV
    flat, at = mx.flatten(logits_RV), mx.array(places)
    picked = flat[at]
    if params.repetition_penalty != 1:
        scaled = mx.where(picked < 0, picked * params.repetition_penalty, picked / params.repetition_penalty)
        picked = scaled
    if params.presence_penalty:
        picked = picked - params.presence_penalty
    if params.frequency_penalty:
        times = mx.array([times for tokens in counts for times in tokens.values()], dtype=mx.float32)
        picked = picked - params.frequency_penalty * times
    return mx.unflatten(mx.put_along_axis(flat, at, picked, axis=-1), 0, logits_RV.shape)


def filtered(logprobs_RV: mx.array, params: SamplingParams) -> mx.array:
    """Return log-probabilities with what top-p, min-p and top-k drop set to minus infinity.

    Args:
        logprobs_RV: float32, every row normalised.
        params: the filters.
    """
    is_cut = 0 < params.top_k < logprobs_RV.shape[-1]
    # What top-k leaves decides alone where top-p ends: all of the vocabulary is sorted only without top-k.
    best_RK = mx.topk(logprobs_RV, params.top_k, axis=-1) if is_cut else logprobs_RV
    floors: list[mx.array] = []
    if is_cut:
        floors.append(mx.min(best_RK, axis=-1, keepdims=True))
    if 0 < params.top_p < 1 and best_RK.shape[-1] > 1:
        floors.append(_top_p_floor(best_RK, params.top_p))
    if params.min_p > 0:
        floors.append(mx.max(best_RK, axis=-1, keepdims=True) + math.log(params.min_p))
    for floor_R1 in floors[1:]:
        floors[0] = mx.maximum(floors[0], floor_R1)
    return mx.where(logprobs_RV < floors[0], -mx.inf, logprobs_RV) if floors else logprobs_RV


def _through(processors: Sequence[LogitsProcessor], history: Sequence[int], logits_V: mx.array) -> mx.array:
    for process in processors:
        logits_V = process(history, logits_V)
    return logits_V.astype(mx.float32)


def _top_p_floor(best_RK: mx.array, top_p: float) -> mx.array:
    """Return the least log-probability [R, 1] that top-p keeps, of the K best."""
    ascending_RK = mx.sort(best_RK, axis=-1)
    mass_above_RK = mx.cumsum(mx.exp(ascending_RK), axis=-1, reverse=True, inclusive=False)
    # The likeliest token has no mass above it and stays, even where top_p is nought in float32.
    num_dropped_R1 = (mass_above_RK[:, :-1] >= top_p).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(ascending_RK, num_dropped_R1, axis=-1)


def _require(condition: bool, rule: str, value: object) -> None:
    if not condition:
        raise InvalidRequest(f"{rule}: {value}", hint="leave it out to use the model's own default")
