"""What drafting cost and brought, kept from run to run. Entry points: `open_kept_tables`, `KeptTables`.

Format: one JSON document of at most `FILE_BYTES_MAX` beside the popularity of the same checkpoint, at most
`MOST_RUNS` entries in it, newest first; docs/FORMATS.md lists the fields. A run begins with the entry that
fits it best and leaves one of its own:

    the same draft, hints, machine, threads and about as many slots   costs count as `MOST_TRUST` observations
    the same draft elsewhere, or with another budget                  costs count as one
    either                                                            acceptance counts as `SURVIVAL_TRUST`

Both halve with every `HALF_LIFE_S`. An entry's date is that of its last measured proposal, so that a run
which only rests does not make it younger. Nothing in the file is executed, and nothing it says can change an
answer; what it can cost is bounded by the governor (V2). A file that is anything else is a note, and is
written anew.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from drafter.api import MAX_PROPOSALS
from drafter.reasons import shown
from expert_store.published import publish
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.engine.conditions import version_of
from mlx_flashnext.engine.learned import MOST_TRUST, NOTHING_LEARNED, NUM_MOMENTS, SURVIVAL_TRUST, Learned
from mlx_flashnext.engine.machine import GIB, Machine, usable_cpus
from mlx_flashnext.engine.plan import Plan
from mlx_flashnext.regular_file import read_regular

FORMAT: Final = "flashnext-draft-costs"
VERSION: Final = 1
FILE_BYTES_MAX: Final = 1 << 18
MOST_RUNS: Final = 16
"""Entries of one checkpoint: drafts times budgets that somebody compares."""
HALF_LIFE_S: Final = 30 * 86_400.0
ELSEWHERE_TRUST: Final = 1.0
"""Observations that a cost counts as where machine or budget are others: it says where to try first."""
SAME_BUDGET: Final = 1 / 16
"""Share of all experts by which the slots of a layer may differ before misses, and so costs, are others'."""
_WORDS_MAX: Final = 400
_COST_MIN: Final = 1e-3
_COST_MAX: Final = 1e3
_COUNT_MAX: Final = 1e6
_PURSE_MAX: Final = 1e3


class _Run(msgspec.Struct, forbid_unknown_fields=False):
    draft: str
    draft_digest: str
    hints: str
    machine: str
    slots_share: float
    measured_at: float
    costs: list[float]
    times: list[float]
    reached: list[float]
    passed: list[float]
    purse: float
    num_drafting: int
    moments: list[tuple[list[float], list[float]]] = []


class _Document(msgspec.Struct, forbid_unknown_fields=False):
    format: str
    version: int
    model_digest: str
    runs: list[_Run]


@dataclass(frozen=True, slots=True)
class TablesKey:
    """What costs and acceptance depend on.

    Attributes:
        model_digest: of the checkpoint.
        draft, draft_digest: who proposes.
        hints: who says what to read ahead.
        machine: its name, threads and library.
        slots_share: of the experts of a layer, those in memory.
    """

    model_digest: str
    draft: str
    draft_digest: str
    hints: str
    machine: str
    slots_share: float


class _Unusable(Exception):
    """The file is none of ours."""


