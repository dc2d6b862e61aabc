"""Fits a route sidecar to native routes. Entry points: `SidecarRows`, `fit_sidecar`.

Rows are what the drafter will have when a proposal is made, computed once by the frozen draft; half of the
time a few layers count as seen already, so that one set of values serves the proposal and its refreshes. Only
numpy: the network is shallow, and its gradients are written out (a test compares them with MLX's).

Source: drafter/sidecar.py.
"""

# Shapes: N rows, H hidden, r rank, L layers, E experts, K experts of a row, A anchors.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError
from drafter.sidecar import EPSILON, INPUTS, NUM_BEFORE, STAGES, RouteHead, SidecarSizes
from drafter.train.fit_state import SAVE_EVERY, FitState
from drafter.train.route_losses import Adam, fit_calibration, layer_weights, loss_and_slope, wanted
from drafter.train.schedule import rate_at

Values = dict[str, NDArray[np.float32]]
HEAD_SCALE = 0.3
_CLIP = 30.0


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


class EmbeddingTable:
    """The target's embedding rows of the tokens that occur, brought to a mean square of one.

    Args:
        ids: that occur, in any order and number.
        embed: returns float32 rows [T, H] of some ids.
    """

    def __init__(
        self, ids: NDArray[np.int32], embed: Callable[[NDArray[np.int32]], NDArray[np.float32]]
    ) -> None:
        self._ids = np.unique(ids)
        rows = embed(self._ids)
        self._rows = (rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + EPSILON)).astype(
            np.float16
        )

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.float16]:
        """Return the rows of ids that occur."""
        return self._rows[np.searchsorted(self._ids, ids)]


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


def initial_sidecar(sizes: SidecarSizes, seed: int) -> Values:
    """Return first values: nothing is seen yet, and every expert is as likely as another."""
    generator = np.random.default_rng(seed)
    found: Values = {}
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


@dataclass(frozen=True, slots=True)
class SidecarBatch:
    """What one step looks at.

    Attributes:
        inputs: [N, 5 H], the five inputs side by side.
        slots: [N].
        seen: [N, L * E], 1 for every expert that a layer which counts as seen has chosen.
        wanted: [L, N, E], 1 for every expert that was chosen.
        weights: [L, N]; 0 where a layer counts as seen.
    """

    inputs: NDArray[np.float32]
    slots: NDArray[np.int32]
    seen: NDArray[np.float32]
    wanted: NDArray[np.float32]
    weights: NDArray[np.float32]


def loss_and_gradients(params: Values, batch: SidecarBatch, top_k: int) -> tuple[float, Values]:
    """Return the loss of a batch, and the gradient of every parameter but the calibration."""
    whole = np.concatenate([params[f"{name}.weight"] for name in INPUTS], axis=1)
    seen = params["seen"].reshape(-1, params["seen"].shape[-1])
    code = batch.inputs @ whole.T + params["slot"][batch.slots] + batch.seen @ seen
    active, slope_of_z = gated(code, params["layer"])
    scores = (active @ params["heads"].swapaxes(1, 2) + params["bias"][:, None]).astype(np.float32)
    loss, slope = loss_and_slope(scores, batch.wanted, batch.weights, top_k=top_k)
    back = (slope @ params["heads"]) * slope_of_z
    of_code = back.sum(axis=0)
    pieces = np.split(of_code.T @ batch.inputs, len(INPUTS), axis=1)
    gradients = {f"{name}.weight": piece for name, piece in zip(INPUTS, pieces, strict=True)}
    is_slot = (np.arange(len(params["slot"]))[:, None] == batch.slots[None]).astype(np.float32)
    gradients |= {
        "slot": is_slot @ of_code,
        "layer": back.sum(axis=1),
        "heads": slope.swapaxes(1, 2) @ active,
        "bias": slope.sum(axis=1),
        "seen": (batch.seen.T @ of_code).reshape(params["seen"].shape),
    }
    return loss, gradients


