"""`flashnext chat` through a pipe: turns, commands, saving and resuming, what happens when something
fails.
"""

import json
import os
import stat

import pytest

from tests.cli.scripted import Script
from tests.tiny.tokenizer import IM_END

THINKING = Script(answers=["why one\n</think>\n\nOne.<|im_end|>", "why two\n</think>\n\nTwo.<|im_end|>"])
PLAIN = Script(answers=["One.<|im_end|>", "Two.<|im_end|>"])


def test_each_line_is_answered_on_stdout(cli):
    result = cli.chat(input="first\n\nsecond\n", script=THINKING)
    assert (result.exit_code, result.stdout) == (0, "One.\nTwo.\n")
    assert result.stderr == "why one\n\nwhy two\n\n"


@pytest.mark.parametrize("thinking", [True, False])
def test_a_turn_is_a_fresh_rendering_that_continues_what_the_state_has_seen(cli, thinking):
    flag, script = ("--think", THINKING) if thinking else ("--no-think", PLAIN)
    cli.chat(flag, input="first\nsecond\n", script=script)
    one, two = cli.rig.engine.calls
    said = cli.rig.engine.tokenizer.encode(script.answers[0])
    consumed = [*one.prompt, *said]
    assert said[-1] == IM_END
    assert two.prompt[: len(consumed)] == consumed
    think = "why one" if thinking else ""
    assert f"<think>\n{think}\n</think>\n\nOne.<|im_end|>\n<|im_start|>user\nsecond" in cli.prompt_text()


def test_the_figures_of_the_second_turn_count_what_was_reused(cli):
    result = cli.chat("--no-think", "--stats", input="first\nsecond\n", script=PLAIN)
    first, second = (line for line in result.stderr.splitlines() if line.startswith("prefill"))
    assert "reused" not in first
    assert "reused)" in second


def test_reset_forgets_everything_but_the_system_prompt(cli):
    cli.chat("--system-prompt", "Be brief.", input="first\n/reset\nsecond\n", script=THINKING)
    assert "first" not in cli.prompt_text()
    assert "Be brief." in cli.prompt_text()


def test_exit_ends_and_ignores_the_rest(cli):
    result = cli.chat(input="/exit\nfirst\n")
    assert (result.exit_code, result.stdout) == (0, "")


def test_help_and_stats_speak_on_stderr_alone(cli):
    result = cli.chat("-R", input="first\n/help\n/stats\n", script=THINKING)
    assert result.stdout == "One.\n"
    assert "/save FILE" in result.stderr
    assert "of 4096 tokens, 1 turn\n" in result.stderr


def test_an_unknown_command_is_refused_with_a_near_match(cli):
    result = cli.chat(input="/rest\n")
    assert result.exit_code == 2
    assert result.stderr == "error: No such command: /rest\n\nhint: did you mean /reset?\n"


@pytest.mark.parametrize("command", ["/rest", "/save", "/save no/such/place.json"])
def test_a_piped_chat_goes_on_after_a_refused_command_and_tells_in_the_end(cli, command):
    result = cli.chat("-R", input=f"first\n{command}\nsecond\n", script=THINKING)
    assert result.stdout == "One.\nTwo.\n"
    assert "error: " in result.stderr
    assert result.exit_code in (1, 2)


def test_two_slashes_send_text_that_begins_with_one(cli):
    cli.chat(input="//usr/bin is what?\n")
    assert "user\n/usr/bin is what?<|im_end|>" in cli.prompt_text()


def test_three_quotes_hold_a_message_of_several_lines(cli):
    cli.chat(input='"""\none\n\ntwo\n"""\n"""a"""\n', script=THINKING)
    assert "user\none\n\ntwo<|im_end|>" in cli.prompt_text(0)
    assert "user\na<|im_end|>" in cli.prompt_text(1)


def test_a_saved_conversation_continues_where_it_was(cli, tmp_path):
    path = tmp_path / "chat.json"
    cli.chat("--system-prompt", "Be brief.", input=f"first\n/save {path}\nsecond\n", script=THINKING)
    expected = cli.call.prompt
    result = cli.chat("--resume", str(path), input="second\n", script=THINKING)
    assert result.exit_code == 0
    assert cli.call.prompt == expected
    assert "continuing" in result.stderr


def test_a_saved_conversation_names_format_version_and_model(cli, tmp_path):
    path = tmp_path / "chat.json"
    cli.chat(input=f"first\n/save {path}\n", script=THINKING)
    saved = json.loads(path.read_text())
    assert {name: saved[name] for name in ("format", "version", "model_digest")} == {
        "format": "flashnext-chat",
        "version": 1,
        "model_digest": "d" * 64,
    }
    assert saved["messages"][1] == {"role": "assistant", "content": "One.", "reasoning_content": "why one\n"}


def test_saving_twice_replaces_the_file_and_leaves_no_other(cli, tmp_path):
    path = tmp_path / "saved" / "chat.json"
    path.parent.mkdir()
    cli.chat(input=f"first\n/save {path}\nsecond\n/save {path}\n", script=THINKING)
    assert len(json.loads(path.read_text())["messages"]) == 4
    assert list(path.parent.iterdir()) == [path]