class KeptTables:
    """What a run inherits from earlier ones of the same model and draft, and leaves to the next.

    Args:
        path: of the file; None neither reads nor writes one.
        key: of this run.
        clock: seconds since 1970.

    Attributes:
        note: why nothing was inherited, or why the next run will inherit nothing; "" if all is well.
    """

    def __init__(self, path: Path | None, key: TablesKey, clock: Callable[[], float] = time.time) -> None:
        self.note = ""
        self._path, self._key, self._clock = path, key, clock
        self._found = 0
        self._measured_at = clock()

    def begin(self) -> Learned:
        """Return what earlier runs measured, as far as it is to be trusted here."""
        try:
            runs = [run for run in self._read() if self._is_same(run)]
        except _Unusable as error:
            self.note = f"No costs of drafting from {self._name}: {error}; they are measured anew"
            return NOTHING_LEARNED
        best = max(runs, key=self._fit, default=None)
        if best is None:
            return NOTHING_LEARNED
        age = 0.5 ** (abs(self._clock() - best.measured_at) / HALF_LIFE_S)
        costs = age * (MOST_TRUST if self._is_here(best) else ELSEWHERE_TRUST)
        if costs < ELSEWHERE_TRUST / 2:
            return NOTHING_LEARNED
        self._found, self._measured_at = best.num_drafting, best.measured_at
        kept = Learned(
            tuple(best.costs),
            tuple(best.times),
            tuple(best.reached),
            tuple(best.passed),
            best.purse if self._is_here(best) else 0.0,
            best.num_drafting,
            tuple((tuple(reached), tuple(passed)) for reached, passed in best.moments),
        )
        return kept.trusted(costs, age * min(SURVIVAL_TRUST, max(best.reached, default=0.0)))

    def save(self, learned: Learned) -> None:
        """Leave what is known now to the next run; nothing where nobody ever proposed."""
        if self._path is None or len(learned.costs) < 2:
            return
        key = self._key
        costs, times = _within(learned.costs, learned.times)
        at = self._measured_at if learned.num_drafting == self._found else self._clock()
        own = _Run(
            key.draft, key.draft_digest, key.hints, key.machine, key.slots_share, at,
            costs, times, list(learned.reached), list(learned.passed),
            learned.purse, learned.num_drafting, [(list(each), list(kept)) for each, kept in learned.moments],
        )  # fmt: skip
        try:
            others = [run for run in self._read() if not (self._is_same(run) and self._is_here(run))]
        except _Unusable:
            others = []
        others.sort(key=lambda run: -run.measured_at)
        document = _Document(FORMAT, VERSION, key.model_digest, [own, *others[: MOST_RUNS - 1]])
        try:
            publish(self._path, msgspec.json.encode(document))
        except OSError as error:
            self.note = f"Costs of drafting are not kept in {self._name}: {error.strerror}"

    @property
    def _name(self) -> str:
        return "" if self._path is None else self._path.name

    def _read(self) -> list[_Run]:
        """Return the entries.

        Raises:
            _Unusable: the file is not one of these.
        """
        if self._path is None:
            return []
        try:
            document = msgspec.json.decode(read_regular(self._path, FILE_BYTES_MAX), type=_Document)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _Unusable(f"it cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise _Unusable(f"it is damaged: {str(error)[:_WORDS_MAX]}") from error
        if (document.format, document.version) != (FORMAT, VERSION):
            raise _Unusable(f"it is {shown(document.format)!r} version {shown(document.version)}")
        if document.model_digest != self._key.model_digest:
            raise _Unusable("it was written for another checkpoint")
        for run in document.runs[:MOST_RUNS]:
            _check(run)
        return document.runs[:MOST_RUNS]

    def _is_same(self, run: _Run) -> bool:
        key = self._key
        return (run.draft, run.draft_digest) == (key.draft, key.draft_digest)

    def _is_here(self, run: _Run) -> bool:
        key = self._key
        is_near = abs(run.slots_share - key.slots_share) <= SAME_BUDGET
        return (run.hints, run.machine) == (key.hints, key.machine) and is_near

    def _fit(self, run: _Run) -> tuple[bool, float, float]:
        return self._is_here(run), -abs(run.slots_share - self._key.slots_share), run.measured_at


def open_kept_tables(
    checkpoint: Checkpoint, plan: Plan, machine: Machine, draft_digest: str, directory: Path | None
) -> KeptTables:
    """Return the tables of a run; none without a drafter, or without a directory.

    Args:
        checkpoint: the model.
        plan: of it: drafter, hints, slots, reader threads.
        machine: that it runs on.
        draft_digest: of a draft's files, empty for a drafter that has none.
        directory: where popularity is kept.
    """
    path = None
    if directory is not None and plan.draft != "none":
        path = directory / f"{checkpoint.digest[:32]}.drafting.json"
    where = (
        f"{machine.name}, {machine.backend}, {machine.kernels} kernels, {usable_cpus()} processors, "
        f"{machine.total_bytes / GIB:.0f} GiB, {plan.num_readers} readers, mlx {version_of('mlx')}"
    )
    share = plan.slots_per_layer / plan.num_experts
    key = TablesKey(checkpoint.digest, plan.draft, draft_digest, plan.hints, where[:_WORDS_MAX], share)
    return KeptTables(path, key)


def _within(costs: tuple[float, ...], times: tuple[float, ...]) -> tuple[list[float], list[float]]:
    """Return costs as a reader takes them; a machine that slept in a cycle measured nothing of its cost."""
    kept = [min(max(cost, _COST_MIN), _COST_MAX) for cost in costs]
    return kept, [
        weight if cost == own else 0.0 for cost, own, weight in zip(costs, kept, times, strict=True)
    ]


def _check(run: _Run) -> None:
    """Refuse figures that no run measures.

    Raises:
        _Unusable: one of them.
    """
    all_counts = [(run.reached, run.passed), *run.moments]
    words = (run.draft, run.draft_digest, run.hints, run.machine)
    is_sized = (
        len(run.costs) == len(run.times) <= MAX_PROPOSALS + 1
        and all(len(reached) == len(passed) <= MAX_PROPOSALS for reached, passed in all_counts)
        and len(run.moments) <= NUM_MOMENTS
        and all(len(word) <= _WORDS_MAX for word in words)
    )
    if not is_sized:
        raise _Unusable("it has an entry with other numbers of figures")
    costs, times = _all_within(run.costs, _COST_MIN, _COST_MAX), _all_within(run.times, 0.0, _COUNT_MAX)
    counts = all(
        _all_within([*each, *kept], 0.0, _COUNT_MAX)
        and all(passed <= reached for reached, passed in zip(each, kept, strict=True))
        for each, kept in all_counts
    )
    rest = _all_within([run.slots_share], 0.0, 1.0) and _all_within([run.purse], 0.0, _PURSE_MAX)
    rest = rest and math.isfinite(run.measured_at) and run.num_drafting >= 0
    if not (costs and times and counts and rest and abs(run.measured_at) < 1e12):
        raise _Unusable("it has a figure that cannot have been measured")


def _all_within(values: list[float], least: float, most: float) -> bool:
    return all(math.isfinite(value) and least <= value <= most for value in values)