def gated(
    code: NDArray[np.floating], layer_Lr: NDArray[np.float32]
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Return what the heads read of codes [N, r], [L, N, r], and its slope in the codes."""
    z = code[None] + layer_Lr[:, None]
    one = np.float32(1)
    gate = (one / (one + np.exp(-np.clip(z, -_CLIP, _CLIP)))).astype(np.float32)
    return z * gate, gate * (1 + z * (1 - gate))


def fit_sidecar(
    rows: SidecarRows,
    aside: SidecarRows,
    survival: NDArray[np.float32],
    sizes: SidecarSizes,
    table: EmbeddingTable,
    settings: SidecarSettings,
    progress: Callable[[int, int, float], None] = lambda _done, _total, _loss: None,
    state: FitState | None = None,
) -> Values:
    """Train a sidecar and return its values, calibrated, its early trunk as it began (`fit_early.py`).

    Args:
        rows: to train on.
        aside: of other documents, for the calibration.
        survival: [B], chance that the answer keeps the row of each slot.
        sizes: of the sidecar.
        table: embedding rows of the tokens of both.
        settings: how.
        progress: called with (steps done, steps in all, mean loss since the last call).
        state: goes on from where a killed fit was, and is kept up to date; None keeps nothing.

    Raises:
        DrafterError: the state is of another fit, a loss is not finite.
    """
    generator = np.random.default_rng((settings.seed, 3))
    initial = initial_sidecar(sizes, settings.seed)
    early = {name: initial.pop(name) for name in sizes.shapes() if name.startswith("early.")}
    del initial["calibration"]
    params = initial
    adam, losses = Adam(params, settings.clip), list[float]()
    first = 0 if state is None else state.resume(adam, generator)
    for step in range(first, settings.num_steps):
        batch = _batch(rows, survival, sizes, table, settings, generator)
        loss, gradients = loss_and_gradients(params, batch, sizes.top_k)
        if not np.isfinite(loss):
            raise DrafterError(
                f"Step {step} has a loss that is not finite", hint="train with a smaller --rate"
            )
        adam.step(gradients, rate_at(step, settings.num_steps, settings.rate))
        losses.append(loss)
        if (step + 1) % 100 == 0 or step + 1 == settings.num_steps:
            progress(step + 1, settings.num_steps, float(np.mean(losses)))
            losses = []
        if state is not None and (step + 1) % SAVE_EVERY == 0:
            state.save(step + 1, adam, generator)
    return params | early | {"calibration": calibrated(params, aside, sizes, table)}


def calibrated(
    params: Values, aside: SidecarRows, sizes: SidecarSizes, table: EmbeddingTable
) -> NDArray[np.float32]:
    """Return scale and shift of every layer by stage: with nothing seen, and with the layers before it."""
    found = np.zeros((len(STAGES), len(sizes.layers), 2), np.float32)
    found[..., 0] = 1
    head = RouteHead(params | {"calibration": found.copy()}, sizes.layers, sizes.top_k, 0.0)
    codes = codes_of(params, aside, table)
    truth = wanted(aside.routes, sizes.num_experts).astype(bool)
    fresh = head.log_odds(codes, is_refreshed=False)
    for place, layer in enumerate(sizes.layers):
        found[0, place] = fit_calibration(fresh[place], truth[:, place])
        seen = head.log_odds(codes, place, place + 1, is_refreshed=True)[0]
        found[1, place] = fit_calibration(seen, truth[:, place])
        codes = head.after(codes, layer, aside.routes[:, place])
    return found


def codes_of(params: Values, rows: SidecarRows, table: EmbeddingTable) -> NDArray[np.float32]:
    """Return the codes [N, r] of rows, nothing seen."""
    whole = np.concatenate([params[f"{name}.weight"] for name in INPUTS], axis=1)
    return inputs_of(rows, np.arange(len(rows)), table) @ whole.T + params["slot"][rows.slot]


def inputs_of(rows: SidecarRows, chosen: NDArray[np.integer], table: EmbeddingTable) -> NDArray[np.float32]:
    """Return [N, 5 H]: what the trunk reads of rows, in the order of `INPUTS`."""
    parts = [rows.hidden[chosen], *(table.rows(rows.ids[chosen, back]) for back in range(NUM_BEFORE + 1))]
    return np.concatenate([*parts, rows.context[rows.anchor[chosen]]], axis=1, dtype=np.float32)


def _batch(
    rows: SidecarRows,
    survival: NDArray[np.float32],
    sizes: SidecarSizes,
    table: EmbeddingTable,
    settings: SidecarSettings,
    generator: np.random.Generator,
) -> SidecarBatch:
    chosen = generator.integers(0, len(rows), settings.batch)
    some = generator.integers(1, max(2, len(sizes.layers)), settings.batch)
    num_seen = np.where(generator.random(settings.batch) < settings.refreshed, some, 0)
    truth = wanted(rows.routes[chosen], sizes.num_experts)
    is_seen = np.arange(len(sizes.layers))[None] < num_seen[:, None]
    seen = (truth * is_seen[..., None]).reshape(len(chosen), -1)
    keeps = np.where(rows.is_candidate[chosen], np.float32(1), survival[rows.slot[chosen]])
    weights = keeps[:, None] * ~is_seen * layer_weights(sizes.layers)[None]
    return SidecarBatch(
        inputs_of(rows, chosen, table),
        rows.slot[chosen],
        seen,
        np.ascontiguousarray(truth.swapaxes(0, 1)),
        np.ascontiguousarray(weights.T.astype(np.float32)),
    )
