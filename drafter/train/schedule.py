"""What changes along a run and along a block: rate, weight of the selector, weights of slots.

Only the standard library, so that trainers of any framework go the same way.

Source: dflash2.md 5.3 and 5.4.
"""

from __future__ import annotations

import math

from drafter.train.runs import TrainSettings

BETAS, EPSILON = (0.9, 0.95), 1e-8
WARM_UP, LAST_SHARE = 0.04, 0.1


def rate_at(step: int, num_steps: int, peak: float) -> float:
    """Return the rate of a step counted from 0: linear to the peak, then a cosine down to a tenth of it."""
    warm = max(1, math.ceil(WARM_UP * num_steps))
    if step < warm:
        return peak * (step + 1) / warm
    along = (step - warm) / max(1, num_steps - warm)
    return peak * (LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, along))))


def selector_share(step: int, settings: TrainSettings) -> float:
    """Return the weight of the selector's loss in a step counted from 0."""
    return settings.selector_weight * min(1.0, (step + 1) / max(1, settings.selector_ramp))


def slot_weights(num_slots: int, gamma: float) -> list[float]:
    """Return exp(-(t - 1) / gamma) for slots t = 1, 2, ..."""
    return [math.exp(-slot / gamma) for slot in range(num_slots)]
