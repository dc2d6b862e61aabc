"""The operating system's cache of a checkpoint's files: emptied, filled and looked at on purpose.

A figure of a streaming engine means nothing without it: on a machine with free memory a second run reads from
memory what the first one read from the drive. Entry points: `prepare`, `cached_share`.

Linux drops the clean pages of a file when told that they are not needed, without privileges, and says of a
read whether it would have to wait (`RWF_NOWAIT`). macOS has neither: there the cache is as it is, and reports
say so.
"""

import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from drafter.files import naming

CacheState = Literal["cold", "warm", "as-is"]
NUM_SAMPLES: Final = 64
"""Pages looked at in each file to say what share of it is cached."""
MOST_CACHED: Final = 0.1
"""Share of pages in memory up to which a read was of the drive."""
_PAGE: Final = 4096
_ATTEMPTS: Final = 4
_PAUSE_S: Final = 0.02
_CHUNK_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was done to the cache and what was found then.

    Attributes:
        state: what was asked for.
        how: how it was made so, in words.
        cached_share: share of sampled pages that were in memory afterwards; None where it cannot be known.
    """

    state: CacheState
    how: str
    cached_share: float | None


def prepare(files: Sequence[Path], state: CacheState) -> Prepared:
    """Bring the files' pages into a state.

    Args:
        files: of the checkpoint.
        state: `cold` drops them, `warm` reads them once, `as-is` does nothing.

    Raises:
        OSError: a file cannot be read.
    """
    how = "left as it was"
    if state == "cold":
        how = (
            "pages dropped (posix_fadvise) before every repetition"
            if _can_drop()
            else "cannot be emptied here"
        )
        share = _dropped(files)
        return Prepared(state, how, share)
    if state == "warm":
        how = "files read once before every repetition"
        for path in files:
            _read(path)
    return Prepared(state, how, cached_share(files))


def _dropped(files: Sequence[Path]) -> float | None:
    """Drop the files' pages and return the share that is there all the same.

    It is advice: pages that the kernel handles at that moment stay, and all of a small file may be one of its
    units. So it is given again, a few times.
    """
    share: float | None = None
    for attempt in range(_ATTEMPTS):
        time.sleep(_PAUSE_S * attempt)
        for path in files:
            drop(path)
        share = cached_share(files)
        if not share:
            break
    return share


def drop(path: Path) -> None:
    """Drop a file's pages from the cache, where the system can; pages that are mapped stay.

    What was written a moment ago is brought to the drive first: only clean pages can be dropped.
    """
    if not _can_drop():
        return
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(files: Sequence[Path], seed: int | None = None) -> float | None:
    """Return the share of sampled pages that are in memory; None where the system does not say.

    A page that is looked at and is not in memory is fetched, though nobody waits for it: so no page is looked
    at twice in a call, each call looks at pages of its own, unless a seed says otherwise, and no page is read
    ahead of those.
    """
    if sys.platform != "linux" or not files:
        return None
    chance, found, num_pages = random.Random(seed), 0, 0
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            pages = range(0, os.fstat(descriptor).st_size, _PAGE)
            for offset in chance.sample(pages, min(NUM_SAMPLES, len(pages))):
                is_cached = _is_cached(descriptor, offset)
                if is_cached is None:
                    return None
                found, num_pages = found + is_cached, num_pages + 1
        finally:
            os.close(descriptor)
    return found / num_pages if num_pages else None


def _is_cached(descriptor: int, offset: int) -> bool | None:
    """Return whether a page is in memory, None if the file system does not say."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:
        return None


def _read(path: Path) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    with naming(path), path.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def _can_drop() -> bool:
    return sys.platform == "linux"
