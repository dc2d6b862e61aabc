"""Runs that `flashnext bench --report ssd-wait` compares, and bounds beside them. Entry: `measure_ssd_wait`.

In this order, everything in one process:

    record    each prompt once, plain: the tokens and routes that oracles replay
    disk      records of this model at the readers of a run: bandwidth of the storage bound
    compute   every expert resident, for each drafter: the compute bound
    variants  one engine for each budget and drafter; hints are compared inside it, A/B/B/A after a run each
              that does not count

Decode alone is on the clock: a prompt is read before it starts. Outputs are compared with the recorded ones:
a figure of another text would be worth nothing.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from drafter.api import Drafter
from drafter.oracle import OracleDrafter
from expert_store.policy.belady import best_hits
from expert_store.source import ByteSource, FileSource
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.engine.conditions import Conditions, conditions_of
from mlx_flashnext.engine.deltas import plus, since
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.machine import Machine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.predictors import Oracle, Predictor, PredictorSetting, make_predictor
from mlx_flashnext.engine.route_files import kind_that_loads
from mlx_flashnext.engine.routes import Pass, RecordedRoutes, RouteLog, demands
from mlx_flashnext.reports.disk import DiskRate, measure_disk
from mlx_flashnext.reports.measure import GREEDY, answer
from mlx_flashnext.reports.page_cache import CacheState, Prepared, prepare
from mlx_flashnext.reports.prediction import score
from mlx_flashnext.reports.ssd_wait import (
    FORMAT,
    VERSION,
    Bounds,
    Run,
    Variant,
    VariantReport,
    added_slots,
    summarise,
)
from mlx_flashnext.reports.waterfall import MOST_TOKENS, CycleRecorder, RecordedCycle

DRAFT_ORACLE: Final = "oracle-draft"
"""Hints of a perfect predictor that knows the tokens of a block when it begins, and nothing beyond it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured.

    Attributes:
        directory: of the checkpoint.
        label: what to call the model.
        request: of every plan, but for slots and drafter.
        slots: budgets: experts of each layer in memory.
        drafts: drafters with the most proposals of a cycle; (`none`, 0) is plain decode.
        hints: who says what to read ahead: names of `HINTS`, or `DRAFT_ORACLE`.
        prompts: token ids of each.
        prompt_set: what they are, in words.
        num_tokens: of each answer.
        repetitions: of each variant, after one that does not count.
        page_cache: state before every repetition.
        disk: what rows say of the drive.
        wrap_source: wraps the files.
        seed: of `random` hints.
        hint_bytes: what hints may have read for one block; None does not limit.
    """

    directory: Path
    label: str
    request: PlanRequest
    slots: Sequence[int]
    drafts: Sequence[tuple[str, int]]
    hints: Sequence[str]
    prompts: Sequence[Sequence[int]]
    prompt_set: str
    num_tokens: int
    repetitions: int
    page_cache: CacheState
    disk: str = "real"
    wrap_source: Callable[[ByteSource], ByteSource] = lambda source: source
    seed: int = 0
    hint_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SsdWaitReport:
    """Everything that was found.

    Attributes:
        conditions: of the first variant; slots and drafter are in each variant.
        disk: the drive under the storage bound.
        page_cache: as it was found before the first repetition.
        variants: in the order of budgets, drafters, hints.
    """

    conditions: Conditions
    disk: DiskRate
    page_cache: Prepared
    variants: tuple[VariantReport, ...]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values: bytes, nanoseconds, shares."""
        disk = {**asdict(self.disk), "bytes_per_s": self.disk.bytes_per_s}
        variants = [
            {
                **asdict(one),
                "exposed_wait_ns": one.exposed_wait_ns,
                "exposed_wait_per_cycle_ns": one.exposed_wait_per_cycle_ns,
                "books_add_up": one.books.add_up,
            }
            for one in self.variants
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "conditions": self.conditions.to_dict(),
            "page_cache": asdict(self.page_cache),
            "disk": disk,
            "variants": variants,
        }


