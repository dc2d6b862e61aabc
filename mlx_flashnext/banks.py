"""Memory that the store writes and the model computes from: slot tensors and row buffers.

This is the only file where bytes of the store become arrays of the model. MLX allocates, readers write
through memoryviews, kernels read the same memory: nothing is copied.

Invariants
    B1  A bank array is made once with `mx.zeros`, evaluated, and never assigned to, never given to an
        in-place operator and never put into a module tree: its memoryview would point at freed memory.
    B2  A slot is refilled only after the host has seen the end of the last graph that named it (T5). Who
        computes keeps this: see `experts.py`.
    B3  A bank array stays below 2^31 elements and 4 GiB: MLX shapes are 32-bit.

Source: FEASIBILITY.md 1 (zero-copy banks, in-place `preadv`, the hazards; MLX 0.32.4 on the CPU backend).
"""

# Shapes: E experts, S slots.

from collections.abc import Mapping, Sequence

import mlx.core as mx

from expert_store.reader import RowMemory, SlotMemory
from mlx_flashnext.checkpoint import BLOCK_SCALES, ExpertLayout, NgramLayout, Projection
from mlx_flashnext.errors import UnsupportedCheckpoint
from mlx_flashnext.model.quant import ExpertBank, ExpertMatrix
from mlx_flashnext.stored_numbers import IN_BANKS, array_memory

MAX_BANK_ELEMENTS = 1 << 31
MAX_BANK_BYTES = 1 << 32
NUM_ROW_BUFFERS = 2


class SlotBanks(SlotMemory):
    """Slot tensors of every MoE layer: one array per component with S slots in front (see B1 to B3).

    Args:
        layouts: stored form of each layer's experts.
        slots: S of each layer.

    Raises:
        UnsupportedCheckpoint: a component's dtype has no MLX counterpart, or an array would pass the limits
        of B3.
    """

    def __init__(self, layouts: Mapping[int, ExpertLayout], slots: Mapping[int, int]) -> None:
        self._arrays: dict[int, tuple[mx.array, ...]] = {}
        self._views: dict[int, tuple[memoryview, ...]] = {}
        self._lengths: dict[int, tuple[int, ...]] = {}
        self._banks: dict[int, ExpertBank] = {}
        for layer, layout in layouts.items():
            arrays = tuple(
                _bank_array(
                    f"layer {layer} {component.name}", (slots[layer], *component.shape), component.dtype
                )
                for component in layout.components
            )
            self._arrays[layer] = arrays
            self._views[layer] = tuple(array_memory(array) for array in arrays)
            self._lengths[layer] = layout.record.component_lengths
            self._banks[layer] = _expert_bank(layout, arrays)

    def views(self, layer: int, slot: int) -> Sequence[memoryview]:
        """Return the writable bytes of one slot, a view per component. Called on reader threads."""
        return [
            view[slot * length : (slot + 1) * length]
            for view, length in zip(self._views[layer], self._lengths[layer], strict=True)
        ]

    def bank(self, layer: int) -> ExpertBank:
        """Return the arrays of a layer as the expert kernels take them."""
        return self._banks[layer]

    @property
    def num_bytes(self) -> int:
        """Return the size of all banks."""
        return sum(array.nbytes for arrays in self._arrays.values() for array in arrays)


class RowBanks(RowMemory):
    """Landing buffers for n-gram rows, used in turn: rows of one chunk land while the last one computes.

    Args:
        layout: stored form of the table.
        rows_per_buffer: most distinct rows of one block.
    """

    def __init__(self, layout: NgramLayout, rows_per_buffer: int) -> None:
        self._rows_per_buffer = rows_per_buffer
        self._lengths = layout.record.component_lengths
        self._arrays = [
            tuple(
                _bank_array(f"n-gram {component.name}", (rows_per_buffer, *component.shape), component.dtype)
                for component in layout.components
            )
            for _ in range(NUM_ROW_BUFFERS)
        ]
        self._views = [tuple(array_memory(array) for array in arrays) for arrays in self._arrays]

    @property
    def num_buffers(self) -> int:
        """Return how many batches may be alive at a time."""
        return NUM_ROW_BUFFERS

    @property
    def rows_per_buffer(self) -> int:
        """Return the most distinct rows of one batch."""
        return self._rows_per_buffer

    def row_views(self, buffer: int, index: int) -> Sequence[memoryview]:
        """Return the writable bytes of one row, a view per component. Called on reader threads."""
        return [
            view[index * length : (index + 1) * length]
            for view, length in zip(self._views[buffer], self._lengths, strict=True)
        ]

    def arrays(self, buffer: int) -> tuple[mx.array, ...]:
        """Return a buffer's component arrays."""
        return self._arrays[buffer]


def _bank_array(name: str, shape: tuple[int, ...], dtype: str) -> mx.array:
    if dtype not in IN_BANKS:
        raise UnsupportedCheckpoint(
            f"Experts of type {dtype} cannot be computed: {name}",
            hint="use a BF16, FP8 or MLX quantised checkpoint",
            dtype=dtype,
        )
    array = mx.zeros(shape, IN_BANKS[dtype])
    if array.size >= MAX_BANK_ELEMENTS or array.nbytes >= MAX_BANK_BYTES:
        raise UnsupportedCheckpoint(
            f"One slot tensor would be {array.nbytes} bytes, {name}: the limit is {MAX_BANK_BYTES}",
            hint="ask for fewer slots with a smaller --memory",
        )
    mx.eval(array)  # zero-filled pages now: a bank that does not fit fails at start, not at token 300
    return array


def _expert_bank(layout: ExpertLayout, arrays: Sequence[mx.array]) -> ExpertBank:
    by_name = {component.name: array for component, array in zip(layout.components, arrays, strict=True)}

    def matrix(projection: Projection) -> ExpertMatrix:
        return ExpertMatrix(
            weight=by_name[f"{projection}_proj.weight"],
            scales=by_name.get(f"{projection}_proj.scales", by_name.get(f"{projection}_proj.{BLOCK_SCALES}")),
            biases=by_name.get(f"{projection}_proj.biases"),
            spec=layout.specs[projection],
        )

    return ExpertBank(gate=matrix("gate"), up=matrix("up"), down=matrix("down"))
