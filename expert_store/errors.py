"""What can go wrong in the store: one tree, caught once at the boundary of the program.

    StoreError                      message, hint, context
      CheckpointNotFound            no checkpoint there
      CheckpointCorrupt             header, index, offsets or names that must not be trusted
      RecordCorrupt                 a record or row ended early, or is not what its digest says
      PackVersionUnsupported        a pack of a later version
      TargetRefused                 the place to write to is taken, in use, or begun from something else
      NotEnoughSpace                the disk cannot hold what is to be written
      WriteFailed                   the operating system refused a write
      SourceFailed                  the operating system refused a read
      SourceChanged                 a file was edited or replaced after its index was read
      PopularityUnusable            a warm start's file is damaged, or of another model: start cold
      SlotsExhausted                a request needs more slots than can be freed
      WouldBlock                    a `*_nowait` call, or a wait whose time ran out
      WorkerDied                    a reader thread is gone: the store is broken, open it again
      StoreClosed                   the store was closed by its owner

Closed by you (`StoreClosed`) and broken by the world (all others) are different classes. Errors of worker
threads are delivered to the waiter of the read, never logged and dropped.
"""

from __future__ import annotations

import re
from typing import Final, Self

_SHOWN_MAX: Final = 120
_LONG_WORD: Final = re.compile(r"\S{200,}")


class StoreError(Exception):
    """Root of everything this package raises on purpose.

    Attributes:
        message: One line that names the wrong value.
        hint: The next command or action, or "".
        context: Machine-readable facts (file, offset, layer, expert, ...).
    """

    def __init__(self, message: str, *, hint: str = "", **context: object) -> None:
        """Store the three parts; `str(error)` is the message alone."""
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context = context

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by parts, since `Exception` would forget the keyword arguments."""
        return (_rebuild, (type(self), self.message, self.hint, self.context))

    def again(self) -> Self:
        """Return a fresh error of the same content, caused by this one.

        One failed read may have several waiters. Raising one instance in several threads would let them
        write into each other's traceback.
        """
        copy = type(self)(self.message, hint=self.hint, **self.context)
        copy.__cause__ = self
        return copy


def brief(message: str, most: int) -> str:
    """Return a message of at most so many characters, whose words a stranger cannot make long either."""
    text = _LONG_WORD.sub(lambda word: f"{word[0][:_SHOWN_MAX]}...", message)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: object) -> str:
    """Return a value out of a file for a message: `repr`, cut where a stranger made it long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def _rebuild(kind: type[StoreError], message: str, hint: str, context: dict[str, object]) -> StoreError:
    return kind(message, hint=hint, **context)


class CheckpointNotFound(StoreError):
    """There is no checkpoint at the path. Give the directory that holds the `.safetensors` files."""


class CheckpointCorrupt(StoreError):
    """The files contradict themselves or each other. Fetch them again; nothing was loaded."""


class RecordCorrupt(StoreError):
    """A record or row is cut short or fails its digest. The request stops; nothing is substituted."""


class PackVersionUnsupported(StoreError):
    """The pack was written by a later version of this program."""


class TargetRefused(StoreError):
    """The place to write to is taken, in use, or was begun from something else. Nothing was changed."""


class NotEnoughSpace(StoreError):
    """The disk cannot hold what is to be written. What is done is kept; the target does not exist."""


class WriteFailed(StoreError):
    """The operating system could not write. What is done is kept; the target does not exist."""


class SourceFailed(StoreError):
    """The operating system could not read. The context holds errno, file and offset."""


class SourceChanged(StoreError):
    """A file is no longer the one whose index was read. Open the checkpoint again."""


class SlotsExhausted(StoreError):
    """More distinct records were asked for than there are slots that may be freed now."""


class WouldBlock(StoreError):
    """The answer is not there yet. The request stays valid: wait for it, or cancel it."""


class WorkerDied(StoreError):
    """A reader thread ended without finishing its read. The store takes no further work."""


class StoreClosed(StoreError):
    """The store was closed while or before this was asked of it."""
