"""A start that is not cold: what the last run of this model used most is read ahead. Entry: `WarmStart`.

The records are speculative tickets like any guess: whatever an answer demands goes first, and nothing they do
can change it (I1). They end with the first answer; what came and was not used by then leaves first. A file
that cannot be trusted, or a disk that takes no new one, is a note, never an error.
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

    Attributes:
        note: why there was no warm start, or why the next run will have none; "" if there is nothing to say.
        num_hints: records that were named.
    """

    def __init__(
        self,
        store: ExpertStore,
        path: Path | None,
        *,
        model_digest: str,
        num_experts: Mapping[int, int],
        slots: Mapping[int, int],
    ) -> None:
        self.note = ""
        self.num_hints = 0
        self._store = store
        self._path = path
        self._digest = model_digest
        self._num_experts = num_experts
        self._slots = slots
        self._popularity = Popularity({})
        self._is_over = path is None

    def begin(self) -> None:
        """Read the file and hand over what it names. Returns before anything of it is read from the drive."""
        if self._path is None or not self._path.exists():
            return
        try:
            self._popularity = load_popularity(
                self._path, model_digest=self._digest, num_experts=self._num_experts
            )
        except PopularityUnusable as error:
            self.note = error.message
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
        """Leave this run's demands to the next one; nothing is written where nothing was demanded."""
        if self._path is None or not any(any(layer) for layer in self._demands().values()):
            return
        try:
            save_popularity(self._path, self.usage(), model_digest=self._digest)
        except PopularityUnusable as error:
            self.note = error.message

    def _demands(self) -> dict[int, tuple[int, ...]]:
        counts = self._store.demand_counts()
        return {layer: counts[layer] for layer in self._num_experts if layer in counts}


def open_warm_start(
    checkpoint: Checkpoint, plan: Plan, store: ExpertStore, directory: Path | None
) -> WarmStart:
    """Return the warm start of a run; none where every expert is resident, or without a directory."""
    path = None
    if directory is not None and not plan.is_resident:
        path = directory / f"{checkpoint.digest[:32]}.json"
    return WarmStart(
        store,
        path,
        model_digest=checkpoint.digest,
        num_experts={layer: one.record.num_experts for layer, one in checkpoint.experts.items()},
        slots=dict.fromkeys(checkpoint.experts, plan.slots_per_layer),
    )
