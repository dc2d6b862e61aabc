"""What can go wrong while a model is planned, opened or run.

EngineError
  BudgetTooSmall    the memory target cannot hold the model; the message names the smallest that can
  BudgetTooLarge    the memory target exceeds the machine
  ContextTooLong    prompt and answer do not fit the planned context
  EmptyPrompt       there is nothing to answer
  InvalidRequest    a value that no run could honour
  MissingDrafter    the checkpoint lacks what the asked drafter is made of
  IncompatibleDrafter  the gate refuses a draft; the message names the first reason
    DamagedDrafter  because a document of it is none
  TargetDiffers     what was captured or trained belongs to another target build
  EngineClosed      used after `close`
  WrongThread       used on another thread than the one that opened it
"""


class EngineError(Exception):
    """Root of the engine's errors: one line for people, a hint with the next step, and the values.

    Attributes:
        message: one line that names what was wrong and its value.
        hint: what to do next, "" when there is nothing to advise.
        context: the values, for machine-readable reports.
    """

    def __init__(self, message: str, *, hint: str = "", **context: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context = context


class BudgetTooSmall(EngineError):
    """The memory target cannot hold the plan. Nothing was allocated."""


class BudgetTooLarge(EngineError):
    """The memory target exceeds what the machine has."""


class ContextTooLong(EngineError):
    """The prompt leaves no room for an answer in the planned context."""


class EmptyPrompt(EngineError):
    """The prompt has no tokens."""


class InvalidRequest(EngineError):
    """A request names a value that no run could honour."""


class MissingDrafter(EngineError):
    """The checkpoint lacks what the asked drafter is made of. Nothing was loaded."""


class IncompatibleDrafter(EngineError):
    """A draft does not fit its target. Nothing of it was loaded."""


class DamagedDrafter(IncompatibleDrafter):
    """A document of a draft is there and is not what its name says. Nothing of it was loaded."""


class TargetDiffers(EngineError):
    """A capture set or a run was made with another target build."""


class EngineClosed(EngineError):
    """The engine was used after it was closed."""


class WrongThread(EngineError):
    """The engine was used on another thread than the one that opened it."""
