"""Ctrl-C: the first press asks, the second ends the process at once.

Entry point: `Interrupts`. While something polls (generation), the first press sets a flag that it sees at
the next cycle boundary; otherwise it raises KeyboardInterrupt. Either way the kernel's default action is
armed until `rearm`, so a second press ends the process even where Python code cannot run; shells show
that as 130 too.
"""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Self


class Interrupts:
    """Takes over SIGINT while used as a context. Main thread only."""

    def __init__(self) -> None:
        self._is_polled = False
        self._was_pressed = False

    def __enter__(self) -> Self:
        self._previous = signal.getsignal(signal.SIGINT)
        self.rearm()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def rearm(self) -> None:
        """Forget the press: the next one is the first again."""
        self._was_pressed = False
        signal.signal(signal.SIGINT, self._press)

    def was_pressed(self) -> bool:
        """Return whether Ctrl-C was pressed."""
        return self._was_pressed

    @contextmanager
    def polled(self) -> Generator[None]:
        """Within: somebody asks `was_pressed`, so the first press raises nothing."""
        self._is_polled = True
        try:
            yield
        finally:
            self._is_polled = False

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._was_pressed = True
        if not self._is_polled:
            raise KeyboardInterrupt
