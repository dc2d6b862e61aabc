"""Messages as a chat template wants them: text, of roles it knows. Entry point: `plain_messages`.

flashnext reads text. A picture that is silently left out gives an answer that is confident and wrong, so any
part that is not text is refused, and so is a role that a template might pass over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from mlx_flashnext.errors import ModelError

Message = Mapping[str, Any]
ROLES: Final = ("system", "user", "assistant", "tool")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")


class MessageRefused(ModelError):
    """A message has a part that is not text, a role that nobody knows, or the wrong shape."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages without nulls, parts of text joined, tool arguments as mappings.

    Raises:
        MessageRefused: names the message, counted from 1, and what is wrong with it.
    """
    return [_plain(number, message) for number, message in enumerate(messages, start=1)]


def _plain(number: int, message: Message) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if role not in ROLES:
        raise MessageRefused(
            f"Message {number} has a role that the model does not know: {role!r}",
            hint=f"roles are {', '.join(ROLES)}",
        )
    if "content" in plain:
        plain["content"] = _text(number, plain["content"])
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_plain_call(call) for call in cast("list[Mapping[str, Any]]", calls)]
    return plain


def _text(number: int, content: object) -> str:
    """Return content as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessageRefused(
            f"Message {number} has content that is neither text nor parts: {type(content).__name__}",
            hint="send text, or a list of text parts",
        )
    return "".join(_part(number, part) for part in cast("list[object]", content))


def _part(number: int, part: object) -> str:
    if isinstance(part, Mapping):
        fields = cast("Mapping[str, object]", part)
        kind, text = fields.get("type"), fields.get("text")
        if kind in _TEXT_PARTS and isinstance(text, str):
            return text
    else:
        kind = type(part).__name__
    raise MessageRefused(
        f"Message {number} has a part that is not text: {kind}",
        hint="flashnext reads text only; say in words what it shows, or leave it out",
    )


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError as error:
            raise MessageRefused(
                f"Arguments of the tool call {function.get('name')!r} are not JSON: {error}",
                hint="send arguments as a JSON object",
            ) from error
        function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else dict(function)
