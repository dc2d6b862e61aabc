"""Tokenizer and template equal transformers' on the same files. transformers is imported here only.

The official template is not in the tree. FLASHNEXT_OFFICIAL_TEMPLATE may name a file of it, whose digest is
checked: then it is held against transformers too.
"""

import hashlib
import json
import os
import warnings
from pathlib import Path

import pytest

from mlx_flashnext.errors import ModelError
from mlx_flashnext.text.template import ChatTemplate, ChatTemplateFailed
from mlx_flashnext.tokenizer import Tokenizer
from tests.tiny.tokenizer import write_tokenizer

TEXTS = [
    "",
    "Hello there",
    " leading, trailing \n\n\t",
    "na\u00efve caf\u00e9 \u20ac 100 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "<|im_start|>user\n<think>x</think><|im_end|>",
    "<|im_en d|> <|endoftext|><|endoftext|>",
    "1234567890 don't I'll\r\n  x",
    "\u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
]
SYSTEM = {"role": "system", "content": " You are terse. "}
USER = {"role": "user", "content": "What's <b>up</b> & \u20ac?\n"}
REPLY = {"role": "assistant", "content": " Fine. ", "reasoning_content": " Because. "}
PLAIN = {"role": "assistant", "content": "Fine."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it, <b> & all.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALLS = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "Two places.",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"place": "Ulm", "days": [1, 2]}}},
        {"type": "function", "function": {"name": "weather", "arguments": {"place": "Bonn"}}},
    ],
}
RESULTS = [{"role": "tool", "content": "sun"}, {"role": "tool", "content": "rain"}]
TOOL_TALKS = [[USER], [SYSTEM, USER, CALLS, *RESULTS], [USER, CALLS, *RESULTS, REPLY, USER]]
TALKS = [[USER], [SYSTEM, USER], [USER, REPLY, USER], [SYSTEM, USER, REPLY, USER, PLAIN, USER]]
VARIABLES = [
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "medium"},
    {"preserve_thinking": False},
    {"enable_thinking": False, "preserve_thinking": False},
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    tiny = write_tokenizer(tmp_path_factory.mktemp("parity") / "tiny", vocab_size=400)
    (tiny / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    from mlx_flashnext.demo import demo_dir

    demo = demo_dir()
    return [tiny, demo] if (demo / "tokenizer.json").is_file() else [tiny]


@pytest.fixture(scope="module")
def reference(directories):
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        return [transformers.PreTrainedTokenizerFast.from_pretrained(str(path)) for path in directories]


def test_ids_and_text_equal_transformers(directories, reference):
    for directory, theirs in zip(directories, reference, strict=True):
        ours = Tokenizer.open(directory)
        for text in TEXTS:
            ids = ours.encode(text)
            assert ids == theirs.encode(text, add_special_tokens=False)
            assert ours.decode(ids, special=True) == theirs.decode(ids, clean_up_tokenization_spaces=False)
            hidden = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids) == hidden


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
def test_renderings_equal_transformers(directories, reference, variables):
    for directory, theirs in zip(directories, reference, strict=True):
        with ChatTemplate.open(directory) as ours:
            for talk in TALKS:
                for generation in (True, False):
                    expected = theirs.apply_chat_template(
                        talk, tokenize=False, add_generation_prompt=generation, **variables
                    )
                    assert ours.render(talk, add_generation_prompt=generation, **variables) == expected


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"preserve_thinking": False}], ids=str)
@pytest.mark.parametrize(
    "tools", [None, [WEATHER], [WEATHER, {**WEATHER, "strict": True}]], ids=["0", "1", "2"]
)
def test_tools_calls_and_results_equal_transformers(directories, reference, variables, tools):
    """With the demo's template, which has the shape of the official one; that one is not in the tree."""
    with ChatTemplate.open(directories[-1]) as ours:
        for talk in TOOL_TALKS:
            expected = reference[-1].apply_chat_template(
                talk, tools=tools, tokenize=False, add_generation_prompt=True, **variables
            )
            assert ours.render(talk, tools=tools, **variables) == expected
            if tools:
                assert '"strict": true' in expected or len(tools) == 1
                assert "<b> & all" in expected


