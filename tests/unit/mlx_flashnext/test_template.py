"""Chat templates: what is rendered, and that whatever a template does, rendering ends within its limits."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_flashnext.errors import DocumentCorrupt
from mlx_flashnext.text import template as template_module
from mlx_flashnext.text import template_worker
from mlx_flashnext.text.messages import MessageRefused
from mlx_flashnext.text.template import ChatTemplate, ChatTemplateFailed
from tests.tiny.tokenizer import CHAT_TEMPLATE, write_tokenizer

USER = {"role": "user", "content": "hi"}
LIMIT_S = 1.0


@pytest.fixture
def open_template():
    opened: list[ChatTemplate] = []

    def start(source: str, **rest) -> ChatTemplate:
        opened.append(ChatTemplate(source, **rest))
        return opened[-1]

    yield start
    for template in opened:
        template.close()


@pytest.fixture(scope="module")
def tiny():
    with ChatTemplate(CHAT_TEMPLATE) as template:
        yield template


def pid_of(template: ChatTemplate) -> int:
    assert template._process is not None
    return template._process._process.pid


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_thinking_on_ends_inside_a_think_block_and_off_behind_an_empty_one(tiny):
    assert tiny.render([USER], enable_thinking=True).endswith("<|im_start|>assistant\n<think>\n")
    assert tiny.render([USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert tiny.render([USER]) == tiny.render([USER], enable_thinking=True)


def test_the_effort_high_is_rendered_as_xhigh(tiny):
    assert tiny.render([USER], reasoning_effort="high") == tiny.render([USER], reasoning_effort="xhigh")
    assert tiny.render([USER], reasoning_effort="low") != tiny.render([USER], reasoning_effort="medium")


def test_what_the_template_refuses_is_told_in_its_own_words(tiny):
    with pytest.raises(
        ChatTemplateFailed, match="refused the conversation: Unexpected reasoning effort turbo"
    ):
        tiny.render([USER], reasoning_effort="turbo")
    assert tiny.render([USER])


def test_earlier_turns_keep_their_reasoning_unless_told_otherwise(tiny):
    talk = [USER, {"role": "assistant", "content": " a ", "reasoning_content": " why "}, USER]
    kept = tiny.render(talk)
    assert "<|im_start|>assistant\n<think>\nwhy\n</think>\n\na<|im_end|>\n" in kept
    assert "why" not in tiny.render(talk, preserve_thinking=False)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_turn_as_generated_is_a_prefix_of_the_next_rendering(tiny, thinking):
    first = tiny.render([USER], enable_thinking=thinking)
    said = "why\n</think>\n\na" if thinking else "a"
    reply = {"role": "assistant", "content": "a", "reasoning_content": "why" if thinking else ""}
    second = tiny.render([USER, reply, USER], enable_thinking=thinking)
    assert second.startswith(first + said + "<|im_end|>\n")


def test_the_variables_of_a_template_are_known(tiny):
    assert {"messages", "enable_thinking", "reasoning_effort", "preserve_thinking"} <= tiny.variables()


def test_json_is_written_as_it_is(open_template):
    template = open_template("{{ messages[0].content | tojson }}{{ tools | tojson }}")
    shown = template.render(
        [{"role": "user", "content": "<a href='x'>\u20ac & </a>"}], tools=[{"b": 1, "a": 2}]
    )
    assert shown == "\"<a href='x'>\u20ac & </a>\"" + '[{"b": 1, "a": 2}]'


def test_tool_arguments_given_as_text_reach_the_template_as_a_mapping(open_template):
    template = open_template("{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Oslo"
    broken = {"function": {"name": "weather", "arguments": "{"}}
    with pytest.raises(MessageRefused, match="'weather' are not JSON"):
        template.render([{"role": "assistant", "tool_calls": [broken]}])


def test_generation_blocks_loop_controls_and_dates_work(open_template):
    source = (
        "{% generation %}x{% endgeneration %}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}"
        "{{ i }}"
        "{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    template = open_template(source, tokens={"eos_token": "<end>"})
    assert template.render([]) == "x014<end>"


def test_any_text_arrives_unchanged(open_template):
    template = open_template("{{ messages[0].content }}")
    text = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000, 97)))) * 3
    assert template.render([{"role": "user", "content": text}]) == text


LOOPS = {
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "computing": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}"
    "{% endfor %}{% endfor %}",
    "slow filter": "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_loops_is_stopped_and_its_process_is_gone(open_template, name):
    template = open_template(LOOPS[name], time_limit_s=LIMIT_S)
    template.variables()
    pid = pid_of(template)
    started = time.monotonic()
    with pytest.raises(ChatTemplateFailed, match=r"did not finish within 1 s and was stopped") as caught:
        template.render([USER])
    assert "\n" not in caught.value.message
    assert time.monotonic() - started < 30
    assert is_gone(pid)


def test_after_a_stop_the_next_rendering_starts_afresh(open_template):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = open_template("{% if messages %}" + loop + "{% endif %}ok", time_limit_s=LIMIT_S)
    with pytest.raises(ChatTemplateFailed, match="was stopped"):
        template.render([USER])
    assert template.render([]) == "ok"


GROWTH = {
    "repetition": "{{ 'x' * 10**12 }}",
    "doubling": "{% set n = namespace(s='xxxxxxxxxx') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "endless output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxx"
    "{% endfor %}{% endfor %}",
    "wide filter": "{{ 'x' | center(10**10) }}",
    "wide method": "{{ 'x'.ljust(10000000000) }}",
    "wide format": "{{ '%1000000000000d' % 3 }}",
    "wide format method": "{{ '{:>10000000000}'.format(3) }}",
    "power": "{{ 2 ** (10 ** 9) }}",
    "replacing": "{% set a = 'a' * 16000000 %}{{ a.replace('a', a) | length }}",
}


@pytest.mark.skipif(sys.platform == "darwin", reason="one huge allocation in C is only capped by RLIMIT_AS")
@pytest.mark.parametrize("name", GROWTH)
def test_a_template_that_grows_is_stopped(open_template, name):
    template = open_template(GROWTH[name], time_limit_s=20)
    with pytest.raises(ChatTemplateFailed, match="grew too large and was stopped"):
        template.render([USER])


def test_the_watchdog_sees_growth_that_the_kernel_does_not_cap(open_template, monkeypatch):
    # As on macOS, where RLIMIT_AS is not enforced: the process limits itself.
    monkeypatch.setattr(template_module, "MEMORY_EXIT", template_worker.MEMORY_EXIT)
    script = (
        "import resource, runpy; resource.setrlimit = lambda *_: None; "
        f"runpy.run_path({template_worker.__file__!r}, run_name='__main__')"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    setup = {"source": GROWTH["doubling"], "memory_bytes": 200 << 20, "output_chars": 1000, "seconds": 30}
    frames = b""
    for value in (setup, {"variables": {}}):
        body = json.dumps(value).encode()
        frames += len(body).to_bytes(4, "little") + body
    child.communicate(frames, timeout=60)
    assert child.returncode == template_worker.MEMORY_EXIT


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "not valid Jinja: line 1"),
        ("a\n{% endfor %}", "not valid Jinja: line 2"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable|refused"),
        ("{{ x.y.z }}", "'x' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
        ("{% include 'other' %}", "TypeError|no loader"),
    ],
)
def test_a_broken_or_hostile_template_is_an_error_of_one_line(open_template, source, message):
    with pytest.raises(ChatTemplateFailed, match=message) as caught:
        open_template(source, time_limit_s=20).render([USER])
    assert "\n" not in caught.value.message


def test_closing_ends_the_process_and_may_be_repeated(open_template):
    template = open_template("x")
    assert template.render([]) == "x"
    pid = pid_of(template)
    template.close()
    template.close()
    assert is_gone(pid)


def test_an_abandoned_template_leaves_no_process():
    template = ChatTemplate("x")
    template.variables()
    pid = pid_of(template)
    del template
    assert is_gone(pid)


def test_a_killed_parent_takes_the_process_along(tmp_path):
    """P56: no child outlives whoever started it."""
    script = (
        "from mlx_flashnext.text.template import ChatTemplate\n"
        "template = ChatTemplate('x')\ntemplate.variables()\n"
        "print(template._process._process.pid, flush=True)\ninput()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while not _is_zombie_or_gone(pid) and time.monotonic() < deadline:
        os.sched_yield()
    assert _is_zombie_or_gone(pid)
    parent.stdout.close()
    parent.stdin.close()


def _is_zombie_or_gone(pid: int) -> bool:
    """An orphan of a container without an init stays as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return is_gone(pid)


