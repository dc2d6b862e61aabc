"""From logits to a token: penalties, filters, temperature, one seeded draw.

Entry points: `SamplingParams` (what was asked, validated) and `Sampler` (one answer's chooser).

Invariants:
1. The draw at a position depends on seed, position, logits and history alone: not on chunking, blocks or
   other draws.
2. Nothing here waits for the device; the returned token is a lazy scalar.
3. Temperature 0 is greedy: the largest logit, the lowest id among equals.

Source: order and semantics of mlx-lm 0.32 `sample_utils` (bias, repetition, presence, frequency, then
top-p, min-p, top-k on the temperature-1 distribution, then temperature), compared with it in the tests.
Equal logits at the edge of top-k are the one difference: all of them stay.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_flashnext.engine.errors import InvalidRequest

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


class Sampler:
    """Chooses the tokens of one answer.

    Not thread-safe; every call on the inference thread.
    """

    def __init__(self, params: SamplingParams, history: Sequence[int] = ()) -> None:
        """Start an answer.

        Args:
            params: how to choose.
            history: every token before the answer, oldest first.
        """
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self._recent = list(history[-params.penalty_context :])
        self._position = len(history)

    def observe(self, token: int) -> None:
        """Record a committed token: it is history for the next draw."""
        self._position += 1
        self._recent.append(token)
        if len(self._recent) > self.params.penalty_context:
            del self._recent[0]

    def sample(self, logits_V: mx.array, history: Sequence[int] | None = None) -> mx.array:
        """Choose the token that follows the history.

        Args:
            logits_V: of one position.
            history: every token before it; None means the tokens observed so far.

        Returns:
            A lazy int32 or uint32 scalar.
        """
        recent = self._recent if history is None else history[-self.params.penalty_context :]
        position = self._position if history is None else len(history)
        logits_V = penalised(logits_V.astype(mx.float32), recent, self.params)
        if self.params.is_greedy:
            return mx.argmax(logits_V)
        logprobs_V = filtered(logits_V - mx.logsumexp(logits_V), self.params)
        key = mx.random.key(draw_seed(self.seed, position))
        return mx.random.categorical(logprobs_V * (1.0 / self.params.temperature), key=key)


def penalised(logits_V: mx.array, recent: Sequence[int], params: SamplingParams) -> mx.array:
    """Return logits with bias and penalties applied.

    Args:
        logits_V: float32.
        recent: the tokens the penalties look at.
        params: their strengths.
    """
    if params.logit_bias:
        ids, values = mx.array(list(params.logit_bias)), mx.array(list(params.logit_bias.values()))
        logits_V = mx.put_along_axis(logits_V, ids, logits_V[ids] + values, axis=-1)
    if not recent or not params.has_penalties:
        return logits_V
    counts: dict[int, int] = {}
    for token in recent:
        counts[token] = counts.get(token, 0) + 1
    ids = mx.array(list(counts))
    picked = logits_V[ids]
    if params.repetition_penalty != 1:
        scaled = mx.where(picked < 0, picked * params.repetition_penalty, picked / params.repetition_penalty)
        picked = scaled
    if params.presence_penalty:
        picked = picked - params.presence_penalty
    if params.frequency_penalty:
        picked = picked - params.frequency_penalty * mx.array(list(counts.values()), dtype=mx.float32)
    return mx.put_along_axis(logits_V, ids, picked, axis=-1)


def filtered(logprobs_V: mx.array, params: SamplingParams) -> mx.array:
    """Return log-probabilities with what top-p, min-p and top-k drop set to minus infinity.

    Args:
        logprobs_V: float32, normalised.
        params: the filters.
    """
    if 0 < params.top_p < 1:
        logprobs_V = _top_p(logprobs_V, params.top_p)
    if params.min_p > 0:
        floor = mx.max(logprobs_V) + math.log(params.min_p)
        logprobs_V = mx.where(logprobs_V < floor, -mx.inf, logprobs_V)
    if 0 < params.top_k < logprobs_V.shape[-1]:
        kth = mx.min(mx.topk(logprobs_V, params.top_k))
        logprobs_V = mx.where(logprobs_V < kth, -mx.inf, logprobs_V)
    return logprobs_V


def draw_seed(seed: int, position: int) -> int:
    """Return the 64-bit seed of one draw: splitmix64 of seed and position.

    Neighbouring seeds and positions give unrelated draws, and no draw depends on how many came before it.
    """
    value = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _top_p(logprobs_V: mx.array, top_p: float) -> mx.array:
    ascending_V = mx.sort(logprobs_V)
    probs_V = mx.exp(ascending_V)
    mass_above_V = mx.cumsum(probs_V, reverse=True, inclusive=False)
    total = mass_above_V[:1] + probs_V[:1]
    # The likeliest token has no mass above it and stays, even where top_p is nought in float32.
    num_dropped = (mass_above_V[:-1] >= top_p * total).sum(keepdims=True)
    threshold = mx.take_along_axis(ascending_V, num_dropped, axis=-1)
    return mx.where(logprobs_V < threshold, -mx.inf, logprobs_V)


def _require(condition: bool, rule: str, value: object) -> None:
    if not condition:
        raise InvalidRequest(f"{rule}: {value}", hint="leave it out to use the model's own default")
