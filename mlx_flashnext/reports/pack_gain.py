"""What a pack gains over the checkpoint it was made from, on this drive. Entry point: `measure_gain`.

The same random records, A/B/B/A, with the read call and as many threads as a run has, each time after the
files' pages were dropped from the page cache where the system can. The pack is read as a run reads it first:
every record is compared with its digest.
"""

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from expert_store.layout import RecordLayout
from expert_store.source import ByteSource, FileSource
from expert_store.verified import VerifiedSource
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.reports.page_cache import MOST_CACHED, drop, prepare

ROUNDS: Final = 3
SECONDS_EACH: Final = 0.5
READERS: Final = 8
FEW_RECORDS: Final = 64
"""Fewer records than this say little about a drive."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PackGain:
    """How much faster a pack is read than its source.

    Attributes:
        ratio: Rate of the pack over that of the source, the median round; None where it was not measured.
        low: The least of all rounds.
        high: The greatest.
        source_bytes_per_s: Median rate of the source.
        pack_bytes_per_s: Median rate of the pack.
        page_cache: `cold`, or `unknown` where the system does not say or did not let go of the pages.
        why: Why it was not measured; "" if it was.
    """

    ratio: float | None
    low: float = 0.0
    high: float = 0.0
    source_bytes_per_s: float = 0.0
    pack_bytes_per_s: float = 0.0
    page_cache: str = "unknown"
    why: str = ""

    @property
    def is_gain(self) -> bool:
        """Return whether every round was faster."""
        return self.ratio is not None and self.low > 1

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {**asdict(self), "is_gain": self.is_gain}


def measure_gain(
    source: Path,
    pack: Path,
    *,
    few: int = FEW_RECORDS,
    progress: Progress = lambda _stage, _done, _total: None,
    wrap_source: Callable[[ByteSource], ByteSource] = lambda files: files,
) -> PackGain:
    """Read random records of both for a few seconds.

    Args:
        source: What the pack was made from.
        pack: The pack.
        few: Records of a model that are not enough to say anything.
        progress: Called with (stage, runs done, runs in all).
        wrap_source: Wraps the files of both, to throttle or break reads.

    Raises:
        StoreError: A record could not be read.
        ModelError: One of them does not open.
    """
    plain, packed = open_checkpoint(source), open_checkpoint(pack)
    num_records = sum(layout.record.num_experts for layout in plain.experts.values())
    if num_records < few:
        return PackGain(None, why=f"{num_records} records are too few to say anything")
    rounds: list[tuple[float, float]] = []
    shares: list[float | None] = []
    try:
        for path in _files_of(plain) + _files_of(packed):
            drop(path)
    except OSError as error:  # a file system that cannot; the pack is whole all the same
        return PackGain(None, why=f"the page cache cannot be emptied: {error.strerror}")
    for number in range(ROUNDS):
        rates: dict[bool, list[float]] = {False: [], True: []}
        for turn, is_pack in enumerate((False, True, True, False)):
            progress("measuring", 4 * number + turn, 4 * ROUNDS)
            rate, share = _rate(packed if is_pack else plain, number, wrap_source)
            if rate is None:
                return PackGain(None, why="the clock did not move")
            rates[is_pack].append(rate)
            shares.append(share)
        rounds.append((sum(rates[False]) / 2, sum(rates[True]) / 2))
    ratios = [fast / slow for slow, fast in rounds]
    is_cold = all(share is not None and share <= MOST_CACHED for share in shares)
    return PackGain(
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        source_bytes_per_s=statistics.median(slow for slow, _ in rounds),
        pack_bytes_per_s=statistics.median(fast for _, fast in rounds),
        page_cache="cold" if is_cold else "unknown",
    )


def _rate(
    checkpoint: Checkpoint, seed: int, wrap_source: Callable[[ByteSource], ByteSource]
) -> tuple[float | None, float | None]:
    """Return bytes a second, and the share of the files that was in memory before."""
    records = [layout.record for layout in checkpoint.experts.values()]
    order = [(one, expert) for one in records for expert in range(one.num_experts)]
    random.Random(seed).shuffle(order)
    share = prepare(_files_of(checkpoint), "cold").cached_share
    with FileSource(checkpoint.table.files, cache="bypass") as plain:
        source: ByteSource = wrap_source(plain)
        if checkpoint.records is not None:
            source = VerifiedSource(source, checkpoint.records, verify="every")
        left, ends = deque(order), time.monotonic() + SECONDS_EACH
        began = time.perf_counter_ns()
        with ThreadPoolExecutor(READERS, thread_name_prefix="pack-gain") as readers:
            counts = [readers.submit(_read, source, left, ends) for _ in range(READERS)]
            num_bytes = sum(count.result() for count in counts)
        wall_ns = time.perf_counter_ns() - began
    return num_bytes / wall_ns * 1e9 if wall_ns > 0 and num_bytes else None, share


def _files_of(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that hold routed experts."""
    records = [layout.record for layout in checkpoint.experts.values()]
    used = {run.file for one in records for run in (*one.reads(0), *one.reads(one.num_experts - 1))}
    return [checkpoint.table.files[file].path for file in sorted(used)]


def _read(source: ByteSource, left: deque[tuple[RecordLayout, int]], ends_s: float) -> int:
    """Read records of the queue until it is empty or time is up; return the bytes."""
    num_bytes = 0
    views: list[memoryview] = []
    while time.monotonic() < ends_s:
        try:
            record, expert = left.popleft()
        except IndexError:
            break
        if [view.nbytes for view in views] != list(record.component_lengths):
            views = _views(record.component_lengths)
        num_bytes += source.read_runs(record.reads(expert), views)
    return num_bytes


def _views(lengths: Sequence[int]) -> list[memoryview]:
    """Return memory for one record, its components one after the other."""
    whole = memoryview(bytearray(sum(lengths)))
    ends = list(itertools.accumulate(lengths, initial=0))
    return [whole[begin:end] for begin, end in itertools.pairwise(ends)]
