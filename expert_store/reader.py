"""Who moves the bytes. Entry: `ThreadReader`; the seams are `SlotMemory`, `RowMemory`, `Desk` and `Reader`.

A desk (the store, a row table) hands out jobs; a reader carries them out. A job is read without any lock,
then handed in; handing in and taking the next is one acquisition of the desk's lock.

Invariants:
    R1  every job that was taken is handed in once, with its error if it failed, by a dying thread too;
    R2  no error is logged and dropped: it goes to whoever waits for the job;
    R3  a thread that ends for any reason but `close` breaks the desk: `reader_failed` fails what is queued,
        and waiters who find a thread gone without a word (`check`) do the same. Nobody waits for the dead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from expert_store.completion import Completion
from expert_store.errors import SourceFailed, StoreError, WorkerDied

_REOPEN: Final = "open the model again; if it happens twice, report it with the cause"


class SlotMemory(Protocol):
    """Where records go."""

    def views(self, layer: int, slot: int) -> Sequence[memoryview]:
        """Return the memory of one slot, one view per component, in component order.

        Called on reader threads, from several at once. Views are writable, contiguous, format "B", and as
        long as the components, which is checked when a slot is first read into (FIELD P18).
        """
        ...


class RowMemory(Protocol):
    """Where rows go: a few buffers of equal size that take turns."""

    @property
    def num_buffers(self) -> int:
        """Buffers that take turns."""
        ...

    @property
    def rows_per_buffer(self) -> int:
        """Rows that fit one buffer."""
        ...

    def row_views(self, buffer: int, index: int) -> Sequence[memoryview]:
        """Return the memory of one row, one view per component; as `SlotMemory.views`."""
        ...


class Job(Protocol):
    """One piece of reading."""

    def read(self) -> None:
        """Move the bytes. Without any lock; blocks; raises what goes wrong."""
        ...

    def hand_in(self, error: StoreError | None) -> None:
        """Take it back, with what went wrong. The caller holds the desk's lock."""
        ...


class Desk(Protocol):
    """Hands out jobs."""

    @property
    def lock(self) -> threading.Lock:
        """Protects everything the desk and its jobs share."""
        ...

    def next_job(self) -> Job | None:
        """Return the most urgent job, or None. The caller holds the lock."""
        ...

    def reader_failed(self, error: StoreError) -> None:
        """Fail all that is queued and refuse all that comes. The caller holds the lock."""
        ...


class Reader(Protocol):
    """Carries out the jobs of one desk."""

    @property
    def num_readers(self) -> int:
        """Jobs that may be in hand at once."""
        ...

    def start(self, desk: Desk) -> None:
        """Begin to serve a desk. Once."""
        ...

    def wake(self, num_jobs: int) -> None:
        """Say that jobs were added. The caller holds the desk's lock; does not block."""
        ...

    def check(self) -> None:
        """Raise `WorkerDied` if jobs may never be finished."""
        ...

    def wait_for(self, completion: Completion, timeout_s: float | None, check: Callable[[], None]) -> bool:
        """Block until the last end of a completion, as `Completion.wait`; the caller does not hold the lock.

        Threads bring that about by themselves. A reader that has none does its work here (simulate.py).
        """
        return completion.wait(timeout_s, check)

    def close(self) -> None:
        """Stop after the jobs in hand; blocks until they are handed in. Idempotent."""
        ...


class ThreadReader(Reader):
    """Worker threads, each with one job in hand."""

    def __init__(
        self, num_readers: int = 4, *, name: str = "expert-reader", close_timeout_s: float = 60.0
    ) -> None:
        """Remember the settings; `start` starts the threads.

        Args:
            num_readers: Threads, and so reads in flight at once.
            name: Prefix of thread names.
            close_timeout_s: How long `close` waits for reads in hand.
        """
        self._name = name
        self._num_readers = max(1, num_readers)
        self._close_timeout_s = close_timeout_s
        self._threads: list[threading.Thread] = []
        self._is_closing = False

    @property
    def num_readers(self) -> int:
        """Threads."""
        return self._num_readers

    def start(self, desk: Desk) -> None:
        """Start the threads; see `Reader`."""
        assert not self._threads, "a reader serves one desk"
        self._desk = desk
        self._jobs_added = threading.Condition(desk.lock)
        self._threads = [
            threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            for number in range(self._num_readers)
        ]
        for thread in self._threads:
            thread.start()

    def wake(self, num_jobs: int) -> None:
        """Wake as many idle threads as there are jobs, in one go; see `Reader`."""
        self._jobs_added.notify(num_jobs)

    def check(self) -> None:
        """Raise if a thread is gone though nobody closed the reader."""
        if not self._is_closing and not all(thread.is_alive() for thread in self._threads):
            raise WorkerDied("A reader thread is gone", hint=_REOPEN)

    def close(self) -> None:
        """Let every thread hand in its job and join it."""
        if not self._threads:
            return
        with self._desk.lock:
            self._is_closing = True
            self._jobs_added.notify_all()
        for thread in self._threads:
            thread.join(self._close_timeout_s)
            if thread.is_alive():
                raise WorkerDied(
                    f"A reader thread did not stop within {self._close_timeout_s:g} s",
                    hint="the drive does not answer: check it, then end the process",
                    thread=thread.name,
                )

    def _work(self) -> None:
        """Serve until closed."""
        job: Job | None = None
        error: StoreError | None = None
        try:
            while True:
                done, job = job, None  # handed in at most once, even if handing in is what fails
                job = self._exchange(done, error)
                if job is None:
                    return
                error = attempt(job)
        except BaseException as death:  # noqa: BLE001 - delivered to the waiters (R2), the thread ends
            self._die(job, death)

    def _exchange(self, done: Job | None, error: StoreError | None) -> Job | None:
        """Hand in a job and take the next, waiting for one; None when the reader closes."""
        with self._desk.lock:  # the lock of `_jobs_added`; taken directly, it costs no Python call
            if done is not None:
                done.hand_in(error)
            while (job := self._desk.next_job()) is None:
                if self._is_closing:
                    return None
                self._jobs_added.wait()
            return job

    def _die(self, job: Job | None, death: BaseException) -> None:
        """Hand in the job in hand and break the desk (R1, R3)."""
        error = WorkerDied(f"A reader thread died: {type(death).__name__}: {death}", hint=_REOPEN)
        error.__cause__ = death
        with self._desk.lock:
            self._desk.reader_failed(error)
            if job is not None:
                job.hand_in(error)


def check_views(views: Sequence[memoryview], lengths: tuple[int, ...], what: str, index: int) -> None:
    """Assert that memory is as long as what is read into it: a longer view would take a neighbour's bytes."""
    found = tuple([view.nbytes for view in views])
    assert found == lengths, f"memory of {what} {index} has {found} bytes, its components have {lengths}"


def attempt(job: Job) -> StoreError | None:
    """Carry out a job; return what went wrong."""
    try:
        job.read()
    except StoreError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a fault of the source or the memory: delivered, not dropped
        failure = SourceFailed(f"Read failed: {type(error).__name__}: {error}", hint="report this as a bug")
        failure.__cause__ = error
        return failure
    return None
