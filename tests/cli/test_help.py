"""Help pages and errors of usage: readable at 40 columns, without colour, with near matches."""

import pytest
import typer.main
from typer.testing import CliRunner

from cli.command import FOREIGN_FLAGS
from cli.reference import REFERENCE, render_reference
from cli.tree import app

COMMANDS = ["run", "chat", "plan", "show", "pull", "list", "rm", "bench", "doctor"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_fits_the_terminal_and_names_every_flag_whole(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.isascii()
    assert all(len(line) <= columns for line in result.stdout.splitlines())
    group = typer.main.get_command(app)
    entry = group if not command else group.commands[command[0]]
    for parameter in entry.params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            assert flag in result.stdout or not flag.startswith("-")


def test_no_arguments_show_the_help():
    assert CliRunner().invoke(app, []).stdout == CliRunner().invoke(app, ["-h"]).stdout


def test_the_version_is_shown():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "flashnext")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["run", "--tempp", "1"], "No such option: --tempp", "did you mean --temp?"),
        (["run", "--max-token", "1"], "No such option: --max-token", "did you mean --max-tokens?"),
        (["chta"], "No such command 'chta'. Did you mean 'chat'?", "flashnext --help"),
        (["run", "--nothing-like-it"], "No such option", "flashnext run --help lists what there is"),
        (["plan", "a", "b"], "unexpected extra argument", "flashnext plan --help"),
        (["run", "--top-k"], "requires an argument", "flashnext run --help"),
        (
            ["run", "--policy", "x"],
            "Invalid value for '--policy': 'x' is not one of 'lru', 'slru'",
            "flashnext run --help",
        ),
        (
            ["compare", "a", "b", "--prompts", "1.5"],
            "'--prompts': not a whole number: '1.5'",
            "compare --help",
        ),
        (["compare", "a", "b", "--prompts", "0"], "'--prompts': must be at least 1: '0'", "compare --help"),
        (["draft", "train-sidecar", "a", "--rank", "9999"], "must be at most 4096: '9999'", "--help"),
        (["run", "--policy", "{x}"], "'{x}' is not one of 'lru', 'slru'", "--help"),
        (["draft", "train", "a", "b", "--rate", "x"], "'--rate': not a number: 'x'", "train --help"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest_one(arguments, message, hint):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert hint in result.stderr
    assert "Value error" not in result.stderr


@pytest.mark.parametrize("flag", [flag for flag in FOREIGN_FLAGS if flag.startswith("--")])
def test_flags_of_other_runtimes_are_refused_with_what_to_do_instead(flag):
    result = CliRunner().invoke(app, ["run", flag, "1", "hello"])
    assert result.exit_code == 2
    assert f"hint: {FOREIGN_FLAGS[flag]}" in result.stderr


def test_the_reference_page_is_current():
    path = REFERENCE
    assert path.read_text() == render_reference(), "write it again: python -m cli.reference > docs/CLI.md"
