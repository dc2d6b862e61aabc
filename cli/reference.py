"""The reference page of the command line, made from the commands: `python -m cli.reference > docs/CLI.md`.

A test compares the page with this, so that help and documentation cannot drift apart.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main

from cli.errors import __doc__ as errors_page
from cli.help import WIDEST
from cli.settings import __doc__ as settings_page
from cli.tree import app

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "CLI.md"


def render_reference() -> str:
    """Return the page as Markdown."""
    group: Any = typer.main.get_command(app)
    parts = ["# Command line", "Made by `python -m cli.reference`; do not edit."]
    wide = mock.patch.dict(os.environ, {"COLUMNS": str(WIDEST)})
    with wide, group.make_context("flashnext", [], resilient_parsing=True) as context:
        parts += ["## flashnext", f"```text\n{group.get_help(context).strip()}\n```"]
        for name, command in group.commands.items():
            if not command.hidden:
                parts += _pages(command, name, context)
    parts += ["## Environment", f"```text\n{_table(settings_page)}\n```"]
    parts += ["## Exit codes", f"```text\n{_table(errors_page)}\n```"]
    return "\n\n".join(parts) + "\n"


def _pages(command: Any, name: str, parent: Any) -> list[str]:
    """Return the page of a command, and of those it has."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    pages = [f"## {context.command_path}", f"```text\n{command.get_help(context).strip()}\n```"]
    for inner_name, inner in getattr(command, "commands", {}).items():
        pages += _pages(inner, inner_name, context)
    return pages


def _table(page: str | None) -> str:
    """Return the paragraph after the first one."""
    return (page or "").split("\n\n")[1].rstrip()


if __name__ == "__main__":
    sys.stdout.write(render_reference())
