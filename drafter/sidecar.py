"""The route sidecar: which experts of the target the rows of a proposal will want, from the draft's state.

Entry points: `Sidecar` (on the device, inside the drafter's own pass) and `RouteHead` (on the host, where
reads are issued). A verifier row t is the token d_t; slot t of the block knows the context, d_t and the two
tokens before it are what the target's n-gram memory will look up. All of it becomes one code of rank r:

    code_t  = W_h h_t + W_0 e(d_t) + W_1 e(d_t-1) + W_2 e(d_t-2) + W_c c + slot_t        on the device
    score_tl = heads_l silu(code_t + layer_l) + bias_l                                   on the host
    code_t += sum over experts e that layer m chose for row t of seen_me                 after layer m has run

so that one forward of the trunk a proposal serves all layers, rides on the read-back that the proposal needs
anyway, and is refreshed inside the verify pass by what earlier layers have shown, without asking the device.

Of the anchor's row all but h_0 is known before the draft runs. A trunk of its own, with the same heads, makes
a code of that, so that reads for one row of the block can begin while the draft computes:

    early   = V_0 e(d_0) + V_1 e(d_-1) + V_2 e(d_-2) + V_c c + slot                      before the draft

Invariants:
R1. Nothing here reaches a token: codes leave beside the proposal, and only reads are made of them.
R2. Rows of a code follow the proposed path: the anchor first, then every proposed token.

Source: dflash2.md 4.6. The form of trunk, heads and refresh is ours; docs/TRAINING.md says what it reaches.
"""

# Shapes: R rows, H hidden, r rank, B slots, L routed layers, E experts, K experts of a row.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.layers import Params

INPUTS = ("hidden", "token", "before", "earlier", "context")
STAGES = ("proposed", "refreshed", "early")
"""What a code knows when it is scored: the draft's states, layers that have run too, or neither."""
NUM_BEFORE = 2
"""Tokens before a row's own that its code reads."""
EPSILON = 1e-6
_CLIP = 30.0


@dataclass(frozen=True, slots=True)
class SidecarSizes:
    """Sizes of a sidecar.

    Attributes:
        hidden_size: H, of the draft and of embedding rows.
        rank: r of the codes.
        num_slots: B of the draft's block: most rows that have a slot of their own.
        layers: of the target whose routes it was trained on, ascending.
        num_experts: E of each.
        top_k: K that a row chooses.
    """

    hidden_size: int
    rank: int
    num_slots: int
    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by name."""
        num_layers = len(self.layers)
        heads = (num_layers, self.num_experts, self.rank)
        return {
            **{f"{name}.weight": (self.rank, self.hidden_size) for name in INPUTS},
            "slot": (self.num_slots, self.rank),
            "layer": (num_layers, self.rank),
            "heads": heads,
            "bias": (num_layers, self.num_experts),
            "seen": heads,
            "calibration": (len(STAGES), num_layers, 2),
            **{f"early.{name}.weight": (self.rank, self.hidden_size) for name in INPUTS[1:]},
            "early.slot": (self.rank,),
        }

    def num_values(self) -> int:
        """Return the values of all tensors."""
        return sum(int(np.prod(shape)) for shape in self.shapes().values())


def trunk(weight: mx.array, first: mx.array, parts: Sequence[mx.array]) -> mx.array:
    """Return codes [R, r], float32, lazy: all inputs side by side in one product.

    Args:
        weight: of the inputs side by side, [r, inputs * H].
        first: what a row has of itself, [R, r] or [r]: its slot.
        parts: final-normed states of the draft's slots, where there are any; the target's raw embedding rows
            of every row's token and of those before it, each of mean square one; the newest fused context
            row: each [R, H].
    """
    rows = mx.concatenate([part.astype(weight.dtype) for part in parts], axis=-1)
    return (rows @ weight.T).astype(mx.float32) + first.astype(mx.float32)


def _unit(rows: mx.array) -> mx.array:
    """Return rows brought to a mean square of one: embedding rows of rare tokens are small."""
    wide = rows.astype(mx.float32)
    return wide * mx.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + EPSILON)


class Sidecar:
    """The part on the device.

    Args:
        params: of both trunks: `INPUTS` and `slot`, of the early one behind `early.`.
        sizes: of them.
        head: the part on the host.
        pad_id: stands for tokens before the start of a text.
    """

    def __init__(self, params: Params, sizes: SidecarSizes, head: RouteHead, pad_id: int) -> None:
        self.head = head
        self.sizes = sizes
        self._pad_id = pad_id
        self._slot, self._early_slot = params["slot"], params["early.slot"]
        # Side by side once: every operation that is saved is a wait less for the first read.
        self._weight = mx.concatenate([params[f"{name}.weight"] for name in INPUTS], axis=1)
        self._early_weight = mx.concatenate([params[f"early.{name}.weight"] for name in INPUTS[1:]], axis=1)

    def codes(
        self,
        hidden_RH: mx.array,
        before: Sequence[int],
        path_R: mx.array,
        embed: Callable[[mx.array], mx.array],
        context_1H: mx.array,
    ) -> mx.array:
        """Return the codes [R, r] of a proposal's rows, lazy: nothing is waited for.

        Args:
            hidden_RH: states of slots 0 to R - 1.
            before: committed tokens before the anchor, the newest last.
            path_R: int32 ids on the device: the anchor, then the path.
            embed: the target's embedding rows of ids.
            context_1H: the newest fused row, [1, H] or [0, H] where there is none.
        """
        num_rows = path_R.shape[0]
        slot = self._slot
        if num_rows > self.sizes.num_slots:
            slot = slot[mx.minimum(mx.arange(num_rows), self.sizes.num_slots - 1)]
        parts = [hidden_RH, *self._known(before, path_R, embed, context_1H)]
        return trunk(self._weight, slot[:num_rows], parts)

    def early_code(
        self,
        before: Sequence[int],
        anchor: int,
        embed: Callable[[mx.array], mx.array],
        context_1H: mx.array,
    ) -> mx.array:
        """Return the code [1, r] of the anchor's row, lazy, of what is known before the draft runs.

        Args:
            before: committed tokens before the anchor, the newest last.
            anchor: the last committed token.
            embed: the target's embedding rows of ids.
            context_1H: as in `codes`.
        """
        parts = self._known(before, mx.array([anchor], mx.int32), embed, context_1H)
        return trunk(self._early_weight, self._early_slot, parts)

    def _known(
        self,
        before: Sequence[int],
        path_R: mx.array,
        embed: Callable[[mx.array], mx.array],
        context_1H: mx.array,
    ) -> list[mx.array]:
        """Return the embedding rows of every row's token and of those before it, and its context row."""
        known = [*([self._pad_id] * NUM_BEFORE), *before][-NUM_BEFORE:]
        rows = _unit(embed(mx.concatenate([mx.array(known, mx.int32), path_R.astype(mx.int32)])))
        num_rows = path_R.shape[0]
        embedded = [rows[NUM_BEFORE - back : NUM_BEFORE - back + num_rows] for back in range(NUM_BEFORE + 1)]
        shape = (num_rows, self.sizes.hidden_size)
        context = context_1H if context_1H.shape[0] else mx.zeros((1, shape[1]), context_1H.dtype)
        return [*embedded, mx.broadcast_to(context, shape)]

    def num_bytes(self) -> int:
        """Return the bytes of both parts."""
        weights = (self._weight, self._early_weight, self._slot, self._early_slot)
        return sum(value.nbytes for value in weights) + self.head.num_bytes()


