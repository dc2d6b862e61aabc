"""`flashnext run`: one prompt, one answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.answer import Ask, LinesSink, SilentSink, Sink, TextSink, opened, play, show_end
from cli.console import Console, as_json_value
from cli.demo_notice import show_demo_notice
from cli.engine_factory import Services
from cli.errors import INTERRUPTED, OK, UsageProblem
from cli.interrupts import Interrupts
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
from cli.prompts import PromptMaker, read_prompt, system_messages
from cli.sampling import sampling_params, sampling_report, stop_ids
from mlx_flashnext.text.thinking import prompt_ends_inside

if TYPE_CHECKING:
    from mlx_flashnext.engine.sampler import SamplingParams


def run(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    prompting: PromptOptions,
    sampling: SamplingOptions,
    memory: MemoryOptions,
    draft: DraftOptions,
    hints: HintOptions,
    shown: AnswerOptions,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", help="What to answer; - stands for standard input.", show_default=False
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt as a flag; - is standard input.")
    ] = None,
    ignore_chat_template: Annotated[
        bool,
        typer.Option("--ignore-chat-template", help="Send the text as it is.", rich_help_panel="Prompt"),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel="Output")
    ] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Print one JSON event a line.", rich_help_panel="Output")
    ] = False,
) -> int:
    """Answer one prompt.

    The answer goes to stdout and nothing else; reasoning, notes and figures go to stderr.
    """
    if json and jsonl:
        raise UsageProblem("Two forms of output at once: --json --jsonl", hint="choose one")
    if (json or jsonl) and shown.hide_reasoning:
        raise UsageProblem(
            "A document has the reasoning in its own field: --hide-reasoning", hint="leave it out"
        )
    if prompt is not None and words:
        raise UsageProblem("Two prompts: one as --prompt, one without a flag", hint="give one")
    if ignore_chat_template and prompting != PromptOptions():
        raise UsageProblem(
            "Nothing reads --system-prompt, --think or --reasoning-effort without a chat template",
            hint="leave them out, or leave out --ignore-chat-template",
        )
    services: Services = context.obj
    with Interrupts() as interrupts:
        found = find_model(model.model)
        text = read_prompt([prompt] if prompt is not None else words, console)
        # The template is asked before the model is loaded: what it refuses costs no loading.
        made = _prepare(found, prompting, sampling, text, raw=ignore_chat_template, has_header=json or jsonl)
        if made.note:
            console.note(made.note)
        show_demo_notice(found, console)
        with opened(services, found, memory, draft, hints, console) as engine:
            ask = Ask(
                prompt=engine.tokenizer.encode(made.text),
                starts_inside=prompt_ends_inside(made.text),
                params=made.params,
                stop_ids=stop_ids(sampling, engine.tokenizer),
                max_tokens=sampling.max_tokens,
                rule=draft.draft_rule,
            )
            start = {
                "model": {"name": found.label, "digest": engine.checkpoint.digest},
                "prompt": made.header,
                "sampling": sampling_report(made.params, sampling),
                "plan": as_json_value(engine.plan.to_dict()),
            }
            if jsonl:
                console.document({"event": "start", **start}, in_one_line=True)
            answer = play(engine.session(), ask, _sink(console, shown, json=json, jsonl=jsonl), interrupts)
            if json:
                console.document({**answer.to_dict(), **start})
            elif jsonl:
                console.document({"event": "finished", **answer.to_dict()}, in_one_line=True)
            elif console.out_is_terminal and answer.text and not answer.text.endswith("\n"):
                console.answer("\n")
            show_end(console, answer, engine, shown, max_tokens=sampling.max_tokens)
    return INTERRUPTED if answer.finish_reason == "cancelled" else OK


@dataclass(frozen=True, slots=True)
class _Made:
    """A prompt and how it was made; `header` is None for text sent as it is."""

    text: str
    params: "SamplingParams"
    header: Mapping[str, Any] | None = None
    note: str = ""


def _prepare(
    found: FoundModel,
    prompting: PromptOptions,
    sampling: SamplingOptions,
    text: str,
    *,
    raw: bool,
    has_header: bool,
) -> _Made:
    """Return prompt text and sampling. MLX is imported while the template compiles in its own process."""
    if raw:
        return _Made(text, sampling_params(sampling, found.directory))
    with PromptMaker(found.directory, prompting) as maker:
        params = sampling_params(sampling, found.directory)
        rendered = maker.render([*system_messages(prompting), {"role": "user", "content": text}])
        return _Made(rendered, params, maker.header() if has_header else None, maker.note)


def _sink(console: Console, shown: AnswerOptions, *, json: bool, jsonl: bool) -> Sink:
    if jsonl:
        return LinesSink(console)
    if json:
        return SilentSink(console)
    return TextSink(console, hide_reasoning=shown.hide_reasoning)
