"""Option groups that commands share, as frozen dataclasses; `cli/command.py` turns their fields into flags.

Names follow mlx-lm where it has one. A value of None means that the flag was not given.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cli.model_path import complete_model
from cli.parse import parse_count, parse_json_object, parse_memory, parse_number, parse_whole
from cli.settings import MEMORY_VARIABLE, MODEL_VARIABLE

_MEMORY, _SAMPLING, _PROMPT, _DRAFT, _OUTPUT = "Memory", "Sampling", "Prompt", "Speculation", "Output"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Checkpoint directory, or Hub id in the local cache. Left out: the demo model.",
            envvar=MODEL_VARIABLE,
            autocompletion=complete_model,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How much of the machine a run may use. Shown line by line by `flashnext plan`."""

    memory: Annotated[
        int | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory the process may use, such as 12GiB. Left out: what leaves the machine usable.",
            parser=parse_memory,
            envvar=MEMORY_VARIABLE,
            rich_help_panel=_MEMORY,
        ),
    ] = None
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "--ctx-size",
            "--max-kv-size",
            "-c",
            metavar="TOKENS",
            help="Tokens that prompt and answer may have together, such as 8192 or 32k.",
            parser=parse_count,
            rich_help_panel=_MEMORY,
        ),
    ] = None
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            metavar="N",
            help="Expert slots of each layer, instead of as many as fit.",
            parser=parse_count,
            rich_help_panel=_MEMORY,
        ),
    ] = None
    prefill_step_size: Annotated[
        int | None,
        typer.Option(
            "--prefill-step-size",
            metavar="TOKENS",
            help="Prompt tokens computed together.",
            parser=parse_count,
            rich_help_panel=_MEMORY,
        ),
    ] = None
    policy: Annotated[
        Literal["lru", "slru"],
        typer.Option("--policy", help="Which expert leaves a full layer.", rich_help_panel=_MEMORY),
    ] = "lru"
    verify_reads: Annotated[
        Literal["first", "every"],
        typer.Option(
            "--verify-reads",
            help="Compare the records of a pack with their digests at their first read, or at every read.",
            rich_help_panel=_MEMORY,
        ),
    ] = "first"
    mirror: Annotated[
        Path | None,
        typer.Option(
            "--mirror",
            metavar="DIR",
            help="A second copy of the model's data files, on another drive: experts are read from both.",
            rich_help_panel=_MEMORY,
        ),
    ] = None
    readers: Annotated[
        int | None,
        typer.Option(
            "--readers",
            metavar="N",
            help="Threads that read experts.",
            parser=parse_count,
            rich_help_panel=_MEMORY,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen; what is left out comes from the model's generation_config.json."""

    temp: Annotated[
        float | None,
        typer.Option(
            "--temp",
            "--temperature",
            help="Temperature; 0 is greedy.",
            parser=parse_number,
            metavar="NUMBER",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            help="Keep the likeliest tokens up to this mass.",
            parser=parse_number,
            metavar="NUMBER",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k",
            help="Keep this many tokens; 0 keeps all.",
            parser=parse_whole,
            metavar="N",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            help="Drop tokens below this share of the likeliest.",
            parser=parse_number,
            metavar="NUMBER",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            help="1 is off.",
            parser=parse_number,
            metavar="NUMBER",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            "--presence-penalty",
            help="0 is off.",
            parser=parse_number,
            metavar="NUMBER",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            "--frequency-penalty",
            help="0 is off.",
            parser=parse_number,
            metavar="NUMBER",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            help="Make the draws repeatable.",
            parser=parse_whole,
            metavar="N",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-m",
            metavar="TOKENS",
            help="Most tokens of an answer. Left out: the rest of the context.",
            parser=parse_count,
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    extra_eos_token: Annotated[
        list[str] | None,
        typer.Option(
            "--extra-eos-token",
            help="Also end an answer at this token. Repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Who proposes tokens that the model then verifies. Nothing here changes what the model says."""

    draft: Annotated[
        Literal["none", "lookup", "mtp", "dflash2", "auto"],
        typer.Option(
            "--draft",
            metavar="DRAFTER",
            help="none; lookup: what followed the same words before; mtp: the model's own next-token module; "
            "dflash2: a draft trained for the model; auto: the best that is there.",
            rich_help_panel=_DRAFT,
        ),
    ] = "none"
    draft_model: Annotated[
        Path | None,
        typer.Option(
            "--draft-model",
            metavar="DIR",
            help="Directory of a draft for --draft dflash2. Left out: the one beside the model.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            metavar="N",
            help="Most tokens proposed at a time; fewer where fewer pay.",
            parser=parse_count,
            rich_help_panel=_DRAFT,
        ),
    ] = None
    draft_rule: Annotated[
        Literal["auto", "coupled", "delta", "sampled"],
        typer.Option(
            "--draft-rule",
            metavar="RULE",
            help="How proposals are verified: auto, coupled, delta or sampled. Each keeps the model's "
            "distribution; with coupled a seed gives the same text with every drafter.",
            rich_help_panel=_DRAFT,
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class HintOptions:
    """What is read before it is asked for. Nothing here changes what the model says."""

    hints: Annotated[
        Literal[
            "off", "frequency", "previous", "random", "near-gate", "near-linear", "sidecar", "both", "oracle"
        ],
        typer.Option(
            "--hints",
            metavar="SOURCE",
            help="Who says which experts to read ahead: off; frequency: the most used; previous: the last "
            "token's; near-gate: the next layer's router, asked early; near-linear: a trained map, two "
            "layers early; sidecar: a draft's guess of what its rows need; both; random: for measuring.",
            rich_help_panel=_MEMORY,
        ),
    ] = "off"
    warm: Annotated[
        bool,
        typer.Option(
            "--warm/--no-warm",
            help="Read the experts that the last run of this model used most while it starts.",
            rich_help_panel=_MEMORY,
        ),
    ] = True


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How messages become a prompt."""

    system_prompt: Annotated[
        str | None,
        typer.Option("--system-prompt", help="What the model is told first.", rich_help_panel=_PROMPT),
    ] = None
    think: Annotated[
        bool | None,
        typer.Option(
            "--think/--no-think",
            help="Let the model reason before it answers. Left out: the model's own default.",
            rich_help_panel=_PROMPT,
        ),
    ] = None
    reasoning_effort: Annotated[
        str | None,
        typer.Option(
            "--reasoning-effort", help="Such as low, medium, high, where offered.", rich_help_panel=_PROMPT
        ),
    ] = None
    tools: Annotated[
        Path | None,
        typer.Option(
            "--tools",
            metavar="FILE",
            help="JSON list of tools that the model may call; calls come as text.",
            rich_help_panel=_PROMPT,
        ),
    ] = None
    chat_template_config: Annotated[
        dict[str, Any] | None,
        typer.Option(
            "--chat-template-config",
            metavar="JSON",
            help="Further variables of the chat template.",
            parser=parse_json_object,
            rich_help_panel=_PROMPT,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What is shown beside an answer."""

    hide_reasoning: Annotated[
        bool,
        typer.Option("--hide-reasoning", "-R", help="Do not show the reasoning.", rich_help_panel=_OUTPUT),
    ] = False
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats",
            help="Print a line of figures on stderr. Left out: on a terminal.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """What every command has."""

    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="No notes, progress or figures.", rich_help_panel=_OUTPUT),
    ] = False
    no_progress: Annotated[
        bool,
        typer.Option("--no-progress", help="No progress lines.", rich_help_panel=_OUTPUT),
    ] = False
    no_color: Annotated[
        bool,
        typer.Option("--no-color", help="No colour.", rich_help_panel=_OUTPUT),
    ] = False
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks of errors.", rich_help_panel=_OUTPUT),
    ] = False