class RouteHead:
    """The part on the host: from codes to calibrated log-odds of every expert. No device is asked.

    Args:
        arrays: float32 `layer`, `heads`, `bias`, `seen`, `calibration`, as in `SidecarSizes.shapes`.
        layers: of the target, in the order of the arrays.
        top_k: experts that a row chooses.
        cut: confidence below which an expert is not worth reading.
    """

    def __init__(
        self,
        arrays: Mapping[str, NDArray[np.float32]],
        layers: Sequence[int],
        top_k: int,
        cut: float,
    ) -> None:
        self.layers = tuple(layers)
        self.top_k = top_k
        self.cut = cut
        self._place = {layer: place for place, layer in enumerate(self.layers)}
        self._half_layer = 0.5 * np.asarray(arrays["layer"], np.float32)
        self._heads = np.ascontiguousarray(arrays["heads"].transpose(0, 2, 1), np.float32)
        self._seen = np.ascontiguousarray(arrays["seen"], np.float32)
        calibration = np.asarray(arrays["calibration"], np.float32)
        self._scale = calibration[:, :, None, None, 0].copy()
        bias = np.asarray(arrays["bias"], np.float32)[None, :, None]
        self._offset = bias * self._scale + calibration[:, :, None, None, 1]

    def log_odds(
        self, codes: NDArray[np.float32], first: int = 0, last: int | None = None, *, is_refreshed: bool
    ) -> NDArray[np.float32]:
        """Return calibrated log-odds [L', R, E] that each row chooses each expert.

        Args:
            codes: [R, r].
            first: place of the first layer.
            last: place after the last one; None for all.
            is_refreshed: whether a layer has been seen since the codes came: calibrated apart.
        """
        return self.log_odds_of(codes, slice(first, last), "refreshed" if is_refreshed else "proposed")

    def log_odds_of(self, codes: NDArray[np.float32], which: slice, stage: str) -> NDArray[np.float32]:
        """Return calibrated log-odds [L', R, E] of codes of one of `STAGES`, of some places."""
        at = STAGES.index(stage)
        half = 0.5 * codes + self._half_layer[which, None]
        gated = np.tanh(half)  # silu(z) = z / 2 (1 + tanh(z / 2))
        gated += 1
        gated *= half
        scores = np.matmul(gated, self._heads[which])
        scores *= self._scale[at, which]
        scores += self._offset[at, which]
        return scores

    def after(
        self, codes: NDArray[np.float32], layer: int, ids_RK: Sequence[Sequence[int]] | NDArray[np.integer]
    ) -> NDArray[np.float32]:
        """Return the codes once a layer has shown what it chose for the rows; other layers change nothing."""
        place = self._place.get(layer)
        if place is None or len(ids_RK) != len(codes):
            return codes
        return codes + self._seen[place][np.asarray(ids_RK)].sum(axis=1)

    def place_after(self, layer: int) -> int:
        """Return the place of the first layer behind one."""
        return sum(1 for one in self.layers if one <= layer)

    def num_bytes(self) -> int:
        """Return the bytes held."""
        arrays = (self._half_layer, self._heads, self._seen, self._scale, self._offset)
        return sum(array.nbytes for array in arrays)


def union_confidence(log_odds_RE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return how likely it is that any of the rows chooses an expert, [.., E] of [.., R, E].

    Rows are taken as independent.
    """
    odds = np.exp(np.minimum(log_odds_RE, _CLIP), dtype=np.float64)
    odds += 1.0
    return (1.0 - 1.0 / np.multiply.reduce(odds, axis=-2)).astype(np.float32)
