"""What each phase of a cycle costs when it waits for its own work. Entry points: `MeasuredLaps`, `NO_LAPS`.

A phase that is waited for cannot run beside the next one, so laps add up to more than the cycle takes without
them. Rates are never taken with laps on; laps say where the time goes, and what a row or a rollback costs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_flashnext.model.host import HostSync, fence

Phase = Literal["draft", "verify", "commit", "observe"]


@dataclass(frozen=True, slots=True)
class LapsOfCycle:
    """One cycle.

    Attributes:
        num_rows: of its block.
        num_kept: rows that stayed.
        draft_ns: until the proposal was there.
        verify_ns: until the verdict on the block was there, waits for experts included.
        commit_ns: until what the sequence carries had moved; where rows were cut, the way back.
        observe_ns: until the drafter had taken in the rows that stay.
    """

    num_rows: int
    num_kept: int
    draft_ns: int
    verify_ns: int
    commit_ns: int
    observe_ns: int


class Laps:
    """Nobody measures: the base of those that do."""

    def begin(self) -> None:
        """Start the clock of the next phase."""

    def end(self, phase: Phase, arrays: Callable[[], Sequence[mx.array]] = tuple) -> None:
        """End a phase and start the clock of the next one.

        Args:
            phase: that ends.
            arrays: what it made and nobody has waited for yet; asked only if somebody measures.
        """

    def cycle(self, num_rows: int, num_kept: int) -> None:
        """End the cycle."""


NO_LAPS = Laps()


class MeasuredLaps(Laps):
    """Measures every cycle, with a wait for the device after each phase.

    Args:
        sync: counts the waits.
        clock: nanoseconds.

    Attributes:
        cycles: what was measured, in order.
    """

    def __init__(self, sync: HostSync, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.cycles: list[LapsOfCycle] = []
        self._sync, self._clock = sync, clock
        self._began_ns = clock()
        self._took_ns: dict[Phase, int] = {}

    def begin(self) -> None:
        """See `Laps.begin`."""
        self._began_ns = self._clock()

    def end(self, phase: Phase, arrays: Callable[[], Sequence[mx.array]] = tuple) -> None:
        """See `Laps.end`."""
        # A stream computes in order: what was submitted before this array is there when it is.
        fence(self._sync, *arrays(), mx.zeros(1))
        now_ns = self._clock()
        self._took_ns[phase] = now_ns - self._began_ns
        self._began_ns = now_ns

    def cycle(self, num_rows: int, num_kept: int) -> None:
        """See `Laps.cycle`."""
        took, self._took_ns = self._took_ns, {}
        self.cycles.append(
            LapsOfCycle(num_rows, num_kept, took["draft"], took["verify"], took["commit"], took["observe"])
        )
