"""A second copy of the records on another drive. Entry points: `find_mirror`, `MirroredSource`.

Each record is read from the drive that would have it first, as the rates say that were measured so far. The
mirror is never needed: one that fails, comes short or disagrees is dropped for good, its read is done again
from the first copy, and the reason is kept for whoever asks.

Invariants:
    M1  what a record's owner gets is what the first copy holds: bytes of the mirror were compared, with the
        record's digest where a pack has one, else with the first copy the first time they are read;
    M2  an error of the mirror is never an error of the read;
    M3  only durations above zero count for a rate, and the drive that is not chosen is tried again now and
        then: a clock that stumbled must not make one drive look infinitely fast for ever (FIELD P21).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from expert_store.errors import CheckpointNotFound, StoreError
from expert_store.layout import ReadOp
from expert_store.safetensors_file import FileInfo, read_header
from expert_store.source import ByteSource

Side = Literal[0, 1]
FIRST: Final = 0
MIRROR: Final = 1
NUM_PROBES: Final = 4
"""Reads of each drive before rates decide."""
PROBE_EVERY: Final = 64
"""So many reads after which the other drive is tried."""
WINDOW_NS: Final = 250_000_000
"""Busy time after which what was measured counts half."""
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Mirror:
    """The files of a second copy.

    Attributes:
        files: of the mirror.
        numbers: which of them mirrors which file of the first copy, by index.
        notes: what a person should know: files that are not there or differ, a drive that is the same.
    """

    files: tuple[FileInfo, ...]
    numbers: Mapping[int, int]
    notes: tuple[str, ...]


def find_mirror(files: Sequence[FileInfo], wanted: Sequence[int], directory: Path) -> Mirror:
    """Look for copies of data files, by name, size and header; no tensor data is read.

    Args:
        files: of the first copy.
        wanted: indices of those that hold records.
        directory: of the second one.

    Raises:
        CheckpointNotFound: there is no such directory, or no copy in it.
    """
    if not directory.is_dir():
        raise CheckpointNotFound(
            f"No mirror there: {directory}", hint="--mirror takes a directory", path=str(directory)
        )
    found: list[FileInfo] = []
    numbers: dict[int, int] = {}
    notes: list[str] = []
    for number in wanted:
        first = files[number]
        path = directory / first.path.name
        if not path.is_file():
            continue
        try:
            info, header = read_header(path, path.resolve())
            is_same = info.size == first.size and header == read_header(first.path, first.path.resolve())[1]
        except StoreError as error:
            notes.append(f"the mirror's {path.name} is not used: {error.message}")
            continue
        if not is_same:
            notes.append(f"the mirror's {path.name} is not used: it is no copy")
            continue
        numbers[number] = len(found)
        found.append(info)
    if not found:
        raise CheckpointNotFound(
            f"The mirror holds no copy of the model's {len(wanted)} data files: {directory}",
            hint="; ".join(notes) or f"copy them there, such as {files[wanted[0]].path.name}",
            path=str(directory),
        )
    if len(found) < len(wanted):
        notes.append(f"the mirror holds {len(found)} of {len(wanted)} data files")
    if found[0].path.stat().st_dev == files[wanted[0]].path.stat().st_dev:
        notes.append(
            "the mirror lies on the same drive as the model: two copies there are no faster than one"
        )
    return Mirror(tuple(found), numbers, tuple(notes))


@dataclass(slots=True)
class _Drive:
    """What is known of one drive."""

    num_started: int = 0
    num_ended: int = 0
    waiting_bytes: int = 0
    since_ns: int = 0
    busy_ns: float = 0.0
    done_bytes: float = 0.0
    total_bytes: int = field(default=0)

    @property
    def bytes_per_ns(self) -> float | None:
        return self.done_bytes / self.busy_ns if self.busy_ns > 0 and self.done_bytes > 0 else None

    def tick(self, now_ns: int) -> None:
        """Count the time since the last event, if something was on the wire."""
        passed = now_ns - self.since_ns
        if self.num_started > self.num_ended and passed > 0:
            self.busy_ns += passed
        self.since_ns = now_ns


class Splitter:
    """Says which of two drives a record should be read from. Pure but for its counts; no lock, no clock.

    A drive's rate is what it gave while something was on the wire, recent reads counting more.
    """

    def __init__(self) -> None:
        self.drives = (_Drive(), _Drive())
        self._num_chosen = 0

    def start(self, num_bytes: int, now_ns: int) -> Side:
        """Choose a drive for a read that begins now."""
        side = self._choose(num_bytes)
        self.begin(side, num_bytes, now_ns)
        return side

    def begin(self, side: Side, num_bytes: int, now_ns: int) -> None:
        """Note a read that begins on a drive, whoever chose it."""
        drive = self.drives[side]
        drive.tick(now_ns)
        drive.num_started += 1
        drive.waiting_bytes += num_bytes

    def end(self, side: Side, num_bytes: int, now_ns: int) -> None:
        """Note its end."""
        drive = self.drives[side]
        drive.tick(now_ns)
        drive.num_ended += 1
        drive.waiting_bytes -= num_bytes
        drive.done_bytes += num_bytes
        drive.total_bytes += num_bytes
        if drive.busy_ns > 2 * WINDOW_NS:
            drive.busy_ns /= 2
            drive.done_bytes /= 2

    def _choose(self, num_bytes: int) -> Side:
        first, mirror = self.drives
        self._num_chosen += 1
        rates = first.bytes_per_ns, mirror.bytes_per_ns
        if rates[0] is None or rates[1] is None or min(first.num_ended, mirror.num_ended) < NUM_PROBES:
            return FIRST if first.num_started <= mirror.num_started else MIRROR
        ends = [
            (drive.waiting_bytes + num_bytes) / rate
            for drive, rate in zip(self.drives, rates, strict=True)
            if rate is not None
        ]
        better: Side = FIRST if ends[0] <= ends[1] else MIRROR
        if self._num_chosen % PROBE_EVERY == 0:
            return MIRROR if better == FIRST else FIRST
        return better


class MirroredSource(ByteSource):
    """Two copies read as one. Whole records are split; everything else comes from the first copy."""

    def __init__(
        self,
        first: ByteSource,
        mirror: ByteSource,
        numbers: Mapping[int, int],
        *,
        is_proved: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Wrap two sources, which this closes.

        Args:
            first: the copy that decides.
            mirror: the second one.
            numbers: index of a file in `mirror` by its index in `first`.
            is_proved: the mirror compares its records with digests itself.
            clock: nanoseconds.
        """
        self._first = first
        self._mirror = mirror
        self._numbers = dict(numbers)
        self._is_proved = is_proved
        self._clock = clock
        self._lock = threading.Lock()  # protects everything below
        self._splitter = Splitter()
        self._proved: set[tuple[int, int]] = set()
        self._dropped = ""

    @property
    def dropped(self) -> str:
        """Return why the mirror is not used any more, "" while it is."""
        return self._dropped

    @property
    def read_bytes(self) -> tuple[int, int]:
        """Return the bytes of records read from the first copy and from the mirror."""
        with self._lock:
            first, mirror = self._splitter.drives
            return first.total_bytes, mirror.total_bytes

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Fill the views from the first copy; see `ByteSource`."""
        return self._first.read_into(file, offset, views)

    def read_runs(self, runs: Sequence[ReadOp], views: Sequence[memoryview]) -> int:
        """Do the reads of one record from either copy; see `ByteSource`."""
        wanted = 0
        is_mirrored = not self._dropped
        for run in runs:
            wanted += run.length
            is_mirrored = is_mirrored and run.file in self._numbers
        if not is_mirrored:
            return self._first.read_runs(runs, views)
        with self._lock:
            side = self._splitter.start(wanted, self._clock())
        try:
            if side == FIRST:
                return self._first.read_runs(runs, views)
            fault = self._try_mirror(runs, views, wanted)
        finally:
            with self._lock:
                self._splitter.end(side, wanted, self._clock())
        fault = fault or self._try_comparing(runs, views, wanted)
        if not fault:
            return wanted
        self._drop(fault)
        return self._first.read_runs(runs, views)

    def name(self, file: int) -> str:
        """Return what messages call a file."""
        return self._first.name(file)

    def close(self) -> None:
        """Close both."""
        self._mirror.close()
        self._first.close()

    def _try_mirror(self, runs: Sequence[ReadOp], views: Sequence[memoryview], wanted: int) -> str:
        """Read a record from the mirror; return what is wrong with it, "" if nothing is."""
        there = [ReadOp(self._numbers[run.file], run.offset, run.length, run.first, run.end) for run in runs]
        try:
            got = self._mirror.read_runs(there, views)
        except StoreError as error:
            return error.message
        except OSError as error:
            return error.strerror or type(error).__name__
        if got != wanted:
            return f"{self._mirror.name(there[0].file)} gave {got} of {wanted} bytes at {there[0].offset}"
        return ""

    def _try_comparing(self, runs: Sequence[ReadOp], views: Sequence[memoryview], wanted: int) -> str:
        """Compare a record of the mirror the first time; return where it differs, "" if it does not.

        The first copy is read for it, and its drive is charged for that, not the mirror's.
        """
        key = (runs[0].file, runs[0].offset)
        if self._is_proved or key in self._proved:
            return ""
        with self._lock:
            self._splitter.begin(FIRST, wanted, self._clock())
        try:
            for run in runs:
                if not self._agrees(run, views[run.first : run.end]):
                    return f"{self.name(run.file)} differs from the first copy at {run.offset}"
        finally:
            with self._lock:
                self._splitter.end(FIRST, wanted, self._clock())
        with self._lock:
            self._proved.add(key)
        return ""

    def _agrees(self, run: ReadOp, views: Sequence[memoryview]) -> bool:
        """Compare what the mirror gave with the first copy, a piece at a time: memory for one piece."""
        piece = bytearray(min(run.length, _CHUNK_BYTES))
        at = run.offset
        for view in views:
            for start in range(0, view.nbytes, _CHUNK_BYTES):
                given = view[start : start + _CHUNK_BYTES]
                kept = piece if len(piece) == given.nbytes else bytearray(given.nbytes)
                if self._first.read_into(run.file, at, [memoryview(kept)]) != given.nbytes:
                    return False
                # A bytearray is compared as a whole, two memoryviews value by value.
                if kept != given:  # pyright: ignore[reportUnnecessaryComparison]  (they do compare)
                    return False
                at += given.nbytes
        return True

    def _drop(self, reason: str) -> None:
        with self._lock:
            if not self._dropped:
                self._dropped = f"the mirror is not used any more: {reason}"
