"""Experts and n-gram rows as the model asks for them, from memory or from the SSD.

`StreamedExperts` and `ResidentExperts` implement `model.moe.ExpertProvider` and agree bit for bit;
`StreamedRows` implements `model.ple.RowSource`. This is the only file where bytes of the store become
tensors of the model.

Invariants
    B1  A bank array is made once with `mx.zeros`, evaluated, and never assigned to, never given to an
        in-place operator and never put into a module tree: its memoryview would point at freed memory.
    B2  A slot is refilled only after the host has seen the end of the last graph that named it (T5). A
        read-back of layer m's ids proves that for every layer before m; `device_idle` says it for all.
    B3  A bank array stays below 2^31 elements and 4 GiB: MLX shapes are 32-bit.
    B4  Pair outputs never depend on which experts were resident, in which slot they lay, or how a block was
        split.

Measured basis: zero-copy banks, in-place `preadv`, the hazards above: MLX 0.32.4 on the CPU backend.
"""

# Shapes: T positions, K experts per token, P pairs (T * K), D hidden, E experts, S slots, N n-gram heads.

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from expert_store.lease import Lease
from expert_store.reader import RowMemory, SlotMemory
from expert_store.rows import RowBatch, RowTable
from expert_store.source import ByteSource
from expert_store.store import ExpertStore
from mlx_flashnext.checkpoint import ExpertLayout, NgramLayout, Projection
from mlx_flashnext.errors import UnsupportedCheckpoint
from mlx_flashnext.model.host import HostSync, fence
from mlx_flashnext.model.quant import ExpertBank, ExpertMatrix, dequantize_rows, expert_glu
from mlx_flashnext.stored_numbers import NATIVE, array_memory

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


def _bank_array(name: str, shape: tuple[int, ...], dtype: str) -> mx.array:
    if dtype not in NATIVE:
        raise UnsupportedCheckpoint(
            f"Experts of type {dtype} cannot be computed: {name}",
            hint="use a BF16 or MLX quantised checkpoint",
            dtype=dtype,
        )
    array = mx.zeros(shape, NATIVE[dtype])
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
            scales=by_name.get(f"{projection}_proj.scales"),
            biases=by_name.get(f"{projection}_proj.biases"),
            spec=layout.specs[projection],
        )

    return ExpertBank(gate=matrix("gate"), up=matrix("up"), down=matrix("down"))


