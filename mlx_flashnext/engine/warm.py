"""A start that is not cold: what the last run of this model used most is read ahead. Entry: `WarmStart`.

The records are speculative tickets like any guess: whatever an answer demands goes first, and nothing they do
can change it (I1). They end with the first answer; what came and was not used by then leaves first. What
drafting cost and brought is inherited too (`kept_tables.py`). A file that cannot be trusted, or a disk that
takes no new one, is a note, never an error.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from expert_store.popularity import (
    WARM_OWNER,
    Popularity,
    PopularityUnusable,
    load_popularity,
    save_popularity,
)
from expert_store.store import ExpertStore
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.engine.kept_tables import KeptTables, open_kept_tables
from mlx_flashnext.engine.learned import NOTHING_LEARNED
from mlx_flashnext.engine.machine import Machine
from mlx_flashnext.engine.plan import Plan

_SLICE: Final = 2048
"""Hints of one hand-over; `PrefetchLimits.max_hints` looks at no more."""


class WarmStart:
    """What a run inherits from the last one and leaves to the next.

    Args:
        store: whose slots are warmed; its demands are what is left behind.
        path: of the popularity file; None neither reads nor writes one.
        model_digest: of the checkpoint.
        num_experts: of each layer.
        slots: of each layer.
        tables: of the planned drafter.

    Attributes:
        num_hints: records that were named.
        learned: what the governors of the planned drafter measured, in earlier runs and in this one; where
            the next session's begins.
    """

    def __init__(
        self,
        store: ExpertStore,
        path: Path | None,
        *,
        model_digest: str,
        num_experts: Mapping[int, int],
        slots: Mapping[int, int],
        tables: KeptTables,
    ) -> None:
        self.learned = NOTHING_LEARNED
        self._note = ""
        self._tables = tables
        self.num_hints = 0
        self._store = store
        self._path = path
        self._digest = model_digest
        self._num_experts = num_experts
        self._slots = slots
        self._popularity = Popularity({})
        self._is_over = path is None

    @property
    def note(self) -> str:
        """Why something was not inherited, or will not be by the next run; "" if there is nothing to say."""
        return "; ".join(note for note in (self._note, self._tables.note) if note)

    def begin(self) -> None:
        """Read what was left and hand over what it names; returns before a record is read from the drive."""
        self.learned = self._tables.begin()
        if self._path is None or not self._path.exists():
            return
        try:
            self._popularity = load_popularity(
                self._path, model_digest=self._digest, num_experts=self._num_experts
            )
        except PopularityUnusable as error:
            self._note = error.message
            return
        hints = self._popularity.hints(self._slots)
        self.num_hints = len(hints)
        for start in range(0, len(hints), _SLICE):
            self._store.prefetch(hints[start : start + _SLICE], owner=WARM_OWNER, generation=0)

    def end(self) -> None:
        """Give up what has not come or was not used. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._store.leave(WARM_OWNER, 1)

    def usage(self) -> Popularity:
        """Return what earlier runs left, faded, and this run's demands: all that is known of what is used."""
        return self._popularity.followed_by(self._demands())

    def save(self) -> None:
        """Leave this run's demands and costs to the next one; nothing where there were none."""
        self._tables.save(self.learned)
        if self._path is None or not any(any(layer) for layer in self._demands().values()):
            return
        try:
            save_popularity(self._path, self.usage(), model_digest=self._digest)
        except PopularityUnusable as error:
            self._note = error.message

    def _demands(self) -> dict[int, tuple[int, ...]]:
        counts = self._store.demand_counts()
        return {layer: counts[layer] for layer in self._num_experts if layer in counts}


def open_warm_start(
    checkpoint: Checkpoint,
    plan: Plan,
    machine: Machine,
    store: ExpertStore,
    draft_digest: str,
    directory: Path | None,
) -> WarmStart:
    """Return the warm start of a run.

    Args:
        checkpoint: the model.
        plan: of it; where every expert is resident no records are read ahead.
        machine: that it runs on; costs of drafting are its own.
        store: whose slots are warmed.
        draft_digest: of the planned draft's files, empty for a drafter that has none.
        directory: where runs leave what they used; None inherits nothing and leaves nothing.
    """
    path = None
    if directory is not None and not plan.is_resident:
        path = directory / f"{checkpoint.digest[:32]}.json"
    return WarmStart(
        store,
        path,
        model_digest=checkpoint.digest,
        num_experts={layer: one.record.num_experts for layer, one in checkpoint.experts.items()},
        slots=dict.fromkeys(checkpoint.experts, plan.slots_per_layer),
        tables=open_kept_tables(checkpoint, plan, machine, draft_digest, directory),
    )
