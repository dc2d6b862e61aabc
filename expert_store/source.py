"""Where bytes come from. Entry: `FileSource`; the seam is `ByteSource`.

A source reads a run of a file into memory that somebody else owns. It never allocates for the data, never
pads, and never returns bytes of another file than the one whose index was read:
    B1  `read_into` writes to the views only, and only as many bytes as it returns;
    B2  after each read, or record, the open file is compared with its `FileInfo`: an edit, a truncation or a
        removal since the index was read is `SourceChanged`, even when the read itself looked fine;
    B3  every call to the operating system, opening included, is made on the thread that calls `read_into`.
Faulty, throttled, counting and in-memory sources: testing.py.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Sequence
from typing import Final, Literal, Protocol, Self

from expert_store.errors import RecordCorrupt, SourceChanged, SourceFailed, StoreClosed, StoreError
from expert_store.layout import ReadOp
from expert_store.safetensors_index import FileInfo

_MAX_VIEWS: Final = 1024
"""IOV_MAX of Linux and macOS."""
_MAX_BYTES: Final = 2**30
"""macOS refuses a read of 2 GiB or more; Linux cuts it short."""


class ByteSource(Protocol):
    """Files by number, bytes by offset."""

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Fill the views, in order, from one run of a file.

        May block; called on reader threads, from several at once.

        Args:
            file: Index of the file.
            offset: First byte.
            views: Writable, contiguous, format "B"; the run is as long as they are together.

        Returns:
            Bytes read; fewer than asked for only where the file ends.

        Raises:
            StoreError: `SourceFailed`, `SourceChanged`, `StoreClosed`. An `OSError` counts as `SourceFailed`.
        """
        ...

    def read_runs(self, runs: Sequence[ReadOp], views: Sequence[memoryview]) -> int:
        """Do the reads of one record, in order, up to the first that comes out short; as `read_into`.

        Args:
            runs: What to read; each says which of the views it fills.
            views: The memory of the record, component by component.

        Returns:
            Bytes read, all runs together.
        """
        total = 0
        for run in runs:
            got = self.read_into(run.file, run.offset, views[run.first : run.end])
            total += got
            if got != run.length:
                break
        return total

    def name(self, file: int) -> str:
        """Return what messages call a file."""
        ...

    def close(self) -> None:
        """Give up the files. Idempotent; nobody may be reading."""
        ...


