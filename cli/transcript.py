"""The chat file: a conversation that can be continued. Owns its format.

Format: one JSON document with `format`, `version`, `model`, `model_digest` and `messages`; a message has
`role`, `content` and, for assistants, `reasoning_content`. Unknown fields are ignored. Written beside the
target and renamed, so that a crash leaves the old file or the new one.
"""

import os
import tempfile
from pathlib import Path

import msgspec

from cli.errors import DAMAGED, INCOMPATIBLE, CommandError, code_of, code_of_reading
from drafter.reasons import shown
from mlx_flashnext.regular_file import read_regular

FORMAT = "flashnext-chat"
VERSION = 1
ROLES = ("system", "user", "assistant")


class SavedMessage(msgspec.Struct, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str
    reasoning_content: str | None = None

    def to_message(self) -> dict[str, str]:
        """Return the message as the chat template takes it."""
        message = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


class Transcript(msgspec.Struct):
    """A saved conversation.

    Attributes:
        model: what the model was called; for people.
        model_digest: identity of the checkpoint the conversation was held with.
    """

    format: str
    version: int
    model: str
    model_digest: str
    messages: list[SavedMessage]


def save_transcript(path: Path, transcript: Transcript) -> None:
    """Write a conversation, replacing an older one but no other kind of file.

    Raises:
        CommandError: the path holds something else, or cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(transcript), indent=1)
    try:
        if os.path.lexists(path) and not _is_transcript(path):
            raise CommandError(
                f"The file exists and is not a saved conversation: {path}", hint="choose another name"
            )
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".flashnext-", delete=False) as file:
            try:
                file.write(data + b"\n")
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise CommandError(
            f"Cannot save to {path}: {reason}", hint="choose another place", code=code_of(error)
        ) from error


def read_transcript(path: Path) -> Transcript:
    """Read a saved conversation.

    Raises:
        CommandError: the file is missing, damaged, or of another format or version.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise CommandError(
            f"Cannot read {path}: {error.strerror or error}",
            hint="save a conversation with /save FILE",
            code=code_of_reading(error),
        ) from error
    try:
        transcript = msgspec.json.decode(data, type=Transcript)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(
            f"Not a saved conversation: {path}: {error}", hint="save one with /save FILE", code=DAMAGED
        ) from error
    if transcript.format != FORMAT:
        raise CommandError(
            f"Not a saved conversation: {path}: format {transcript.format[:80]!r}", code=DAMAGED
        )
    if transcript.version != VERSION:
        raise CommandError(
            f"{path} has version {shown(transcript.version)}, this flashnext reads version {VERSION}",
            hint="use the flashnext that wrote it",
            code=INCOMPATIBLE,
        )
    for index, message in enumerate(transcript.messages):
        if message.role not in ROLES or (message.role == "system" and index):
            raise CommandError(
                f"{path}: message {index} cannot have the role {message.role[:80]!r}", code=DAMAGED
            )
    return transcript


def _is_transcript(path: Path) -> bool:
    try:
        return msgspec.json.decode(read_regular(path), type=Transcript).format == FORMAT
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
