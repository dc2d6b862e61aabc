"""What this machine can do for a model, measured in seconds. Entry: `examine`. Nothing is written."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from expert_store.source import ByteSource, FileSource
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.engine.conditions import quantisation_of, version_of
from mlx_flashnext.engine.machine import Machine, usable_cpus
from mlx_flashnext.reports.disk import DiskRate, measure_disk
from mlx_flashnext.reports.page_cache import MOST_CACHED, cached_share, prepare

READERS: Final = (1, 2, 4, 8)
SECONDS_EACH: Final = 1.5
"""Reading time of each number of readers."""
MAX_BYTES: Final = 2 << 30
FEW_RECORDS: Final = 64
"""Fewer records than this say little about a drive."""


@dataclass(frozen=True, slots=True)
class DiskLine:
    """One way to read.

    Attributes:
        rate: what was read and how fast.
        page_cache: `cold` or `warm` before it.
        cached_share: share of sampled pages that were in memory before it; None where nobody knows.
    """

    rate: DiskRate
    page_cache: str
    cached_share: float | None

    @property
    def was_cold(self) -> bool:
        """Return whether the drive is known to have answered: a dropped page may have stayed in memory."""
        is_known = self.cached_share is not None and self.cached_share <= MOST_CACHED
        return self.page_cache == "cold" and is_known


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found.

    Attributes:
        versions: of flashnext and what it stands on.
        num_cpus: processors this process may use.
        free_bytes: free space where the model lies.
        disk: the drive, cold first.
        unmeasured: what could not be measured here, and why.
    """

    machine: Machine
    versions: dict[str, str]
    num_cpus: int
    free_bytes: int
    quantisation: str
    record_bytes: int
    num_records: int
    disk: tuple[DiskLine, ...]
    unmeasured: tuple[str, ...]


def examine(
    checkpoint: Checkpoint,
    machine: Machine,
    *,
    wrap_source: Callable[[ByteSource], ByteSource] = lambda source: source,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Examination:
    """Measure the drive under the model with the model's own records, at several depths.

    Args:
        checkpoint: the model.
        machine: this machine.
        wrap_source: wraps the files, to throttle or break reads.
        progress: told (measurements done, measurements in all).

    Raises:
        StoreError: a record could not be read.
    """
    records = {layer: layout.record for layer, layout in checkpoint.experts.items()}
    files = _files_of_experts(checkpoint)
    record_bytes = max(record.record_bytes for record in records.values())
    num_records = sum(record.num_experts for record in records.values())
    settings = [("cold", readers) for readers in READERS] + [("warm", max(READERS))]
    lines: list[DiskLine] = []
    for number, (state, num_readers) in enumerate(settings):
        progress(number, len(settings))
        if state == "cold":
            prepare(files, "cold")
        share = cached_share(files)
        with FileSource(checkpoint.table.files) as plain:
            # The warm line draws the records of the cold one before it: those are in memory now.
            rate = measure_disk(
                records,
                wrap_source(plain),
                num_readers=num_readers,
                per_request=max(READERS),
                max_records=max(FEW_RECORDS, min(4096, MAX_BYTES // record_bytes)),
                max_seconds=SECONDS_EACH,
            )
        lines.append(DiskLine(rate, state, share))
    progress(len(settings), len(settings))
    return Examination(
        machine=machine,
        versions={name: version_of(name) for name in ("flashnext", "mlx", "numpy", "tokenizers")},
        num_cpus=usable_cpus(),
        free_bytes=shutil.disk_usage(checkpoint.directory).free,
        quantisation=quantisation_of(checkpoint),
        record_bytes=record_bytes,
        num_records=num_records,
        disk=tuple(lines),
        unmeasured=tuple(_unmeasured(machine, num_records, lines)),
    )


def drive_rate(checkpoint: Checkpoint, num_readers: int = max(READERS)) -> float | None:
    """Return the bytes a second that the drive gives of this model's records; None where memory answered.

    Raises:
        StoreError: a record could not be read.
    """
    records = {layer: layout.record for layer, layout in checkpoint.experts.items()}
    files = _files_of_experts(checkpoint)
    prepare(files, "cold")
    share = cached_share(files)
    with FileSource(checkpoint.table.files) as source:
        rate = measure_disk(
            records, source, num_readers=num_readers, per_request=num_readers, max_seconds=SECONDS_EACH
        )
    was_cold = share is not None and share <= MOST_CACHED
    return rate.bytes_per_s if was_cold else None


def _files_of_experts(checkpoint: Checkpoint) -> Sequence[Path]:
    used = {read.file for layout in checkpoint.experts.values() for read in layout.record.reads(0)}
    return [checkpoint.table.files[number].path for number in sorted(used)]


def _unmeasured(machine: Machine, num_records: int, lines: Sequence[DiskLine]) -> list[str]:
    missing: list[str] = []
    if machine.backend == "cpu":
        missing.append("what a wait for the device costs, and wired memory: there is no Metal device here")
    if sys.platform != "linux":
        missing.append("the cold drive: only an administrator can empty the page cache here (sudo purge)")
    elif any(line.page_cache == "cold" and not line.was_cold for line in lines):
        missing.append("the cold drive: pages stayed in memory though they were dropped")
    if num_records < FEW_RECORDS:
        missing.append(f"the drive at rest: the model has {num_records} records, too few to say")
    missing.append(
        "heat: a laptop that has read for minutes may be slower than one that has read for seconds"
    )
    return missing
