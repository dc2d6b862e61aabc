"""Tools, thinking and effort on the command line: what the template is told, and what people are told."""

import json
import os
from pathlib import Path

import pytest

from tests.tiny.tokenizer import CHAT_TEMPLATE

WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}" + CHAT_TEMPLATE
)
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    return path


def test_tools_reach_the_template(cli, tools):
    (cli.checkpoint / "chat_template.jinja").write_text(WITH_TOOLS)
    result = cli.run("what time is it?", "--tools", str(tools), "--json")
    assert result.exit_code == 0, result.output
    assert cli.prompt_text().startswith(json.dumps(TOOLS[0]) + "\n")
    assert json.loads(result.stdout)["prompt"]["num_tools"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "wants a JSON list"),
        ("[1]", "wants a JSON list"),
        ("[", "wants a JSON list"),
        (None, "Cannot read --tools"),
    ],
)
def test_tools_of_another_shape_are_refused(cli, tmp_path, text, message):
    (cli.checkpoint / "chat_template.jinja").write_text(WITH_TOOLS)
    path = tmp_path / "tools.json"
    if text is not None:
        path.write_text(text)
    result = cli.run("hello", "--tools", str(path))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "hint: " in result.stderr


def test_tools_for_a_template_without_them_are_refused(cli, tools):
    result = cli.run("hello", "--tools", str(tools))
    assert result.exit_code == 2
    assert "knows no tools" in result.stderr
    assert "--tools FILE gives tools" in cli.run("hello", "--chat-template-config", '{"tools": []}').stderr


@pytest.mark.parametrize(
    "flags", [["--reasoning-effort", "high"], ["--chat-template-config", '{"reasoning_effort": "high"}']]
)
def test_the_effort_high_is_taken_as_xhigh_and_a_hint_says_so(cli, flags):
    result = cli.run("hello", *flags)
    assert result.exit_code == 0
    assert "Think hard." in cli.prompt_text()
    assert "high is taken as xhigh" in result.stderr
    assert "hint: --reasoning-effort medium" in result.stderr
    assert "taken as" not in cli.run("hello", "--reasoning-effort", "low").stderr


@pytest.mark.parametrize(
    ("flags", "effort", "is_default"),
    [
        ([], "xhigh", True),
        (["--reasoning-effort", "medium"], "medium", False),
        (["--reasoning-effort", "high"], "xhigh", False),
        (["--no-think"], None, True),
    ],
)
def test_p76_the_effort_and_the_template_are_in_the_header_of_a_report(cli, flags, effort, is_default):
    for form in ("--json", "--jsonl"):
        result = cli.run("hello", form, *flags)
        start = json.loads(result.stdout if form == "--json" else result.stdout.splitlines()[0])
        assert start["prompt"]["reasoning_effort"] == effort
        assert start["prompt"]["is_default_effort"] is is_default
        assert len(start["prompt"]["template_sha256"]) == 64


def test_p76_a_drifted_template_is_told_from_the_official_one(cli, monkeypatch):
    import hashlib

    from cli.commands.show import _template

    digest, said = _template(cli.checkpoint)
    assert digest == hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    assert "not the official one" in said
    monkeypatch.setattr("mlx_flashnext.text.template.OFFICIAL_DIGEST", digest[:8])
    assert _template(cli.checkpoint)[1].endswith(", the official one")


def test_preserve_thinking_passes_through(cli):
    cli.run("hello", "--chat-template-config", '{"preserve_thinking": false}')
    assert cli.prompt_text().endswith("<think>\n")


def test_text_that_is_sent_as_it_is_has_no_header(cli):
    start = json.loads(cli.run("hello", "--ignore-chat-template", "--json").stdout)
    assert start["prompt"] is None


@pytest.mark.parametrize("kind", ["pipe", "endless", "too large"])
def test_tools_that_are_no_file_are_refused_and_not_waited_for(cli, tmp_path, kind):
    (cli.checkpoint / "chat_template.jinja").write_text(WITH_TOOLS)
    path = tmp_path / "tools.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as stream:
            stream.truncate(2 << 30)
    result = cli.run("hello", "--tools", str(path))
    assert result.exit_code == 2
    assert "Cannot read --tools: " in result.stderr
