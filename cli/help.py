"""Help pages: plain text in groups, readable at any width and without colour.

No rich here, so that `--help` stays quick. Entry point: `help_page`. Flag names are never cut; on narrow
terminals a description moves below its flag.
"""

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

WIDEST, NARROW, FLAG_COLUMN = 96, 64, 32
Row = tuple[str, str]
# typer shows Python types; people expect placeholders.
_NAMES = {"str": "TEXT", "list[str]": "TEXT", "int": "N", "float": "NUMBER", "path": "FILE", "bool": "BOOL"}
_METAVARS = re.compile(r"<(" + "|".join(map(re.escape, _NAMES)) + r")>")


class _Parameter(Protocol):
    def get_help_record(self, ctx: Any) -> Row | None: ...


class _Command(Protocol):
    help: str | None
    epilog: str | None

    def get_params(self, ctx: Any) -> Sequence[_Parameter]: ...
    def collect_usage_pieces(self, ctx: Any) -> list[str]: ...


def help_page(command: _Command, context: Any, commands: Iterable[Row] = ()) -> str:
    """Return the help of a command.

    Args:
        command: as typer holds it.
        context: of its invocation.
        commands: name and summary of each subcommand.
    """
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    usage = " ".join(("Usage:", context.command_path, *command.collect_usage_pieces(context)))
    parts = [textwrap.fill(usage, width, subsequent_indent="    ")]
    parts += [textwrap.fill(" ".join(text.split()), width) for text in (command.help or "").split("\n\n")]
    groups: dict[str, list[Row]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            kind = "Options"
            if getattr(parameter, "param_type_name", "") == "argument":
                kind, record = "Arguments", (getattr(parameter, "metavar", None) or record[0], record[1])
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
    if rows := list(commands):
        groups["Commands"] = rows
    parts += [f"{name}:\n{_rows(rows, width)}" for name, rows in groups.items()]
    if command.epilog:
        parts.append("\n".join(_epilog_line(line, width) for line in command.epilog.splitlines()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _epilog_line(line: str, width: int) -> str:
    if not line.startswith(" "):
        return textwrap.fill(line, width)
    # An example: cut so that it can still be pasted.
    pieces = textwrap.wrap(line.strip(), width - 8, break_long_words=False, break_on_hyphens=False)
    return "  " + " \\\n      ".join(pieces)


def _rows(rows: Sequence[Row], width: int) -> str:
    longest = max(len(name) for name, _ in rows)
    column = 6 if width < NARROW else min(longest, FLAG_COLUMN) + 4
    lines: list[str] = []
    for name, text in ((_METAVARS.sub(lambda found: _NAMES[found[1]], name), text) for name, text in rows):
        described = textwrap.wrap(" ".join(text.split()), max(width - column, 20))
        head = f"  {name}"
        if described and len(head) + 2 <= column:
            head = f"{head:<{column}}{described.pop(0)}"
        lines += [head, *(" " * column + line for line in described)]
    return "\n".join(lines)
