"""Says every two seconds that something still goes on while nothing comes. Entry: `Pulse` (FIELD P80).

A chunk of a prompt may sweep every expert of the model from the drive, which takes tens of seconds and gives
no event. A person, and a program that reads lines, must not take that for the end.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, Self

EVERY_S: Final = 2.0


class Pulse:
    """Calls `beat` from a thread of its own while used as a context, until stopped.

    Invariant: `beat` never runs while somebody holds the pulse, nor after `stop` has returned.
    """

    def __init__(self, beat: Callable[[float], None], *, every_s: float | None = None) -> None:
        """Prepare.

        Args:
            beat: told the seconds since the context began.
            every_s: seconds without a touch after which it is called.
        """
        self._beat = beat
        self._every_s = EVERY_S if every_s is None else every_s
        self._lock = threading.Lock()  # protects what `beat` writes to, and the moment below
        self._touched_s = self._began_s = time.monotonic()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._touched_s = self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextmanager
    def held(self) -> Generator[None]:
        """Within: it is silent; afterwards it waits anew."""
        with self._lock:
            yield
            self._touched_s = time.monotonic()

    def stop(self) -> None:
        """Let it be silent from now on. Idempotent."""
        if not self._is_stopped.is_set():
            with self._lock:
                self._is_stopped.set()

    def _run(self) -> None:
        while not self._is_stopped.wait(self._every_s / 4):
            with self._lock:
                now_s = time.monotonic()
                if self._is_stopped.is_set() or now_s - self._touched_s < self._every_s * 3 / 4:
                    continue
                self._touched_s = now_s
                try:
                    self._beat(now_s - self._began_s)
                except Exception:  # noqa: BLE001  a stream that is gone is met by whoever has an answer to write
                    return
