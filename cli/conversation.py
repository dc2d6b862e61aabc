"""A conversation: messages, one engine session, and what `chat` can do with them.

Invariant: the prompt of every turn is a fresh rendering of all messages. The session reuses its state
when that rendering continues what it has consumed and rebuilds it otherwise, so what is said never
depends on which happened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cli.answer import Answer, Ask, TextSink, context_advice, play, show_end
from cli.console import Console, counted, statistics_line
from cli.engine_factory import EngineLike
from cli.errors import INCOMPATIBLE, CommandError, UsageProblem
from cli.interrupts import Interrupts
from cli.model_path import FoundModel
from cli.options import AnswerOptions, DraftOptions, SamplingOptions
from cli.prompts import Message, PromptMaker
from cli.sampling import stop_ids
from cli.settings import expanded
from cli.transcript import FORMAT, VERSION, SavedMessage, Transcript, save_transcript
from mlx_flashnext.text.thinking import prompt_ends_inside

if TYPE_CHECKING:
    from mlx_flashnext.engine.sampler import SamplingParams

HELP = """\
/help        show this
/reset       forget the conversation
/stats       figures of the last answer and of the context
/save FILE   write the conversation; chat --resume FILE continues it
/exit        leave (also Ctrl-D)
//text       send text that begins with a slash
\"\"\"          begin and end a message of several lines
Ctrl-C stops an answer; a second Ctrl-C ends flashnext"""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """What every turn shares."""

    params: "SamplingParams"
    sampling: SamplingOptions
    draft: DraftOptions
    shown: AnswerOptions


class Conversation:
    """One conversation with one model."""

    def __init__(
        self,
        engine: EngineLike,
        model: FoundModel,
        maker: PromptMaker,
        console: Console,
        settings: TurnSettings,
        system: list[Message],
    ) -> None:
        self._engine = engine
        self._model = model
        self._maker = maker
        self._console = console
        self._settings = settings
        self._system = system
        self._stop_ids = stop_ids(settings.sampling, engine.tokenizer)
        self._session = engine.session()
        self._last: Answer | None = None
        self.messages: list[Message] = list(system)

    def resume(self, transcript: Transcript, path: Path) -> None:
        """Continue a saved conversation.

        Raises:
            CommandError: it was held with another model, or has its own system prompt beside a given one.
        """
        digest = self._engine.checkpoint.digest
        if transcript.model_digest != digest:
            raise CommandError(
                f"{path} was held with another model: {transcript.model} ({transcript.model_digest[:12]}), "
                f"this is {self._model.label} ({digest[:12]})",
                hint=f"--model {transcript.model}",
                code=INCOMPATIBLE,
            )
        saved: list[Message] = [message.to_message() for message in transcript.messages]
        brings_system = bool(saved) and saved[0]["role"] == "system"
        if self._system and saved and saved[:1] != self._system:
            raise UsageProblem(
                f"{path} has its own beginning: --system-prompt cannot change it",
                hint="leave out --system-prompt",
            )
        if brings_system:
            self._system = [saved[0]]
        self.messages = saved or list(self._system)
        self._console.note(f"continuing {path}: {counted(self.num_turns, 'turn')}")

    @property
    def num_turns(self) -> int:
        """Return how many messages the user sent."""
        return sum(message["role"] == "user" for message in self.messages)

    def turn(self, text: str, interrupts: Interrupts) -> None:
        """Answer one message. What fails leaves the conversation as it was."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        rendered = self._maker.render(messages)
        ask = Ask(
            prompt=self._engine.tokenizer.encode(rendered),
            starts_inside=prompt_ends_inside(rendered),
            params=self._settings.params,
            stop_ids=self._stop_ids,
            max_tokens=self._settings.sampling.max_tokens,
            rule=self._settings.draft.draft_rule,
        )
        sink = TextSink(self._console, hide_reasoning=self._settings.shown.hide_reasoning)
        answer = play(self._session, ask, sink, interrupts)
        if answer.text:
            self._console.answer("\n")
        if answer.text or answer.reasoning or answer.finish_reason != "cancelled":
            said = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning}
            self.messages = [*messages, said]
        self._last = answer
        if answer.finish_reason == "cancelled":
            self._console.note("stopped")
        show_end(
            self._console,
            answer,
            self._engine,
            self._settings.shown,
            max_tokens=self._settings.sampling.max_tokens,
        )

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash. Returns False when the conversation is to end.

        Raises:
            UsageProblem: there is no such command.
        """
        word, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._console.note(HELP),
            "/reset": lambda _: self._reset(),
            "/stats": lambda _: self._stats(),
            "/save": self._save,
        }
        if word in ("/exit", "/quit", "/bye"):
            return False
        if word not in commands:
            import difflib

            near = difflib.get_close_matches(word, [*commands, "/exit"], n=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else "/help lists them; // sends text beginning with a slash"
            )
            raise UsageProblem(f"No such command: {word}", hint=hint)
        commands[word](rest.strip())
        return True

    def _reset(self) -> None:
        self.messages = list(self._system)
        self._session = self._engine.session()
        self._last = None
        self._console.note("the conversation is forgotten")

    def _stats(self) -> None:
        used, plan = len(self._session.tokens), self._engine.plan
        self._console.note(
            f"context {used} of {plan.context_tokens} tokens, {counted(self.num_turns, 'turn')}"
        )
        if self._last is not None:
            self._console.note(statistics_line(self._last.statistics))
        if used >= plan.context_tokens:
            self._console.note(context_advice(self._engine))

    def _save(self, name: str) -> None:
        if not name:
            raise UsageProblem("Where to? /save needs a file", hint="/save chat.json")
        path = expanded(name)
        saved = [
            SavedMessage(message["role"], message["content"], message.get("reasoning_content"))
            for message in self.messages
        ]
        digest = self._engine.checkpoint.digest
        save_transcript(path, Transcript(FORMAT, VERSION, self._model.label, digest, saved))
        self._console.note(f"saved {counted(self.num_turns, 'turn')}: {path}")