def test_a_file_in_the_working_directory_cannot_shadow_jinja2(open_template, tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise SystemExit(9)")
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert open_template("x").render([]) == "x"


def test_the_template_file_wins_over_the_tokenizer_config(tmp_path):
    write_tokenizer(tmp_path, chat_template="from the file")
    config = {"chat_template": "from the config", "eos_token": {"content": "<e>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with ChatTemplate.open(tmp_path) as template:
        assert template.render([]) == "from the file"
    (tmp_path / "chat_template.jinja").unlink()
    with ChatTemplate.open(tmp_path) as template:
        assert template.render([]) == "from the config"
    config["chat_template"] = [
        {"name": "tools", "template": "t"},
        {"name": "default", "template": "{{ eos_token }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with ChatTemplate.open(tmp_path) as template:
        assert template.render([]) == "<e>"


def test_a_missing_or_unreadable_template_is_refused(tmp_path):
    with pytest.raises(ChatTemplateFailed, match="has no chat template") as caught:
        ChatTemplate.open(tmp_path)
    assert "--ignore-chat-template" in caught.value.hint
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(DocumentCorrupt, match="not UTF-8 at byte 2"):
        ChatTemplate.open(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DocumentCorrupt, match=r"tokenizer_config\.json cannot be read"):
        ChatTemplate.open(tmp_path)


def test_the_exit_status_of_the_watchdog_is_the_one_the_parent_knows():
    assert template_module.MEMORY_EXIT == template_worker.MEMORY_EXIT


@pytest.mark.parametrize(
    "value", [[{}], ["text"], [None], [{"name": "default"}], [{"name": "default", "template": []}], 7]
)
def test_an_embedded_template_of_another_shape_is_none(tmp_path, value):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ChatTemplateFailed, match="no chat template"):
        ChatTemplate.open(tmp_path)


def test_a_template_that_writes_half_a_surrogate_pair_is_refused(open_template):
    with pytest.raises(ChatTemplateFailed, match=r"no character: .*ud800.* at 2"):
        open_template(r"ab{{ '\ud800' }}").render([USER])


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "image_url"),
        ({"type": "image", "image": "cat.png"}, "image"),
        ({"type": "input_image"}, "input_image"),
        ({"type": "video", "video": "cat.mp4"}, "video"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
        ({"type": "text"}, "text"),
        ({"text": "typeless"}, "None"),
        (7, "int"),
    ],
)
def test_what_is_not_text_is_refused_by_name_and_number(tiny, part, kind):
    talk = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "look:"}, part]},
    ]
    with pytest.raises(MessageRefused, match=f"^Message 2 has a part that is not text: {kind}$") as caught:
        tiny.render(talk)
    assert "text only" in caught.value.hint


