"""Fits a route sidecar to native routes. Entry points: `SidecarRows`, `fit_sidecar`.

Rows are what the drafter will have when a proposal is made, computed once by the frozen draft; half of the
time a few layers count as seen already, so that one set of values serves the proposal and its refreshes.

Source: drafter/sidecar.py.
"""

# Shapes: N rows, H hidden, r rank, L layers, E experts, K experts of a row, A anchors.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError
from drafter.sidecar import RouteHead, SidecarSizes, trunk
from drafter.train.adam import adam_step, clipped, fresh_state
from drafter.train.losses import FrozenTarget
from drafter.train.route_losses import fit_calibration, layer_weights, route_loss, wanted
from drafter.train.schedule import rate_at

Params = dict[str, mx.array]
HEAD_SCALE = 0.3


@dataclass(frozen=True, slots=True)
class SidecarRows:
    """Verifier rows with what a sidecar sees of them.

    Attributes:
        hidden: float16 [N, H], final-normed states of their slots.
        ids: int32 [N, 3], their token and the two before it.
        context: float16 [A, H], the newest fused row of every anchor.
        anchor: int32 [N], which anchor a row belongs to.
        slot: int32 [N].
        routes: uint16 [N, L, K], native.
        is_kept: bool [N]: all tokens before and of the row are those of the answer. A row of a proposed path
            may be of a token that was rejected.
        is_candidate: bool [N]: a row of a proposed path, not of committed text.
        document: int32 [N]: rows of one document stay together when a part is put aside.
    """

    hidden: NDArray[np.float16]
    ids: NDArray[np.int32]
    context: NDArray[np.float16]
    anchor: NDArray[np.int32]
    slot: NDArray[np.int32]
    routes: NDArray[np.uint16]
    is_kept: NDArray[np.bool_]
    is_candidate: NDArray[np.bool_]
    document: NDArray[np.int32]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.slot)


def joined(parts: Sequence[SidecarRows]) -> SidecarRows:
    """Return the rows of all parts.

    Raises:
        DrafterError: there are none.
    """
    if not any(len(part) for part in parts):
        raise DrafterError("No row to train on", hint="capture longer answers, with routes")
    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(SidecarRows)
    }
    shift = np.cumsum([0, *(len(part.context) for part in parts)])
    columns["anchor"] = np.concatenate([part.anchor + shift[number] for number, part in enumerate(parts)])
    return SidecarRows(**columns)


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """How a sidecar is trained.

    Attributes:
        rank: r.
        num_steps: of training.
        batch: rows of a step.
        rate: the highest.
        clip: largest norm of the gradients together.
        seed: of first values and batches.
        refreshed: share of rows that some layers count as seen of.
    """

    rank: int = 96
    num_steps: int = 3000
    batch: int = 512
    rate: float = 4e-3
    clip: float = 1.0
    seed: int = 0
    refreshed: float = 0.5


def initial_sidecar(sizes: SidecarSizes, seed: int) -> dict[str, NDArray[np.float32]]:
    """Return first values: nothing is seen yet, and every expert is as likely as another."""
    generator = np.random.default_rng(seed)
    found: dict[str, NDArray[np.float32]] = {}
    for name, shape in sizes.shapes().items():
        value = np.zeros(shape, np.float32)
        if name.endswith(".weight"):
            value = generator.standard_normal(shape, np.float32) / np.float32(np.sqrt(5 * shape[-1]))
        elif name == "heads":
            value = HEAD_SCALE * generator.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        elif name == "bias":
            share = sizes.top_k / sizes.num_experts
            value += np.float32(np.log(share / max(1e-6, 1 - share)))
        elif name == "calibration":
            value[..., 0] = 1
        found[name] = value
    return found


def scores_of(
    params: Params,
    hidden: mx.array,
    embedded: Sequence[mx.array],
    context: mx.array,
    slots: mx.array,
    seen_NS: mx.array,
) -> mx.array:
    """Return uncalibrated log-odds [N, L, E].

    Args:
        params: of the sidecar.
        hidden: [N, H].
        embedded: three times [N, H]: of each row's token and of the two before it.
        context: [N, H].
        slots: [N].
        seen_NS: [N, L * E], 1 for every expert that a layer which counts as seen has chosen.
    """
    code = trunk(params, hidden, embedded, context, slots)
    seen = params["seen"]
    code = code + seen_NS @ seen.reshape(-1, seen.shape[-1])
    z_LNr = code[None] + params["layer"][:, None]
    scores = (z_LNr * mx.sigmoid(z_LNr)) @ params["heads"].swapaxes(1, 2)
    return (scores + params["bias"][:, None]).swapaxes(0, 1)


