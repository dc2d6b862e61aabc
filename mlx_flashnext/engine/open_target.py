"""A target that decodes: trunk in memory, experts and rows behind their tables. Entry: `open_target`."""

import contextlib
from collections.abc import Callable

import mlx.core as mx

from expert_store.prefetch import PrefetchLimits
from expert_store.rows import RowTable
from expert_store.source import ByteSource
from expert_store.store import ExpertStore
from mlx_flashnext.banks import RowBanks, SlotBanks
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.engine.cycle import Target
from mlx_flashnext.engine.machine import Machine
from mlx_flashnext.engine.plan import Plan
from mlx_flashnext.experts import StreamedExperts
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.rows import StreamedRows, row_readers
from mlx_flashnext.weights import CheckpointWeights

Progress = Callable[[str, int, int], None]


def silent(_stage: str, _done: int, _total: int) -> None:
    """Report nothing."""


def open_target(
    checkpoint: Checkpoint,
    source: ByteSource,
    plan: Plan,
    machine: Machine,
    resources: contextlib.ExitStack,
    progress: Progress,
) -> tuple[Target, CheckpointWeights]:
    """Read the trunk, make slots and row buffers, and start their readers.

    Args:
        checkpoint: what is opened.
        source: its files; the caller closes it after `resources`.
        plan: what fits.
        machine: says the type of activations.
        resources: closes what was started.
        progress: called with a stage, how much of it is done, and how much there is.

    Raises:
        StoreError: a read failed.
        CheckpointError: a tensor is not what the configuration says.
    """
    dtype = mx.bfloat16 if machine.compute_dtype == "bfloat16" else mx.float32
    weights = CheckpointWeights(
        checkpoint, source, compute_dtype=dtype, progress=lambda done, total: progress("trunk", done, total)
    )
    layouts = checkpoint.expert_layouts(mtp=plan.draft == "mtp")
    slots = dict.fromkeys(layouts, plan.slots_per_layer)
    banks = SlotBanks(layouts, slots)
    records = {layer: layout.record for layer, layout in layouts.items()}
    # Guesses leave each layer what the widest block can ask of it at once, or half its slots where that is
    # less: a demand takes the others back, it waits for what is on the wire alone.
    widest = checkpoint.config.num_experts_per_tok * (plan.num_draft_tokens + 1)
    kept = min(widest, (plan.slots_per_layer + 1) // 2)
    store = ExpertStore(
        records,
        source,
        banks,
        slots=slots,
        policy=plan.policy,
        num_readers=plan.num_readers,
        limits=PrefetchLimits(max_queued=max(1024, sum(slots.values())), min_exact_slots=kept),
    )
    resources.callback(store.close)
    row_banks = RowBanks(checkpoint.ngram, plan.rows_per_buffer)
    num_row_readers = row_readers(checkpoint.config, plan.num_readers)
    table = RowTable(
        checkpoint.ngram.record,
        source,
        row_banks,
        num_readers=num_row_readers,
        when_idle=store.resume_guesses,
    )
    store.give_way_to(lambda: table.is_busy)
    resources.callback(table.close)
    sync = HostSync()
    experts = StreamedExperts(store, banks, slots, sync)
    rows = StreamedRows(table, row_banks, checkpoint.ngram, dtype, weights.ngram_scale())
    model = FlashNext(checkpoint.config, weights, experts, rows, sync, compute_dtype=dtype)
    if plan.is_resident:
        experts.preload(tuple(slots), lambda done, total: progress("experts", done, total))
    return Target(model, experts, store, rows, sync), weights
