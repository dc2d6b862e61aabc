"""Bytes of everything a run keeps, as functions of context, expert slots and snapshots.

Entry point: `Sizes`. `plan.make_plan` chooses the three so that their sum fits.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from drafter.lookup import BYTES_PER_TOKEN
from mlx_flashnext.banks import MAX_BANK_BYTES, MAX_BANK_ELEMENTS, NUM_ROW_BUFFERS
from mlx_flashnext.checkpoint import BLOCK_SCALES, Checkpoint, Component, ExpertLayout
from mlx_flashnext.engine.machine import MIB, Machine
from mlx_flashnext.engine.rested import MOST_ROWS
from mlx_flashnext.geometry import (
    FLOAT32_BYTES,
    block_bytes,
    buffer_rows,
    forward_workspace_bytes,
    qsa_layer_bytes,
    state_bytes,
)
from mlx_flashnext.model.quant import WIDEN_GROUPS, WIDEN_PAIRS
from mlx_flashnext.weights import STAGING_BYTES

# One header entry costs about 700 bytes as a Python object: 152 thousand tensors of the FP8 layout, measured.
INDEX_BYTES_PER_TENSOR = 700
# One row of logits while it is judged: penalised, sorted, cumulated, filtered, p, p less q; 9.5 measured.
LOGITS_COPIES = 10


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One use of memory: bytes and why."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class DraftBytes:
    """What a draft of one's own takes.

    Attributes:
        weights: bytes of its parameters.
        context: bytes of one sequence's rows, however long it is.
        feature_width: values of the target that it reads of every row.
        max_proposals: tokens it can propose.
        context_per_token: bytes of layers that keep every token, doubled: they are copied while they grow.
        snapshot, snapshot_per_token: bytes that a snapshot of the conversation holds for it.
        candidates: bytes of a proposal's logits and candidates.
        scratch, scratch_per_token: bytes of a pass over a block.
        scratch_per_row: bytes of one row of a chunk on its way into the context.
    """

    weights: int
    context: int
    feature_width: int
    max_proposals: int
    context_per_token: int = 0
    snapshot: int = 0
    snapshot_per_token: int = 0
    candidates: int = 0
    scratch: int = 0
    scratch_per_token: int = 0
    scratch_per_row: int = 0


class Sizes:
    """Bytes of everything, as functions of context, slots and snapshots.

    Args:
        checkpoint: headers of the model.
        machine: what there is.
        prefill_step: tokens of one prefill chunk; None for the machine's own.
        draft: where proposals come from: `none`, `lookup`, `mtp` (whose parts are there), `dflash2` or
            `oracle`.
        num_draft_tokens: proposals of one cycle.
        own: what the draft takes, for `dflash2`.
        hint_bytes: what trained hints take.

    Attributes:
        fewest_slots: expert slots of a layer without which no token can be computed.
        slot_limit: the most that one array of this machine holds.
        prefill_step: tokens of one prefill chunk.
        rows_per_buffer: most n-gram rows of one block.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        machine: Machine,
        *,
        prefill_step: int | None,
        draft: str,
        num_draft_tokens: int,
        own: DraftBytes | None = None,
        hint_bytes: int = 0,
    ) -> None:
        self._checkpoint = checkpoint
        self._own = own
        self._hint_bytes = hint_bytes
        self._draft = draft
        self._num_draft_tokens = num_draft_tokens
        self._machine = machine
        config = checkpoint.config
        self._config = config
        self._itemsize = 2 if machine.compute_dtype == "bfloat16" else 4
        self.fewest_slots = max(2, config.num_experts_per_tok)
        self.prefill_step = prefill_step or machine.prefill_step
        # The longest block: a prefill chunk, or the anchor and its proposals.
        self.rows_per_buffer = max(self.prefill_step, num_draft_tokens + 1) * checkpoint.ngram.num_heads
        self._vocabulary = sum(
            tensor.loaded_bytes(self._itemsize)
            for name, tensor in checkpoint.tensors.items()
            if name in ("embed_tokens", "lm_head")
        )
        everything = sum(tensor.loaded_bytes(self._itemsize) for tensor in checkpoint.tensors.values())
        self._trunk = everything - self._vocabulary
        self._rows = NUM_ROW_BUFFERS * self.rows_per_buffer * checkpoint.ngram.record_bytes
        self._index = INDEX_BYTES_PER_TENSOR * len(checkpoint.table.tensors)
        self._record_bytes = sum(layout.record.record_bytes for layout in checkpoint.experts.values())
        self._mtp_weights = self._mtp_record = 0
        if draft == "mtp" and checkpoint.mtp_experts is not None:
            self._mtp_weights = sum(one.loaded_bytes(self._itemsize) for one in checkpoint.mtp.values())
            self._mtp_record = checkpoint.mtp_experts.record.record_bytes
        layouts = checkpoint.expert_layouts(mtp=draft == "mtp").values()
        self.slot_limit = min(config.num_experts, *(_slot_limit(layout, machine) for layout in layouts))
        self._widened_per_slot = max(_widened_per_slot(layout, self._itemsize) for layout in layouts)
        self._widened_pairs = max(_widened_pairs_bytes(layout, self._itemsize) for layout in layouts)

    def _state(self, context: int) -> int:
        growing = qsa_layer_bytes(self._config, buffer_rows(context, None), self._itemsize)
        return state_bytes(self._config, context, self._itemsize).total + growing

    def _workspace(self, context: int) -> int:
        rows = self._num_draft_tokens + 1
        sampling = LOGITS_COPIES * self._config.vocab_size * FLOAT32_BYTES
        # Every row of a verified block has logits, and a token is drawn from each.
        chunk = self._block(self.prefill_step, context, revocable=False) + sampling
        verified = self._block(rows, context, revocable=True) + rows * sampling
        return max(chunk, verified, STAGING_BYTES)

    def _block(self, num_rows: int, context: int, *, revocable: bool) -> int:
        """Return what one block holds beside the state, computed and kept until it is committed."""
        computed = forward_workspace_bytes(self._config, num_rows, context, self._itemsize)
        return computed + block_bytes(self._config, num_rows, self._itemsize, revocable=revocable)

    def _snapshot(self, context: int) -> int:
        """Return the bytes of one: keys and values are shared with the state, what is rewritten is not."""
        state = state_bytes(self._config, 0, self._itemsize)
        own = self._own if self._draft == "dflash2" else None
        drafted = own.snapshot + context * own.snapshot_per_token if own is not None else 0
        return state.recurrent + state.ple + drafted

    def _draft_line(self, context: int, slots: int) -> list[PlanLine]:
        if self._draft == "lookup":
            size = BYTES_PER_TOKEN * (context + 1)
            return [PlanLine("draft", size, f"lookup: an index of the text, {context} tokens")]
        if self._draft == "mtp":
            cache = qsa_layer_bytes(self._config, buffer_rows(context, None), self._itemsize)
            # Rows of a rest are in one array beside their own when the drafter is told of them.
            rested = 2 * MOST_ROWS * self._config.stack_size * self._itemsize
            size = self._mtp_weights + slots * self._mtp_record + cache + rested
            why = f"mtp: its weights, {slots} experts, its keys and values, rows it is told of later"
            return [PlanLine("draft", size, why)]
        if self._draft == "dflash2" and self._own is not None:
            return self._own_lines(self._own, context)
        return []

    def _own_lines(self, own: DraftBytes, context: int) -> list[PlanLine]:
        rows = max(self.prefill_step, self._num_draft_tokens + 1)
        # Each tap's rows, and all of them side by side.
        features = 2 * rows * own.feature_width * self._itemsize
        scratch = max(own.scratch + context * own.scratch_per_token, rows * own.scratch_per_row)
        rings = own.context + context * own.context_per_token
        return [
            PlanLine("draft weights", own.weights, "dflash2: its parameters; it borrows embedding and head"),
            PlanLine("draft context", rings, "keys, values and fused rows of what it looks back on"),
            PlanLine("draft features", features, f"what it reads of the target, {rows} rows"),
            PlanLine(
                "draft candidates", own.candidates, f"logits of {own.max_proposals} slots and their best"
            ),
            PlanLine("draft scratch", scratch, "intermediate arrays of its passes"),
        ]

    def lines(self, context: int, slots: int, num_snapshots: int = 0) -> tuple[PlanLine, ...]:
        """Return every use of memory, with its reason."""
        config, machine = self._config, self._machine
        chunk = f"chunks of {self.prefill_step} tokens"
        lines = [
            PlanLine(
                "imports", machine.imports_bytes, "Python and libraries, measured before anything is loaded"
            ),
            PlanLine("index", self._index, f"{len(self._checkpoint.table.tensors)} tensors in the headers"),
            PlanLine(
                "trunk", self._trunk, f"{config.num_hidden_layers} layers without routed experts, as computed"
            ),
            PlanLine(
                "vocabulary",
                self._vocabulary,
                f"embedding and head, {config.vocab_size} x {config.hidden_size} each",
            ),
            PlanLine(
                "state",
                self._state(context),
                f"keys, values, recurrence for {context} tokens; one layer twice, while it grows",
            ),
            PlanLine(
                "snapshots",
                num_snapshots * self._snapshot(context),
                f"{num_snapshots} earlier points of the conversation to go back to"
                if num_snapshots
                else "none are kept",
            ),
            PlanLine(
                "workspace", self._workspace(context), f"intermediate arrays of a forward pass in {chunk}"
            ),
            PlanLine("n-gram rows", self._rows, f"two landing buffers of {self.rows_per_buffer} rows"),
            PlanLine("mlx cache", machine.cache_bytes, "freed buffers that MLX may keep"),
            PlanLine(
                "expert slots",
                slots * self._record_bytes,
                f"{slots} of {config.num_experts} experts in each of {len(self._checkpoint.experts)} layers",
            ),
            *self._draft_line(context, slots),
        ]
        if self._hint_bytes:
            lines.append(PlanLine("route hints", self._hint_bytes, "trained maps of what to read ahead"))
        widened = slots * self._widened_per_slot + self._widened_pairs
        if widened:
            reason = "expert parts of one layer brought to the type they are computed in"
            lines.append(PlanLine("widening", widened, reason))
        subtotal = sum(line.bytes for line in lines)
        lines.append(PlanLine("reserve", _reserve(subtotal), "threads, allocator slack, what nobody counted"))
        return tuple(lines)

    def total(self, context: int, slots: int, num_snapshots: int = 0) -> int:
        """Return the sum of the lines: it grows with each of the three."""
        return sum(line.bytes for line in self.lines(context, slots, num_snapshots))

    def most_slots(self, budget: int, context: int, num_snapshots: int) -> int:
        """Return the largest number of slots that fits beside the others, 0 if none does."""
        return _largest(self.slot_limit, budget, lambda slots: self.total(context, slots, num_snapshots))

    def most_snapshots(self, budget: int, context: int, slots: int, asked: int) -> int:
        """Return how many snapshots of those asked for fit beside the others; 0 if none does."""
        return _largest(asked, budget, lambda count: self.total(context, slots, count))

    def largest_context(self, budget: int, slots: int) -> int:
        """Return the largest context that fits beside `slots`, 0 if none does."""
        longest = self._config.max_position_embeddings
        return _largest(longest, budget, lambda context: self.total(context, slots))


