"""Prompts for a model to answer, from a file: one JSON object a line.

Entry points: `read_prompts`, `parse_prompts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from drafter.documents import DocumentRefused, brief, read_document, unusable
from drafter.train.captures import TEXT_LIMIT
from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.text.template import ChatTemplate
from mlx_flashnext.tokenizer import Tokenizer

_HINT: Final = '{"prompt": "..."} a line'
# What a capture set takes for a label.
_Label = Annotated[str, msgspec.Meta(max_length=TEXT_LIMIT)]


class Prompt(NamedTuple):
    """A rendered prompt, what kind it is of, and what the target may well answer.

    The guess makes capturing faster and changes nothing: it is verified like any proposal.
    """

    tokens: list[int]
    label: str = ""
    guess: Sequence[int] = ()


def read_prompts(path: Path, directory: Path, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Read prompts, one JSON object a line: `messages` (or one `prompt`), `label`, `thinking`, `guess`.

    Args:
        path: of the file.
        directory: of the checkpoint, whose chat template renders them.
        tokenizer: of the checkpoint.

    Raises:
        DamagedDocument: it is no plain file.
        InvalidRequest: a line is not such an object.
        OSError: the file cannot be read.
        ModelError: the template refused a prompt.
    """
    try:
        lines = read_document(path)
    except DocumentRefused as error:
        raise unusable(f"No prompts in {path}", error, hint=_HINT) from None
    with ChatTemplate.open(directory) as template:
        for asked in parse_prompts(lines, path.name):
            messages = asked.messages or [{"role": "user", "content": asked.prompt}]
            variables: dict[str, Any] = {}
            if asked.thinking is not None:
                variables["enable_thinking"] = asked.thinking
            tokens = tokenizer.encode(template.render(messages, **variables))
            yield Prompt(tokens, asked.label or asked.genre, tokenizer.encode(asked.guess))


class PromptLine(msgspec.Struct):
    """One line of a file of prompts: `messages`, or one `prompt` of the user."""

    prompt: str = ""
    messages: list[dict[str, str]] = []
    label: _Label = ""
    genre: _Label = ""
    guess: str = ""
    thinking: bool | None = None


def parse_prompts(data: bytes, name: str) -> Iterator[PromptLine]:
    """Return the lines of a file of prompts; empty ones are left out.

    Args:
        data: the whole file, UTF-8.
        name: of the file, for messages.

    Raises:
        InvalidRequest: a line is no such object.
    """
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield msgspec.json.decode(line, type=PromptLine)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(
                f"Line {number} of {name} is no prompt: {brief(str(error))}", hint=_HINT
            ) from None
