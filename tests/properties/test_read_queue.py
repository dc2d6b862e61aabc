"""The read queue against a sorted list: priorities, joins, upgrades, bounds, cancellation by generation."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from expert_store.errors import StoreError
from expert_store.keys import ExpertKey, ReadClass
from expert_store.read_queue import ReadQueue
from expert_store.ticket import Ticket, TicketState

MAX_PREDICTED = 4
KEYS = st.builds(ExpertKey, st.integers(0, 2), st.integers(0, 4))
CLASSES = st.sampled_from(list(ReadClass))


class QueueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.queue = ReadQueue(max_predicted=MAX_PREDICTED)
        self.queued = []  # [class, deadline, arrival, ticket]
        self.reading = []
        self.arrivals = 0
        self.refused = 0

    def in_flight(self):
        return {ticket.key: ticket for *_, ticket in self.queued} | {
            ticket.key: ticket for ticket in self.reading
        }

    def predicted(self):
        return [entry for entry in self.queued if entry[0] is not ReadClass.EXACT]

    @rule(
        key=KEYS,
        read_class=CLASSES,
        deadline=st.integers(0, 2),
        owner=st.integers(0, 1),
        generation=st.integers(0, 3),
    )
    def push(self, key, read_class, deadline, owner, generation):
        ticket = Ticket(
            key,
            slot=0,
            num_bytes=1,
            owner=owner,
            generation=generation,
            read_class=read_class,
            deadline=deadline,
        )
        if key in self.in_flight():
            with pytest.raises(AssertionError, match="second read"):
                self.queue.push(ticket)
            return
        is_full = read_class is not ReadClass.EXACT and len(self.predicted()) >= MAX_PREDICTED
        assert self.queue.push(ticket) == (not is_full)
        self.refused += is_full
        if not is_full:
            self.arrive(read_class, ticket)

    def arrive(self, read_class, ticket):
        self.arrivals += 1
        self.queued.append([read_class, ticket.deadline, self.arrivals, ticket])

    @rule(key=KEYS, read_class=CLASSES)
    def join(self, key, read_class):
        ticket = self.in_flight().get(key)
        assert self.queue.find(key) is ticket
        if ticket is None:
            return
        old = ticket.read_class
        assert self.queue.join(key, read_class) is ticket
        assert ticket.read_class is min(old, read_class)
        if ticket.state is TicketState.QUEUED and read_class < old:
            self.queued = [entry for entry in self.queued if entry[3] is not ticket]
            self.arrive(read_class, ticket)

    @rule()
    def pop(self):
        ticket = self.queue.pop(now_ns=9)
        if not self.queued:
            assert ticket is None
            return
        first = min(self.queued, key=lambda entry: entry[:3])
        assert ticket is first[3]
        assert (ticket.state, ticket.started_ns) == (TicketState.READING, 9)
        self.queued.remove(first)
        self.reading.append(ticket)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), is_good=st.booleans())
    def end(self, data, is_good):
        ticket = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        self.queue.forget(ticket)
        if is_good:
            ticket.finish()
        else:
            ticket.fail(StoreError("no"))

    @rule(owner=st.integers(0, 1), generation=st.integers(0, 4))
    def cancel_older(self, owner, generation):
        stale = [e for e in self.predicted() if e[3].owner == owner and e[3].generation < generation]
        assert {id(t) for t in self.queue.cancel_older(owner, generation)} == {id(e[3]) for e in stale}
        assert all(entry[3].state is TicketState.CANCELLED for entry in stale)
        self.queued = [entry for entry in self.queued if entry not in stale]

    @precondition(lambda self: len(self.queued) > 6)
    @rule()
    def drain(self):
        expected = [entry[3] for entry in sorted(self.queued, key=lambda entry: entry[:3])]
        assert self.queue.drain() == expected
        assert all(ticket.state is TicketState.QUEUED for ticket in expected)
        self.queued = []

    @invariant()
    def counts_agree(self):
        assert len(self.queue) == len(self.queued) + len(self.reading)
        assert self.queue.num_queued == len(self.queued)
        assert self.queue.num_refused == self.refused
        assert len(self.predicted()) <= MAX_PREDICTED
        assert {id(ticket) for ticket in self.queue.in_flight()} == {id(t) for t in self.in_flight().values()}


def test_the_queue_agrees_with_a_sorted_list():
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
