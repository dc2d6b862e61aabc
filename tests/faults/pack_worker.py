"""Packs or converts a checkpoint in a process of its own, which ends itself with SIGKILL at the n-th act that
touches the disk: `python -m tests.faults.pack_worker pack|convert SOURCE TARGET [N]`. Prints the number of
acts when it gets through.

An act is a write (which dies half written), a flush, a rename or a removal, once before and once after.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expert_store import pack_writer, staging
from mlx_flashnext import packing

WORK, SOURCE, TARGET = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
KILL_AT = int(sys.argv[4]) if len(sys.argv) > 4 else -1
acts = 0


def act() -> bool:
    """Count one act; return whether it is the last."""
    global acts
    acts += 1
    return acts == KILL_AT


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if act():
            die()
        result = function(*arguments, **options)
        if act():
            die()
        return result

    return call


def deadly_write(stream: Any, data: bytes) -> None:
    if act():
        honest_write(stream, memoryview(data)[: len(data) // 2])
        die()
    honest_write(stream, data)


honest_write = staging.write_all
staging.write_all = pack_writer.write_all = deadly_write
staging._to_disk = deadly(staging._to_disk)
staging._directory_to_disk = deadly(staging._directory_to_disk)
Path.rename = deadly(Path.rename)
Path.unlink = deadly(Path.unlink)
Path.mkdir = deadly(Path.mkdir)

if WORK == "pack":
    packing.pack_checkpoint(SOURCE, TARGET)
else:
    from mlx_flashnext.conversion import writing
    from mlx_flashnext.conversion.recipe import Recipe

    writing.write_all = deadly_write
    writing.convert_checkpoint(SOURCE, TARGET, Recipe())
sys.stdout.write(f"{acts}\n")
