"""How many bytes anything may use: one table, decided before anything is allocated (invariant I6).

`make_plan` is a pure function of the checkpoint's headers, the machine and the request. Components receive
bytes and slots from the plan; none sizes itself. A plan that does not fit is refused with the smallest
budget that would.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from drafter.api import MAX_PROPOSALS
from expert_store.verified import VerifyReads
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.engine.errors import (
    BudgetTooLarge,
    BudgetTooSmall,
    ContextTooLong,
    InvalidRequest,
    MissingDrafter,
)
from mlx_flashnext.engine.machine import GIB, MIB, Machine
from mlx_flashnext.engine.predictors import HINTS
from mlx_flashnext.engine.sizes import DraftBytes, PlanLine, Sizes

MAX_READERS = 256
DEFAULT_CONTEXT = 32_768
IMPORTS_SPREAD = 4 * MIB
"""By which a process may be larger than the next with the same libraries: a budget that was named must do."""
SMALLEST_DEFAULT_CONTEXT = 2_048
DRAFTS = ("none", "lookup", "mtp", "dflash2", "auto", "oracle")
# Of the demo's text 91, 40 and 15 % of cycles keep a first, second and third proposal of mtp, and of those in
# which lookup proposes 70, 51, 39 and 30 %: a third of mtp would cost a row for less than it brings.
# `python -m bench.studies.draft_acceptance`
DEFAULT_DRAFT_TOKENS = {"none": 0, "lookup": 4, "mtp": 2, "oracle": 4}  # dflash2: all of its block
MAX_SNAPSHOTS = 64


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
        verify_reads: compare the records of a pack with their digests at the first read, or at every one.
        draft: where proposals come from: one of `DRAFTS`; `auto` takes the best that is there and fits.
        draft_directory: of a draft of one's own; None for the one beside the checkpoint, if there is one.
        num_draft_tokens: most proposals of one cycle.
        num_snapshots: earlier points of a conversation to keep, so that a prompt which leaves it there need
            not be read again; fewer are kept where memory is short.
        hints: who says what to read ahead: one of `HINTS`, but for `oracle`, which needs a recorded run.
        mirror_directory: of a second copy of the experts, on another drive.
    """

    memory_bytes: int | None = None
    context_tokens: int | None = None
    slots_per_layer: int | None = None
    prefill_step: int | None = None
    policy: str = "lru"
    num_readers: int | None = None
    verify_reads: VerifyReads = "first"
    draft: str = "none"
    draft_directory: Path | None = None
    num_draft_tokens: int | None = None
    num_snapshots: int = 4
    hints: str = "off"
    mirror_directory: Path | None = None


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
        verify_reads: when the records of a pack are compared with their digests.
        draft: where proposals come from: `none`, `lookup`, `mtp`, `dflash2` or `oracle`.
        draft_reason: why this one.
        num_draft_tokens: most proposals of one cycle; 0 without a drafter.
        num_snapshots: snapshots that may be kept at a time.
        hints: who says what to read ahead.
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
    verify_reads: VerifyReads
    draft: str
    draft_reason: str
    num_draft_tokens: int
    num_snapshots: int
    hints: str

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


def make_plan(
    checkpoint: Checkpoint,
    machine: Machine,
    request: PlanRequest,
    own: DraftBytes | None = None,
    why_no_own: str | None = None,
    hint_bytes: int = 0,
) -> Plan:
    """Decide the memory of a run.

    Args:
        checkpoint: headers of the model; no tensor is read.
        machine: what there is.
        request: what was asked.
        own: what a draft takes that the gate let in; `auto` prefers it.
        why_no_own: why there is none, for `auto`.
        hint_bytes: what trained hints take that fit model and draft.

    Returns:
        The plan; its total is at most its budget.

    Raises:
        InvalidRequest: a value that no run could honour.
        BudgetTooLarge: the target exceeds this machine's memory.
        BudgetTooSmall: the target cannot hold the model; names the smallest that can.
        ContextTooLong: the asked context is longer than the model's positions.
        MissingDrafter: the checkpoint lacks what the asked drafter is made of.
    """
    _check(request, checkpoint, machine)
    if request.draft != "auto":
        return _plan_with(checkpoint, machine, request, request.draft, "as asked", own, hint_bytes)
    missing = _mtp_missing(checkpoint)
    reasons = [] if why_no_own is None else [why_no_own]
    for draft, is_there in (("dflash2", own is not None), ("mtp", missing is None)):
        if is_there:
            try:
                why = f" ({'; '.join(reasons)})" if reasons else ""
                reason = f"the best that is there{why}"
                return _plan_with(checkpoint, machine, request, draft, reason, own, hint_bytes)
            except BudgetTooSmall:
                reasons.append(f"{draft} does not fit this memory target")
        elif draft == "mtp" and missing is not None:
            reasons.append(missing)
    return _plan_with(checkpoint, machine, request, "lookup", "; ".join(reasons), None, hint_bytes)


