"""Machines that are not here, for plans."""

from mlx_flashnext.engine.machine import GIB, MIB, Machine


def mac(total_gib: int, *, available_gib: float | None = None) -> Machine:
    """Return a Mac with Metal and `total_gib` of unified memory; Metal recommends three quarters of it."""
    total = total_gib * GIB
    return Machine(
        name=f"Mac {total_gib} GB",
        backend="metal",
        total_bytes=total,
        available_bytes=int((0.9 * total_gib if available_gib is None else available_gib) * GIB),
        recommended_bytes=int(0.75 * total),
        max_buffer_bytes=int(0.56 * total),
        imports_bytes=150 * MIB,
        cache_bytes=256 * MIB,
    )


def linux(total_gib: float = 24) -> Machine:
    """Return a Linux machine with the CPU backend."""
    return Machine(
        name="Linux",
        backend="cpu",
        total_bytes=int(total_gib * GIB),
        available_bytes=int(0.9 * total_gib * GIB),
        recommended_bytes=None,
        max_buffer_bytes=None,
        imports_bytes=150 * MIB,
        cache_bytes=16 * MIB,
    )
