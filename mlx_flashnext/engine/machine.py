"""What this machine has: memory, backend, limits. The only file that asks psutil or MLX about the device.

Everything above receives a frozen `Machine`, so tests plan for Macs that are not here. What only a Mac can
show (that the wired limit helps, what a synchronisation costs) is marked where it is used; the values set
here follow the Metal backend's documented limits and are never measured on this project's Linux machines.
"""

import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
import psutil

from mlx_flashnext.model.halves import compute_in_halves
from mlx_flashnext.model.traced import may_replay, replay_pieces

FUSE_VARIABLE = "FLASHNEXT_FUSE"
"""Set to anything, the CPU backend replays too. It calls g++ for each fused kernel at its first use: 25 of
them for an answer of the demo, 15 s once per machine, kept under the folder for temporary files, where it
loads them again whoever has put them there. So not unless asked."""

_STATUS = Path("/proc/self/status")

GIB = 1 << 30
MIB = 1 << 20

Backend = Literal["metal", "cpu"]


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine as the plan sees it. All sizes in bytes.

    Attributes:
        recommended_bytes: Metal's recommended working set; None on the CPU backend.
        max_buffer_bytes: the largest single array; None when the backend states no limit.
        imports_bytes: resident size of this process once everything is imported and nothing is loaded.
        cache_bytes: what MLX may keep of freed buffers.
        replays: whether pieces of a pass are replayed as fused kernels (`model/traced.py`).
        halves: whether large products are computed on two cores (`model/halves.py`).
    """

    name: str
    backend: Backend
    total_bytes: int
    available_bytes: int
    recommended_bytes: int | None
    max_buffer_bytes: int | None
    imports_bytes: int
    cache_bytes: int
    replays: bool = True
    halves: bool = False

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """Return the activation type of this backend.

        MLX's CPU kernels are scalar in bfloat16 (9 to 16 times slower) and accumulate in it (6 % error in one
        quantised product); both measured on 0.32.4.
        """
        return "bfloat16" if self.backend == "metal" else "float32"

    @property
    def prefill_step(self) -> int:
        """Return the tokens of one prefill chunk when nobody asks for another number.

        Metal's matrix kernels want long chunks. The CPU backend computes row by row: short ones cost nothing
        there and show progress every few seconds.
        """
        return 512 if self.backend == "metal" else 64

    @property
    def kernels(self) -> Literal["fused", "plain"]:
        """Return what a pass runs, in a word."""
        return "fused" if self.replays else "plain"

    def ceiling_bytes(self) -> int:
        """Return the most this process may plan for: what keeps the machine itself alive.

        Leaves 35 % of memory or 8 GiB, whichever is less (public reports of over-wired 16 GB Macs), stays
        under nine tenths of Metal's recommended working set, and under what is free now.
        """
        ceiling = self.total_bytes - min(int(0.35 * self.total_bytes), 8 * GIB)
        if self.recommended_bytes is not None:
            ceiling = min(ceiling, int(0.9 * self.recommended_bytes))
        return max(0, min(ceiling, self.available_bytes + self.imports_bytes))


def resident_bytes() -> int:
    """Return the resident size of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the largest resident size this process has had, in bytes.

    Linux's `ru_maxrss` survives `exec`: it would count what the parent had when it forked.
    """
    if sys.platform == "linux":
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_array_peak() -> None:
    """Begin a new peak of MLX's arrays: `peak_array_bytes` counts from here on."""
    mx.reset_peak_memory()


def peak_array_bytes() -> int:
    """Return the most bytes that MLX's arrays have taken at a time since `forget_array_peak`."""
    return mx.get_peak_memory()


def usable_cpus() -> int:
    """Return the processors this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def detect_machine() -> Machine:
    """Describe the machine this process runs on."""
    memory = psutil.virtual_memory()
    on_metal = mx.metal.is_available() and mx.default_device().type == mx.gpu
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size") if on_metal else None
    largest = info.get("max_buffer_length") if on_metal else None
    return Machine(
        name=str(info.get("device_name") or platform.processor() or platform.machine()),
        backend="metal" if on_metal else "cpu",
        total_bytes=int(memory.total),
        available_bytes=int(memory.available),
        recommended_bytes=None if recommended is None else int(recommended),
        max_buffer_bytes=None if largest is None else int(largest),
        imports_bytes=resident_bytes(),
        cache_bytes=(256 if on_metal else 8) * MIB,
        halves=not on_metal and usable_cpus() > 1,
        replays=may_replay() and (on_metal or bool(os.environ.get(FUSE_VARIABLE))),
    )


def swap_bytes() -> tuple[int, int]:
    """Return the bytes of swap in use and in all."""
    swap = psutil.swap_memory()
    return int(swap.used), int(swap.total)


def is_on_battery() -> bool | None:
    """Return whether the machine runs on its battery; None where it has none."""
    battery = cast("Any", psutil).sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def filesystem_of(path: Path) -> tuple[str, str]:
    """Return the kind of file system that a path lies on, "" if nobody knows, and where that is mounted."""
    real = path.resolve()
    best = ("", "/")
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if real.is_relative_to(mount) and (not best[0] or len(mount.parts) >= len(Path(best[1]).parts)):
            best = (partition.fstype, partition.mountpoint)
    return best


def mac_of(total_gib: int) -> Machine:
    """Return a Mac that is not here, with nothing else open, for plans.

    Metal recommends two thirds of the memory as working set up to 36 GB and three quarters beyond, and allows
    arrays of about 0.56 of it, as public reports of `device_info` have it; a tenth of memory is in use by the
    system. To be compared with real machines.
    """
    total = total_gib * GIB
    return Machine(
        name=f"Mac with {total_gib} GB",
        backend="metal",
        total_bytes=total,
        available_bytes=int(0.9 * total),
        recommended_bytes=int(total * (2 / 3 if total_gib <= 36 else 3 / 4)),
        max_buffer_bytes=int(0.56 * total),
        imports_bytes=150 * MIB,
        cache_bytes=256 * MIB,
    )


def prepare_device(machine: Machine, planned_bytes: int) -> None:
    """Set MLX's process-wide limits for a plan. Call once, before anything is allocated."""
    mx.set_cache_limit(machine.cache_bytes)
    replay_pieces(machine.replays)
    compute_in_halves(machine.halves)
    if machine.backend == "cpu":
        return
    # Slot banks live outside any module tree, so nobody else wires them. Effect to be shown on a Mac.
    limit = (
        planned_bytes if machine.recommended_bytes is None else min(planned_bytes, machine.recommended_bytes)
    )
    mx.set_wired_limit(limit)
