"""How fast this drive gives this model's records, through the store's own readers. Entry: `measure_disk`.

The same records, reads, threads and queue as a run, and no computing: the bandwidth of the storage bound
(METRICS.md). Records are drawn at random over all layers, and as long as the checkpoint has enough of them
none is read twice.
"""

import itertools
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from expert_store.layout import RecordLayout
from expert_store.lease import LeaseRequest
from expert_store.source import ByteSource
from expert_store.store import ExpertStore

REQUESTS_AHEAD: Final = 2
"""Requests asked for before one is waited for, so that the queue does not run dry."""


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What was read and how fast.

    Attributes:
        record_bytes: of one expert.
        num_readers: reads on the wire at once.
        num_records: records read.
        num_bytes: their bytes.
        wall_ns: from the first request to the last record.
        read_p50_ns: from the start of a read to its record being usable, half of them are below.
        read_p95_ns: as `read_p50_ns`.
        read_p99_ns: as `read_p50_ns`.
    """

    record_bytes: int
    num_readers: int
    num_records: int
    num_bytes: int
    wall_ns: int
    read_p50_ns: int
    read_p95_ns: int
    read_p99_ns: int

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth; None where no time passed, which no drive can do (FIELD P21)."""
        return self.num_bytes / self.wall_ns * 1e9 if self.wall_ns > 0 and self.num_bytes > 0 else None


class _Landing:
    """Slots that all layers share, as long as what lands there is never looked at."""

    def __init__(self, lengths: Sequence[int], num_slots: int, layers: Sequence[int]) -> None:
        """Make the memory.

        Args:
            lengths: of a record's components.
            num_slots: of each layer.
            layers: that have slots of their own; all others share.
        """
        size = sum(lengths)
        whole = memoryview(bytearray((len(layers) + 1) * num_slots * size))
        ends = list(itertools.accumulate(lengths, initial=0))
        self._first = {layer: (place + 1) * num_slots for place, layer in enumerate(layers)}
        self._views = [
            [whole[slot * size :][begin:end] for begin, end in itertools.pairwise(ends)]
            for slot in range((len(layers) + 1) * num_slots)
        ]

    def views(self, layer: int, slot: int) -> Sequence[memoryview]:
        """Return the memory of a slot."""
        return self._views[self._first.get(layer, 0) + slot]


def measure_disk(
    layouts: Mapping[int, RecordLayout],
    source: ByteSource,
    *,
    num_readers: int,
    per_request: int,
    max_records: int = 512,
    max_seconds: float = 2.0,
    seed: int = 0,
    is_compared: bool = False,
) -> DiskRate:
    """Read random records for a while.

    Args:
        layouts: of every layer; those whose records have the size of the first layer's take part.
        source: what is read from.
        num_readers: threads.
        per_request: records asked for together, as a layer does.
        max_records: stop after so many.
        max_seconds: stop after so long.
        seed: of the draw.
        is_compared: the source compares what has landed, so no two layers may share slots.

    Raises:
        StoreError: a record could not be read.
    """
    lengths = layouts[min(layouts)].component_lengths
    alike = {layer: one for layer, one in layouts.items() if one.component_lengths == lengths}
    num_slots = per_request * (REQUESTS_AHEAD + 2)
    chance = random.Random(seed)
    order = [(layer, expert) for layer, one in alike.items() for expert in range(one.num_experts)]
    chance.shuffle(order)
    by_layer: dict[int, list[int]] = {}
    requests: list[tuple[int, list[int]]] = []
    for layer, expert in order[:max_records]:
        by_layer.setdefault(layer, []).append(expert)
        if len(by_layer[layer]) == per_request:
            requests.append((layer, by_layer.pop(layer)))
    requests += list(by_layer.items())
    landing = _Landing(lengths, num_slots, list(alike) if is_compared else [])
    slots = dict.fromkeys(alike, num_slots)
    with ExpertStore(alike, source, landing, slots=slots, num_readers=num_readers) as store:
        started = time.perf_counter_ns()
        waiting: deque[LeaseRequest] = deque()
        for layer, experts in requests:
            waiting.append(store.request(layer, experts))
            if len(waiting) > REQUESTS_AHEAD:
                waiting.popleft().wait().release()
            if time.perf_counter_ns() - started > max_seconds * 1e9:
                break
        while waiting:
            waiting.popleft().wait().release()
        wall_ns = time.perf_counter_ns() - started
        got = store.statistics()
    return DiskRate(
        record_bytes=sum(lengths),
        num_readers=num_readers,
        num_records=got.num_exact,
        num_bytes=got.physical_bytes,
        wall_ns=wall_ns,
        read_p50_ns=got.read_time.quantile_ns(0.5),
        read_p95_ns=got.read_time.quantile_ns(0.95),
        read_p99_ns=got.read_time.quantile_ns(0.99),
    )
