"""Owns the rendering child: starts it, talks to it under a deadline, kills it.

Entry point: `TemplateProcess`.

Invariants:
1. No call outlasts its deadline, whatever the child does; a child that misses one is dead before the call
   returns.
2. The child never outlives this process: its input closes with us, and it arms an alarm while it renders.
3. The child does not see the terminal's Ctrl-C (own process group) and holds none of our descriptors.

Safe after MLX has started threads: `subprocess` replaces the process image at once; nothing runs in the
fork.
"""

import contextlib
import json
import os
import selectors
import struct
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, NoReturn

WORKER = Path(__file__).with_name("template_worker.py")
START_LIMIT_S = 30.0


class TemplateProcessEnded(Exception):
    """The child ended or was killed. Attributes: `status` (exit status, None while unknown), `is_late`."""

    def __init__(self, *, status: int | None, is_late: bool) -> None:
        super().__init__("deadline missed" if is_late else f"exit status {status}")
        self.status = status
        self.is_late = is_late


class TemplateProcess:
    """One rendering child. Not thread-safe."""

    def __init__(self, setup: dict[str, Any], *, time_limit_s: float) -> None:
        """Start the child; returns before it is ready.

        Args:
            setup: the first frame.
            time_limit_s: for compiling, and for each rendering.
        """
        self._time_limit_s = time_limit_s
        # -P: neither the working directory nor the worker's own may shadow jinja2 or the standard library.
        command = [sys.executable, "-P", "-W", "ignore", str(WORKER)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._unsent = _frame({**setup, "seconds": time_limit_s + 1.0})
        self._received = bytearray()
        self._variables: dict[str, Any] | None = None

    def compiled(self) -> dict[str, Any]:
        """Return the child's answer to the setup, waiting for it if need be.

        Raises:
            TemplateProcessEnded: no answer came in time.
        """
        if self._variables is None:
            self._exchange(b"", START_LIMIT_S)
            self._variables = self._exchange(b"", self._time_limit_s)
        return self._variables

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            TemplateProcessEnded: no answer came in time.
        """
        self.compiled()
        return self._exchange(_frame(request), self._time_limit_s)

    def close(self) -> None:
        """End the child and wait for it. Idempotent."""
        self._finalizer()

    def _exchange(self, data: bytes, limit_s: float) -> dict[str, Any]:
        """Send `data` and what is still unsent; return the next frame."""
        self._unsent += data
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if self._unsent:
                selector.register(self._process.stdin, selectors.EVENT_WRITE)
            while (answer := self._parse()) is None:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    self._fail(is_late=True)
                for key, _ in ready:
                    if key.fileobj is self._process.stdout:
                        self._receive()
                    else:
                        self._send()
                        if not self._unsent:
                            selector.unregister(self._process.stdin)
        return answer

    def _send(self) -> None:
        assert self._process.stdin is not None
        try:
            sent = os.write(self._process.stdin.fileno(), self._unsent[: 1 << 16])
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._fail(is_late=False)
        else:
            self._unsent = self._unsent[sent:]

    def _receive(self) -> None:
        assert self._process.stdout is not None
        try:
            data = os.read(self._process.stdout.fileno(), 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._fail(is_late=False)
        self._received += data

    def _parse(self) -> dict[str, Any] | None:
        if len(self._received) < 4:
            return None
        size = struct.unpack("<I", self._received[:4])[0]
        if len(self._received) < 4 + size:
            return None
        body = bytes(self._received[4 : 4 + size])
        del self._received[: 4 + size]
        return json.loads(body)

    def _fail(self, *, is_late: bool) -> NoReturn:
        self.close()
        raise TemplateProcessEnded(status=self._process.returncode, is_late=is_late)


def _frame(value: dict[str, Any]) -> bytes:
    body = json.dumps(value).encode()
    return struct.pack("<I", len(body)) + body


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child, which holds nothing worth finishing, and reap it."""
    assert process.stdout is not None
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdout.close()