class ResidentExperts:
    """All experts of all layers in memory: the reference path, and what a large machine runs.

    Args:
        layouts: stored form of each layer's experts.
        source: where their bytes are.
        progress: called with (records read, records in all).
    """

    def __init__(
        self,
        layouts: Mapping[int, ExpertLayout],
        source: ByteSource,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        counts = {layer: layout.record.num_experts for layer, layout in layouts.items()}
        self._banks = SlotBanks(layouts, counts)
        total, done = sum(counts.values()), 0
        for layer, layout in layouts.items():
            for expert in range(counts[layer]):
                views = self._banks.views(layer, expert)
                for read in layout.record.reads(expert):
                    source.read_into(read.file, read.offset, views[read.first : read.end])
                done += 1
                if progress is not None:
                    progress(done, total)

    def is_resident(self, layer: int) -> bool:
        """Return True: slot and expert are the same number everywhere."""
        del layer
        return True

    def run(self, layer: int, x_TD: mx.array, ids_TK: mx.array) -> mx.array:
        """Return every pair's expert output.

        Args:
            layer: layer index.
            x_TD: expert inputs.
            ids_TK: expert ids on the device.

        Returns:
            y_TKD in float32, pairs in the order of `ids_TK`.
        """
        return expert_glu(x_TD, ids_TK, self._banks.bank(layer))


class StreamedExperts:
    """Experts computed from slots that the store fills on demand.

    One read-back of ids per layer (by `model.moe`), one hand-over to the store, one gathered product per
    projection. A block whose union of experts exceeds the slots is run in groups of experts, each expert
    read once; the pair outputs are put back in order before they are summed, so groups never show in the
    result (B4).

    Args:
        store: the expert store over the same layouts.
        banks: the slot tensors the store writes into.
        slots: S of each layer.
        sync: counter of waits for the device.

    Attributes:
        owner: ticket owner of the demands to come; the timeline that runs a block sets it.
    """

    def __init__(
        self, store: ExpertStore, banks: SlotBanks, slots: Mapping[int, int], sync: HostSync
    ) -> None:
        self._store = store
        self._banks = banks
        self._slots = dict(slots)
        self._sync = sync
        self.owner = 0
        self._identity: set[int] = set()
        self._held: list[Lease] = []

    def preload(self, layers: Sequence[int], progress: Callable[[int, int], None] | None = None) -> None:
        """Fill layers whose slots hold every expert, slot by expert, so that they need no read-back.

        Args:
            layers: layers with as many slots as experts.
            progress: called with (layers done, layers in all).
        """
        for done, layer in enumerate(layers, start=1):
            self._store.preload(layer)
            self._identity.add(layer)
            if progress is not None:
                progress(done, len(layers))

    def is_resident(self, layer: int) -> bool:
        """Return whether slot and expert are the same number, so that ids may stay on the device."""
        return layer in self._identity

    def run(self, layer: int, x_TD: mx.array, ids_TK: mx.array | Sequence[Sequence[int]]) -> mx.array:
        """Return every pair's expert output, reading what is missing.

        Args:
            layer: layer index.
            x_TD: expert inputs.
            ids_TK: expert ids, on the device for a resident layer, else on the host.

        Returns:
            y_TKD in float32, pairs in the order of `ids_TK`.

        Raises:
            StoreError: a record could not be read; nothing was substituted.
        """
        if isinstance(ids_TK, mx.array):
            return expert_glu(x_TD, ids_TK, self._banks.bank(layer))
        self.device_idle()  # these ids were computed from the outputs of every layer before this one (B2)
        union = sorted({expert for row in ids_TK for expert in row})
        if len(union) <= self._slots[layer]:
            lease = self._store.acquire(layer, union, owner=self.owner)
            self._held.append(lease)
            slot_of = dict(zip(lease.experts, lease.slots, strict=True))
            slots_TK = mx.array([[slot_of[expert] for expert in row] for row in ids_TK], mx.uint32)
            return expert_glu(x_TD, slots_TK, self._banks.bank(layer))
        return self._run_in_groups(layer, x_TD, ids_TK, union)

    def device_idle(self) -> None:
        """End every lease held: the host has just seen the end of all graphs that named their slots."""
        for lease in self._held:
            lease.release()
        self._held.clear()

    def _run_in_groups(
        self, layer: int, x_TD: mx.array, ids_TK: Sequence[Sequence[int]], union: Sequence[int]
    ) -> mx.array:
        """Visit the union in file order, half the slots at a time: one half loads, the other computes."""
        half = self._slots[layer] // 2
        groups = [union[start : start + half] for start in range(0, len(union), half)]
        top_k = len(ids_TK[0])
        pairs_of: dict[int, list[int]] = {expert: [] for expert in union}
        for position, row in enumerate(ids_TK):
            for rank, expert in enumerate(row):
                pairs_of[expert].append(position * top_k + rank)

        outputs: list[mx.array] = []
        visited: list[int] = []
        request = self._store.request(layer, groups[0], owner=self.owner)
        try:
            for later in [*groups[1:], None]:
                with request.wait() as lease:
                    pairs = [pair for expert in lease.experts for pair in pairs_of[expert]]
                    y_PD = self._run_pairs(layer, x_TD, lease, pairs_of, [pair // top_k for pair in pairs])
                    mx.async_eval(y_PD)
                    if later is not None:
                        request = self._store.request(layer, later, owner=self.owner)
                    fence(
                        self._sync, y_PD
                    )  # the lease ends here: the graph that named its slots has run (B2)
                outputs.append(y_PD)
                visited.extend(pairs)
        finally:
            request.cancel()  # drops pins if a wait was interrupted; a finished lease stays finished
        place_P = mx.argsort(mx.array(visited, mx.int32))
        return mx.concatenate(outputs)[place_P].reshape(len(ids_TK), top_k, -1)

    def _run_pairs(
        self, layer: int, x_TD: mx.array, lease: Lease, pairs_of: Mapping[int, Sequence[int]], rows: list[int]
    ) -> mx.array:
        """Return y_PD of the pairs of a lease's experts, expert by expert."""
        slots_P1 = [
            [slot] for expert, slot in zip(lease.experts, lease.slots, strict=True) for _ in pairs_of[expert]
        ]
        x_PD = x_TD[mx.array(rows, mx.int32)]
        return expert_glu(x_PD, mx.array(slots_P1, mx.uint32), self._banks.bank(layer))[:, 0]


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


class StreamedRows:
    """Rows of the n-gram table, read when token ids are known and waited for only where the model needs them.

    Args:
        table: gathers rows into `banks`.
        banks: where they land.
        layout: stored form of the table.
        dtype: type the rows are computed in.
    """

    def __init__(self, table: RowTable, banks: RowBanks, layout: NgramLayout, dtype: mx.Dtype) -> None:
        self._table = table
        self._banks = banks
        self._layout = layout
        self._dtype = dtype

    def issue(self, rows_TN: Sequence[Sequence[int]]) -> "PendingNgramRows":
        """Start reading the rows of a block and return at once.

        Args:
            rows_TN: table rows of each position and head.
        """
        batch = self._table.gather([row for rows in rows_TN for row in rows])
        return PendingNgramRows(self, batch, len(rows_TN), len(rows_TN[0]))

    def assemble(self, batch: RowBatch, num_positions: int, num_heads: int) -> mx.array:
        """Return the landed rows as [T, N, width] in the compute type."""
        index = mx.array(list(batch.index), mx.int32)
        parts = [array[index] for array in self._banks.arrays(batch.buffer)]
        rows = dequantize_rows(parts, self._layout.spec, self._dtype)
        return rows.reshape(num_positions, num_heads, -1)


class PendingNgramRows:
    """Rows of one block on their way."""

    def __init__(self, rows: StreamedRows, batch: RowBatch, num_positions: int, num_heads: int) -> None:
        self._rows = rows
        self._batch = batch
        self._shape = (num_positions, num_heads)

    def wait(self) -> mx.array:
        """Wait for the reads and return rows [T, N, width].

        Raises:
            StoreError: a row could not be read.
        """
        self._batch.wait()
        return self._rows.assemble(self._batch, *self._shape)
