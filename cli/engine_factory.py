"""Where commands get their engine, plan and checkpoint from: the one seam to the floors below.

Entry point: `Services`, carried as the command line's context object. Tests put a scripted engine behind
the same protocols. Everything heavy is imported when called, so that `--help` stays quick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from expert_store.source import ByteSource
    from mlx_flashnext.checkpoint import Checkpoint, Inspection
    from mlx_flashnext.conversion.recipe import Recipe
    from mlx_flashnext.conversion.writing import Converted
    from mlx_flashnext.engine.engine import Engine
    from mlx_flashnext.engine.events import Event
    from mlx_flashnext.engine.machine import Machine
    from mlx_flashnext.engine.plan import Plan, PlanRequest
    from mlx_flashnext.engine.sampler import SamplingParams
    from mlx_flashnext.packing import Packed, Verified
    from mlx_flashnext.reports.compare import Difference
    from mlx_flashnext.reports.doctor import Examination
    from mlx_flashnext.reports.draft_report_run import Asked as DraftsAsked
    from mlx_flashnext.reports.draft_report_run import DraftReport
    from mlx_flashnext.reports.golden import GoldenCheck
    from mlx_flashnext.reports.pack_gain import PackGain
    from mlx_flashnext.reports.predictor_report_run import PredictorReport, PredictorsAsked
    from mlx_flashnext.reports.ssd_wait_run import Asked, SsdWaitReport
    from mlx_flashnext.reports.warm_run import WarmAsked, WarmStartReport
    from mlx_flashnext.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
WrapSource = Callable[["ByteSource"], "ByteSource"]


class SessionLike(Protocol):
    """One conversation's state. Prompts are whole renderings; what the state has seen is reused."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens the state has consumed."""
        ...

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int | None,
        stop_ids: Collection[int],
        stop_strings: Sequence[str] = (),
        cancelled: Callable[[], bool] = ...,
        rule: Literal["auto", "coupled", "delta", "sampled"] = "auto",
    ) -> Iterator[Event]:
        """Answer a prompt, event by event."""
        ...


class HasDigest(Protocol):
    """What the command line asks of an open checkpoint."""

    @property
    def digest(self) -> str:
        """Return the identity of the checkpoint."""
        ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Return the tensors that nothing reads: vision, rotary tables."""
        ...


class HasNote(Protocol):
    """What the command line asks of a warm start."""

    @property
    def note(self) -> str:
        """Return what went wrong with it, "" if nothing did."""
        ...


class HasDropped(Protocol):
    """What the command line asks of a mirror."""

    @property
    def dropped(self) -> str:
        """Return why it is not used any more, "" while it is."""
        ...


class EngineLike(Protocol):
    """A loaded model."""

    @property
    def plan(self) -> Plan:
        """Return the memory plan in force."""
        ...

    @property
    def notices(self) -> tuple[str, ...]:
        """Return lines that the person should read once."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        ...

    @property
    def checkpoint(self) -> HasDigest:
        """Return the checkpoint that is open."""
        ...

    @property
    def mirror(self) -> HasDropped | None:
        """Return the second copy of the experts, if there is one."""
        ...

    @property
    def warm(self) -> HasNote:
        """Return how the run started."""
        ...

    def session(self) -> SessionLike:
        """Begin a conversation."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it was made from."""

    checkpoint: Checkpoint
    machine: Machine
    plan: Plan


def _open_engine(
    directory: Path, request: PlanRequest, progress: Progress, warm_directory: Path | None
) -> EngineLike:
    from mlx_flashnext.engine.engine import Engine

    return Engine.open(directory, request, progress=progress, warm_directory=warm_directory)


def _open_measured(
    directory: Path, request: PlanRequest, progress: Progress, wrap_source: WrapSource
) -> Engine:
    from mlx_flashnext.engine.engine import Engine

    return Engine.open(directory, request, progress=progress, wrap_source=wrap_source)


def _inspect_checkpoint(directory: Path) -> Inspection:
    from mlx_flashnext.checkpoint import inspect_checkpoint

    return inspect_checkpoint(directory)


def _make_plan(directory: Path, request: PlanRequest) -> Planned:
    import_module("mlx_flashnext.engine.engine")  # a run has it in memory, so its plan counts it
    from mlx_flashnext.checkpoint import open_checkpoint
    from mlx_flashnext.engine.engine import asked_routes
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.engine.own_draft import find_draft
    from mlx_flashnext.engine.plan import make_plan

    checkpoint, machine = open_checkpoint(directory), detect_machine()
    found = find_draft(checkpoint, machine, request)
    own = found.draft and found.draft.bytes
    trained = asked_routes(checkpoint, request, found.draft).num_bytes
    plan = make_plan(checkpoint, machine, request, own, found.reason, hint_bytes=trained)
    return Planned(checkpoint, machine, plan)


