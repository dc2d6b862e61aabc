"""The target as the `mtp` drafter sees it: its MTP module, caches for it, and counted waits.

Entry point: `open_mtp_view`, which is where the module's weights are loaded: nothing of it is unless this is
called.
"""

# Shapes: T rows, G streams, D hidden, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from drafter.api import CellCache, TargetView
from drafter.errors import DrafterError
from mlx_flashnext.errors import StateError
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.model.host import HostSync, to_host
from mlx_flashnext.model.moe import ExpertProvider
from mlx_flashnext.model.mtp import MtpCell
from mlx_flashnext.model.weight_source import WeightSource
from mlx_flashnext.state import MtpState, Snapshot


def open_mtp_view(
    model: FlashNext, weights: WeightSource, experts: ExpertProvider, sync: HostSync
) -> MtpView:
    """Load the MTP module and return the view of it.

    Args:
        model: the target; its embedding and head are shared, not loaded again.
        weights: where the module's weights come from.
        experts: computes its routed experts, as layer `num_hidden_layers`.
        sync: counts the waits for the device.

    Raises:
        WeightMismatch: a part of the module is missing or of another shape.
    """
    return MtpView(model.mtp_cell(weights, experts, sync), sync, model.compute_dtype)


class MtpView(TargetView):
    """See `TargetView`.

    Args:
        cell: the module.
        sync: counts the waits for the device.
        compute_dtype: of the caches.
    """

    def __init__(self, cell: MtpCell, sync: HostSync, compute_dtype: mx.Dtype) -> None:
        self._cell = cell
        self._sync = sync
        self._dtype = compute_dtype

    def new_cache(self) -> MtpState:
        """Return the cache of an empty sequence."""
        return MtpState(self._cell.config, compute_dtype=self._dtype)

    def extend(self, stack_TGD: mx.array, next_tokens: Sequence[int], cache: CellCache) -> None:
        """Append cells for later ones to look at; submitted, not waited for."""
        state = _state(cache)
        with state.begin(len(next_tokens), revocable=False) as block:
            self._cell.extend(stack_TGD, next_tokens, block)
            block.commit()
        # Otherwise the stacks of a whole prefill chunk would be held until somebody proposes.
        mx.async_eval(state.arrays())  # pyright: ignore[reportUnknownMemberType]  (half typed stubs)

    def run_cell(
        self, stack_1GD: mx.array, next_token: Sequence[int] | mx.array, cache: CellCache
    ) -> tuple[mx.array, mx.array]:
        """Append one cell and return its logits [1, V] and its stack [1, G, D]."""
        with _state(cache).begin(1, revocable=False) as block:
            logits_1V, stack_1GD = self._cell.forward(stack_1GD, next_token, block)
            block.commit()
        return logits_1V, stack_1GD

    def mark(self, cache: CellCache) -> Snapshot:
        """Return a reference to the cache as it is."""
        return _state(cache).snapshot()

    def rewind(self, cache: CellCache, mark: object) -> None:
        """Drop the cells appended since `mark`."""
        assert isinstance(mark, Snapshot)
        try:
            _state(cache).restore(mark)
        except StateError as error:
            raise DrafterError(error.message, hint=error.hint) from error

    def to_host(self, array: mx.array) -> Any:
        """Wait for `array` and return its values."""
        return to_host(self._sync, array)


def _state(cache: CellCache) -> MtpState:
    assert isinstance(cache, MtpState)
    return cache