def test_saving_over_another_kind_of_file_is_refused(cli, tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    result = cli.chat(input=f"first\n/save {path}\n")
    assert result.exit_code == 1
    assert "not a saved conversation" in result.stderr
    assert path.read_text() == "years of work"


def test_a_save_that_fails_leaves_the_old_file(cli, tmp_path, monkeypatch):
    path = tmp_path / "saved" / "chat.json"
    path.parent.mkdir()
    cli.chat(input=f"first\n/save {path}\n", script=THINKING)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cli.transcript.os.fsync", full)
    result = cli.chat(input=f"first\nsecond\n/save {path}\n", script=THINKING)
    assert "No space left on device" in result.stderr
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_saving_without_a_name_or_to_nowhere_is_refused(cli, tmp_path):
    assert "/save needs a file" in cli.chat(input="/save\n").stderr
    assert "Cannot save" in cli.chat(input=f"/save {tmp_path}/no/such/place.json\n").stderr


VALID = {
    "format": "flashnext-chat",
    "version": 1,
    "model": "m",
    "model_digest": "d" * 64,
    "messages": [{"role": "user", "content": "x"}],
}


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, 1, "Cannot read"),
        ("{", 5, "Not a saved conversation"),
        ("[]", 5, "Not a saved conversation"),
        (json.dumps({**VALID, "format": "other"}), 5, "format 'other'"),
        (json.dumps({**VALID, "version": 2}), 3, "has version 2"),
        (json.dumps({**VALID, "model_digest": "e" * 64}), 3, "another model: m (eeeeeeeeeeee), this is"),
        (json.dumps({**VALID, "messages": [{"role": "ghost", "content": "x"}]}), 5, "'ghost'"),
        (
            json.dumps({**VALID, "messages": [*VALID["messages"], {"role": "system", "content": "x"}]}),
            5,
            "message 1",
        ),
        (json.dumps({**VALID, "messages": [{"role": "user"}]}), 5, "content"),
        (json.dumps(VALID)[:-1] + ', "x": ' + "[" * 100_000, 5, "Not a saved conversation"),
    ],
)
def test_a_file_that_cannot_be_resumed_is_refused_with_the_reason(cli, tmp_path, content, code, message):
    path = tmp_path / "chat.json"
    if content is not None:
        path.write_text(content)
    result = cli.chat("--resume", str(path), input="hello\n")
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""


def test_a_system_prompt_beside_a_resumed_one_is_refused(cli, tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(VALID))
    result = cli.chat("--resume", str(path), "--system-prompt", "Be brief.", input="hello\n")
    assert result.exit_code == 2
    assert "--system-prompt" in result.stderr


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_what_is_no_file_is_neither_resumed_nor_replaced(cli, tmp_path, make):
    path = tmp_path / "chat.json"
    make(path)
    resumed = cli.chat("--resume", str(path), input="hello\n")
    assert "Not a regular file" in resumed.stderr
    assert resumed.exit_code == 5
    assert "is not a saved conversation" in cli.chat(input=f"first\n/save {path}\n").stderr
    assert not path.is_file()


@pytest.mark.parametrize("name", ["n" * 300, "nu\0ll", "~nobody-of-this-name/chat.json"])
def test_a_name_that_no_file_can_have_is_refused(cli, name):
    result = cli.chat(input=f"first\n/save {name}\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: Cannot save to ") or "\nerror: Cannot save to " in result.stderr


def test_the_longest_name_a_file_can_have_is_saved(cli, tmp_path):
    path = tmp_path / ("n" * 255)
    cli.chat(input=f"first\n/save {path}\n")
    assert json.loads(path.read_text())["format"] == "flashnext-chat"


def test_saved_files_are_private(cli, tmp_path):
    path = tmp_path / "chat.json"
    cli.chat(input=f"first\n/save {path}\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_that_is_not_utf8_ends_a_piped_chat_with_its_place(cli):
    result = cli.chat(input=b"first\nsec\xffond\n", script=THINKING)
    assert result.exit_code == 2
    assert result.stdout == "One.\n"
    assert "Line 2 of the input is not UTF-8 at byte 3: 0xff" in result.stderr


def test_a_prompt_that_does_not_fit_ends_a_piped_chat_with_its_counts(cli):
    result = cli.chat(input="word " * 2000 + "\n", script=Script(context_tokens=100))
    assert result.exit_code == 4
    assert "the planned context holds 100" in result.stderr


def test_a_full_context_says_so_in_chat(cli):
    result = cli.chat(
        "--no-think", input="first\n", script=Script(["word "], repeat=1 << 20, context_tokens=60)
    )
    assert "the context is full: 60 tokens" in result.stderr


def test_the_seed_is_one_for_the_whole_conversation(cli):
    cli.chat(input="first\nsecond\n", script=THINKING)
    one, two = cli.rig.engine.calls
    assert one.params.seed == two.params.seed
