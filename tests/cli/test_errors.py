"""Exit codes: every error of every floor has one, and the table in the documentation is the one in force."""

import inspect

import pytest

import drafter.errors
import expert_store.errors
import mlx_flashnext.engine.errors
import mlx_flashnext.errors
from cli import errors
from cli.errors import DAMAGED, FAILED, INCOMPATIBLE, NOT_ENOUGH, USAGE, describe
from mlx_flashnext.simulation.simulated_machine import MachineForeign, MachineUnusable
from mlx_flashnext.text.messages import MessageRefused
from mlx_flashnext.text.template import ChatTemplateFailed

ROOTS = [
    (expert_store.errors, expert_store.errors.StoreError),
    (mlx_flashnext.errors, mlx_flashnext.errors.ModelError),
    (mlx_flashnext.engine.errors, mlx_flashnext.engine.errors.EngineError),
    (drafter.errors, drafter.errors.DrafterError),
]
TREE = [
    kind
    for module, root in ROOTS
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, root)
]


@pytest.mark.parametrize("kind", [*TREE, ChatTemplateFailed, MessageRefused], ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_message_and_hint_and_has_a_code(kind):
    failure = describe(kind("what was wrong: 7", hint="do this"))
    assert (failure.kind, failure.message, failure.hint) == (kind.__name__, "what was wrong: 7", "do this")
    assert failure.code in (FAILED, USAGE, INCOMPATIBLE, NOT_ENOUGH, DAMAGED)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("CheckpointCorrupt", 5),
        ("RecordCorrupt", 5),
        ("SourceChanged", 5),
        ("DocumentCorrupt", 5),
        ("DocumentUnreadable", 1),
        ("DamagedDrafter", 5),
        ("DamagedDocument", 5),
        ("ForeignDocument", 3),
        ("DrafterError", 1),
        ("IncompatibleDrafter", 3),
        ("CheckpointNotFound", 1),
        ("SourceFailed", 1),
        ("WorkerDied", 1),
        ("UnsupportedCheckpoint", 3),
        ("WeightMismatch", 3),
        ("TokenizerMismatch", 3),
        ("BudgetTooSmall", 4),
        ("BudgetTooLarge", 4),
        ("ContextTooLong", 4),
        ("EmptyPrompt", 2),
        ("InvalidRequest", 2),
    ],
)
def test_codes_of_the_documented_table(name, code):
    (kind,) = (kind for kind in TREE if kind.__name__ == name)
    assert describe(kind("x", hint="")).code == code


def test_every_name_in_the_table_exists():
    known = {
        kind.__name__ for kind in (*TREE, ChatTemplateFailed, MessageRefused, MachineForeign, MachineUnusable)
    } | {"MemoryError"}
    assert set(errors._CODES) <= known


def test_other_exceptions_are_told_in_one_line():
    assert describe(MemoryError()).code == NOT_ENOUGH
    failure = describe(PermissionError(13, "Permission denied", "/x"))
    assert failure.message == "Permission denied: /x"
    assert failure.hint
    full = describe(OSError(28, "No space left on device"))
    assert (full.message, full.code) == ("No space left on device", NOT_ENOUGH)
    assert describe(KeyError("x")).message == "Internal error: KeyError: 'x'"