@dataclass(frozen=True, slots=True)
class Recorded:
    """One prompt with what a plain run made of it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    routes: RecordedRoutes


class DifferentText(Exception):
    """An answer is not the recorded one: the figures would compare different work."""


def measure_ssd_wait(
    asked: Asked, machine: Machine, progress: Callable[[str, int, int], None] = lambda _s, _d, _t: None
) -> SsdWaitReport:
    """Measure every variant.

    Args:
        asked: what.
        machine: this machine.
        progress: told (what runs now, steps done, steps in all).

    Raises:
        DifferentText: hints or drafts changed an answer, which they must not.
        StoreError: a record could not be read.
        EngineError: a plan does not fit.
    """
    steps = _Steps(progress, 2 + len(asked.drafts) * (1 + len(asked.slots)) * (1 + asked.repetitions))
    with _open(asked, min(asked.slots), ("none", 0)) as engine:
        checkpoint, plan = engine.checkpoint, engine.plan
        steps.done("recording")
        recorded = [_record(engine, prompt, asked.num_tokens) for prompt in asked.prompts]
    files = [info.path for info in checkpoint.table.files]
    found = prepare(files, asked.page_cache)
    disk = _disk(asked, checkpoint, plan.num_readers)
    steps.done("reading the drive")
    record_bytes = statistics.fmean(one.record.record_bytes for one in checkpoint.experts.values())
    compute: dict[tuple[str, int], float] = {}
    for draft in asked.drafts:
        with _open(asked, plan.num_experts, draft) as engine:
            bench = _Bench(asked, engine, draft, recorded, files, steps)
            runs = bench.compare([Variant(plan.num_experts, *draft, "off")])
            compute[draft] = statistics.median(run.wall_ns / run.output_tokens for run in runs)
    reports: list[VariantReport] = []
    for slots in asked.slots:
        for draft in asked.drafts:
            with _open(asked, slots, draft) as engine:
                bench = _Bench(asked, engine, draft, recorded, files, steps)
                variants = [Variant(engine.plan.slots_per_layer, *draft, hints) for hints in asked.hints]
                runs = bench.compare(variants)
                bounds = Bounds(compute[draft], disk.bytes_per_s, bench.belady_hit_rate())
                cycles = [bench.recorded_cycle(variant) for variant in variants]
            these = _reports(variants, runs, bounds, record_bytes, checkpoint.config.num_experts_per_tok)
            reports += [replace(one, cycle=cycle) for one, cycle in zip(these, cycles, strict=True)]
    conditions = conditions_of(
        checkpoint,
        machine,
        plan,
        model=asked.label,
        hints=",".join(asked.hints),
        page_cache=asked.page_cache,
        page_cache_how=found.how,
        disk=asked.disk,
        prompt_set=asked.prompt_set,
    )
    return SsdWaitReport(conditions, disk, found, tuple(reports))


def _reports(
    variants: Sequence[Variant], runs: Sequence[Run], bounds: Bounds, record_bytes: float, top_k: int
) -> list[VariantReport]:
    """Return a report of each variant; the ratios are to the first one, repetition by repetition."""
    first = [run for run in runs if run.variant == variants[0]]
    reports: list[VariantReport] = []
    for variant in variants:
        own = [run for run in runs if run.variant == variant]
        ratios = tuple(
            (mine.wall_ns / mine.output_tokens) / (base.wall_ns / base.output_tokens)
            for mine, base in zip(own, first, strict=True)
        )
        reports.append(replace(summarise(own, bounds, record_bytes, top_k), ratios=ratios))
    return reports


@dataclass(slots=True)
class _Steps:
    """Counts what is done."""

    tell: Callable[[str, int, int], None]
    total: int
    num_done: int = field(default=0, init=False)

    def done(self, what: str) -> None:
        """Note a step."""
        self.num_done += 1
        self.tell(what, self.num_done, self.total)


class _Bench:
    """One engine, the runs that are compared in it, and everything its layers were asked for."""

    def __init__(
        self,
        asked: Asked,
        engine: Engine,
        draft: tuple[str, int],
        recorded: Sequence[Recorded],
        files: Sequence[Path],
        steps: _Steps,
    ) -> None:
        self._asked = asked
        self._engine = engine
        self._draft = draft
        self._recorded = recorded
        self._files = files
        self._steps = steps
        self._log = RouteLog()
        self._is_measured: list[bool] = []
        layers = {layer: layout.record.num_experts for layer, layout in engine.checkpoint.experts.items()}
        routes = engine.routes
        self._setting = PredictorSetting(
            layers,
            engine.config.num_experts_per_tok,
            seed=asked.seed,
            near=routes.near,
            head=None if routes.sidecar is None else routes.sidecar.head,
        )
        engine.target.store.set_prefetch_budget(asked.hint_bytes)
        self._predictors: dict[str, Predictor | None] = {}

    def compare(self, variants: Sequence[Variant]) -> list[Run]:
        """Run every variant once uncounted, then in turns, forwards and backwards."""
        runs: list[Run] = []
        for repetition in range(1 + self._asked.repetitions):
            order = variants if repetition % 2 == 0 else list(reversed(variants))
            for variant in order:
                prepare(self._files, self._asked.page_cache)
                run = self._run(variant, is_counted=repetition > 0)
                runs += [run] if repetition else []
            self._steps.done(f"{variants[0].slots} experts, {_draft_name(self._draft)}")
        return runs

    def belady_hit_rate(self) -> float | None:
        """Return the hit rate that the best eviction would have had over the decoding of all counted runs."""
        slots, demands, hits = self._engine.plan.slots_per_layer, 0, 0
        for layer, (wanted, is_measured) in _demands(self._log.passes, self._is_measured).items():
            del layer
            best = best_hits(wanted, slots, is_measured=is_measured)
            demands, hits = demands + best.num_demands, hits + best.num_hits
        return hits / demands if demands else None

    def _run(self, variant: Variant, *, is_counted: bool) -> Run:
        engine = self._engine
        store, rows = engine.target.store, engine.target.rows
        parts: list[Run] = []
        for one in self._recorded:
            hints = Hints(self._predictor(variant.hints, one), engine.config.num_hidden_layers, self._log)
            session = engine.session(self._drafter(one), is_guarded=False, hints=hints)
            answer(session, one.prompt, 0)
            store.wait_idle()  # what was in flight before would end in these books
            self._mark(is_counted=False)
            before, rows_before = store.statistics(), rows.statistics()
            first, began_ns = len(self._log.passes), time.perf_counter_ns()
            events = list(session.generate(one.prompt, GREEDY, max_tokens=self._asked.num_tokens))
            self._mark(is_counted=is_counted)
            tokens = tuple(event.token_id for event in events if isinstance(event, Token))
            if tokens != one.tokens:
                raise DifferentText(f"{variant} answered other tokens than the plain run")
            store.wait_idle()
            assert isinstance(events[-1], Finished)
            end = events[-1].statistics
            now, rows_now = store.statistics(), rows.statistics()
            passes = self._log.passes[first:]
            unions = [len(union) for wanted in demands(passes).values() for union in wanted]
            parts.append(
                Run(
                    variant=variant,
                    output_tokens=end.output_tokens,
                    cycles=end.cycles,
                    wall_ns=end.decode_ns,
                    token_ns=_per_token(passes, began_ns),
                    store=since(now, before),
                    rows=since(rows_now, rows_before),
                    num_hints=hints.num_guesses,
                    hints_stopped=hints.stopped,
                    prediction=score(passes),
                    num_blocks=len(unions),
                    num_unique=sum(unions),
                    proposed_by_slot=end.draft.proposed_by_slot,
                    accepted_by_slot=end.draft.accepted_by_slot,
                )
            )
        return _added(parts)

    def recorded_cycle(self, variant: Variant) -> RecordedCycle | None:
        """Answer the first prompt once more, no figure taken, and return one of its cycles step by step."""
        engine, one = self._engine, self._recorded[0]
        recorder = CycleRecorder()
        hints = Hints(self._predictor(variant.hints, one), engine.config.num_hidden_layers, recorder.routes)
        session = engine.session(self._drafter(one), is_guarded=False, hints=hints, laps=recorder)
        prepare(self._files, self._asked.page_cache)
        answer(session, one.prompt, 0)
        engine.target.store.wait_idle()
        with recorder.watching(engine.target):
            answer(session, one.prompt, min(self._asked.num_tokens, MOST_TOKENS))
        return recorder.typical()

    def _predictor(self, hints: str, one: Recorded) -> Predictor | None:
        """Return who guesses: oracles anew for each prompt, the others learn from one to the next."""
        if hints in ("oracle", DRAFT_ORACLE):
            return Oracle(one.routes, looks_beyond=hints == "oracle")
        if hints not in self._predictors:
            self._predictors[hints] = make_predictor(hints, self._setting)
        return self._predictors[hints]

    def _drafter(self, one: Recorded) -> Drafter | None:
        if self._draft[0] != "oracle":
            return None  # the planned kind, if any
        return OracleDrafter([*one.prompt, *one.tokens], self._engine.config.vocab_size)

    def _mark(self, *, is_counted: bool) -> None:
        """Say of the passes since the last mark whether they count for Belady's bound."""
        self._is_measured += [is_counted] * (len(self._log.passes) - len(self._is_measured))


