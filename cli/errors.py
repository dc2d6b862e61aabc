"""Errors as the command line reports them, and the exit codes.

code  meaning
0     done
1     failed for a reason of its own: nothing is there, or the system refuses
2     usage error
3     incompatible: whole, but another model, tokenizer, template, draft or version
4     not enough: memory, disk or context
5     damaged: there, but no plain file, not its format, cut short, changed meanwhile,
      or not what its digest or another file says
130   interrupted
"""

import errno
from dataclasses import dataclass

OK, FAILED, USAGE, INCOMPATIBLE, NOT_ENOUGH, DAMAGED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

# Of a path that is there and is no file to read, whoever met it.
_NO_FILE = frozenset((errno.EISDIR, errno.ELOOP, errno.ENXIO))
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_CODES = {
    "DocumentCorrupt": DAMAGED,
    "DamagedDocument": DAMAGED,
    "ForeignDocument": INCOMPATIBLE,
    "DamagedDrafter": DAMAGED,
    "CheckpointCorrupt": DAMAGED,
    "RecordCorrupt": DAMAGED,
    "SourceChanged": DAMAGED,
    "UnsupportedCheckpoint": INCOMPATIBLE,
    "PackVersionUnsupported": INCOMPATIBLE,
    "NotEnoughSpace": NOT_ENOUGH,
    "WeightMismatch": INCOMPATIBLE,
    "TokenizerMismatch": INCOMPATIBLE,
    "MissingDrafter": INCOMPATIBLE,
    "IncompatibleDrafter": INCOMPATIBLE,
    "TargetDiffers": INCOMPATIBLE,
    "MachineForeign": INCOMPATIBLE,
    "MachineUnusable": DAMAGED,
    "ChatTemplateFailed": INCOMPATIBLE,
    "BudgetTooSmall": NOT_ENOUGH,
    "BudgetTooLarge": NOT_ENOUGH,
    "ContextTooLong": NOT_ENOUGH,
    "SlotsExhausted": NOT_ENOUGH,
    "MemoryError": NOT_ENOUGH,
    "EmptyPrompt": USAGE,
    "MessageRefused": USAGE,
    "InvalidRequest": USAGE,
}


class CommandError(Exception):
    """Something the command line itself refuses.

    Attributes:
        message: one line with the value that was wrong.
        hint: the next command or action.
        code: exit code.
    """

    def __init__(self, message: str, *, hint: str = "", code: int = FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code


class UsageProblem(CommandError):
    """The flags or arguments do not make sense together."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, code=USAGE)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error, ready to be shown.

    Attributes:
        code: exit code.
        kind: class name, for programs.
    """

    code: int
    kind: str
    message: str
    hint: str = ""

    def to_dict(self) -> dict[str, dict[str, str]]:
        """Return the JSON form."""
        return {"error": {"type": self.kind, "message": self.message, "hint": self.hint}}


def code_of(error: BaseException) -> int:
    """Return the exit code of what the system refused."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return NOT_ENOUGH
    return DAMAGED if number in _NO_FILE else FAILED


def code_of_reading(error: BaseException) -> int:
    """Return the exit code of what `read_regular` could not read."""
    from mlx_flashnext.regular_file import NO_PLAIN_FILE

    is_damaged = isinstance(error, OSError) and error.errno in NO_PLAIN_FILE
    return DAMAGED if is_damaged else code_of(error)


def describe(error: BaseException) -> Failure:
    """Return what to tell about any exception that reached the boundary."""
    from drafter.errors import DrafterError
    from expert_store.errors import StoreError
    from mlx_flashnext.engine.errors import EngineError
    from mlx_flashnext.errors import ModelError

    kind = type(error).__name__
    if isinstance(error, CommandError):
        return Failure(error.code, kind, error.message, error.hint)
    if isinstance(error, StoreError | ModelError | EngineError | DrafterError):
        codes = (_CODES[base.__name__] for base in type(error).__mro__ if base.__name__ in _CODES)
        return Failure(next(codes, FAILED), kind, error.message, error.hint)
    if isinstance(error, MemoryError):
        hint = "close other programs, or ask for less"
        return Failure(NOT_ENOUGH, kind, "The machine has no memory left", hint)
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or kind
        message = reason if error.filename is None else f"{reason}: {error.filename}"
        hint = "check the path, its permissions and the space on its disk"
        return Failure(code_of(error), kind, message, hint)
    detail = str(error) or "no message"
    return Failure(
        FAILED, kind, f"Internal error: {kind}: {detail}", "add --debug for the traceback, and report it"
    )
