"""The state machine of a ticket, every step of it."""

import itertools
import pathlib
import re

import pytest

import expert_store
from expert_store.errors import StoreError
from expert_store.keys import ExpertKey, ReadClass
from expert_store.ticket import TRANSITIONS, Need, Ticket, TicketState

ERROR = StoreError("cannot be read")
WAYS = {  # a path from the start to every state
    TicketState.QUEUED: [],
    TicketState.READING: ["start"],
    TicketState.READY: ["start", "finish"],
    TicketState.FAILED: ["start", "fail"],
    TicketState.CANCELLED: ["cancel"],
}
ACTIONS = {
    "start": (TicketState.READING, lambda ticket: ticket.start(5)),
    "finish": (TicketState.READY, lambda ticket: ticket.finish(9)),
    "fail": (TicketState.FAILED, lambda ticket: ticket.fail(ERROR)),
    "cancel": (TicketState.CANCELLED, lambda ticket: ticket.cancel()),
}


class Told:
    def __init__(self, need=Need.NONE):
        self.errors, self.need = [], need

    def ticket_ended(self, ticket, error):
        self.errors.append(error)
        return self.need


def ticket_in(state, read_class=ReadClass.SPECULATIVE):
    ticket = Ticket(ExpertKey(3, 7), slot=1, num_bytes=10, read_class=read_class)
    for action in WAYS[state]:
        ACTIONS[action][1](ticket)
    assert ticket.state is state
    return ticket


@pytest.mark.parametrize(("state", "action"), list(itertools.product(TicketState, ACTIONS)))
def test_a_ticket_takes_the_steps_of_the_table_and_no_others(state, action):
    ticket = ticket_in(state)
    target, act = ACTIONS[action]
    if target in TRANSITIONS[state]:
        act(ticket)
        assert ticket.state is target
    else:
        with pytest.raises(AssertionError):
            act(ticket)
        assert ticket.state is state


def test_the_table_names_every_state_and_every_state_leads_to_an_end():
    assert set(TRANSITIONS) == set(TicketState)
    ends = {state for state, steps in TRANSITIONS.items() if not steps}
    assert ends == {TicketState.READY, TicketState.FAILED, TicketState.CANCELLED}
    assert all(ticket_in(state).is_ended == (state in ends) for state in TicketState)
    assert all(steps <= set(TicketState) - {TicketState.QUEUED} for steps in TRANSITIONS.values())


@pytest.mark.parametrize(("way", "error"), [("finish", None), ("fail", ERROR)])
def test_waiters_are_told_once_at_the_end(way, error):
    ticket = ticket_in(TicketState.READING, ReadClass.EXACT)
    waiters = [Told(), Told()]
    ticket.waiters.extend(waiters)
    ACTIONS[way][1](ticket)
    assert [waiter.errors for waiter in waiters] == [[error], [error]]
    assert ticket.waiters == []


def test_the_most_urgent_need_of_the_waiters_is_told():
    for needs in itertools.product(Need, Need):
        ticket = ticket_in(TicketState.READING)
        ticket.waiters.extend(map(Told, needs))
        assert ticket.finish(9) is max(needs)
    assert ticket_in(TicketState.READING).finish(9) is Need.NONE


def test_an_exact_ticket_is_never_cancelled_and_cancelling_a_guess_tells_whoever_watches_it():
    with pytest.raises(AssertionError, match="exact"):
        ticket_in(TicketState.QUEUED, ReadClass.EXACT).cancel()
    watched, watcher = ticket_in(TicketState.QUEUED), Told()
    watched.waiters.append(watcher)
    watched.cancel()
    assert (watcher.errors, watched.waiters) == ([None], [])


@pytest.mark.parametrize(("old", "new"), list(itertools.product(ReadClass, ReadClass)))
def test_an_upgrade_raises_the_class_and_never_lowers_it(old, new):
    ticket = ticket_in(TicketState.QUEUED, old)
    assert ticket.upgrade(new) == (new < old)
    assert ticket.read_class is min(old, new)


def test_only_the_ticket_file_assigns_a_ticket_state():
    assigning = re.compile(r"\.state\s*=[^=]")
    root = pathlib.Path(expert_store.__file__).parent
    found = [path.name for path in root.rglob("*.py") if assigning.search(path.read_text())]
    assert found == ["ticket.py"]