class FileSource(ByteSource):
    """Files of a checkpoint, read with `preadv`; safe for any number of threads."""

    def __init__(
        self,
        files: Sequence[FileInfo],
        *,
        cache: Literal["keep", "bypass"] = "keep",
    ) -> None:
        """Remember the files; each is opened by the first read that needs it.

        Args:
            files: As they were when their headers were read.
            cache: "bypass" asks the system not to keep what was read (a hint: FEASIBILITY.md 3).
        """
        self._files = tuple(files)
        self._stamps = [(info.mtime_ns, info.size, info.inode) for info in files]
        self._bypass = cache == "bypass"
        self._descriptors: list[int] = [-1] * len(files)
        self._open_lock = threading.Lock()  # protects opening and closing; reads do not take it
        self._is_closed = False

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Fill the views from one run of a file; see `ByteSource`."""
        got = self._fill(file, offset, views)
        self._verify(file)
        return got

    def read_runs(self, runs: Sequence[ReadOp], views: Sequence[memoryview]) -> int:
        """Do the reads of one record, then look once at each file they came from; see `ByteSource`."""
        total = 0
        verified = -1
        for run in runs:
            part = views[run.first : run.end]
            descriptor = self._descriptors[run.file]
            is_plain = descriptor >= 0 and not self._bypass and run.length <= _MAX_BYTES
            try:  # the common case in as few steps as can be: the caches are cold here (dispatch.py)
                got = os.preadv(descriptor, part, run.offset) if is_plain else 0
            except OSError as error:
                raise self._refused(error, run.file, run.offset) from error
            if got != run.length:
                got = self._fill(run.file, run.offset, part)
            total += got
            if got != run.length:
                break
        for run in runs:
            if run.file != verified:
                verified = run.file
                if self._descriptors[verified] >= 0:  # a short run may have ended the loop before this file
                    self._verify(verified)
        return total

    def _fill(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Read one run."""
        descriptor = self._descriptors[file]
        if descriptor < 0:
            descriptor = self._open(file)
        wanted = 0
        for view in views:
            wanted += view.nbytes
        try:
            is_one_call = wanted <= _MAX_BYTES and len(views) <= _MAX_VIEWS
            got = os.preadv(descriptor, views, offset) if is_one_call else 0
            if got != wanted:
                got = _read_on(descriptor, offset, views, got, wanted)
            if self._bypass and sys.platform == "linux":
                os.posix_fadvise(descriptor, offset, got, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._refused(error, file, offset) from error
        return got

    def _verify(self, file: int) -> None:
        """Refuse what was read if the file is no longer the one that was indexed (B2)."""
        try:
            status = os.fstat(self._descriptors[file])
        except OSError as error:
            raise self._refused(error, file, 0) from error
        if (status.st_mtime_ns, status.st_size, status.st_ino) != self._stamps[file] or not status.st_nlink:
            raise self._changed(file, status)

    def _refused(self, error: OSError, file: int, offset: int) -> StoreError:
        return _closed() if self._is_closed else self._failed(error, file, offset)

    def name(self, file: int) -> str:
        """Return the file name."""
        return self._files[file].path.name

    def close(self) -> None:
        """Close every file."""
        with self._open_lock:
            self._is_closed = True
            descriptors, self._descriptors = self._descriptors, [-1] * len(self._files)
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def __enter__(self) -> Self:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _open(self, file: int) -> int:
        with self._open_lock:
            if self._is_closed:
                raise _closed()
            if self._descriptors[file] >= 0:
                return self._descriptors[file]
            try:
                descriptor = os.open(self._files[file].path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise self._changed(file, None) from error
            except OSError as error:
                raise self._failed(error, file, 0) from error
            self._advise(descriptor)
            self._descriptors[file] = descriptor
            return descriptor

    def _advise(self, descriptor: int) -> None:
        """Tell the system how the file will be read; hints, so a refusal does not matter."""
        if sys.platform == "darwin" and self._bypass:
            import fcntl

            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)

    def _changed(self, file: int, status: os.stat_result | None) -> SourceChanged:
        info = self._files[file]
        if status is None or not status.st_nlink:
            what = "was removed or replaced"
        elif status.st_ino != info.inode:
            what = "was replaced"
        elif status.st_size != info.size:
            what = f"had {info.size} bytes and has {status.st_size}"
        else:
            what = "was written to"
        return SourceChanged(
            f"File changed while in use: {info.path.name} {what}",
            hint="leave the checkpoint alone while it is open, then open it again",
            file=info.path.name,
        )

    def _failed(self, error: OSError, file: int, offset: int) -> SourceFailed:
        return read_failed(error, self.name(file), offset)


def read_failed(error: OSError, name: str, offset: int) -> SourceFailed:
    """Return the error for a read that the operating system refused."""
    is_crowded = error.errno in (errno.EMFILE, errno.ENFILE)
    return SourceFailed(
        f"Cannot read {name} at {offset}: {error.strerror or error}",
        hint="raise the limit of open files: ulimit -n 1024"
        if is_crowded
        else "check the drive that holds the model",
        errno=error.errno,
        file=name,
        offset=offset,
    )


def _read_on(descriptor: int, offset: int, views: Sequence[memoryview], got: int, wanted: int) -> int:
    """Finish a run that one call did not fill; return the bytes read, fewer only at the end of the file."""
    while got < wanted:
        count = os.preadv(descriptor, _remaining(views, got), offset + got)
        if count == 0:
            break
        got += count
    return got


def _remaining(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of the views after `done` bytes, as much as one call may take."""
    left: list[memoryview] = []
    room = _MAX_BYTES
    for view in views:
        if done >= view.nbytes:
            done -= view.nbytes
            continue
        part = view[done : done + room]
        done = 0
        room -= part.nbytes
        left.append(part)
        if not room or len(left) == _MAX_VIEWS:
            break
    return left


def _closed() -> StoreClosed:
    return StoreClosed("Source is closed", hint="open the checkpoint again")


def cut_short(source: ByteSource, what: str, file: int, offset: int, wanted: int, got: int) -> RecordCorrupt:
    """Return the error of a read that came out short."""
    name = source.name(file)
    return RecordCorrupt(
        f"{name} ended early: {what} wanted {wanted} bytes, got {got}",
        hint="fetch this file again",
        file=name,
        offset=offset,
        wanted=wanted,
        got=got,
    )
