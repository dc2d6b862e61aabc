"""Experts as the model asks for them: all in memory, or streamed through slots.

`StreamedExperts` and `ResidentExperts` implement `model.moe.ExpertProvider` and agree bit for bit.

Invariants
    B2  A slot is refilled only after the host has seen the end of the last graph that named it (T5). A
        read-back of layer m's ids proves that for every layer before m; `device_idle` says it for all.
    B4  Pair outputs never depend on which experts were resident, in which slot they lay, or how a block was
        split.
"""

# Shapes: T positions, K experts per token, P pairs (T * K), D hidden, E experts, S slots.

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from expert_store.keys import Prefetch
from expert_store.lease import Lease
from expert_store.prefetch import NO_OUTLOOK
from expert_store.source import ByteSource
from expert_store.store import ExpertStore
from mlx_flashnext.banks import SlotBanks
from mlx_flashnext.checkpoint import ExpertLayout
from mlx_flashnext.model.host import HostSync, fence
from mlx_flashnext.model.moe import LookAhead
from mlx_flashnext.model.quant import expert_glu


class HandOver(NamedTuple):
    """What to read ahead.

    Attributes:
        hints: for the store, in any order.
        passes_ahead: how many passes after the running one they stay good for.
        outlook: how likely the running pass wants each expert of a layer; see `ExpertStore.prefetch`.
    """

    hints: Sequence[Prefetch] = ()
    passes_ahead: int = 0
    outlook: Mapping[int, memoryview] = NO_OUTLOOK


class RouteListener(Protocol):
    """Hears what streamed layers choose, and says what to read ahead. Moves bytes, decides nothing (I1)."""

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        """Return who is to guess later layers while this one runs."""
        ...

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> None:
        """Take what one of them said of a layer."""
        ...

    def routed(self, layer: int, ids_TK: Sequence[Sequence[int]]) -> HandOver:
        """Take a layer's true choice, whose exact reads are queued by now; say what to read ahead."""
        ...

    def accepted(self, hints: Sequence[Prefetch]) -> None:
        """Hear which hints of the last hand-over have led to reads."""
        ...


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

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        """Return nobody: nothing is read ahead."""
        del layer
        return ()

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> None:
        """Do nothing."""

    def device_busy(self) -> None:
        """Do nothing."""

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
        owner: ticket owner of the demands to come; the timeline that runs a block sets it, and the rest.
        generation: of the owner.
        num_unverified: rows of the block that may still be rejected, 0 if none can be.
        listener: hears the routes of the block, if anybody does.
    """

    def __init__(
        self, store: ExpertStore, banks: SlotBanks, slots: Mapping[int, int], sync: HostSync
    ) -> None:
        self._store = store
        self._banks = banks
        self._slots = dict(slots)
        self._sync = sync
        self.owner = 0
        self.generation = 0
        self.num_unverified = 0
        self.listener: RouteListener | None = None
        self._identity: set[int] = set()
        self._held: list[Lease] = []
        self._untold: tuple[int, Sequence[Sequence[int]]] | None = None

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

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        """Return who is to guess later layers while this one runs.

        Where either layer is resident nothing is read back, or nothing can be read ahead.
        """
        if self.listener is None or layer in self._identity:
            return ()
        asked = self.listener.looks_ahead(layer)
        if not self._identity:
            return asked
        return [who for who in asked if layer + who.layers_ahead not in self._identity]

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> None:
        """Pass on what a layer yet to come will probably choose."""
        if self.listener is not None:
            self.listener.expect(layer, ids_TN)

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
            self._untold = None if self.listener is None else (layer, ids_TK)
            lease = self._store.acquire(
                layer,
                union,
                owner=self.owner,
                row_masks=self._row_masks(union, ids_TK),
                meanwhile=self._tell_untold,
            )
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

    def device_busy(self) -> None:
        """Let the listener hear a layer's choice whose reads nobody had to wait for."""
        self._tell_untold()

    def end_pass(self) -> None:
        """End a pass: nobody listens any more, to what was put off either."""
        self.listener = self._untold = None
        self.num_unverified = 0

    def hand_over(self, ahead: HandOver) -> None:
        """Give hints to the store: at most one hand-over, never a wait."""
        if ahead.hints or ahead.outlook:
            generation = self.generation + ahead.passes_ahead
            issued: list[Prefetch] = []
            self._store.prefetch(
                ahead.hints, owner=self.owner, generation=generation, issued=issued, outlook=ahead.outlook
            )
            if self.listener is not None:
                self.listener.accepted(issued)

    def _tell_untold(self) -> None:
        if self._untold is not None:
            (layer, ids_TK), self._untold = self._untold, None
            self._tell(layer, ids_TK)

    def _tell(self, layer: int, ids_TK: Sequence[Sequence[int]]) -> None:
        """Let the listener hear a layer's choice and hand over what it says."""
        if self.listener is not None:
            self.hand_over(self.listener.routed(layer, ids_TK))

    def _row_masks(self, union: Sequence[int], ids_TK: Sequence[Sequence[int]]) -> list[int] | None:
        """Return which rows of an unverified block chose each expert; None where all rows stay."""
        if not self.num_unverified:
            return None
        masks = dict.fromkeys(union, 0)
        for row, experts in enumerate(ids_TK):
            for expert in experts:
                masks[expert] |= 1 << row
        return list(masks.values())

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
            self._tell(layer, ids_TK)
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
