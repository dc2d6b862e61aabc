"""Reader threads and the countdown: every job handed in once, every waiter woken, the dead noticed."""

import threading
from collections import deque

import pytest

from expert_store.completion import Completion
from expert_store.errors import SourceFailed, StoreError, WorkerDied
from expert_store.reader import ThreadReader, check_views
from expert_store.testing import StepReader


class Desk:
    """Hands out callables; remembers what came back."""

    def __init__(self, *jobs):
        self.lock = threading.Lock()
        self.jobs = deque(Work(self, job) for job in jobs)
        self.done = []
        self.failure = None
        self.all_done = Completion(len(jobs))

    def next_job(self):
        return self.jobs.popleft() if self.jobs else None

    def reader_failed(self, error):
        self.failure = error
        while self.jobs:
            self.jobs.popleft().hand_in(error)


class Work:
    def __init__(self, desk, job):
        self.desk, self.job = desk, job

    def read(self):
        self.job()

    def hand_in(self, error):
        assert self.desk.lock.locked()
        self.desk.done.append(error)
        self.desk.all_done.count_down(error)


def fail(error):
    raise error


def nothing():
    pass


def test_each_job_is_handed_in_once_with_its_own_error():
    refused = StoreError("refused")
    desk = Desk(
        nothing,
        lambda: fail(refused),
        lambda: fail(OSError(5, "broken")),
        lambda: fail(ZeroDivisionError("oops")),
    )
    reader = ThreadReader(1)
    reader.start(desk)
    assert desk.all_done.wait(30, reader.check)
    reader.close()
    assert desk.done[:2] == [None, refused]
    assert all(isinstance(error, SourceFailed) for error in desk.done[2:])
    assert "ZeroDivisionError: oops" in desk.done[3].message
    assert desk.failure is None


def test_a_dying_thread_hands_in_its_job_and_breaks_the_desk():
    desk = Desk(nothing, lambda: fail(SystemExit("gone")), nothing, nothing)
    reader = ThreadReader(1)
    reader.start(desk)
    assert desk.all_done.wait(30, nothing)
    assert desk.done[0] is None
    assert [type(error) for error in desk.done[1:]] == [WorkerDied] * 3
    assert isinstance(desk.failure, WorkerDied)
    assert isinstance(desk.failure.__cause__, SystemExit)
    reader.close()


def test_a_thread_that_is_gone_without_a_word_is_noticed_by_the_waiter():
    class Silent(ThreadReader):
        def _work(self):
            pass

    reader = Silent(1)
    desk = Desk(nothing)
    reader.start(desk)
    with pytest.raises(WorkerDied, match="gone"):
        desk.all_done.wait(30, reader.check)
    reader.close()
    reader.check()  # closed by its owner: nobody died


def test_a_lost_wake_up_is_a_time_out_and_not_a_hang():
    class Deaf(ThreadReader):
        def wake(self, num_jobs):
            """Planted: tells nobody."""

    desk = Desk()
    reader = Deaf(1)
    reader.start(desk)
    completion = Completion(1)
    with desk.lock:
        while reader._jobs_added._waiters == deque():  # until the thread has found nothing and waits
            reader._jobs_added.wait(0.001)
    assert not completion.wait(0.05, reader.check)
    reader.close()


def test_closing_twice_or_before_the_start_does_nothing():
    reader = ThreadReader(2)
    reader.close()
    desk = Desk(nothing)
    reader.start(desk)
    reader.close()
    reader.close()
    assert all(not thread.is_alive() for thread in reader._threads)


def test_a_reader_that_does_not_stop_is_reported():
    gate = threading.Event()
    desk = Desk(gate.wait)
    reader = ThreadReader(1, close_timeout_s=0.01)
    reader.start(desk)
    while desk.jobs:
        pass
    with pytest.raises(WorkerDied, match=r"did not stop within 0\.01 s"):
        reader.close()
    gate.set()
    desk.all_done.wait(30, nothing)


def test_a_step_reader_says_so_instead_of_hanging():
    reader = StepReader()
    reader.start(Desk())
    with pytest.raises(AssertionError, match="waiting on the thread that steps"):
        Completion(1).wait(None, reader.check)


def test_a_countdown_of_zero_is_done_and_one_too_many_is_our_bug():
    done = Completion(0)
    assert done.wait(0, nothing)
    with pytest.raises(AssertionError):
        done.count_down(None)


def test_a_countdown_keeps_its_first_error_and_wakes_every_waiter():
    completion = Completion(3)
    first, second = StoreError("first"), StoreError("second")
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(completion.wait(30, nothing))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for error in (None, first, second):
        completion.count_down(error)
    for thread in threads:
        thread.join()
    assert seen == [True] * 3
    assert completion.error is first


def test_memory_of_the_wrong_length_is_our_bug():
    check_views([memoryview(bytearray(3))], (3,), "slot", 0)
    with pytest.raises(AssertionError, match="slot 0"):
        check_views([memoryview(bytearray(4))], (3,), "slot", 0)
