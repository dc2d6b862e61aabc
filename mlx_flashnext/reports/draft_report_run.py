"""Measures drafters against plain decode on the same weights, prompts, limits and sampling.

Entry point: `measure_drafts`. A drafter is part of a plan, so each has an engine of its own: every repetition
opens one after another, forwards and then backwards (A/B/B/A), answers one prompt that does not count, then
all of them. The governor is off: what does not pay is to be seen. Answers are greedy and end at stop tokens,
and must be those of plain decode, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

from drafter.api import MAX_PROPOSALS, Drafter
from drafter.oracle import OracleDrafter
from expert_store.source import ByteSource
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.engine.conditions import Conditions, conditions_of
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import BudgetTooSmall, IncompatibleDrafter, MissingDrafter
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.laps import NO_LAPS, Laps, MeasuredLaps
from mlx_flashnext.engine.machine import Machine, forget_array_peak, peak_array_bytes
from mlx_flashnext.engine.own_draft import find_draft
from mlx_flashnext.engine.plan import Plan, PlanRequest, make_plan
from mlx_flashnext.engine.routes import Pass, RouteLog
from mlx_flashnext.engine.stats import GenerationStatistics
from mlx_flashnext.reports.draft_report import (
    FORMAT,
    VERSION,
    Budget,
    RoutedCycle,
    VariantReport,
    Visit,
    summarise,
)
from mlx_flashnext.reports.measure import GREEDY
from mlx_flashnext.reports.page_cache import CacheState, Prepared, prepare
from mlx_flashnext.reports.ssd_wait_run import DifferentText

PLAIN: Final = ("none", 0)
SAMPLING: Final = "greedy, stop tokens end an answer"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured.

    Attributes:
        directory: of the checkpoint.
        label: what to call the model.
        request: of every plan, but for the drafter; a memory target holds for all drafters, slots likewise.
        drafts: drafters with the most proposals of a cycle, 0 for their own.
        may_lack: whether a drafter that is not there is left out with a sentence, instead of refused.
        prompts: token ids of each.
        prompt_set: what they are, in words.
        num_tokens: most tokens of each answer.
        repetitions: of each drafter.
        page_cache: state before every visit.
        disk: what rows say of the drive.
        wrap_source: wraps the files.
    """

    directory: Path
    label: str
    request: PlanRequest
    drafts: Sequence[tuple[str, int]]
    may_lack: bool
    prompts: Sequence[Sequence[int]]
    prompt_set: str
    num_tokens: int
    repetitions: int
    page_cache: CacheState
    disk: str = "real"
    wrap_source: Callable[[ByteSource], ByteSource] = lambda source: source


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A drafter that was not measured, and why."""

    draft: str
    why: str


@dataclass(frozen=True, slots=True)
class DraftReport:
    """Everything that was found.

    Attributes:
        conditions: of target-only; slots and drafter are in each variant.
        page_cache: as it was found before the first visit.
        num_prompts, num_output_tokens: of each repetition; the tokens are the same for every drafter.
        variants: target-only first.
        left_out: drafters that are not there, or do not fit.
        notices: what the gate wants said of the draft.
    """

    conditions: Conditions
    page_cache: Prepared
    num_prompts: int
    num_output_tokens: int
    variants: tuple[VariantReport, ...]
    left_out: tuple[LeftOut, ...]
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values: bytes, nanoseconds, shares."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "conditions": self.conditions.to_dict(),
            "page_cache": asdict(self.page_cache),
            "num_prompts": self.num_prompts,
            "num_output_tokens": self.num_output_tokens,
            "variants": [one.to_dict() for one in self.variants],
            "left_out": [asdict(one) for one in self.left_out],
            "notices": list(self.notices),
        }


@dataclass(frozen=True, slots=True)
class _Variant:
    """A drafter that is there, its request and what it takes."""

    draft: str
    request: PlanRequest
    plan: Plan
    budget: Budget


def measure_drafts(
    asked: Asked, machine: Machine, progress: Callable[[str, int, int], None] = lambda _s, _d, _t: None
) -> DraftReport:
    """Measure every drafter.

    Args:
        asked: what.
        machine: this machine.
        progress: told (what runs now, steps done, steps in all).

    Raises:
        DifferentText: a drafter changed an answer, which it must not.
        MissingDrafter, IncompatibleDrafter, BudgetTooSmall: a drafter that was named cannot be had.
        StoreError: a record could not be read.
        EngineError: a plan does not fit.
    """
    checkpoint = open_checkpoint(asked.directory)
    files = [info.path for info in checkpoint.table.files]
    found = prepare(files, asked.page_cache)
    variants, left_out, notices = _variants(asked, checkpoint, machine)
    steps = 1 + asked.repetitions * len(variants)
    with Engine.open(asked.directory, variants[0].request, wrap_source=asked.wrap_source) as engine:
        progress("recording", 0, steps)
        recorded = [_answer(engine, prompt, asked.num_tokens)[0] for prompt in asked.prompts]
    visits: dict[str, list[Visit]] = {variant.draft: [] for variant in variants}
    done = 1
    for repetition in range(asked.repetitions):
        for variant in variants if repetition % 2 == 0 else reversed(variants):
            progress(variant.draft, done, steps)
            prepare(files, asked.page_cache)
            visits[variant.draft].append(_visit(asked, variant, recorded))
            done += 1
    progress("done", steps, steps)
    plain = variants[0]
    return DraftReport(
        conditions=conditions_of(
            checkpoint,
            machine,
            plain.plan,
            model=asked.label,
            page_cache=asked.page_cache,
            page_cache_how=found.how,
            disk=asked.disk,
            prompt_set=asked.prompt_set,
            sampling=SAMPLING,
        ),
        page_cache=found,
        num_prompts=len(asked.prompts),
        num_output_tokens=sum(map(len, recorded)),
        variants=tuple(
            summarise(
                variant.draft,
                variant.plan.num_draft_tokens,
                variant.budget,
                visits[variant.draft],
                visits[plain.draft],
                checkpoint.config.num_experts_per_tok,
            )
            for variant in variants
        ),
        left_out=tuple(left_out),
        notices=notices,
    )


def _variants(
    asked: Asked, checkpoint: Checkpoint, machine: Machine
) -> tuple[list[_Variant], list[LeftOut], tuple[str, ...]]:
    """Plan every drafter beside target-only, which always comes first.

    A block of one's own sets the width of the oracle, unless a width was asked for: it bounds that draft.
    """
    request = asked.request
    if request.memory_bytes is None:  # what is free changes from plan to plan
        request = replace(request, memory_bytes=machine.ceiling_bytes())
    base = _planned(checkpoint, machine, replace(request, draft="none", num_draft_tokens=None))[0]
    variants = [_variant("none", replace(request, draft="none"), base, base, base.slots_per_layer)]
    left_out: list[LeftOut] = []
    notices: tuple[str, ...] = ()
    block = 0
    named = dict(asked.drafts)
    for draft in sorted((kind for kind in named if kind != "none"), key=lambda kind: kind == "oracle"):
        width = named[draft] or (block if draft == "oracle" else 0)
        own = replace(request, draft=draft, num_draft_tokens=min(width, MAX_PROPOSALS) or None)
        try:
            plan, said = _planned(checkpoint, machine, own)
        except (MissingDrafter, IncompatibleDrafter, BudgetTooSmall) as error:
            if not asked.may_lack:
                raise
            left_out.append(LeftOut(draft, error.message))
            continue
        if draft == "dflash2":
            block, notices = plan.num_draft_tokens, said
        at_same = own
        if asked.request.slots_per_layer is not None:
            at_same = replace(own, memory_bytes=base.total_bytes, slots_per_layer=None)
        try:
            slots = _planned(checkpoint, machine, at_same)[0].slots_per_layer
        except BudgetTooSmall:
            slots = None
        variants.append(_variant(draft, own, plan, base, slots))
    order = ["none", *named]
    return sorted(variants, key=lambda variant: order.index(variant.draft)), left_out, notices


def _variant(draft: str, request: PlanRequest, plan: Plan, base: Plan, at_same: int | None) -> _Variant:
    own = sum(line.bytes for line in plan.lines if line.name.startswith("draft"))
    lost = None if at_same is None else base.slots_per_layer - at_same
    return _Variant(draft, request, plan, Budget(plan.total_bytes, own, plan.slots_per_layer, at_same, lost))


def _planned(checkpoint: Checkpoint, machine: Machine, request: PlanRequest) -> tuple[Plan, tuple[str, ...]]:
    """Return a plan, and what the gate wants said."""
    found = find_draft(checkpoint, machine, request)
    own = found.draft
    plan = make_plan(checkpoint, machine, request, own and own.bytes, found.reason)
    return plan, () if own is None else own.notices


def _visit(asked: Asked, variant: _Variant, recorded: Sequence[list[int]]) -> Visit:
    """Open an engine; answer a prompt that does not count, all of them, and the first again with laps."""
    with Engine.open(asked.directory, variant.request, wrap_source=asked.wrap_source) as engine:
        texts = list(zip(asked.prompts, recorded, strict=True))

        def answer(
            prompt: Sequence[int], told: list[int], laps: Laps = NO_LAPS, hints: Hints | None = None
        ) -> GenerationStatistics:
            drafter = None
            if variant.draft == "oracle":
                drafter = OracleDrafter([*prompt, *told], engine.config.vocab_size)
            said, figures = _answer(engine, prompt, asked.num_tokens, drafter, laps, hints)
            if said != told:
                raise DifferentText(f"{variant.draft} answered other tokens than plain decode")
            return figures

        log = RouteLog()
        answer(*texts[0], hints=Hints(None, engine.config.num_hidden_layers, log))
        forget_array_peak()
        figures = [answer(*text) for text in texts]
        peak = peak_array_bytes()
        laps = MeasuredLaps(engine.target.sync)
        answer(*texts[0], laps)
    routed = _routed(log.passes, len(asked.prompts[0]))
    return _visited(figures, peak, laps, routed)


def _routed(passes: Sequence[Pass], num_prompt: int) -> list[RoutedCycle]:
    """Return what the cycles of an answer asked for; nothing where no layer is streamed."""
    return [
        RoutedCycle(
            one.num_rows,
            one.num_kept,
            fmean(len({expert for row in rows for expert in row}) for rows in one.routes.values()),
        )
        for one in passes
        if one.position >= num_prompt - 1 and one.num_kept and one.routes
    ]


def _visited(
    figures: Sequence[GenerationStatistics], peak: int, laps: MeasuredLaps, routed: Sequence[RoutedCycle]
) -> Visit:
    drafts = [one.draft for one in figures]
    return Visit(
        prompt_tokens=sum(one.prompt_tokens - one.reused_tokens - 1 for one in figures),
        prefill_ns=sum(one.prefill_ns for one in figures),
        output_tokens=sum(one.output_tokens for one in figures),
        cycles=sum(one.cycles for one in figures),
        decode_ns=sum(one.decode_ns for one in figures),
        read_bytes=sum(one.read_bytes for one in figures),
        exposed_wait_ns=sum(one.exposed_wait_ns for one in figures),
        num_proposed=sum(one.num_proposed for one in drafts),
        num_accepted=sum(one.num_accepted for one in drafts),
        proposed_by_slot=_added([one.proposed_by_slot for one in drafts]),
        accepted_by_slot=_added([one.accepted_by_slot for one in drafts]),
        failures=sum(one.num_failures for one in drafts),
        peak_array_bytes=peak,
        laps=tuple(laps.cycles),
        routed=tuple(routed),
    )


def _added(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return sums by place of rows of any lengths."""
    return tuple(sum(row[slot] for row in rows if slot < len(row)) for slot in range(max(map(len, rows))))


def _answer(
    engine: Engine,
    prompt: Sequence[int],
    num_tokens: int,
    drafter: Drafter | None = None,
    laps: Laps = NO_LAPS,
    hints: Hints | None = None,
) -> tuple[list[int], GenerationStatistics]:
    """Return a greedy answer in a session of its own, and what it cost."""
    session = engine.session(drafter, is_guarded=False, hints=hints, laps=laps)
    events = list(session.generate(prompt, GREEDY, max_tokens=num_tokens, stop_ids=engine.tokenizer.eos_ids))
    assert isinstance(events[-1], Finished)
    return [event.token_id for event in events if isinstance(event, Token)], events[-1].statistics
