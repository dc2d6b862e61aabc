"""What a process holds at rest: measured between blocks of a soak, and judged. Entry: `measure`, `judge`.

Everything is measured with no engine open and after a collection, so that a figure has no excuse: memory
that MLX says is in use is nought, threads and descriptors are those of the start, and neither what is
resident nor the number of Python's blocks may grow from one end of a run to the other.
"""

import ctypes
import gc
import os
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

M_ARENA_MAX = -8
"""Of `mallopt`, in glibc's malloc.h."""
MOST_DRIFT = 0.02
"""Of the resident size, and of the number of Python's blocks, from the first fifth of a run to the last."""


@dataclass(frozen=True, slots=True)
class Rest:
    """One moment of rest.

    Attributes:
        turns: how many had run.
        rss_bytes: resident.
        mlx_bytes: that MLX says are in use.
        blocks: of memory that Python's objects take.
        threads: of Python.
        tasks: of the operating system, those of MLX included.
        descriptors: open.
    """

    turns: int
    rss_bytes: int
    mlx_bytes: int
    blocks: int
    threads: int
    tasks: int
    descriptors: int


def use_one_arena() -> None:
    """Let all threads share the C library's main arena; to be called before there are any.

    Every reader thread would have an arena of its own, whose first page of crumbs stays resident when the
    thread has ended: 2,000 turns grew by 3 % that way, of which nothing was in use (bench/LEDGER.md).
    """
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def measure(turns: int) -> Rest:
    """Collect what nobody holds and look; Linux."""
    for _ in range(3):
        gc.collect()
    mx.clear_cache()
    # The C library keeps what was freed in pieces between what was not: that is its reserve, not our leak.
    ctypes.CDLL(None).malloc_trim(0)
    process = Path("/proc/self")
    pages = int((process / "statm").read_text().split()[1])
    return Rest(
        turns,
        pages * os.sysconf("SC_PAGE_SIZE"),
        mx.get_active_memory(),
        sys.getallocatedblocks(),
        threading.active_count(),
        sum(1 for _ in (process / "task").iterdir()),
        sum(1 for _ in (process / "fd").iterdir()),
    )


def judge(rests: Sequence[Rest]) -> list[str]:
    """Return what has grown, in words; nothing if all is flat.

    Args:
        rests: in order; the first is that after the warm-up.
    """
    first, wrong = rests[0], []
    for name in ("mlx_bytes", "threads", "tasks", "descriptors"):
        values = [getattr(rest, name) for rest in rests]
        if max(values) > values[0]:
            wrong.append(f"{name}: {values[0]} after {first.turns} turns, then up to {max(values)}")
    for name in ("rss_bytes", "blocks"):
        grown = drift(rests, name)
        if grown > MOST_DRIFT:
            wrong.append(f"{name}: grew by {grown:.2%} from the first fifth to the last")
    return wrong


def drift(rests: Sequence[Rest], name: str) -> float:
    """Return by what share the median of the last fifth is above that of the first."""
    values = [getattr(rest, name) for rest in rests]
    fifth = max(1, len(values) // 5)
    return statistics.median(values[-fifth:]) / statistics.median(values[:fifth]) - 1
