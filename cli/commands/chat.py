"""`flashnext chat`: a conversation at the terminal, or line by line through a pipe."""

from pathlib import Path
from typing import Annotated

import typer

from cli.answer import opened
from cli.console import Console
from cli.conversation import Conversation, TurnSettings
from cli.demo_notice import show_demo_notice
from cli.engine_factory import EngineLike, Services
from cli.errors import INTERRUPTED, OK, CommandError, describe
from cli.interrupts import Interrupts
from cli.line_input import LineInput
from cli.model_path import FoundModel, find_model
from cli.options import (
    AnswerOptions,
    DraftOptions,
    HintOptions,
    MemoryOptions,
    ModelOptions,
    PromptOptions,
    SamplingOptions,
)
from cli.prompts import PromptMaker, system_messages
from cli.sampling import sampling_params
from cli.transcript import read_transcript


def chat(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    prompting: PromptOptions,
    sampling: SamplingOptions,
    memory: MemoryOptions,
    draft: DraftOptions,
    hints: HintOptions,
    shown: AnswerOptions,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FILE", help="Continue a conversation written by /save."),
    ] = None,
) -> int:
    """Hold a conversation.

    Type /help for what can be done inside. Ctrl-C stops an answer, Ctrl-D leaves.
    """
    services: Services = context.obj
    with Interrupts() as interrupts:
        found = find_model(model.model)
        transcript = None if resume is None else read_transcript(resume)
        system = system_messages(prompting)
        with PromptMaker(found.directory, prompting) as maker:
            if maker.note:
                console.note(maker.note)
            settings = TurnSettings(sampling_params(sampling, found.directory), sampling, draft, shown)
            show_demo_notice(found, console)
            with opened(services, found, memory, draft, hints, console) as engine:
                conversation = Conversation(engine, found, maker, console, settings, system)
                if transcript is not None and resume is not None:
                    conversation.resume(transcript, resume)
                lines = LineInput(console)
                if lines.is_interactive:
                    console.note(_banner(found, engine, maker))
                return _converse(conversation, lines, console, interrupts)


def _banner(found: FoundModel, engine: EngineLike, maker: PromptMaker) -> str:
    plan, header = engine.plan, maker.header()
    effort = header["reasoning_effort"]
    asked = "the model's default" if header["is_default_effort"] else "as asked"
    thinks = f"; reasoning effort {effort}, {asked}" if effort else ""
    return (
        f"{found.label}: context {plan.context_tokens} tokens, {plan.slots_per_layer} of {plan.num_experts} "
        f"experts a layer in memory{thinks}; /help shows what can be done here"
    )


def _converse(conversation: Conversation, lines: LineInput, console: Console, interrupts: Interrupts) -> int:
    """Answer messages until the input ends. Returns the exit code.

    At a terminal an error is shown and the conversation goes on. In a pipe a command that is refused does not
    end it either, but is told by the exit code; what goes wrong in an answer does.
    """
    num_presses, refused = 0, OK
    while True:
        try:
            interrupts.rearm()
            line = lines.read_message()
            num_presses = 0
            if line is None:
                return refused
            if line.startswith("/") and not line.startswith("//"):
                try:
                    if not conversation.command(line.strip()):
                        return refused
                except CommandError as error:
                    failure = describe(error)
                    console.failure(failure)
                    refused = refused or (OK if lines.is_interactive else failure.code)
            elif line.strip():
                conversation.turn(line[1:] if line.startswith("//") else line, interrupts)
        except KeyboardInterrupt:
            num_presses += 1
            if num_presses > 1 or not lines.is_interactive:
                return INTERRUPTED
            console.note("\npress Ctrl-C again to leave, or go on")
        except BrokenPipeError:
            raise
        except Exception as error:
            if not lines.is_interactive:
                raise
            console.failure(describe(error))
