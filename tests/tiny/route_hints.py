"""Trained route hints with random values, in the files that the product reads."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from drafter.near import LAYERS_AHEAD
from drafter.route_files import Lineage, NearDocument, SidecarDocument
from drafter.sidecar import INPUTS, SidecarSizes
from drafter.train.fit_sidecar import initial_sidecar
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.engine.draft_files import open_draft
from mlx_flashnext.engine.route_files import route_facts, write_routes

LINEAGE = Lineage("c", "t", 1, 2, 3, 4, 5, 6, "0")


def write_near(model: Path, *, cut: float = 0.0, seed: int = 0) -> Path:
    """Write a near map beside a checkpoint and return its directory."""
    checkpoint, place = open_checkpoint(model), model / "near"
    config, draws = checkpoint.config, np.random.default_rng(seed)
    layers = list(range(LAYERS_AHEAD, config.num_hidden_layers))
    document = NearDocument(
        tensors_digest="",
        router_digest=route_facts(checkpoint).router_digest,
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        layers=layers,
        layers_ahead=LAYERS_AHEAD,
        num_guesses=2 * config.num_experts_per_tok,
        cut=cut,
        lineage=LINEAGE,
    )
    arrays = {
        name: np.array([1.0, 0.0], np.float32) if name.endswith("calibration") else _normal(draws, shape)
        for name, shape in document.shapes().items()
    }
    write_routes(place, document, arrays)
    return place


def write_sidecar(draft: Path, model: Path, *, cut: float = 0.0, seed: int = 0, num_slots: int = 8) -> Path:
    """Write a sidecar into a draft's directory and return its own."""
    checkpoint, place = open_checkpoint(model), draft / "sidecar"
    config, draws = checkpoint.config, np.random.default_rng(seed)
    layers = tuple(range(config.num_hidden_layers))
    sizes = SidecarSizes(
        config.hidden_size, 6, num_slots, layers, config.num_experts, config.num_experts_per_tok
    )
    with open_draft(draft) as files:
        digest = files.listing.digest
    document = SidecarDocument(
        tensors_digest="",
        router_digest=route_facts(checkpoint).router_digest,
        draft_digest=digest,
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        layers=list(layers),
        hidden_size=config.hidden_size,
        rank=sizes.rank,
        num_slots=num_slots,
        cut=cut,
        lineage=LINEAGE,
    )
    arrays = initial_sidecar(sizes, seed) | {
        name: _normal(draws, shape)
        for name, shape in sizes.shapes().items()
        if name in ("seen", "layer", "slot")
    }
    write_routes(place, document, arrays)
    return place


def reference_scores(
    params: dict[str, mx.array], inputs: mx.array, slots: mx.array, seen: mx.array
) -> mx.array:
    """Return uncalibrated scores [L, N, E] by the formula of `drafter/sidecar.py`, in MLX.

    Args:
        params: of a sidecar.
        inputs: [N, 5 H], embedding rows brought to a mean square of one.
        slots: [N].
        seen: [N, L * E], 1 for what seen layers have chosen.
    """
    parts = mx.split(inputs, len(INPUTS), axis=1)
    code = params["slot"][slots] + seen @ params["seen"].reshape(-1, params["seen"].shape[-1])
    for name, part in zip(INPUTS, parts, strict=True):
        code = code + part @ params[f"{name}.weight"].T
    z = code[None] + params["layer"][:, None]
    return (z * mx.sigmoid(z)) @ params["heads"].swapaxes(1, 2) + params["bias"][:, None]


def _normal(draws: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draws.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[-1]))