@pytest.mark.parametrize("role", ["developer", "User", "", None, 3])
def test_an_unknown_role_is_refused_whatever_the_template_would_do(open_template, role):
    silent = open_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(MessageRefused, match="Message 1 has a role that the model does not know"):
        silent.render([{"role": role, "content": "hi"}])


@pytest.mark.parametrize("content", [{"type": "text", "text": "x"}, 5, b"x"])
def test_content_of_another_shape_is_refused(tiny, content):
    with pytest.raises(MessageRefused, match="neither text nor parts"):
        tiny.render([{"role": "user", "content": content}])


def test_parts_of_text_are_one_text(tiny):
    parts = [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}]
    assert tiny.render([{"role": "user", "content": parts}]) == tiny.render(
        [{"role": "user", "content": "a b"}]
    )


def test_p76_the_effort_that_nobody_asked_for_is_known(tiny, open_template):
    assert tiny.default_effort() == "xhigh"
    medium = open_template(CHAT_TEMPLATE.replace("else 'xhigh' %}", "else 'medium' %}"))
    assert medium.default_effort() == "medium"
    assert open_template("{{ messages[0].content }}").default_effort() is None


def test_p76_another_template_has_another_digest(tiny, open_template):
    assert tiny.digest == hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    assert open_template(CHAT_TEMPLATE + " ").digest != tiny.digest
