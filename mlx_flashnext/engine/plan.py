"""How many bytes anything may use: one table, decided before anything is allocated (invariant I6).

`make_plan` is a pure function of the checkpoint's headers, the machine and the request. Components receive
bytes and slots from the plan; none sizes itself. A plan that does not fit is refused with the smallest
budget that would.
"""

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass

from mlx_flashnext.banks import MAX_BANK_BYTES, MAX_BANK_ELEMENTS, NUM_ROW_BUFFERS
from mlx_flashnext.checkpoint import Checkpoint, Component, ExpertLayout
from mlx_flashnext.engine.errors import BudgetTooLarge, BudgetTooSmall, ContextTooLong, InvalidRequest
from mlx_flashnext.engine.machine import GIB, MIB, Machine
from mlx_flashnext.geometry import (
    FLOAT32_BYTES,
    buffer_rows,
    forward_workspace_bytes,
    qsa_layer_bytes,
    state_bytes,
)
from mlx_flashnext.model.quant import WIDEN_PAIRS
from mlx_flashnext.weights import STAGING_BYTES

MAX_READERS = 256
DEFAULT_CONTEXT = 32_768
SMALLEST_DEFAULT_CONTEXT = 2_048
# One header entry costs about 700 bytes as a Python object: 152 thousand tensors of the FP8 layout, measured.
INDEX_BYTES_PER_TENSOR = 700
# One row of logits while a token is drawn: penalised, sorted, its order, cumulated, filtered.
LOGITS_COPIES = 6


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a person asked for; None leaves the choice to the plan.

    Attributes:
        memory_bytes: total resident target of the process.
        context_tokens: tokens that prompt and answer may have together.
        slots_per_layer: expert slots of every layer, instead of as many as fit.
        prefill_step: tokens of one prefill chunk.
        policy: eviction policy of the expert store.
        num_readers: reader threads.
    """

    memory_bytes: int | None = None
    context_tokens: int | None = None
    slots_per_layer: int | None = None
    prefill_step: int | None = None
    policy: str = "lru"
    num_readers: int | None = None


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One use of memory: bytes and why."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of one run, line by line.

    Attributes:
        lines: every use of memory; they sum to `total_bytes`.
        budget_bytes: the resident target the plan was made for.
        slots_per_layer: expert slots of every MoE layer.
        num_experts: experts of every MoE layer; equal slots mean that nothing is streamed after start.
        context_tokens: tokens that prompt and answer may have together.
        max_context_tokens: the largest context these slots leave room for.
        longest_context_tokens: the largest context any number of slots leaves room for.
        smallest_budget_bytes: the least budget that runs this context, with the fewest slots.
        prefill_step: tokens of one prefill chunk.
        rows_per_buffer: most n-gram rows of one chunk.
        policy: eviction policy.
        num_readers: reader threads.
    """

    lines: tuple[PlanLine, ...]
    budget_bytes: int
    slots_per_layer: int
    num_experts: int
    context_tokens: int
    max_context_tokens: int
    longest_context_tokens: int
    smallest_budget_bytes: int
    prefill_step: int
    rows_per_buffer: int
    policy: str
    num_readers: int

    @property
    def total_bytes(self) -> int:
        """Return the planned resident size of the process."""
        return sum(line.bytes for line in self.lines)

    @property
    def is_resident(self) -> bool:
        """Return whether every expert has its own slot."""
        return self.slots_per_layer == self.num_experts

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain values, sizes in bytes."""
        return {**asdict(self), "total_bytes": self.total_bytes, "is_resident": self.is_resident}


def make_plan(checkpoint: Checkpoint, machine: Machine, request: PlanRequest) -> Plan:
    """Decide the memory of a run.

    Args:
        checkpoint: headers of the model; no tensor is read.
        machine: what there is.
        request: what was asked.

    Returns:
        The plan; its total is at most its budget.

    Raises:
        InvalidRequest: a value that no run could honour.
        BudgetTooLarge: the target exceeds this machine's memory.
        BudgetTooSmall: the target cannot hold the model; names the smallest that can.
        ContextTooLong: the asked context is longer than the model's positions.
    """
    _check(request, checkpoint, machine)
    sizes = _Sizes(checkpoint, machine, request)
    budget = machine.ceiling_bytes() if request.memory_bytes is None else request.memory_bytes
    num_experts, fewest = checkpoint.config.num_experts, sizes.fewest_slots
    context = sizes.context_for(budget, request.context_tokens)
    smallest = sizes.total(context, fewest)
    slots = request.slots_per_layer or sizes.most_slots(budget, context)
    if slots > sizes.slot_limit:
        raise InvalidRequest(
            f"One array of this machine holds {sizes.slot_limit} expert slots, more were asked for: {slots}",
            hint=f"--slots {sizes.slot_limit} is the most",
        )
    if slots < fewest or sizes.total(context, slots) > budget:
        needed = smallest if request.slots_per_layer is None else sizes.total(context, slots)
        hint = f"--memory {_ceil_gib(needed)}, or see flashnext plan"
        if needed > machine.total_bytes:
            most = _gib(machine.total_bytes)
            hint = f"this machine has {most}: ask for a smaller context, prefill step or model"
        raise BudgetTooSmall(
            f"{_gib(budget)} cannot hold this model with a context of {context} tokens and "
            f"{max(slots, fewest)} expert slots a layer: it takes {_gib(needed)}",
            hint=hint,
            budget_bytes=budget,
            smallest_budget_bytes=needed,
        )
    return Plan(
        lines=sizes.lines(context, slots),
        budget_bytes=budget,
        slots_per_layer=slots,
        num_experts=num_experts,
        context_tokens=context,
        max_context_tokens=sizes.largest_context(budget, slots),
        longest_context_tokens=sizes.largest_context(budget, fewest),
        smallest_budget_bytes=smallest,
        prefill_step=sizes.prefill_step,
        rows_per_buffer=sizes.rows_per_buffer,
        policy=request.policy,
        num_readers=request.num_readers or 4,
    )


def _check(request: PlanRequest, checkpoint: Checkpoint, machine: Machine) -> None:
    config = checkpoint.config
    for name, value in (
        ("memory", request.memory_bytes),
        ("context", request.context_tokens),
        ("slots", request.slots_per_layer),
        ("prefill step", request.prefill_step),
        ("readers", request.num_readers),
    ):
        if value is not None and value <= 0:
            raise InvalidRequest(f"The {name} must be positive: {value}", hint="see flashnext plan --help")
    if request.memory_bytes is not None and request.memory_bytes > machine.total_bytes:
        most = _floor_gib(machine.ceiling_bytes())
        raise BudgetTooLarge(
            f"This machine has {_gib(machine.total_bytes)}, the memory target is more: "
            f"{_gib(request.memory_bytes)}",
            hint=f"--memory {most} is the most that leaves the machine usable",
        )
    if request.context_tokens is not None and request.context_tokens > config.max_position_embeddings:
        raise ContextTooLong(
            f"The model has {config.max_position_embeddings} positions, the asked context is longer: "
            f"{request.context_tokens}",
            hint=f"--max-kv-size {config.max_position_embeddings} is the most this model takes",
        )
    if request.num_readers is not None and request.num_readers > MAX_READERS:
        raise InvalidRequest(
            f"At most {MAX_READERS} readers can be started: {request.num_readers}",
            hint="leave the number out; a drive answers a few reads at a time",
        )
    fewest = max(2, config.num_experts_per_tok)
    slots = request.slots_per_layer
    if slots is not None and not fewest <= slots <= config.num_experts:
        raise InvalidRequest(
            f"Expert slots a layer must be from {fewest} to {config.num_experts}: {slots}",
            hint="leave the number out to use as many as fit",
        )


class _Sizes:
    """Bytes of everything, as functions of context and slots."""

    def __init__(self, checkpoint: Checkpoint, machine: Machine, request: PlanRequest) -> None:
        self._checkpoint = checkpoint
        self._machine = machine
        config = checkpoint.config
        self._config = config
        self._itemsize = 2 if machine.compute_dtype == "bfloat16" else 4
        self.fewest_slots = max(2, config.num_experts_per_tok)
        self.prefill_step = request.prefill_step or machine.prefill_step
        self.rows_per_buffer = self.prefill_step * checkpoint.ngram.num_heads
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
        layouts = checkpoint.experts.values()
        self.slot_limit = min(config.num_experts, *(_slot_limit(layout, machine) for layout in layouts))
        self._widened_per_slot = max(_widened_per_slot(layout, self._itemsize) for layout in layouts)
        self._widened_pairs = max(_widened_pairs_bytes(layout, self._itemsize) for layout in layouts)

    def _state(self, context: int) -> int:
        growing = qsa_layer_bytes(self._config, buffer_rows(context, None), self._itemsize)
        return state_bytes(self._config, context, self._itemsize).total + growing

    def _workspace(self, context: int) -> int:
        config = self._config
        forward = forward_workspace_bytes(config, self.prefill_step, context, self._itemsize)
        sampling = LOGITS_COPIES * config.vocab_size * FLOAT32_BYTES
        return max(forward + sampling, STAGING_BYTES)

    def lines(self, context: int, slots: int) -> tuple[PlanLine, ...]:
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
            PlanLine("snapshots", 0, "none are kept"),
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
        ]
        widened = slots * self._widened_per_slot + self._widened_pairs
        if widened:
            reason = "expert parts of one layer brought to the type they are computed in"
            lines.append(PlanLine("widening", widened, reason))
        subtotal = sum(line.bytes for line in lines)
        lines.append(PlanLine("reserve", _reserve(subtotal), "threads, allocator slack, what nobody counted"))
        return tuple(lines)

    def total(self, context: int, slots: int) -> int:
        return sum(line.bytes for line in self.lines(context, slots))

    def most_slots(self, budget: int, context: int) -> int:
        """Return the largest number of slots that fits beside `context`, 0 if none does."""
        return bisect_right(
            range(1, self.slot_limit + 1), budget, key=lambda slots: self.total(context, slots)
        )

    def context_for(self, budget: int, asked: int | None) -> int:
        """Return the asked context, or the largest default that leaves room for the fewest slots."""
        if asked is not None:
            return asked
        context = min(DEFAULT_CONTEXT, self._config.max_position_embeddings)
        while context > SMALLEST_DEFAULT_CONTEXT and self.total(context, self.fewest_slots) > budget:
            context //= 2
        return context

    def largest_context(self, budget: int, slots: int) -> int:
        """Return the largest context that fits beside `slots`, 0 if none does."""
        longest = self._config.max_position_embeddings
        return bisect_right(range(1, longest + 1), budget, key=lambda context: self.total(context, slots))


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
    # Two groups of pairs, as stored and as computed: one is queued while the other runs.
    return 2 * WIDEN_PAIRS * largest * (itemsize + FLOAT32_BYTES)


def _is_scale(part: Component) -> bool:
    return part.name.endswith((".scales", ".biases"))


def _reserve(subtotal: int) -> int:
    return max(8 * MIB, subtotal // 50)


def _gib(value: int) -> str:
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / MIB:.0f} MiB"


def _ceil_gib(value: int) -> str:
    return f"{math.ceil(10 * value / GIB) / 10:.1f}GiB" if value >= GIB else f"{math.ceil(value / MIB)}MiB"


def _floor_gib(value: int) -> str:
    return f"{math.floor(10 * value / GIB) / 10:.1f}GiB" if value >= GIB else f"{value // MIB}MiB"
