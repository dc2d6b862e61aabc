"""Integer constants of the n-gram hash, computed from the config.

Entry point: `ngram_constants`. The checkpoint stores the same numbers; its reader compares them.

Source: qwen4exp.md 2.3.1, recomputed there against the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class NgramConstants:
    """Integers of the n-gram hash: one multiplier per context position; one size and offset per head.

    `num_rows` is the padded number of table rows, `width` the values per row.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int
    width: int

    @property
    def num_heads(self) -> int:
        """Return the number of table rows read per token."""
        return len(self.sizes)


def ngram_constants(
    *,
    vocab_size: int,
    ngram_size: int,
    heads_per_ngram: int,
    vocab_size_base: int,
    divisor: int,
    embed_dim: int,
    seed: int,
    ple_index: int = 0,
) -> NgramConstants:
    """Compute the integer constants of one n-gram table.

    Args:
        vocab_size: Token ids are below this.
        ngram_size: Longest context in tokens; heads exist for orders 2 to this.
        heads_per_ngram: Hash heads per order.
        vocab_size_base: Head sizes are the successive primes from here.
        divisor: The table's row count is padded to a multiple of this.
        embed_dim: Values of all heads together.
        seed: Hash seed of the config (1234 where the file is silent; a runtime that used 0 read other rows).
        ple_index: Place of the layer among the PLE layers.
    """
    num_heads = (ngram_size - 1) * heads_per_ngram
    sizes = _primes_from(vocab_size_base, num_heads * (ple_index + 1))[num_heads * ple_index :]
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    multipliers = tuple(
        2 * (_splitmix((seed + 10007 * ple_index + 0x9E3779B97F4A7C15 * (i + 1)) & _MASK64) % half) + 1
        for i in range(ngram_size)
    )
    return NgramConstants(
        multipliers=multipliers,
        sizes=tuple(sizes),
        offsets=tuple(sum(sizes[:h]) for h in range(num_heads)),
        num_rows=-(-sum(sizes) // divisor) * divisor,
        width=embed_dim // num_heads,
    )


def _splitmix(v: int) -> int:
    v = (v + 0x9E3779B97F4A7C15) & _MASK64
    v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & _MASK64
    return v ^ (v >> 31)


def _primes_from(start: int, count: int) -> list[int]:
    primes: list[int] = []
    n = start
    while len(primes) < count:
        if n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1)):
            primes.append(n)
        n += 1
    return primes
