"""Errors of the target port: a checkpoint, its weights or its tokenizer is not what the model needs.

Every error carries a one-line `message` with the wrong value, a `hint` naming the next command or action, and
a `context` of plain values for programs. They are caught once, at the command line's boundary.
"""

from __future__ import annotations

import re
from typing import Final

MAX_MESSAGE: Final = 2000
"""Characters of a message: a value out of a hostile file may have millions."""
# As in the store's errors, which the model, whose errors these are too, must not know.
_WORD_KEPT: Final = 120
_LONG_WORD: Final = re.compile(r"\S{200,}")


class ModelError(Exception):
    """Root of the errors of `mlx_flashnext` below the engine.

    Args:
        message: One line, with the value that was wrong; cut at `MAX_MESSAGE`.
        hint: The next command or action.
        context: Plain values a program may read.
    """

    def __init__(self, message: str, *, hint: str = "", **context: object) -> None:
        message = _LONG_WORD.sub(lambda word: f"{word[0][:_WORD_KEPT]}...", message)
        message = message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 3]}..."
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context = context


class UnsupportedCheckpoint(ModelError):
    """The checkpoint describes a model, a size or a format that this port does not implement."""


class DocumentCorrupt(ModelError):
    """A small file is there and is not what its name says: no plain file, or not its format."""


class DocumentUnreadable(ModelError):
    """The operating system would not read a small file."""


class WeightMismatch(ModelError):
    """A tensor is missing, left over, of another shape or type than the config says, or not finite."""


class TokenizerMismatch(ModelError):
    """The tokenizer does not fit the checkpoint it came with."""


class StateError(ModelError):
    """A sequence state was asked for something it cannot do, such as forgetting its last tokens."""
