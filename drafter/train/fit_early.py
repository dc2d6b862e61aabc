"""Fits the early trunk of a route sidecar: the anchor's row before the draft has run. Entry: `fit_early`.

Heads and layers stay those that `fit_sidecar` found; only the trunk in front of them is learnt. It needs no
block of the draft, so any row of committed text teaches it: several times as many as blocks have anchors,
which is what it lives on (bench/LEDGER.md).

Source: drafter/sidecar.py.
"""

# Shapes: N rows, H hidden, r rank, L layers, E experts, K experts of a row.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError
from drafter.sidecar import INPUTS, NUM_BEFORE, STAGES, RouteHead, SidecarSizes
from drafter.train.fit_sidecar import EmbeddingTable, SidecarSettings, Values, gated
from drafter.train.route_losses import Adam, fit_calibration, layer_weights, loss_and_slope, wanted
from drafter.train.schedule import rate_at

EARLY = tuple(f"early.{name}.weight" for name in INPUTS[1:])


@dataclass(frozen=True, slots=True)
class EarlyRows:
    """Rows of committed text with what is known of each before a draft runs.

    Attributes:
        ids: int32 [N, 3], their token and the two before it.
        context: float16 [N, H], the newest fused row before each.
        routes: uint16 [N, L, K], native.
    """

    ids: NDArray[np.int32]
    context: NDArray[np.float16]
    routes: NDArray[np.uint16]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)


def joined_early(parts: Sequence[EarlyRows]) -> EarlyRows:
    """Return the rows of all parts.

    Raises:
        DrafterError: there are none.
    """
    if not any(len(part) for part in parts):
        raise DrafterError("No row to train on", hint="capture longer answers, with routes")
    return EarlyRows(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(EarlyRows)
        }
    )


def fit_early(
    params: Values,
    rows: EarlyRows,
    aside: EarlyRows,
    sizes: SidecarSizes,
    table: EmbeddingTable,
    settings: SidecarSettings,
    progress: Callable[[int, int, float], None] = lambda _done, _total, _loss: None,
) -> Values:
    """Return the values of a sidecar, its early trunk trained and calibrated, the others as they were.

    Args:
        params: from `fit_sidecar`; the early trunk begins as the other one is.
        rows: to train on.
        aside: of other documents, for the calibration.
        sizes: of the sidecar.
        table: embedding rows of the tokens of both.
        settings: how; batches are drawn anew from its seed.
        progress: called with (steps done, steps in all, mean loss since the last call).

    Raises:
        DrafterError: a loss is not finite.
    """
    generator = np.random.default_rng((settings.seed, 7))
    trunk = {name: params[name.removeprefix("early.")].copy() for name in EARLY}
    trunk["early.slot"] = params["slot"][0].copy()
    adam, losses = Adam(trunk, settings.clip), list[float]()
    for step in range(settings.num_steps):
        chosen = generator.integers(0, len(rows), settings.batch)
        truth = np.ascontiguousarray(wanted(rows.routes[chosen], sizes.num_experts).swapaxes(0, 1))
        inputs = early_inputs(rows, chosen, table)
        loss, gradients = early_loss(params | trunk, inputs, truth, sizes)
        if not np.isfinite(loss):
            raise DrafterError(
                f"Early step {step} has a loss that is not finite", hint="train with a smaller --rate"
            )
        adam.step(gradients, rate_at(step, settings.num_steps, settings.rate))
        losses.append(loss)
        if (step + 1) % 100 == 0 or step + 1 == settings.num_steps:
            progress(step + 1, settings.num_steps, float(np.mean(losses)))
            losses = []
    found = params | trunk
    return found | {"calibration": calibrated_early(found, aside, sizes, table)}


def calibrated_early(
    params: Values, aside: EarlyRows, sizes: SidecarSizes, table: EmbeddingTable
) -> NDArray[np.float32]:
    """Return the calibration of a sidecar, that of the stage `early` made anew."""
    calibration, stage = params["calibration"].copy(), STAGES.index("early")
    calibration[stage] = (1, 0)
    head = RouteHead(params | {"calibration": calibration}, sizes.layers, sizes.top_k, 0.0)
    log_odds = head.log_odds_of(early_codes_of(params, aside, table), slice(None), "early")
    truth = wanted(aside.routes, sizes.num_experts).astype(bool)
    for place in range(len(sizes.layers)):
        calibration[stage, place] = fit_calibration(log_odds[place], truth[:, place])
    return calibration


def early_loss(
    params: Values, inputs: NDArray[np.float32], truth: NDArray[np.float32], sizes: SidecarSizes
) -> tuple[float, Values]:
    """Return the loss of some rows, and the gradient of every parameter of the early trunk.

    Args:
        params: of the whole sidecar.
        inputs: [N, 4 H], from `early_inputs`.
        truth: [L, N, E], 1 for every expert that was chosen.
        sizes: of the sidecar.
    """
    whole = np.concatenate([params[name] for name in EARLY], axis=1)
    active, slope_of_z = gated(inputs @ whole.T + params["early.slot"], params["layer"])
    scores = (active @ params["heads"].swapaxes(1, 2) + params["bias"][:, None]).astype(np.float32)
    weights = np.repeat(layer_weights(sizes.layers)[:, None], len(inputs), axis=1)
    loss, slope = loss_and_slope(scores, truth, weights, top_k=sizes.top_k)
    of_code = ((slope @ params["heads"]) * slope_of_z).sum(axis=0)
    pieces = np.split(of_code.T @ inputs, len(EARLY), axis=1)
    return loss, dict(zip(EARLY, pieces, strict=True)) | {"early.slot": of_code.sum(axis=0)}


def early_codes_of(params: Values, rows: EarlyRows, table: EmbeddingTable) -> NDArray[np.float32]:
    """Return the early codes [N, r] of rows."""
    whole = np.concatenate([params[name] for name in EARLY], axis=1)
    return early_inputs(rows, np.arange(len(rows)), table) @ whole.T + params["early.slot"]


def early_inputs(rows: EarlyRows, chosen: NDArray[np.integer], table: EmbeddingTable) -> NDArray[np.float32]:
    """Return [N, 4 H]: what the early trunk reads of rows, in the order of `EARLY`."""
    parts = [*(table.rows(rows.ids[chosen, back]) for back in range(NUM_BEFORE + 1)), rows.context[chosen]]
    return np.concatenate(parts, axis=1, dtype=np.float32)
