"""Random numbers that depend on seed, position and purpose alone, and draws with them.

Entry points: `draw_seed` (the law), `stream_keys`, `draw`, `uniform`, and `draw_draft` for drafters.

Invariants:
1. Two numbers of one answer share a key only if they have the same position and the same purpose: what chose
   a proposal never judges it, and what judged it never draws the replacement.
2. A draw does not depend on how many came before it, nor on the rows drawn with it.

Source: dflash2.md 3.4, points 3 and 7.
"""

# Shapes: R rows, V vocabulary or candidates.

from collections.abc import Iterable
from enum import IntEnum

import mlx.core as mx

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a random number decides at its position."""

    DRAW = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def draw_seed(seed: int, position: int, purpose: Purpose = Purpose.DRAW) -> int:
    """Return the 64-bit seed of one draw: splitmix64 of seed and position, and again of the purpose.

    Neighbouring seeds, positions and purposes give unrelated draws.
    """
    value = _mixed(seed + (position + 1) * _GOLDEN)
    return _mixed(value + purpose * _GOLDEN) if purpose else value


def stream_keys(places: Iterable[tuple[int, int, Purpose]]) -> mx.array:
    """Return MLX random keys [R, 2] of (seed, position, purpose)."""
    seeds = [draw_seed(*place) for place in places]
    return mx.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], dtype=mx.uint32)


def draw(scores_RV: mx.array, keys_R2: mx.array) -> mx.array:
    """Draw an id per row, lazy uint32 [R].

    Args:
        scores_RV: log-probabilities up to a constant per row.
        keys_R2: a row is drawn as `mx.random.categorical` draws it alone with its key.
    """
    return mx.vmap(_categorical)(scores_RV, keys_R2)


def uniform(keys_R2: mx.array) -> mx.array:
    """Return a number of [0, 1) per key, lazy float32 [R]."""
    return mx.vmap(_uniform)(keys_R2)


def draw_draft(scores_V: mx.array, seed: int, position: int) -> mx.array:
    """Draw a drafter's proposal for a position, lazy uint32 scalar.

    Verification judges it with numbers of other streams. The proposal's row must hold the softmax of exactly
    these scores.

    Args:
        scores_V: log-probabilities, up to a constant, of the candidates; the result is an index into them.
        seed: of the answer.
        position: of the proposed token.
    """
    return draw(scores_V[None], stream_keys([(seed, position, Purpose.DRAFT)]))[0]


def _categorical(scores_V: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(scores_V, key=key)


def _uniform(key: mx.array) -> mx.array:
    return mx.random.uniform(key=key)


def _mixed(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
