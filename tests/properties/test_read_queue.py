"""The read queue against a sorted list: priorities, joins, upgrades, displacement, bounds, removal."""

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from expert_store import read_queue
from expert_store.errors import StoreError
from expert_store.keys import ExpertKey, ReadClass
from expert_store.read_queue import ReadQueue
from expert_store.ticket import Ticket, TicketState

MAX_PREDICTED = 4
KEYS = st.builds(ExpertKey, st.integers(0, 2), st.integers(0, 4))
GUESSES = st.sampled_from([ReadClass.NEAR, ReadClass.SPECULATIVE])
DEADLINES = st.integers(0, 2)
CONFIDENCES = st.sampled_from([0.0, 0.5, 1.0])


class QueueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.queue = ReadQueue(max_predicted=MAX_PREDICTED)
        self.queued = []  # (order, ticket), the smallest order first
        self.reading = []
        self.arrivals = 0

    def in_flight(self):
        return {t.key: t for _, t in self.queued} | {t.key: t for t in self.reading}

    def guesses(self):
        return [entry for entry in self.queued if entry[1].read_class is not ReadClass.EXACT]

    def arrive(self, ticket):
        self.arrivals += 1
        is_exact = ticket.read_class is ReadClass.EXACT
        urgency = (0, 0, 0.0) if is_exact else (ticket.read_class, ticket.deadline, -ticket.confidence)
        self.queued.append(((*urgency, self.arrivals), ticket))
        self.queued.sort()

    def leave(self, ticket):
        self.queued = [entry for entry in self.queued if entry[1] is not ticket]

    @rule(key=KEYS)
    def push(self, key):
        ticket = Ticket(key, slot=0, num_bytes=1)
        if key in self.in_flight():
            with pytest.raises(AssertionError, match="second read"):
                self.queue.push(ticket)
            return
        self.queue.push(ticket)
        self.arrive(ticket)

    @rule(key=KEYS, read_class=GUESSES, deadline=DEADLINES, confidence=CONFIDENCES)
    def push_guess(self, key, read_class, deadline, confidence):
        ticket = Ticket(
            key, slot=-1, num_bytes=1, read_class=read_class, deadline=deadline, confidence=confidence
        )
        if key in self.in_flight():
            with pytest.raises(AssertionError, match="second read"):
                self.queue.push_guess(ticket)
            return
        got = self.queue.push_guess(ticket)
        if len(self.guesses()) < MAX_PREDICTED:
            assert got == (True, None)
        else:
            worst_order, worst = self.guesses()[-1]
            if (read_class, deadline, -confidence) >= worst_order[:3]:
                assert got == (False, None)
                return
            assert got == (True, worst)
            assert worst.state is TicketState.QUEUED
            self.leave(worst)
        self.arrive(ticket)

    @rule(key=KEYS)
    def join(self, key):
        ticket = self.in_flight().get(key)
        assert self.queue.find(key) is ticket
        if ticket is None:
            return
        old = ticket.read_class
        assert self.queue.join(key) is ticket
        assert ticket.read_class is ReadClass.EXACT
        if ticket.state is TicketState.QUEUED and old is not ReadClass.EXACT:
            self.leave(ticket)
            self.arrive(ticket)

    @precondition(lambda self: self.guesses())
    @rule(data=st.data(), read_class=GUESSES, deadline=DEADLINES, confidence=CONFIDENCES)
    def reorder(self, data, read_class, deadline, confidence):
        order, ticket = data.draw(st.sampled_from(self.guesses()))
        is_higher = (read_class, deadline, -confidence) < order[:3]
        assert self.queue.reorder(ticket, read_class, deadline, confidence) == is_higher
        if is_higher:
            self.leave(ticket)
            self.arrive(ticket)

    @rule()
    def pop(self):
        first = self.queue.first()
        ticket = self.queue.pop(now_ns=9)
        assert ticket is first
        if not self.queued:
            assert ticket is None
            return
        assert ticket is self.queued.pop(0)[1]
        assert (ticket.state, ticket.started_ns) == (TicketState.READING, 9)
        assert ticket.is_predicted_read == (ticket.read_class is not ReadClass.EXACT)
        self.reading.append(ticket)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), is_good=st.booleans())
    def end(self, data, is_good):
        ticket = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        self.queue.forget(ticket)
        if is_good:
            ticket.finish(10)
        else:
            ticket.fail(StoreError("no"))

    @precondition(lambda self: self.guesses())
    @rule(data=st.data())
    def remove(self, data):
        _, ticket = data.draw(st.sampled_from(self.guesses()))
        self.queue.remove(ticket)
        ticket.cancel()
        self.leave(ticket)

    @precondition(lambda self: len(self.queued) > 6)
    @rule()
    def drain(self):
        exact = [entry[1] for entry in self.queued if entry[1].read_class is ReadClass.EXACT]
        assert self.queue.drain() == exact
        self.queued = self.guesses()

    @invariant()
    def counts_agree(self):
        assert len(self.queue) == len(self.queued) + len(self.reading)
        assert self.queue.num_queued == len(self.queued)
        assert self.queue.num_predicted == len(self.guesses()) <= MAX_PREDICTED
        assert self.queue.guesses() == [entry[1] for entry in reversed(self.guesses())]
        assert {id(ticket) for ticket in self.queue.in_flight()} == {id(t) for t in self.in_flight().values()}


STEPS = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_queue_agrees_with_a_sorted_list():
    run_state_machine_as_test(QueueMachine, settings=STEPS)


def confidence_forgotten(patch):
    patch.setattr(read_queue, "_urgency", lambda ticket: (-ticket.read_class, -ticket.deadline, 0.0))


def deadline_before_class(patch):
    patch.setattr(
        read_queue, "_urgency", lambda ticket: (-ticket.deadline, -ticket.read_class, ticket.confidence)
    )


def guesses_before_exact(patch):
    def first(self):
        if self._guesses:
            return self._guesses[-1][4]
        return self._exact[0] if self._exact else None

    patch.setattr(ReadQueue, "first", first)


def the_newcomer_always_wins(patch):
    push_guess = ReadQueue.push_guess

    def push(self, ticket):
        if self.num_predicted >= self.max_predicted and ticket.key not in self._in_flight:
            displaced = self._guesses[0][4]
            self.remove(displaced)
            push_guess(self, ticket)
            return True, displaced
        return push_guess(self, ticket)

    patch.setattr(ReadQueue, "push_guess", push)


@pytest.mark.parametrize(
    "plant", [confidence_forgotten, deadline_before_class, guesses_before_exact, the_newcomer_always_wins]
)
def test_a_planted_fault_of_the_order_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    quick = settings(
        STEPS, phases=[Phase.generate], verbosity=Verbosity.quiet, database=None, derandomize=True
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(QueueMachine, settings=quick)
