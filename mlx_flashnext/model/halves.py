"""Large products in two halves, computed side by side where the backend computes a stream on one core.

MLX's CPU backend computes a stream on one core, whatever the machine has, and products are nearly all of a
token of a wide model there. Neither the pairs of experts' products nor the columns of a matrix depend on each
other: with half of them on a second stream a token takes 0.76 to 0.83 of its time, a prompt 0.70
(`bench.studies.halves_gain`). A GPU computes a product with all it has: there nothing is halved. Entry
points: `compute_in_halves`, `second_stream`.

Invariant: where a part is computed is never seen in what comes out (tests/parity/test_halves.py).
"""

from __future__ import annotations

import mlx.core as mx

LEAST_WORK = 8 << 20
"""Multiply-adds below which a second stream costs more than it takes over: by one row, 512 wide experts broke
even at 2 to 4 million, 1,024 wide ones took 0.61 of their time at 18."""

_second: mx.ThreadLocalStream | None = None


def compute_in_halves(is_on: bool) -> None:
    """Let large products in this process use a second stream, or none."""
    global _second
    if not is_on:
        _second = None
    elif _second is None:
        _second = mx.new_thread_local_stream(mx.cpu)


def second_stream(work: int) -> mx.ThreadLocalStream | None:
    """Return where half of a product of so many multiply-adds is to be computed; None for no other place."""
    return _second if work >= LEAST_WORK else None
