"""Makes a function a command: option groups become flags, every error becomes a message and an exit code.

Entry points: the decorator `command`, and `CommandGroup`, which does the same for errors of parsing.

Invariants:
1. No traceback reaches a person, unless `--debug`.
2. A closed stdout ends a command quietly; Ctrl-C ends it with 130.
3. With `--json` or `--jsonl` an error is one JSON document on stdout, with the same exit code.
"""

import difflib
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from cli.console import Console, ErrorForm, discard_output
from cli.errors import FAILED, INTERRUPTED, OK, USAGE, CommandError, Failure, describe
from cli.help import help_page
from cli.options import CommonOptions

# Flags of mlx-lm and others that people will type, and what stands in their place here.
FOREIGN_FLAGS = {
    "--kv-bits": "the key-value cache is kept exact; make room with a smaller --ctx-size",
    "--kv-group-size": "the key-value cache is kept exact; make room with a smaller --ctx-size",
    "--quantized-kv-start": "the key-value cache is kept exact; make room with a smaller --ctx-size",
    "--prompt-cache-file": "save a conversation with /save in flashnext chat, continue it with --resume",
    "--verbose": "figures are shown with --stats",
    "--adapter-path": "adapters are not supported",
    "--trust-remote-code": "no code of a checkpoint is ever run, except its chat template in a sandbox",
}
# pydantic's types of errors, which typer passes on, in our words.
_PLAIN_WORDS = {
    "int_parsing": "not a whole number",
    "int_from_float": "not a whole number",
    "float_parsing": "not a number",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Return the typer command of a function.

    Parameters annotated with a dataclass become one flag per field; a parameter annotated `Console` receives
    the console. The function returns an exit code, None for 0.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {"common": CommonOptions}
    console_name = ""
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.annotation is Console:
            console_name = parameter.name
        elif is_dataclass(parameter.annotation):
            groups[parameter.name] = cast("type", parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    members = {name: _flags(group) for name, group in groups.items()}
    parameters += [flag for name in (*list(groups)[1:], "common") for flag in members[name]]

    @functools.wraps(function)
    def run(**values: Any) -> None:
        given: dict[str, Any] = {}
        for name, group in groups.items():
            given[name] = group(**{flag.name: values.pop(flag.name) for flag in members[name]})
        common: CommonOptions = given.pop("common")
        console = Console(colour=not common.no_color, quiet=common.quiet, progress=not common.no_progress)
        if console_name:
            given[console_name] = console
        form: ErrorForm = "jsonl" if values.get("jsonl") else "json" if values.get("json") else "text"
        work = functools.partial(function, **values, **given)
        raise typer.Exit(_outcome(work, console, form=form, debug=common.debug))

    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flags(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            member.name, inspect.Parameter.KEYWORD_ONLY, default=member.default, annotation=hints[member.name]
        )
        for member in fields(group)
    ]


def _outcome(work: Callable[[], int | None], console: Console, *, form: ErrorForm, debug: bool) -> int:
    """Do the work and return the exit code, having told people of any error."""
    try:
        return work() or OK
    except BrokenPipeError:
        discard_output()
        return OK
    except KeyboardInterrupt:
        failure = Failure(INTERRUPTED, "Cancelled", "interrupted")
        _tell(lambda: console.note("interrupted") if form == "text" else console.failure(failure, form=form))
        return INTERRUPTED
    except typer.TyperException:
        raise
    except Exception as error:  # noqa: BLE001  the boundary: nothing passes untold
        if debug:
            traceback.print_exc()
        failure = describe(error)
        _tell(lambda: console.failure(failure, form=form))
        return failure.code


def _tell(report: Callable[[], None]) -> None:
    try:
        report()
    except (BrokenPipeError, CommandError):
        discard_output()


def _form(words: Sequence[str]) -> ErrorForm:
    return "jsonl" if "--jsonl" in words else "json" if "--json" in words else "text"


class CommandPage(TyperCommand):
    """One command, with our own help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: D102  as in the base
        formatter.write(help_page(self, ctx))


class CommandGroup(TyperGroup):
    """The top-level group. Reports errors of parsing the way commands report theirs."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: D102  as in the base
        visible = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        rows = [(name, entry.get_short_help_str(200)) for name, entry in visible if not entry.hidden]
        formatter.write(help_page(self, ctx, rows))

    def main(  # noqa: D102  as in the base
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,  # noqa: ARG002  Windows has no MLX
        **extra: Any,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(
                args=words, prog_name=prog_name, complete_var=complete_var, standalone_mode=False, **extra
            )
        except typer.TyperException as problem:
            code = self._tell(_usage_failure(problem, words, self.commands), words)
        except typer.Abort:
            code = INTERRUPTED
        except BrokenPipeError:
            discard_output()
            code = OK
        except Exception as error:  # noqa: BLE001  a help page on a full disk, a flag that breaks its parser
            if "--debug" in words:
                traceback.print_exc()
            code = self._tell(describe(error), words)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else OK)

    def _tell(self, failure: Failure, words: Sequence[str]) -> int:
        console = Console(colour="--no-color" not in words)
        _tell(lambda: console.failure(failure, form=_form(words)))
        return failure.code


def _usage_failure(problem: typer.TyperException, words: Sequence[str], names: Collection[str]) -> Failure:
    context = getattr(problem, "ctx", None)
    path = getattr(context, "command_path", None) or "flashnext"
    if path == "flashnext" and words and not words[0].startswith("-"):
        path = f"flashnext {words[0]}" if words[0] in names else path
    option = getattr(problem, "option_name", None)
    near = difflib.get_close_matches(
        str(option), getattr(problem, "possibilities", None) or (), n=1, cutoff=0.7
    )
    message = getattr(problem, "message", "") if option else problem.format_message()
    hint = f"{path} --help lists what there is"
    if option in FOREIGN_FLAGS:
        hint = FOREIGN_FLAGS[option]
    elif near:
        hint = f"did you mean {near[0]}?"
    code = problem.exit_code if problem.exit_code in (FAILED, USAGE) else FAILED
    message = message or problem.format_message()
    return Failure(code, "UsageError", _with_value(message, problem.__cause__), hint)


def _with_value(message: str, cause: BaseException | None) -> str:
    """Return typer's message in plain words, with the value that was wrong: pydantic's own leaves it out."""
    errors = getattr(cause, "errors", None)
    if errors is None:
        return message
    first = errors()[0]
    said, value = str(first["msg"]), first.get("input")
    if said not in message:
        return message
    words = _PLAIN_WORDS.get(str(first["type"]))
    plain = (
        words.format_map(first.get("ctx") or {}) if words else said.removeprefix("Value error, ").rstrip(".")
    )
    return message.replace(said, plain if repr(value) in plain else f"{plain}: {value!r}")
