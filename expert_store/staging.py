"""A directory written piece by piece, able to go on after any interruption. Entry: `StagedDirectory`.

Everything is written into `TARGET.partial`; `TARGET.journal` beside it names each finished file. The last act
is one rename to `TARGET`.

Invariants:
    S1  `TARGET` appears whole or not at all: a crash, a kill or a full disk at any moment leaves it absent;
    S2  a file counts as finished only once its bytes and then its line in the journal are on the disk; a line
        that was cut short or damaged, and every line after a fault, counts for nothing;
    S3  what was begun from another plan (another source, other settings) is refused, never mixed;
    S4  one process at a time: the journal is locked while it is open;
    S5  nothing outside is written to: what lies where a file is to be is removed, a link or a pipe as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final, Self

import msgspec
from xxhash import xxh3_64

from expert_store.errors import NotEnoughSpace, StoreError, TargetRefused, WriteFailed

FORMAT = "flashnext-journal"
VERSION = 2
"""2 added the seal of a line."""
_SPARE_BYTES: Final = 64 * 2**20
"""Left free beside what is written: directories, journal, and whatever else lives on the disk."""


class _Opening(msgspec.Struct, frozen=True):
    format: str
    version: int
    plan: str


class _Finished(msgspec.Struct, frozen=True):
    name: str
    size: int
    digests: tuple[str, ...]
    seal: str = ""

    def sealed(self) -> _Finished:
        """Return the line with the digest of the rest of it."""
        bare = msgspec.structs.replace(self, seal="")
        return msgspec.structs.replace(bare, seal=xxh3_64(msgspec.json.encode(bare)).hexdigest())


class StagedDirectory:
    """The directory under construction. Use as a context manager; leaving it keeps what is done."""

    def __init__(self, target: Path, plan: str) -> None:
        """Look at the target; nothing is written yet.

        Args:
            target: What is to appear.
            plan: Text that two runs share if and only if they write the same bytes.

        Raises:
            TargetRefused: The target exists, or its parent does not.
        """
        if not target.name:
            raise TargetRefused(f"The target has no name: {target}", hint="name the directory to make")
        self.target = target
        self.partial = target.with_name(target.name + ".partial")
        self.journal = target.with_name(target.name + ".journal")
        self._plan = plan
        self._journal: BinaryIO | None = None
        self._done: dict[str, _Finished] = {}
        if os.path.lexists(target):
            if not self.partial.exists():
                self.journal.unlink(missing_ok=True)  # a run that was killed right after its last act
            raise TargetRefused(
                f"The target exists already: {target}",
                hint="remove it, or choose another place",
                path=str(target),
            )
        if not target.parent.is_dir():
            raise TargetRefused(
                f"There is no such folder: {target.parent}", hint="make it first", path=str(target.parent)
            )

    def __enter__(self) -> Self:
        """Make or take up the partial directory, and lock it.

        Raises:
            TargetRefused: It was begun from something else, or another process is writing it.
            WriteFailed: The operating system refuses.
        """
        try:
            # Without O_NONBLOCK a pipe would be waited for.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._journal = os.fdopen(os.open(self.journal, flags, 0o644), "r+b", buffering=0)
        except OSError as error:
            raise _failed(error, self.partial) from error
        try:
            if not stat.S_ISREG(os.fstat(self._journal.fileno()).st_mode):
                raise TargetRefused(f"Not a regular file: {self.journal}", hint="remove it")
            self._lock()
            self.partial.mkdir(exist_ok=True)
            self._take_up()
        except OSError as error:
            self._journal.close()
            raise _failed(error, self.journal) from error
        except BaseException:
            self._journal.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock; where nothing was finished or begun, leave nothing behind."""
        if self._journal is not None:
            with contextlib.suppress(OSError):
                if not self._done and next(self.partial.iterdir(), None) is None:
                    self.partial.rmdir()
                    self.journal.unlink()
            self._journal.close()
            self._journal = None

    def digests_of(self, name: str) -> tuple[str, ...] | None:
        """Return the digests noted for a finished file, None if it has to be written."""
        finished = self._done.get(name)
        return None if finished is None else finished.digests

    def forget(self, name: str) -> None:
        """Take a finished file for one that has to be written: what was noted of it cannot be."""
        del self._done[name]

    def begin_anew(self) -> None:
        """Take nothing for finished any more: what was written is not what was noted."""
        assert self._journal is not None
        self._done.clear()
        self._journal.seek(0)
        self._journal.truncate()
        self._append(_Opening(FORMAT, VERSION, self._plan))

    def check_space(self, sizes: Mapping[str, int]) -> None:
        """Refuse to begin what cannot end.

        Args:
            sizes: Bytes of every file that is to be.

        Raises:
            NotEnoughSpace: The disk has less room than what is not yet done takes.
        """
        wanted = sum(size for name, size in sizes.items() if name not in self._done) + _SPARE_BYTES
        # A file that was begun is written over: what it holds is room too.
        begun = sum(max(0, _size_of(self.partial / name)) for name in sizes if name not in self._done)
        free = shutil.disk_usage(self.partial).free + begun
        if wanted > free:
            raise _no_space(f"{wanted} bytes are to be written to {self.partial}, {free} are free")

    def write(self, name: str, size: int, fill: Callable[[BinaryIO], tuple[str, ...]]) -> tuple[str, ...]:
        """Write one file, unless it is done already; return its digests.

        Args:
            name: Plain file name.
            size: Bytes it will have.
            fill: Writes them and returns the digests to note.

        Raises:
            NotEnoughSpace: The disk is full. Another run goes on from here.
            WriteFailed: The operating system refuses.
            StoreError: What `fill` raises.
        """
        finished = self._done.get(name)
        if finished is not None:
            return finished.digests
        path = self.partial / name
        try:
            if os.path.lexists(path):
                path.unlink()  # what was begun; or a link, which would be followed (S5)
            with path.open("xb", buffering=0) as stream:
                digests = fill(stream)
                _to_disk(stream.fileno())
                found = os.fstat(stream.fileno()).st_size
        except StoreError:
            raise
        except OSError as error:
            raise _failed(error, path) from error
        assert found == size, f"{name}: {found} bytes were written, {size} were planned"
        self._note(_Finished(name, size, digests).sealed())
        return digests

    def publish(self) -> None:
        """Give the directory its name; the last step.

        Raises:
            TargetRefused: The target has appeared meanwhile.
            WriteFailed: The operating system refuses.
        """
        try:
            _directory_to_disk(self.partial)
            if os.path.lexists(self.target):
                raise TargetRefused(
                    f"The target has appeared meanwhile: {self.target}",
                    hint=f"what was made is in {self.partial}",
                )
            self.partial.rename(self.target)
            _directory_to_disk(self.target.parent)
            self.journal.unlink()
        except OSError as error:
            raise _failed(error, self.target) from error

    def _lock(self) -> None:
        assert self._journal is not None
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TargetRefused(
                f"Another process is writing: {self.partial}", hint="wait for it to end"
            ) from error

    def _take_up(self) -> None:
        """Read the journal, or begin one (S2, S3)."""
        assert self._journal is not None
        text = self._journal.read()
        whole = text[: text.rfind(b"\n") + 1].splitlines()
        if not whole:
            other = next(self.partial.iterdir(), None)
            if other is not None:
                raise TargetRefused(
                    f"The folder holds something else: {self.partial} has {other.name}",
                    hint="remove it, or choose another place",
                )
            self._journal.seek(0)
            self._journal.truncate()
            self._append(_Opening(FORMAT, VERSION, self._plan))
            return
        try:
            opening = msgspec.json.decode(whole[0], type=_Opening)
        except msgspec.MsgspecError:
            opening = None
        if opening != _Opening(FORMAT, VERSION, self._plan):
            raise TargetRefused(
                f"What was begun here is of another source or other settings: {self.partial}",
                hint="remove it to begin anew, or choose another place",
            )
        kept = len(whole[0]) + 1
        for line in whole[1:]:
            try:
                finished = msgspec.json.decode(line, type=_Finished)
            except msgspec.MsgspecError:
                break
            if finished != finished.sealed() or _size_of(self.partial / finished.name) != finished.size:
                break
            self._done[finished.name] = finished
            kept += len(line) + 1
        self._journal.truncate(kept)
        self._journal.seek(kept)

    def _note(self, finished: _Finished) -> None:
        # The name of the file must be on the disk before the line that vouches for it (S2).
        try:
            _directory_to_disk(self.partial)
            self._append(finished)
        except OSError as error:
            raise _failed(error, self.journal) from error
        self._done[finished.name] = finished

    def _append(self, line: msgspec.Struct) -> None:
        assert self._journal is not None
        write_all(self._journal, msgspec.json.encode(line) + b"\n")
        _to_disk(self._journal.fileno())


def write_all(stream: BinaryIO, data: bytes | memoryview) -> None:
    """Write everything; an unbuffered stream may take less at a time."""
    view = memoryview(data)
    while view:
        view = view[stream.write(view) or 0 :]


def _to_disk(descriptor: int) -> None:
    """Wait until the drive itself has the bytes."""
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError:  # a drive or file system that does not know it
            os.fsync(descriptor)
    else:
        os.fsync(descriptor)


def _directory_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_of(path: Path) -> int:
    """Return the bytes of a regular file, -1 for anything else."""
    try:
        return path.lstat().st_size if path.is_file() and not path.is_symlink() else -1
    except OSError:
        return -1


def _failed(error: OSError, path: Path) -> StoreError:
    path = Path(error.filename) if isinstance(error.filename, str) else path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(f"The disk is full: {path}")
    return WriteFailed(
        f"Cannot write {path}: {error.strerror or error}",
        hint="check the permissions of the folder and its drive",
        errno=error.errno,
        path=str(path),
    )


def _no_space(message: str) -> NotEnoughSpace:
    return NotEnoughSpace(
        message, hint="free some space, then run the same command again: it goes on from where it stopped"
    )