def _open(asked: Asked, slots: int, draft: tuple[str, int]) -> Engine:
    kind, num_tokens = draft
    request = replace(
        asked.request,
        slots_per_layer=slots,
        draft=kind,
        num_draft_tokens=num_tokens or None,
        hints=kind_that_loads(asked.hints),
    )
    return Engine.open(asked.directory, request, wrap_source=asked.wrap_source)


def _record(engine: Engine, prompt: Sequence[int], num_tokens: int) -> Recorded:
    """Answer a prompt plainly and write down tokens and routes."""
    log = RouteLog()
    session = engine.session(hints=Hints(None, engine.config.num_hidden_layers, log))
    events = list(session.generate(prompt, GREEDY, max_tokens=num_tokens))
    tokens = tuple(event.token_id for event in events if isinstance(event, Token))
    return Recorded(tuple(prompt), tokens, RecordedRoutes(log.passes))


def _disk(asked: Asked, checkpoint: Checkpoint, num_readers: int) -> DiskRate:
    records = {layer: layout.record for layer, layout in checkpoint.experts.items()}
    with FileSource(checkpoint.table.files) as plain:
        return measure_disk(
            records,
            asked.wrap_source(plain),
            num_readers=num_readers,
            per_request=checkpoint.config.num_experts_per_tok,
        )


