"""Errors carry what a person and a program need, through pickling and to several waiters."""

import inspect
import pickle

import pytest

from expert_store import errors
from expert_store.errors import RecordCorrupt, StoreError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, StoreError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_has_message_hint_and_context(kind):
    error = kind("it is 3", hint="make it 4", offset=3)
    assert (str(error), error.message, error.hint, error.context) == (
        "it is 3",
        "it is 3",
        "make it 4",
        {"offset": 3},
    )
    assert kind("alone").hint == ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling(kind):
    error = pickle.loads(pickle.dumps(kind("it is 3", hint="make it 4", offset=3)))
    assert (type(error), error.message, error.hint, error.context) == (
        kind,
        "it is 3",
        "make it 4",
        {"offset": 3},
    )


def test_each_waiter_gets_an_error_of_its_own():
    original = RecordCorrupt("short", hint="fetch", wanted=3)
    copies = [original.again(), original.again()]
    assert len({id(copy) for copy in copies}) == 2
    assert all(type(copy) is RecordCorrupt and copy.__cause__ is original for copy in copies)
    assert copies[0].context == {"wanted": 3}


def test_the_tree_in_the_docstring_names_every_error():
    assert all(f" {kind.__name__} " in (errors.__doc__ or "").replace("\n", " ") for kind in KINDS)
