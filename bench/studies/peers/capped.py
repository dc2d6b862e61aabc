"""A box for one process: a hard cap of memory, page cache included, and a rate of the drive. Entry: `Box`.

Linux control groups. The cap is that of a small machine: what the kernel caches for the process counts, so
the cache is dropped before it starts, or pages that lie there for somebody else would be free. The rate
holds at the block layer, for every kind of read, whoever makes it: no engine is slowed by other means than
another.
"""

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import Final, Self

_V1: Final = Path("/sys/fs/cgroup")
_NUMBERS: Final = itertools.count()


class Unavailable(SystemExit):
    """This machine has no such control groups, or they may not be changed."""


class Box:
    """Control groups of one process; a context manager.

    Args:
        memory_bytes: most it may have resident, its page cache included; None does not limit.
        disk: a path on the drive whose rate may be changed.
    """

    def __init__(self, memory_bytes: int | None, disk: Path) -> None:
        self._memory_bytes = memory_bytes
        device = disk.stat().st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"
        name = f"flashnext-peers-{os.getpid()}-{next(_NUMBERS)}"
        self._groups = {kind: _V1 / kind / name for kind in ("memory", "blkio")}

    def __enter__(self) -> Self:
        """Make the groups.

        Raises:
            Unavailable: there are none here.
        """
        try:
            for group in self._groups.values():
                group.mkdir()
            if self._memory_bytes is not None:
                (self._groups["memory"] / "memory.limit_in_bytes").write_text(str(self._memory_bytes))
        except OSError as error:
            self.__exit__()
            raise Unavailable(f"no memory and blkio control groups (version 1) to be had: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the groups once the process has left them."""
        for group in self._groups.values():
            for _ in range(50):
                with contextlib.suppress(FileNotFoundError):
                    try:
                        group.rmdir()
                    except OSError:
                        time.sleep(0.1)
                        continue
                break

    def enter(self) -> None:
        """Move the calling process in; called in the child."""
        for group in self._groups.values():
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def set_rate(self, bytes_per_s: int | None) -> None:
        """Limit what the box may read a second from the drive; None lifts the limit."""
        rate = f"{self._device} {bytes_per_s or 0}"
        (self._groups["blkio"] / "blkio.throttle.read_bps_device").write_text(rate)

    def peak_bytes(self) -> int:
        """Return the most that was charged to the box, page cache included."""
        return int((self._groups["memory"] / "memory.max_usage_in_bytes").read_text())

    def was_killed(self) -> bool:
        """Return whether the kernel has killed for want of memory."""
        lines = (self._groups["memory"] / "memory.oom_control").read_text().splitlines()
        return any(line.startswith("oom_kill ") and int(line.split()[1]) for line in lines)


def drop_caches() -> None:
    """Write what is dirty and forget every clean page of the machine; root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