def _measure_drive(directory: Path) -> float | None:
    from mlx_flashnext.checkpoint import open_checkpoint
    from mlx_flashnext.reports.doctor import drive_rate

    return drive_rate(open_checkpoint(directory))


def _examine(directory: Path, progress: Callable[[int, int], None]) -> tuple[Checkpoint, Examination]:
    from mlx_flashnext.checkpoint import open_checkpoint
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.reports.doctor import examine

    checkpoint = open_checkpoint(directory)
    return checkpoint, examine(checkpoint, detect_machine(), progress=progress)


def _check_golden(directory: Path, kept: Path, progress: Progress) -> GoldenCheck:
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.reports.golden import check_golden

    return check_golden(directory, detect_machine(), kept, progress)


def _pack_checkpoint(directory: Path, target: Path, progress: Progress) -> Packed:
    from mlx_flashnext.packing import pack_checkpoint

    return pack_checkpoint(directory, target, progress=progress)


def _verify_pack(directory: Path, progress: Progress) -> Verified:
    from mlx_flashnext.packing import verify_pack

    return verify_pack(directory, progress=progress)


def _measure_pack_gain(source: Path, pack: Path, progress: Progress) -> PackGain:
    from mlx_flashnext.reports.pack_gain import measure_gain

    return measure_gain(source, pack, progress=progress)


def _convert_checkpoint(directory: Path, target: Path, recipe: Recipe, progress: Progress) -> Converted:
    from mlx_flashnext.conversion.writing import convert_checkpoint

    return convert_checkpoint(directory, target, recipe, progress=progress)


def _compare_builds(
    reference: Path,
    other: Path,
    request: PlanRequest,
    num_prompts: int,
    num_tokens: int,
    progress: Progress,
) -> Difference:
    from mlx_flashnext.reports.compare import compare_builds

    return compare_builds(
        reference, other, request, num_prompts=num_prompts, num_tokens=num_tokens, progress=progress
    )


def _measure_ssd_wait(asked: Asked, machine: Machine, progress: Progress) -> SsdWaitReport:
    from mlx_flashnext.reports.ssd_wait_run import measure_ssd_wait

    return measure_ssd_wait(asked, machine, progress)


def _measure_predictors(asked: PredictorsAsked, machine: Machine, progress: Progress) -> PredictorReport:
    from mlx_flashnext.reports.predictor_report_run import measure_predictors

    return measure_predictors(asked, machine, progress)


def _measure_drafts(asked: DraftsAsked, machine: Machine, progress: Progress) -> DraftReport:
    from mlx_flashnext.reports.draft_report_run import measure_drafts

    return measure_drafts(asked, machine, progress)


def _measure_warm_start(asked: WarmAsked, machine: Machine, progress: Progress) -> WarmStartReport:
    from mlx_flashnext.reports.warm_run import measure_warm_start

    return measure_warm_start(asked, machine, progress)


@dataclass(frozen=True, slots=True)
class Services:
    """What commands call below the command line."""

    open_engine: Callable[[Path, PlanRequest, Progress, Path | None], EngineLike] = _open_engine
    open_measured: Callable[[Path, PlanRequest, Progress, WrapSource], Engine] = _open_measured
    inspect_checkpoint: Callable[[Path], Inspection] = _inspect_checkpoint
    make_plan: Callable[[Path, PlanRequest], Planned] = _make_plan
    examine: Callable[[Path, Callable[[int, int], None]], tuple[Checkpoint, Examination]] = _examine
    measure_drive: Callable[[Path], float | None] = _measure_drive
    check_golden: Callable[[Path, Path, Progress], GoldenCheck] = _check_golden
    pack_checkpoint: Callable[[Path, Path, Progress], Packed] = _pack_checkpoint
    verify_pack: Callable[[Path, Progress], Verified] = _verify_pack
    measure_pack_gain: Callable[[Path, Path, Progress], PackGain] = _measure_pack_gain
    convert_checkpoint: Callable[[Path, Path, Recipe, Progress], Converted] = _convert_checkpoint
    compare_builds: Callable[[Path, Path, PlanRequest, int, int, Progress], Difference] = _compare_builds
    measure_ssd_wait: Callable[[Asked, Machine, Progress], SsdWaitReport] = _measure_ssd_wait
    measure_drafts: Callable[[DraftsAsked, Machine, Progress], DraftReport] = _measure_drafts
    measure_predictors: Callable[[PredictorsAsked, Machine, Progress], PredictorReport] = _measure_predictors
    measure_warm_start: Callable[[WarmAsked, Machine, Progress], WarmStartReport] = _measure_warm_start
