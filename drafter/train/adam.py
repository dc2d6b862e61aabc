"""The optimiser: AdamW without weight decay, on clipped gradients.

Entry points: `AdamState`, `adam_step`. Plain functions of dictionaries by parameter name, so that what a
checkpoint holds is what a step reads.

Source: dflash2.md 5.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

from drafter.train.schedule import BETAS, EPSILON


class AdamState(NamedTuple):
    """First and second moments by parameter name."""

    first: dict[str, mx.array]
    second: dict[str, mx.array]


def fresh_state(params: Mapping[str, mx.array]) -> AdamState:
    """Return moments of zero."""
    return AdamState(
        {name: mx.zeros_like(value) for name, value in params.items()},
        {name: mx.zeros_like(value) for name, value in params.items()},
    )


def clipped(gradients: Mapping[str, mx.array], most: float) -> tuple[dict[str, mx.array], mx.array]:
    """Return gradients whose common norm is at most `most`, and the norm that it was."""
    norm = mx.sqrt(sum((mx.square(value).sum() for value in gradients.values()), mx.array(0.0)))
    factor = mx.minimum(1.0, most / (norm + 1e-6))
    return {name: factor * value for name, value in gradients.items()}, norm


def adam_step(
    params: Mapping[str, mx.array],
    gradients: Mapping[str, mx.array],
    state: AdamState,
    *,
    step: int,
    rate: float,
) -> tuple[dict[str, mx.array], AdamState]:
    """Return parameters and moments after a step, counted from 0; lazy."""
    (beta1, beta2), count = BETAS, step + 1
    first = {name: beta1 * state.first[name] + (1 - beta1) * value for name, value in gradients.items()}
    second = {
        name: beta2 * state.second[name] + (1 - beta2) * mx.square(value) for name, value in gradients.items()
    }
    size = rate / (1 - beta1**count)
    moved = {
        name: value - size * first[name] / (mx.sqrt(second[name] / (1 - beta2**count)) + EPSILON)
        for name, value in params.items()
    }
    return moved, AdamState(first, second)