# qwen4exp.md 5.1 gives the first eight figures.
OFFICIAL = "c3cf9e34abf4f9e36c2d72165aa9c132d3e2a725b6c2586aaa3a8af9d7a81041"
EFFORTS = [{}, {"reasoning_effort": "xhigh"}, {"reasoning_effort": "medium"}, {"reasoning_effort": "low"}]


@pytest.fixture(scope="module")
def official() -> str:
    name = os.environ.get("FLASHNEXT_OFFICIAL_TEMPLATE")
    if name is None:
        pytest.skip("set FLASHNEXT_OFFICIAL_TEMPLATE to chat_template.jinja of the official repository")
    data = Path(name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == OFFICIAL, f"not the official template: {name}"
    return data.decode()


@pytest.mark.parametrize("tools", [None, [WEATHER, {**WEATHER, "strict": True}]], ids=["plain", "tools"])
def test_the_official_template_renders_as_transformers_does(official, reference, tools):
    switches = [*EFFORTS, {"enable_thinking": True}, {"enable_thinking": False}]
    with ChatTemplate(official) as ours:
        for variables in [{**one, **more} for one in switches for more in ({}, {"preserve_thinking": False})]:
            for talk in [*TALKS, *TOOL_TALKS]:
                expected = reference[0].apply_chat_template(
                    talk,
                    chat_template=official,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,
                )
                assert ours.render(talk, tools=tools, **variables) == expected
        assert "\n<function=weather>\n<parameter=place>\nUlm\n</parameter>" in expected
        assert ours.render([USER], reasoning_effort="high") == ours.render([USER], reasoning_effort="xhigh")
        assert ours.default_effort() == "xhigh"
        assert ours.render([USER]).endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize(
    ("talk", "variables", "said"),
    [
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], {}, "image"),
        ([USER, {"role": "critic", "content": "no"}], {}, "critic"),
        ([USER, SYSTEM], {}, "System message must be at the beginning"),
        ([SYSTEM], {}, "No user query found"),
        ([USER], {"reasoning_effort": "huge"}, "huge"),
    ],
)
def test_what_the_official_template_refuses_is_an_error_that_says_why(official, talk, variables, said):
    with ChatTemplate(official) as ours, pytest.raises((ChatTemplateFailed, ModelError), match=said):
        ours.render(talk, **variables)


def test_text_in_parts_equals_a_template_that_joins_them(reference):
    source = """{% for message in messages %}<{{ message.role }}>
    {%- if message.content is string %}{{ message.content }}{% else -%}
    {% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"""
    parts = [{"type": "text", "text": " one\n"}, {"type": "text", "text": "two "}]
    talk = [{"role": "user", "content": parts}, PLAIN, {"role": "user", "content": []}]
    expected = reference[0].apply_chat_template(talk, chat_template=source, tokenize=False)
    with ChatTemplate(source) as ours:
        assert ours.render(talk, add_generation_prompt=False) == expected
    assert "one\ntwo" in expected


def test_tokens_of_a_rendering_equal_transformers(directories, reference):
    for directory, theirs in zip(directories, reference, strict=True):
        with ChatTemplate.open(directory) as template:
            text = template.render(TALKS[-1])
        ids = theirs.apply_chat_template(TALKS[-1], add_generation_prompt=True, return_dict=False)
        assert Tokenizer.open(directory).encode(text) == list(ids)


def test_white_space_around_blocks_equals_transformers(reference):
    source = """  {% for message in messages %}
    {% if loop.first %}{{ bos_token }}
    {% endif %}
\t{% set x = message.content %}
    {%- generation -%} [{{ x | trim }}] {%- endgeneration %}
      {{ {"a": [1, "\u20ac<"]} | tojson(indent=2) }}
    {% if loop.index > 1 %}{% break %}{% endif %}

  {% endfor %}
  end"""
    expected = reference[0].apply_chat_template(TALKS[-1], chat_template=source, tokenize=False)
    with ChatTemplate(source) as ours:
        assert ours.render(TALKS[-1], add_generation_prompt=False) == expected
