"""How often experts were demanded, kept from run to run, so that a run starts warm. Entry: `Popularity`.

Format: one JSON document, `FORMAT` and `VERSION` below, written beside its target and renamed.

    {"format": "flashnext-popularity", "version": 1, "model_digest": "...",
     "layers": [{"layer": 0, "num_experts": 512, "experts": [7, 301], "counts": [12.5, 3.0]}, ...]}

`experts` are distinct, most demanded first, `counts` as many, finite and positive. A count is the demands by
committed rows of the last run plus `DECAY` times what the run before had left: older runs fade, none is
forgotten at once. A file that is anything else, or of another checkpoint, is `PopularityUnusable`: the caller
says so and starts cold. Nothing in it is executed, and nothing it says can change an answer (I1): it becomes
speculative hints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

import msgspec

from expert_store.errors import StoreError, brief, shown
from expert_store.keys import Prefetch, ReadClass
from expert_store.published import publish

FORMAT = "flashnext-popularity"
VERSION = 1
DECAY: Final = 0.5
"""What a run's counts are worth to the next: a change of subject is forgotten in a few runs."""
FILE_BYTES_MAX: Final = 16 * 2**20
"""48 layers of 512 experts take 0.4 MB; what is far beyond that is not ours."""
WARM_OWNER: Final = -1
"""Owner of a warm start's tickets; no request has a negative id."""
_WARM_DEADLINE: Final = 1 << 40
"""Later than any layer of any block: whatever else is guessed goes first."""
_COUNT_MIN: Final = 1e-3
"""What has faded below this is left out."""


class PopularityUnusable(StoreError):
    """The popularity file is damaged, of another checkpoint, or cannot be read or written. Start cold."""


class _Layer(msgspec.Struct, forbid_unknown_fields=False):
    layer: int
    num_experts: int
    experts: list[int]
    counts: list[float]


class _Document(msgspec.Struct, forbid_unknown_fields=False):
    format: str
    version: int
    model_digest: str
    layers: list[_Layer]


@dataclass(frozen=True, slots=True)
class Popularity:
    """Demands by layer and expert.

    Attributes:
        counts: For each layer, the decayed demands of every expert.
    """

    counts: Mapping[int, tuple[float, ...]]

    def followed_by(self, demands: Mapping[int, Sequence[int]]) -> Popularity:
        """Return this, faded, plus the demands of a run (`ExpertStore.demand_counts`)."""
        return Popularity(
            {
                layer: tuple(
                    DECAY * old + new
                    for old, new in zip_longest(self.counts.get(layer, ()), counts, fillvalue=0)
                )
                for layer, counts in demands.items()
            }
        )

    def ranked(self, layer: int) -> list[int]:
        """Return the experts of a layer that were demanded, most demanded first."""
        counts = self.counts.get(layer, ())
        wanted = [expert for expert, count in enumerate(counts) if count > 0]
        return sorted(wanted, key=lambda expert: -counts[expert])

    def hints(self, slots: Mapping[int, int]) -> list[Prefetch]:
        """Return what to read ahead at start: the most popular of each layer, up to its slots.

        Ranks take turns across layers, so that a start that is cut short has warmed every layer alike. Hand
        them over with owner `WARM_OWNER`, a slice at a time (`PrefetchLimits`); `advance(WARM_OWNER, 1)`
        ends it: what is queued is cancelled, what came and was not used leaves first.

        Args:
            slots: Slots of each layer to fill.
        """
        hints: list[Prefetch] = []
        for layer, num_slots in slots.items():
            ranked = self.ranked(layer)[:num_slots]
            total = sum(self.counts.get(layer, ())) or 1.0
            hints += [
                Prefetch(
                    layer,
                    expert,
                    ReadClass.SPECULATIVE,
                    min(1.0, self.counts[layer][expert] / total),
                    _WARM_DEADLINE + rank,
                )
                for rank, expert in enumerate(ranked)
            ]
        hints.sort(key=lambda hint: hint.deadline)
        return hints


def load_popularity(path: Path, *, model_digest: str, num_experts: Mapping[int, int]) -> Popularity:
    """Read a popularity file.

    Args:
        path: The file; that it is missing is a reason like any other.
        model_digest: Digest of the checkpoint it must be of.
        num_experts: Experts of each layer; layers that it lacks are cold.

    Raises:
        PopularityUnusable: There is no file that can be trusted.
    """
    document = _decode(_read(path), path)
    if (document.format, document.version) != (FORMAT, VERSION):
        raise _unusable(
            path, f"it is {shown(document.format)} version {shown(document.version)}, not {FORMAT} {VERSION}"
        )
    if document.model_digest != model_digest:
        raise _unusable(path, "it was written for another checkpoint")
    counts: dict[int, tuple[float, ...]] = {}
    for entry in document.layers:
        wanted = num_experts.get(entry.layer)
        if wanted is None or entry.num_experts != wanted or entry.layer in counts:
            raise _unusable(path, f"layer {entry.layer} with {entry.num_experts} experts is not the model's")
        counts[entry.layer] = _checked_counts(entry, path)
    return Popularity(counts)


def save_popularity(path: Path, popularity: Popularity, *, model_digest: str) -> None:
    """Write a popularity file: the old one stays whole until the new one is.

    Raises:
        PopularityUnusable: It cannot be written (a full disk, no permission); the old file is untouched.
    """
    layers = [
        _Layer(layer, len(counts), experts, [counts[expert] for expert in experts])
        for layer, counts in sorted(popularity.counts.items())
        for experts in [[expert for expert in popularity.ranked(layer) if counts[expert] >= _COUNT_MIN]]
    ]
    data = msgspec.json.encode(_Document(FORMAT, VERSION, model_digest, layers))
    try:
        publish(path, data)
    except OSError as error:
        raise _unusable(path, f"it cannot be written: {error.strerror}") from error


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for somebody to write
            raise _unusable(path, "it cannot be read: not a regular file")
        with path.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise _unusable(path, f"it is longer than {FILE_BYTES_MAX} bytes")
    return data


def _decode(data: bytes, path: Path) -> _Document:
    try:
        return msgspec.json.decode(data, type=_Document)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unusable(path, f"it is damaged: {error}") from error


def _checked_counts(entry: _Layer, path: Path) -> tuple[float, ...]:
    counts = [0.0] * entry.num_experts
    if len(entry.experts) != len(entry.counts):
        raise _unusable(
            path, f"layer {entry.layer} has {len(entry.experts)} experts, {len(entry.counts)} counts"
        )
    for expert, count in zip(entry.experts, entry.counts, strict=True):
        if not 0 <= expert < entry.num_experts or counts[expert]:
            raise _unusable(path, f"layer {entry.layer} names expert {expert} twice, or has none such")
        if not (math.isfinite(count) and count > 0):
            raise _unusable(path, f"layer {entry.layer} expert {expert} has count {count}")
        counts[expert] = count
    return tuple(counts)


def _unusable(path: Path, why: str) -> PopularityUnusable:
    return PopularityUnusable(
        f"No warm start from {path.name}: {brief(why, 400)}",
        hint="it is written anew at the end of this run",
        file=str(path),
    )