def _demands(
    passes: Sequence[Pass], is_measured: Sequence[bool]
) -> Mapping[int, tuple[list[list[int]], list[bool]]]:
    """Return the demands of each layer and whether each counts."""
    found: dict[int, tuple[list[list[int]], list[bool]]] = {}
    for one, counts in zip(passes, is_measured, strict=True):
        for layer, rows in one.routes.items():
            wanted, flags = found.setdefault(layer, ([], []))
            wanted.append(sorted({expert for row in rows for expert in row}))
            flags.append(counts)
    return found


def _per_token(passes: Sequence[Pass], began_ns: int) -> tuple[float, ...]:
    """Return the time of each committed token: tokens of one cycle share its time."""
    found: list[float] = []
    for one in passes:
        if one.num_kept:
            found += [(one.committed_ns - began_ns) / one.num_kept] * one.num_kept
            began_ns = one.committed_ns
    return tuple(found)


def _added(parts: Sequence[Run]) -> Run:
    """Return the runs of all prompts as one."""
    total = parts[0]
    for part in parts[1:]:
        total = replace(
            total,
            output_tokens=total.output_tokens + part.output_tokens,
            cycles=total.cycles + part.cycles,
            wall_ns=total.wall_ns + part.wall_ns,
            token_ns=total.token_ns + part.token_ns,
            store=plus(total.store, part.store),
            rows=plus(total.rows, part.rows),
            num_hints=total.num_hints + part.num_hints,
            hints_stopped=total.hints_stopped or part.hints_stopped,
            prediction=plus(total.prediction, part.prediction),
            num_blocks=total.num_blocks + part.num_blocks,
            num_unique=total.num_unique + part.num_unique,
            proposed_by_slot=added_slots([total.proposed_by_slot, part.proposed_by_slot]),
            accepted_by_slot=added_slots([total.accepted_by_slot, part.accepted_by_slot]),
        )
    return total


def _draft_name(draft: tuple[str, int]) -> str:
    return draft[0] if not draft[1] else f"{draft[0]} {draft[1]}"