def fit_sidecar(
    rows: SidecarRows,
    aside: SidecarRows,
    survival: NDArray[np.float32],
    sizes: SidecarSizes,
    target: FrozenTarget,
    to_host: Callable[[mx.array], Any],
    settings: SidecarSettings,
    progress: Callable[[int, int, float], None] = lambda _done, _total, _loss: None,
) -> dict[str, NDArray[np.float32]]:
    """Train a sidecar and return its values, calibrated.

    Args:
        rows: to train on.
        aside: of other documents, for the calibration.
        survival: [B], chance that the answer keeps the row of each slot.
        sizes: of the sidecar.
        target: its embedding.
        to_host: waits for an array and returns its values.
        settings: how.
        progress: called with (steps done, steps in all, mean loss since the last call).

    Raises:
        DrafterError: a loss is not finite.
    """
    generator = np.random.default_rng((settings.seed, 3))
    params = {name: mx.array(value) for name, value in initial_sidecar(sizes, settings.seed).items()}
    fixed = params.pop("calibration")
    moments = fresh_state(params)
    losses: list[float] = []
    for step in range(settings.num_steps):
        chosen = generator.integers(0, len(rows), settings.batch)
        num_seen = np.where(
            generator.random(settings.batch) < settings.refreshed,
            generator.integers(1, len(sizes.layers), settings.batch),
            0,
        )
        inputs, wanted_NLE, is_asked = _batch(rows, chosen, num_seen, sizes, target)
        keeps = np.where(rows.is_candidate[chosen], 1.0, survival[rows.slot[chosen]])
        weights = mx.array(keeps[:, None] * is_asked * layer_weights(sizes.layers)[None])

        def whole(
            tree: Params,
            inputs: tuple[Any, ...] = inputs,
            wanted_NLE: mx.array = wanted_NLE,
            weights: mx.array = weights,
        ) -> mx.array:
            return route_loss(scores_of(tree, *inputs), wanted_NLE, weights, top_k=sizes.top_k)

        loss, gradients = mx.value_and_grad(whole)(params)
        gradients, _ = clipped(gradients, settings.clip)
        rate = rate_at(step, settings.num_steps, settings.rate)
        params, moments = adam_step(params, gradients, moments, step=step, rate=rate)
        mx.eval(params, moments.first, moments.second, loss)
        losses.append(float(to_host(loss)))
        if not np.isfinite(losses[-1]):
            raise DrafterError(
                f"Step {step} has a loss that is not finite", hint="train with a smaller --rate"
            )
        if (step + 1) % 100 == 0 or step + 1 == settings.num_steps:
            progress(step + 1, settings.num_steps, float(np.mean(losses)))
            losses = []
    arrays = {name: np.array(value) for name, value in params.items()} | {"calibration": np.array(fixed)}
    arrays["calibration"] = calibrated(arrays, aside, sizes, target)
    return arrays


def calibrated(
    arrays: dict[str, NDArray[np.float32]], aside: SidecarRows, sizes: SidecarSizes, target: FrozenTarget
) -> NDArray[np.float32]:
    """Return scale and shift of every layer [2, L, 2]: with nothing seen, and with the layers before it."""
    head = RouteHead(arrays, sizes.layers, sizes.top_k, 0.0)
    codes = codes_of(arrays, aside, target)
    found = np.zeros((2, len(sizes.layers), 2), np.float32)
    truth = wanted(aside.routes, sizes.num_experts).astype(bool)
    fresh = head.log_odds(codes, is_refreshed=False)
    for place, layer in enumerate(sizes.layers):
        found[0, place] = fit_calibration(fresh[place], truth[:, place])
        seen = head.log_odds(codes, place, place + 1, is_refreshed=True)[0]
        found[1, place] = fit_calibration(seen, truth[:, place])
        codes = head.after(codes, layer, aside.routes[:, place])
    return found


def codes_of(
    arrays: dict[str, NDArray[np.float32]], rows: SidecarRows, target: FrozenTarget, at_once: int = 4096
) -> NDArray[np.float32]:
    """Return the codes [N, r] of rows, nothing seen."""
    params = {name: mx.array(value) for name, value in arrays.items() if name == "slot" or "." in name}
    found: list[NDArray[np.float32]] = []
    for first in range(0, len(rows), at_once):
        chosen = np.arange(first, min(first + at_once, len(rows)))
        hidden, embedded, context, slots = _inputs(rows, chosen, target)
        found.append(np.array(trunk(params, hidden, embedded, context, slots)))
    return np.concatenate(found)


def _inputs(
    rows: SidecarRows, chosen: NDArray[np.int64], target: FrozenTarget
) -> tuple[mx.array, list[mx.array], mx.array, mx.array]:
    ids = rows.ids[chosen]
    embedding = target.embed(mx.array(ids.T.reshape(-1))).astype(mx.float32)
    embedded = list(mx.stop_gradient(embedding).reshape(3, len(chosen), -1))
    hidden = mx.array(rows.hidden[chosen].astype(np.float32))
    context = mx.array(rows.context[rows.anchor[chosen]].astype(np.float32))
    return hidden, embedded, context, mx.array(rows.slot[chosen])


def _batch(
    rows: SidecarRows,
    chosen: NDArray[np.int64],
    num_seen: NDArray[np.int64],
    sizes: SidecarSizes,
    target: FrozenTarget,
) -> tuple[tuple[Any, ...], mx.array, NDArray[np.float32]]:
    """Return what the scores are computed of, what they are to say, and which layers are asked [N, L]."""
    truth = wanted(rows.routes[chosen], sizes.num_experts)
    places = np.arange(len(sizes.layers))
    is_seen = places[None] < num_seen[:, None]
    seen = (truth * is_seen[..., None]).reshape(len(chosen), -1)
    inputs = (*_inputs(rows, chosen, target), mx.array(seen))
    return inputs, mx.array(truth), (~is_seen).astype(np.float32)