def _largest(most: int, budget: int, total: Callable[[int], int]) -> int:
    """Return the largest number from 1 to `most` whose total is within the budget, 0 if there is none."""
    return bisect_right(range(1, most + 1), budget, key=total)


def _slot_limit(layout: ExpertLayout, machine: Machine) -> int:
    """Return how many slots the largest slot tensor of a layer may have on this machine."""
    most_bytes = min(machine.max_buffer_bytes or MAX_BANK_BYTES, MAX_BANK_BYTES) - 1
    lengths = layout.record.component_lengths
    shapes = (math.prod(part.shape) for part in layout.components)
    return min(
        min(most_bytes // length, (MAX_BANK_ELEMENTS - 1) // size)
        for length, size in zip(lengths, shapes, strict=True)
    )


def _widened_per_slot(layout: ExpertLayout, itemsize: int) -> int:
    """Return the temporary bytes per slot that MLX takes to bring a layer's scales to the compute type."""
    # With scales in float32, MLX widens the activations instead; float16 and bfloat16 meet in float32.
    mixed = ("F16",) if itemsize == 2 else ("BF16", "F16")
    narrow = (part for part in layout.components if part.dtype in mixed and _is_scale(part))
    return sum(FLOAT32_BYTES * math.prod(part.shape) for part in narrow)


def _widened_pairs_bytes(layout: ExpertLayout, itemsize: int) -> int:
    """Return the temporary bytes of unquantised matrices that are brought to the compute type."""
    native = "BF16" if itemsize == 2 else "F32"
    dense = [part for part in layout.components if not _is_scale(part) and part.dtype not in ("U32", native)]
    largest = max((math.prod(part.shape) for part in dense), default=0)
    # As stored, in float32 and as computed, of every group of pairs that is under way.
    return WIDEN_GROUPS * WIDEN_PAIRS * largest * (itemsize + FLOAT32_BYTES)


def _is_scale(part: Component) -> bool:
    return part.name.endswith((".scales", ".biases", BLOCK_SCALES))


def _reserve(subtotal: int) -> int:
    return max(8 * MIB, subtotal // 50)
