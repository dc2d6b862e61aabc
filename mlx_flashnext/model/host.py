"""The only place where the model waits for the device, and the count of how often it did.

Entry points: `to_host` (values to Python), `fence` (wait for arrays). Both are counted in the `HostSync`
passed in, so that a test can assert the number of waits per token: the CPU backend hides their cost, Metal
does not (0.2 to 0.3 ms).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class HostSync:
    """Counter of waits for the device.

    Attributes:
        num_syncs: Waits so far.
    """

    __slots__ = ("num_syncs",)

    def __init__(self) -> None:
        self.num_syncs = 0


def to_host(sync: HostSync, array: mx.array) -> Any:
    """Wait for `array` and return its values as a number or nested lists."""
    sync.num_syncs += 1
    return array.tolist()


def fence(sync: HostSync, *arrays: mx.array) -> None:
    """Wait until `arrays` are computed."""
    sync.num_syncs += 1
    mx.eval(*arrays)
