"""Chat templates: messages to prompt text, rendered as the checkpoint's own Jinja template says.

Entry points: `ChatTemplate.open` and `ChatTemplate.render`.

Invariants:
1. A rendering ends within its limits of time, memory and output, or is an error; the next one starts
   afresh.
2. The checkpoint's template is rendered, never imitated. Two rules are ours: the effort `high` means
   `xhigh`, and tool arguments given as a JSON string are parsed.

Source: qwen4exp.md 5.3. Where the template lies: as transformers 5 looks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import msgspec

from mlx_flashnext.errors import DocumentCorrupt, ModelError
from mlx_flashnext.regular_file import document_failed, read_regular
from mlx_flashnext.text.messages import Message, plain_messages
from mlx_flashnext.text.template_process import TemplateProcess, TemplateProcessEnded

TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 1 << 30
OUTPUT_LIMIT_CHARS = 32_000_000
# Exit status of `template_worker.py` when its watchdog saw too much memory; not imported, to keep jinja2 out.
MEMORY_EXIT = 71
EFFORTS: Final = ("low", "medium", "xhigh")
_SAME_EFFORT = {"high": "xhigh"}
OFFICIAL_DIGEST: Final = "c3cf9e34"
"""How the SHA-256 of the official template begins (qwen4exp.md 5)."""
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplateFailed(ModelError):
    """The chat template is missing, broken, refused the conversation, or did not end."""


class ChatTemplate:
    """The chat template of one checkpoint and the process that renders it. Close it, or use a context."""

    def __init__(
        self,
        source: str,
        *,
        tokens: Mapping[str, str] | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        """Start compiling the template in the background.

        Args:
            source: Jinja source.
            tokens: special tokens by name, such as `eos_token`.
            time_limit_s: for compiling, and for each rendering.
            memory_limit_bytes: of the rendering process.
        """
        self._tokens = dict(tokens or {})
        self._time_limit_s = time_limit_s
        self._setup = {
            "source": source,
            "memory_bytes": memory_limit_bytes,
            "output_chars": OUTPUT_LIMIT_CHARS,
        }
        self._process: TemplateProcess | None = self._start()

    @classmethod
    def open(cls, directory: Path) -> ChatTemplate:
        """Open the template of a checkpoint directory.

        Raises:
            ChatTemplateFailed: there is none.
            DocumentCorrupt, DocumentUnreadable: it cannot be read.
        """
        source, tokens = read_template(directory)
        return cls(source, tokens=tokens)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the template's source."""
        return template_digest(str(self._setup["source"]))

    def default_effort(self) -> str | None:
        """Return the effort that a rendering without one has; None where the template knows none.

        Raises:
            ChatTemplateFailed: the template does not compile.
        """
        if "reasoning_effort" not in self.variables():
            return None
        probe = [{"role": "user", "content": "?"}]
        plain = self.render(probe)
        for effort in EFFORTS:
            try:
                if self.render(probe, reasoning_effort=effort) == plain:
                    return effort
            except ChatTemplateFailed:  # a template with other efforts
                continue
        return None

    def variables(self) -> frozenset[str]:
        """Return the names the template reads from its caller.

        Raises:
            ChatTemplateFailed: it does not compile.
        """
        try:
            answer = self._child().compiled()
        except TemplateProcessEnded as ended:
            self._ended(ended)
        self._check(answer)
        return frozenset(answer["variables"])

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: `role`, `content` (text, or a list of text parts), for assistants perhaps
                `reasoning_content` and `tool_calls`.
            add_generation_prompt: end where the assistant begins to speak.
            enable_thinking: None leaves it to the template.
            reasoning_effort: None leaves it to the template.
            tools: JSON schemas of tools.
            extra: further variables, such as `preserve_thinking`.

        Raises:
            MessageRefused: a part that is not text, or a role that nobody knows.
            ChatTemplateFailed: the template refused the conversation, failed, or exceeded its limits.
        """
        variables: dict[str, Any] = {
            **self._tokens,
            "messages": plain_messages(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else list(tools),
            **extra,
        }
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        if reasoning_effort is not None:
            variables["reasoning_effort"] = _SAME_EFFORT.get(reasoning_effort, reasoning_effort)
        self.variables()
        try:
            answer = self._child().ask({"variables": variables})
        except TemplateProcessEnded as ended:
            self._ended(ended)
        self._check(answer)
        text: str = answer["text"]
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ChatTemplateFailed(
                f"The chat template wrote what is no character: {text[error.start]!r} at {error.start}",
                hint="download chat_template.jinja again",
            ) from error
        return text

    def close(self) -> None:
        """End the rendering process. Idempotent."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> TemplateProcess:
        return TemplateProcess(self._setup, time_limit_s=self._time_limit_s)

    def _child(self) -> TemplateProcess:
        if self._process is None:
            self._process = self._start()
        return self._process

    def _check(self, answer: Mapping[str, Any]) -> None:
        kind = answer.get("kind")
        if kind is None:
            return
        detail = " ".join(str(answer["error"]).split())
        if kind == "syntax":
            self.close()
            raise ChatTemplateFailed(
                f"The chat template is not valid Jinja: {detail}", hint="download chat_template.jinja again"
            )
        if kind == "memory":
            self._refuse_size(detail)
        if kind == "refused":
            raise ChatTemplateFailed(
                f"The chat template refused the conversation: {detail}",
                hint="change the messages, or the flags that the template reads",
            )
        raise ChatTemplateFailed(
            f"The chat template failed: {detail}", hint="the template and this conversation do not fit"
        )

    def _ended(self, ended: TemplateProcessEnded) -> NoReturn:
        self.close()
        if ended.is_late:
            raise ChatTemplateFailed(
                f"The chat template did not finish within {self._time_limit_s:g} s and was stopped",
                hint="do not trust this checkpoint's chat_template.jinja",
            ) from ended
        if ended.status == MEMORY_EXIT:
            self._refuse_size("out of memory")
        raise ChatTemplateFailed(
            f"The chat template's process ended: exit status {ended.status}",
            hint="check that jinja2 is installed beside flashnext",
        ) from ended

    def _refuse_size(self, detail: str) -> NoReturn:
        self.close()
        raise ChatTemplateFailed(
            f"The chat template grew too large and was stopped: {detail}",
            hint="do not trust this checkpoint's chat_template.jinja",
        )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_regular(path), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise document_failed(error, path) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentCorrupt(
            f"{path.name} cannot be read: {error}", hint="download the file again"
        ) from error


def _embedded(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        entries = [cast("dict[str, Any]", entry) for entry in value if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        default = named.get("default")
        return default if isinstance(default, str) else None
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def read_template(directory: Path) -> tuple[str, dict[str, str]]:
    """Return the source of a checkpoint's template and its special tokens.

    Raises:
        ChatTemplateFailed: there is none.
        DocumentCorrupt, DocumentUnreadable: it cannot be read.
    """
    config_path, path = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = _read_config(config_path)
    try:
        source = read_regular(path).decode("utf-8")
    except FileNotFoundError:
        source = _embedded(config.get("chat_template"))
    except UnicodeDecodeError as error:
        raise DocumentCorrupt(
            f"chat_template.jinja is not UTF-8 at byte {error.start}", hint="download the file again"
        ) from error
    except OSError as error:
        raise document_failed(error, path) from error
    if source is None:
        raise ChatTemplateFailed(
            f"The checkpoint has no chat template: {directory}",
            hint="add chat_template.jinja, or send text as it is with --ignore-chat-template",
        )
    return source, _special_tokens(config)


def template_digest(source: str) -> str:
    """Return the SHA-256 of a template's source."""
    return hashlib.sha256(source.encode()).hexdigest()
