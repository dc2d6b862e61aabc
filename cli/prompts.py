"""From flags and messages to prompt text; from stdin and arguments to a message.

Entry points: `PromptMaker` (one chat template with the flags that shape it) and `read_prompt`.

Invariant: a flag that the template has no use for is refused, never ignored.
"""

import os
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from cli.console import Console
from cli.errors import UsageProblem
from cli.options import PromptOptions
from drafter.files import naming

MAX_TOOLS_BYTES = 16 << 20

Message = Mapping[str, str]
# Variables the caller of a template always sets itself.
_OURS = ("messages", "tools", "add_generation_prompt", "enable_thinking", "reasoning_effort")


class PromptMaker:
    """Renders conversations for one model. Use as a context: the template's process ends with it."""

    def __init__(self, directory: Path, options: PromptOptions) -> None:
        """Open the template; it compiles in the background.

        Raises:
            ModelError: the checkpoint's template is missing or unreadable.
        """
        from mlx_flashnext.text.template import ChatTemplate

        self._template: ChatTemplate = ChatTemplate.open(directory)
        self._variables = dict[str, Any](options.chat_template_config or {})
        try:
            self._check(options)
        except BaseException:
            self._template.close()
            raise
        if options.think is not None:
            self._variables["enable_thinking"] = options.think
        if options.reasoning_effort is not None:
            self._variables["reasoning_effort"] = options.reasoning_effort
        if options.tools is not None:
            self._variables["tools"] = _read_tools(options.tools)

    @property
    def note(self) -> str:
        """Return what a person should know about the effort asked for, "" if there is nothing."""
        if self._variables.get("reasoning_effort") != "high":
            return ""
        return (
            "note: this model's efforts are low, medium and xhigh; high is taken as xhigh, its longest. "
            "hint: --reasoning-effort medium answers sooner"
        )

    def header(self) -> dict[str, Any]:
        """Return how prompts are made, for reports: template, thinking, effort (FIELD P76)."""
        thinks = self._variables.get("enable_thinking")
        effort = self._variables.get("reasoning_effort")
        return {
            "template_sha256": self._template.digest,
            "enable_thinking": thinks,
            "reasoning_effort": None
            if thinks is False
            else "xhigh"
            if effort == "high"
            else effort or self._template.default_effort(),
            "is_default_effort": effort is None,
            "num_tools": len(self._variables.get("tools") or ()),
        }

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt that asks for the next answer.

        Raises:
            ModelError: the template refused the messages or had to be stopped.
        """
        return self._template.render(messages, **self._variables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._template.close()

    def _check(self, options: PromptOptions) -> None:
        if options == replace(PromptOptions(), system_prompt=options.system_prompt):
            return
        read = self._template.variables()
        if options.think is not None and "enable_thinking" not in read:
            flag = "--think" if options.think else "--no-think"
            raise UsageProblem(
                f"This model's chat template cannot switch thinking: {flag}", hint="leave it out"
            )
        if options.reasoning_effort is not None and "reasoning_effort" not in read:
            raise UsageProblem(
                f"This model's chat template knows no effort: --reasoning-effort {options.reasoning_effort}",
                hint="leave it out",
            )
        if options.reasoning_effort is not None and options.think is False:
            raise UsageProblem(
                f"Without thinking there is no effort: --reasoning-effort {options.reasoning_effort}",
                hint="leave out --no-think or --reasoning-effort",
            )
        if options.tools is not None and "tools" not in read:
            raise UsageProblem(
                f"This model's chat template knows no tools: --tools {options.tools}", hint="leave it out"
            )
        for name in options.chat_template_config or {}:
            if name in _OURS[:3]:
                hint = "--tools FILE gives tools" if name == "tools" else "leave it out"
                raise UsageProblem(f"--chat-template-config cannot set this: {name}", hint=hint)
            if name not in read:
                known = sorted(set(read) - set(_OURS[:3]))
                raise UsageProblem(
                    f"This model's chat template does not read this variable: {name}",
                    hint=f"it reads {', '.join(known) or 'none'}",
                )
            if (name == "enable_thinking" and options.think is not None) or (
                name == "reasoning_effort" and options.reasoning_effort is not None
            ):
                raise UsageProblem(f"Given twice, as a flag and in --chat-template-config: {name}")


def _read_tools(path: Path) -> list[dict[str, Any]]:
    """Return the tools of a file.

    Raises:
        UsageProblem: it cannot be read, or holds something else than a list of objects.
    """
    import msgspec

    from mlx_flashnext.regular_file import read_regular

    try:
        return msgspec.json.decode(read_regular(path, MAX_TOOLS_BYTES), type=list[dict[str, Any]])
    except OSError as error:
        raise UsageProblem(f"Cannot read --tools: {error.strerror}: {path}", hint="check the path") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageProblem(
            f"--tools wants a JSON list of objects: {path}: {error}",
            hint='such as [{"type": "function", "function": {"name": ..., "parameters": ...}}]',
        ) from error


def system_messages(options: PromptOptions) -> list[Message]:
    """Return the system message, if one was given.

    Raises:
        UsageProblem: its bytes are not UTF-8.
    """
    if options.system_prompt is None:
        return []
    return [{"role": "system", "content": decode_argument(options.system_prompt, "--system-prompt")}]


def read_prompt(words: Sequence[str] | None, console: Console) -> str:
    """Return the message to answer.

    Words are joined by spaces; `-` stands for stdin, set apart by an empty line. Without words, stdin is the
    message.

    Raises:
        UsageProblem: nothing to answer, or bytes that are not UTF-8.
    """
    if not words:
        if _is_terminal(sys.stdin):
            raise UsageProblem(
                "There is no prompt", hint="flashnext run 'PROMPT', or pipe text into flashnext run"
            )
        text = _read_stdin()
    else:
        parts = [[""]]
        for index, word in enumerate(words):
            if word == "-":
                parts += [[_read_stdin()], [""]]
            else:
                word = decode_argument(word, f"Word {index + 1} of the prompt")
                parts[-1] = [*filter(None, parts[-1]), word]
        text = "\n\n".join(part for part in (" ".join(part) for part in parts) if part)
        if "-" not in words and _has_waiting_input():
            console.note("note: stdin was not read; add - to the prompt to include it")
    if not text.strip():
        raise UsageProblem("The prompt is empty", hint="flashnext run 'PROMPT'")
    return text


def decode_utf8(data: bytes, what: str) -> str:
    """Return text.

    Args:
        data: bytes that should be UTF-8.
        what: whose bytes, to begin a message with.

    Raises:
        UsageProblem: they are not; names the offset.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageProblem(
            f"{what} is not UTF-8 at byte {error.start}: 0x{data[error.start]:02x}",
            hint="convert it first, for example with iconv -t utf-8",
        ) from error


def decode_argument(word: str, what: str) -> str:
    """Return a command-line argument whose bytes are UTF-8; others arrive with surrogates in place of bytes.

    Raises:
        UsageProblem: they are not.
    """
    return decode_utf8(word.encode("utf-8", "surrogateescape"), what)


def _read_stdin() -> str:
    stream: BinaryIO | None = None if sys.stdin is None else sys.stdin.buffer
    with naming("standard input"):
        data = stream.read() if stream else b""
    return decode_utf8(data, "Standard input").removeprefix("\ufeff")


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def _has_waiting_input() -> bool:
    """Return whether somebody piped text that nobody asked for. Never waits."""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
        if stat.S_ISREG(mode):
            return os.fstat(number).st_size > 0
        return stat.S_ISFIFO(mode) and bool(select.select([number], [], [], 0)[0]) and _peeks(number)
    except (OSError, ValueError, AttributeError):
        return False


def _peeks(number: int) -> bool:
    """Return whether a readable pipe holds bytes rather than its end."""
    import fcntl
    import termios

    count = bytearray(4)
    fcntl.ioctl(number, termios.FIONREAD, count)
    return any(count)
