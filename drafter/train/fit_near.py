"""Fits the near map to native routes: every layer's experts, linearly, from a read two layers early.

Entry points: `NearSettings`, `fit_near`. One problem a layer, convex, solved side by side.

Source: drafter/near.py.
"""

# Shapes: N rows, L layers, D hidden, E experts, K experts of a row.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError
from drafter.train.fit_state import SAVE_EVERY, FitState
from drafter.train.route_losses import Adam, fit_calibration, loss_and_slope, wanted
from drafter.train.schedule import rate_at


@dataclass(frozen=True, slots=True)
class NearSettings:
    """How a near map is trained: steps, rows of a step, the highest rate, weight decay, seed."""

    num_steps: int = 1500
    batch: int = 512
    rate: float = 2e-2
    decay: float = 1e-4
    seed: int = 0


def fit_near(
    reads_LND: NDArray[np.float16],
    routes_NLK: NDArray[np.uint16],
    is_aside: NDArray[np.bool_],
    layers: Sequence[int],
    num_experts: int,
    settings: NearSettings,
    progress: Callable[[int, int, float], None] = lambda _done, _total, _loss: None,
    state: FitState | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Train the maps and return their values by stored name, calibrated.

    Args:
        reads_LND: what each layer would read of the stack two layers before its turn.
        routes_NLK: what it chose.
        is_aside: [N], rows for the calibration alone.
        layers: of the target, in the order of the arrays.
        num_experts: E.
        settings: how.
        progress: called with (steps done, steps in all, mean loss since the last call).
        state: goes on from where a killed fit was, and is kept up to date; None keeps nothing.

    Raises:
        DrafterError: the state is of another fit, a loss is not finite, or no row is left on a side.
    """
    train, aside = np.flatnonzero(~is_aside), np.flatnonzero(is_aside)
    if not len(train) or not len(aside):
        raise DrafterError("Too few documents to train and to calibrate on", hint="capture more prompts")
    top_k, num_layers = routes_NLK.shape[-1], len(layers)
    # The products are conditioned by the spread of every read; it is folded into the weights at the end.
    spread = reads_LND[:, train[:8192]].astype(np.float32).std(axis=1) + 1e-4
    share = top_k / num_experts
    params = {
        "weight": np.zeros((num_layers, num_experts, reads_LND.shape[-1]), np.float32),
        "bias": np.full((num_layers, num_experts), np.log(share / max(1e-6, 1 - share)), np.float32),
    }
    adam, generator = Adam(params, clip=10.0), np.random.default_rng((settings.seed, 4))
    weights, losses = np.ones((num_layers, settings.batch), np.float32), list[float]()
    first = 0 if state is None else state.resume(adam, generator)
    for step in range(first, settings.num_steps):
        chosen = generator.choice(train, settings.batch)
        x = reads_LND[:, chosen].astype(np.float32) / spread[:, None]
        truth = np.ascontiguousarray(wanted(routes_NLK[chosen], num_experts).swapaxes(0, 1))
        scores = x @ params["weight"].swapaxes(1, 2) + params["bias"][:, None]
        loss, slope = loss_and_slope(scores, truth, weights, top_k=top_k)
        if not np.isfinite(loss):
            raise DrafterError(
                f"Step {step} has a loss that is not finite", hint="train with a smaller --rate"
            )
        gradients = {
            "weight": slope.swapaxes(1, 2) @ x + settings.decay * params["weight"],
            "bias": slope.sum(axis=1),
        }
        adam.step(gradients, rate_at(step, settings.num_steps, settings.rate))
        losses.append(loss)
        if (step + 1) % 100 == 0 or step + 1 == settings.num_steps:
            progress(step + 1, settings.num_steps, float(np.mean(losses)))
            losses = []
        if state is not None and (step + 1) % SAVE_EVERY == 0:
            state.save(step + 1, adam, generator)
    weight, bias = params["weight"] / spread[:, None], params["bias"]
    found: dict[str, NDArray[np.float32]] = {}
    for place, layer in enumerate(layers):
        scores = reads_LND[place, aside].astype(np.float32) @ weight[place].T + bias[place]
        truth = wanted(routes_NLK[aside, place], num_experts).astype(bool)
        found[f"layers.{layer}.weight"] = weight[place]
        found[f"layers.{layer}.bias"] = bias[place]
        found[f"layers.{layer}.calibration"] = np.asarray(fit_calibration(scores, truth), np.float32)
    return found
