"""What a drafter may raise on purpose. The engine drops a drafter that raises, whatever it raises."""

from __future__ import annotations


class DrafterError(Exception):
    """A drafter cannot go on with this sequence.

    Attributes:
        message: one line that states the fact.
        hint: what would help.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class DamagedDocument(DrafterError):
    """Something on the disk is there and is not what its name says: cut short, changed, or not its format."""


class ForeignDocument(DrafterError):
    """Something on the disk is whole and of another version than this program reads."""