def _plan_with(
    checkpoint: Checkpoint,
    machine: Machine,
    request: PlanRequest,
    draft: str,
    reason: str,
    own: DraftBytes | None,
    hint_bytes: int,
) -> Plan:
    """Make the plan for one drafter."""
    asked = None if draft == "none" else request.num_draft_tokens
    if draft == "dflash2":
        assert own is not None, "a draft is planned after the gate has let it in"
        num_draft_tokens = min(asked or own.max_proposals, own.max_proposals)
    else:
        num_draft_tokens = asked or DEFAULT_DRAFT_TOKENS[draft]
    sizes = Sizes(
        checkpoint,
        machine,
        prefill_step=request.prefill_step,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        own=own,
        hint_bytes=hint_bytes,
    )
    budget = machine.ceiling_bytes() if request.memory_bytes is None else request.memory_bytes
    context = _context(sizes, checkpoint, budget, request.context_tokens)
    # First what no token can be computed without, then snapshots, then more experts: so more memory never
    # means fewer of either.
    slots = request.slots_per_layer or max(
        sizes.fewest_slots, sizes.most_slots(budget, context, request.num_snapshots)
    )
    _check_fit(sizes, machine, budget, context, slots)
    num_snapshots = sizes.most_snapshots(budget, context, slots, request.num_snapshots)
    return Plan(
        lines=sizes.lines(context, slots, num_snapshots),
        budget_bytes=budget,
        slots_per_layer=slots,
        num_experts=checkpoint.config.num_experts,
        context_tokens=context,
        max_context_tokens=sizes.largest_context(budget, slots),
        longest_context_tokens=sizes.largest_context(budget, sizes.fewest_slots),
        smallest_budget_bytes=sizes.total(context, sizes.fewest_slots),
        prefill_step=sizes.prefill_step,
        rows_per_buffer=sizes.rows_per_buffer,
        policy=request.policy,
        num_readers=request.num_readers or 4,
        verify_reads=request.verify_reads,
        draft=draft,
        draft_reason=reason,
        num_draft_tokens=num_draft_tokens,
        num_snapshots=num_snapshots,
        hints=request.hints,
    )


def _context(sizes: Sizes, checkpoint: Checkpoint, budget: int, asked: int | None) -> int:
    """Return the asked context, or the largest default that leaves room for the fewest slots."""
    if asked is not None:
        return asked
    context = min(DEFAULT_CONTEXT, checkpoint.config.max_position_embeddings)
    while context > SMALLEST_DEFAULT_CONTEXT and sizes.total(context, sizes.fewest_slots) > budget:
        context //= 2
    return context


def _check_fit(sizes: Sizes, machine: Machine, budget: int, context: int, slots: int) -> None:
    if slots > sizes.slot_limit:
        raise InvalidRequest(
            f"One array of this machine holds {sizes.slot_limit} expert slots, more were asked for: {slots}",
            hint=f"--slots {sizes.slot_limit} is the most",
        )
    needed = sizes.total(context, slots)
    if needed > budget:
        hint = f"--memory {_ceil_gib(needed + IMPORTS_SPREAD)}, or see flashnext plan"
        if needed > machine.total_bytes:
            most = _gib(machine.total_bytes)
            hint = f"this machine has {most}: ask for a smaller context, prefill step or model"
        raise BudgetTooSmall(
            f"{_gib(budget)} cannot hold this model with a context of {context} tokens and "
            f"{slots} expert slots a layer: it takes {_gib(needed)}",
            hint=hint,
            budget_bytes=budget,
            smallest_budget_bytes=needed,
        )


def _mtp_missing(checkpoint: Checkpoint) -> str | None:
    """Return why there is no MTP module to draft with, None if there is one."""
    if not checkpoint.config.num_mtp_layers:
        return "config.json has mtp_num_hidden_layers = 0"
    if not checkpoint.mtp or checkpoint.mtp_experts is None:
        return "no tensor of the checkpoint is named mtp.*"
    return None


def _check(request: PlanRequest, checkpoint: Checkpoint, machine: Machine) -> None:
    config = checkpoint.config
    for name, value in (
        ("memory", request.memory_bytes),
        ("context", request.context_tokens),
        ("slots", request.slots_per_layer),
        ("prefill step", request.prefill_step),
        ("readers", request.num_readers),
        ("number of draft tokens", request.num_draft_tokens),
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
    _check_draft(request, checkpoint)
    fewest = max(2, config.num_experts_per_tok)
    slots = request.slots_per_layer
    if slots is not None and not fewest <= slots <= config.num_experts:
        raise InvalidRequest(
            f"Expert slots a layer must be from {fewest} to {config.num_experts}: {slots}",
            hint="leave the number out to use as many as fit",
        )


def _check_draft(request: PlanRequest, checkpoint: Checkpoint) -> None:
    if request.draft not in DRAFTS:
        known = ", ".join(DRAFTS)
        raise InvalidRequest(f"No drafter has this name: {request.draft}", hint=f"there are {known}")
    if request.num_draft_tokens is not None and request.num_draft_tokens > MAX_PROPOSALS:
        raise InvalidRequest(
            f"At most {MAX_PROPOSALS} tokens are drafted at a time: {request.num_draft_tokens}",
            hint="2 to 4 are the usual best",
        )
    if request.hints not in HINTS or request.hints == "oracle":
        known = ", ".join(kind for kind in HINTS if kind != "oracle")
        raise InvalidRequest(f"Hints cannot come from: {request.hints}", hint=f"there are {known}")
    if not 0 <= request.num_snapshots <= MAX_SNAPSHOTS:
        raise InvalidRequest(
            f"Snapshots must be from 0 to {MAX_SNAPSHOTS}: {request.num_snapshots}",
            hint="leave the number out",
        )
    why = _mtp_missing(checkpoint) if request.draft == "mtp" else None
    if why is not None:
        raise MissingDrafter(
            f"--draft mtp needs the checkpoint's MTP module, and {why}",
            hint="--draft lookup needs none; a pack made with the MTP module kept has one",
        )


def _gib(value: int) -> str:
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / MIB:.0f} MiB"


def _ceil_gib(value: int) -> str:
    return f"{math.ceil(10 * value / GIB) / 10:.1f}GiB" if value >= GIB else f"{math.ceil(value / MIB)}MiB"


def _floor_gib(value: int) -> str:
    return f"{math.floor(10 * value / GIB) / 10:.1f}GiB" if value >= GIB else f"{value // MIB}MiB"
