"""`flashnext run`: streams, forms of output, prompts, and that every flag has an effect or is refused."""

import json

import pytest

from cli.answer import _not_blaming
from cli.interrupts import Interrupts
from expert_store.store import POLICIES
from tests.cli.scripted import Script
from tests.tiny.tokenizer import IM_END, write_tokenizer

THINKING = Script(answers=["let me see\n</think>\n\nH\u00e9llo \U0001f600 there.<|im_end|>"])
ANSWER = "H\u00e9llo \U0001f600 there."


def test_stdout_holds_the_answer_and_nothing_else(cli):
    result = cli.run("hello", script=THINKING)
    assert (result.exit_code, result.stdout) == (0, ANSWER)


def test_reasoning_goes_to_stderr_and_can_be_hidden(cli):
    assert cli.run("hello", script=THINKING).stderr == "let me see\n\n"
    assert cli.run("hello", "-R", script=THINKING).stderr == ""


def test_nothing_is_said_on_stderr_when_there_is_nothing_to_say(cli):
    assert cli.run("hello", "--no-think", script=Script(["Hi<|im_end|>"])).stderr == ""


def test_streamed_text_equals_the_text_of_the_document(cli):
    streamed = cli.run("hello", script=THINKING).stdout
    lines = [json.loads(line) for line in cli.run("hello", "--jsonl", script=THINKING).stdout.splitlines()]
    document = json.loads(cli.run("hello", "--json", script=THINKING).stdout)
    assert document["text"] == streamed == "".join(line.get("text", "") for line in lines[:-1])
    assert (
        document["reasoning"] == "".join(line.get("reasoning", "") for line in lines[:-1]) == "let me see\n"
    )
    assert lines[-1]["text"] == streamed


def test_the_document_names_everything(cli):
    result = cli.run("hello", "--json", "--seed", "7", script=THINKING)
    document = json.loads(result.stdout)
    assert set(document) == {
        "text", "reasoning", "finish_reason", "prompt_tokens", "output_tokens", "statistics",
        "model", "prompt", "sampling", "plan",
    }  # fmt: skip
    assert document["finish_reason"] == "stop"
    assert document["model"] == {"name": str(cli.checkpoint), "digest": "d" * 64}
    assert document["statistics"]["hit_rate"] == 0.91
    assert document["prompt_tokens"] == len(cli.call.prompt)
    assert document["sampling"]["seed"] == 7
    assert document["plan"]["context_tokens"] == 4096
    assert result.stderr == ""


def test_lines_are_events_in_order(cli):
    lines = [json.loads(line) for line in cli.run("hello", "--jsonl", script=THINKING).stdout.splitlines()]
    kinds = [line["event"] for line in lines]
    assert kinds[0] == "start"
    assert kinds[1:3] == ["prefill", "prefill"]
    assert set(kinds[3:-1]) == {"token"}
    assert kinds[-1] == "finished"
    tokens = [line["token_id"] for line in lines if line["event"] == "token" and line["token_id"] is not None]
    assert tokens[-1] == IM_END
    assert all(line.isascii() for line in cli.run("x", "--jsonl", script=THINKING).stdout.splitlines())


def test_the_engine_is_closed_after_an_answer_and_after_an_error(cli):
    cli.run("hello")
    assert cli.rig.engine.is_closed
    cli.run("hello", script=Script(fail_in_decode=("SourceFailed", "Input/output error")))
    assert cli.rig.engine.is_closed


# Prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["what", "is", "it?"], None, "what is it?"),
        (["-"], "from the pipe", "from the pipe"),
        ([], "from the pipe", "from the pipe"),
        (["Summarise:", "-"], "the text", "Summarise:\n\nthe text"),
        (["-", "in", "short"], "the text", "the text\n\nin short"),
        (["--prompt", "as a flag"], None, "as a flag"),
        (["-p", "-"], "from the pipe", "from the pipe"),
        (["--", "--not-a-flag"], None, "--not-a-flag"),
        ([], "\ufeffwith a mark", "with a mark"),
    ],
)
def test_the_prompt_comes_from_words_or_stdin(cli, arguments, stdin, expected):
    result = cli.run(*arguments, input=stdin)
    assert result.exit_code == 0, result.stderr
    assert f"<|im_start|>user\n{expected}<|im_end|>" in cli.prompt_text()


@pytest.mark.parametrize(
    ("arguments", "stdin"), [([], ""), ([], " \n\t"), (["-"], ""), ([""], None), (["  "], None)]
)
def test_an_empty_prompt_is_refused(cli, arguments, stdin):
    result = cli.run(*arguments, input=stdin)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: The prompt is empty\n\nhint: ")
    assert cli.rig.engine is None


def test_bytes_on_stdin_that_are_not_utf8_are_refused_with_their_offset(cli):
    result = cli.run("-", input=b"abc\xe9 def")
    assert result.exit_code == 2
    assert "Standard input is not UTF-8 at byte 3: 0xe9" in result.stderr
    assert "hint: convert it first" in result.stderr


@pytest.mark.parametrize("arguments", [["ok", "b\udcffd"], ["--system-prompt", "b\udcffd", "ok"]])
def test_an_argument_that_is_not_utf8_is_refused_with_its_offset(cli, arguments):
    result = cli.run(*arguments)
    assert result.exit_code == 2
    assert "is not UTF-8 at byte 1: 0xff" in result.stderr


def test_a_million_characters_are_refused_with_both_counts(cli):
    result = cli.run("-", input="word " * 200_000)
    assert result.exit_code == 4
    assert "The prompt has " in result.stderr
    assert "the planned context holds 4096" in result.stderr


def test_two_prompts_are_refused(cli):
    assert cli.run("one", "--prompt", "two").exit_code == 2


def test_the_prompt_is_a_fresh_rendering_with_the_system_prompt_first(cli):
    cli.run("hello", "--system-prompt", "Be brief.", "--no-think")
    assert cli.prompt_text() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


# Flags -------------------------------------------------------------------------------------


def test_sampling_defaults_come_from_the_checkpoint_and_flags_win(cli):
    cli.run("hello")
    params = cli.call.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.95, 0.0)
    cli.run("hello", "--temp", "0.1", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.05")
    params = cli.call.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.1, 5, 0.5, 0.05)
    cli.run("hello", "--temperature", "0")
    assert cli.call.params.is_greedy


def test_a_default_of_the_model_that_makes_no_sense_is_the_files_fault(cli):
    path = cli.checkpoint / "generation_config.json"
    path.write_text(json.dumps({"temperature": -1.0}))
    result = cli.run("hello")
    assert result.exit_code == 3
    assert "generation_config.json: temperature must be 0 or more: -1.0" in result.stderr


def test_without_a_generation_config_everything_is_one_or_off(cli):
    (cli.checkpoint / "generation_config.json").unlink()
    cli.run("hello")
    params = cli.call.params
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)


def test_every_sampling_flag_reaches_the_engine(cli):
    flags = {
        "--seed": ("seed", 7),
        "--repetition-penalty": ("repetition_penalty", 1.2),
        "--presence-penalty": ("presence_penalty", 0.5),
        "--frequency-penalty": ("frequency_penalty", 0.25),
    }
    cli.run("hello", *(word for flag, (_, value) in flags.items() for word in (flag, str(value))), "-m", "3")
    assert {name: getattr(cli.call.params, name) for name, _ in flags.values()} == dict(flags.values())
    assert cli.call.max_tokens == 3


def test_every_memory_flag_reaches_the_plan(cli):
    flags = ["--memory", "12GiB", "-c", "8k", "--slots", "24", "--prefill-step-size", "64", "--readers", "3"]
    cli.run("hello", *flags)
    (request,) = cli.rig.requests
    assert request.memory_bytes == 12 << 30
    assert request.context_tokens == 8192
    assert request.slots_per_layer == 24
    assert request.prefill_step == 64
    assert request.num_readers == 3


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_of_the_store_can_be_chosen(cli, policy):
    cli.run("hello", "--policy", policy)
    assert cli.rig.requests[0].policy == policy


def test_an_extra_end_token_ends_answers_and_an_unknown_one_is_refused(cli):
    result = cli.run(
        "hello", "--extra-eos-token", "<|vision_end|>", script=Script(["</think>a<|vision_end|>b"])
    )
    assert result.stdout == "a"
    assert cli.call.stop_ids == (126, 120, 124)
    result = cli.run("hello", "--extra-eos-token", "<|nothing|>")
    assert result.exit_code == 2
    assert "'<|nothing|>'" in result.stderr


def test_an_extra_end_token_that_is_not_utf8_is_refused(cli):
    result = cli.run("hello", "--extra-eos-token", "\udcff")
    assert result.exit_code == 2
    assert "--extra-eos-token is not UTF-8 at byte 0: 0xff" in result.stderr


def test_template_variables_reach_the_template(cli):
    cli.run("hello", "--reasoning-effort", "high")
    assert "Think hard." in cli.prompt_text()
    cli.run("hello", "--chat-template-config", '{"reasoning_effort": "low"}')
    assert "Think briefly." in cli.prompt_text()


@pytest.mark.parametrize(
    ("template", "flags", "message"),
    [
        ("{{ messages }}", ["--think"], "cannot switch thinking: --think"),
        ("{{ messages }}", ["--no-think"], "cannot switch thinking: --no-think"),
        ("{{ messages }}", ["--reasoning-effort", "low"], "knows no effort"),
        (None, ["--no-think", "--reasoning-effort", "low"], "Without thinking there is no effort"),
        (None, ["--chat-template-config", '{"colour": 1}'], "does not read this variable: colour"),
        (None, ["--chat-template-config", '{"messages": []}'], "cannot set this: messages"),
        (None, ["--think", "--chat-template-config", '{"enable_thinking": false}'], "Given twice"),
        (None, ["--ignore-chat-template", "--no-think"], "without a chat template"),
        (None, ["--ignore-chat-template", "--system-prompt", "x"], "without a chat template"),
        (None, ["--json", "--jsonl"], "--json --jsonl"),
        (None, ["--json", "--hide-reasoning"], "--hide-reasoning"),
        (None, ["--jsonl", "-R"], "--hide-reasoning"),
    ],
)
def test_a_flag_that_cannot_apply_is_refused(cli, template, flags, message):
    if template is not None:
        write_tokenizer(cli.checkpoint, vocab_size=400, chat_template=template)
    result = cli.run("hello", *flags)
    assert result.exit_code == 2
    assert message in result.output
    assert cli.rig.engine is None


def test_without_the_template_the_text_is_the_prompt(cli):
    (cli.checkpoint / "chat_template.jinja").unlink()
    assert cli.run("<|im_start|>raw", "--ignore-chat-template").exit_code == 0
    assert cli.prompt_text() == "<|im_start|>raw"


def test_a_missing_template_is_refused_with_the_way_out(cli):
    (cli.checkpoint / "chat_template.jinja").unlink()
    result = cli.run("hello")
    assert result.exit_code == 3
    assert "--ignore-chat-template" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory", "0"], "must be positive: '0'"),
        (["--memory", "-3GiB"], "must be positive: '-3GiB'"),
        (["--memory", "lots"], "not a size: 'lots'"),
        (["--memory", "12"], "12 bytes hold no model: '12' (write 12GiB)"),
        (["--memory", "3 parsecs"], "not a size: '3 parsecs'"),
        (["--memory", "9" * 400 + ".5GiB"], "not a size"),
        (["--memory", "9" * 5000], "not a size"),
        (["--prefill-step-size", "9" * 400], "too large"),
        (["--ctx-size", "0"], "must be positive: '0'"),
        (["--ctx-size", "many"], "not a whole number: 'many'"),
        (["--max-tokens", "-1"], "must be positive: '-1'"),
        (["--chat-template-config", "[1]"], "not a JSON object: '[1]'"),
        (["--chat-template-config", '{"a": ' + "[" * 5000], "not a JSON object"),
        (["--temp", "-1"], "temperature must be 0 or more: -1.0"),
        (["--temp", "warm"], "'warm'"),
        (["--top-p", "2"], "top_p must be from 0 to 1: 2.0"),
        (["--seed", "-4"], "seed must be from 0"),
        (["--policy", "mru"], "'mru'"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(cli, flags, message):
    result = cli.run("hello", *flags)
    assert result.exit_code == 2
    assert message in result.stderr
    assert cli.rig.engine is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GiB", 12 << 30),
        ("12G", 12 << 30),
        ("12g", 12 << 30),
        ("1.5GiB", 3 << 29),
        ("12GB", 12 * 10**9),
        ("512 MiB", 512 << 20),
        ("4194304", 4194304),
        ("1T", 1 << 40),
    ],
)
def test_sizes_people_write(cli, text, expected):
    cli.run("hello", "--memory", text)
    assert cli.rig.requests[0].memory_bytes == expected


# Ends --------------------------------------------------------------------------------------


def test_a_full_context_says_so_and_what_to_do(cli):
    result = cli.run("hello", script=Script(["word "], repeat=1 << 20, context_tokens=64))
    assert result.exit_code == 0
    assert "note: the context is full: 64 tokens; --ctx-size 8192 fits the same memory" in result.stderr


def test_a_full_context_names_larger_ones_or_more_memory(cli):
    full = {"answers": ["word "], "repeat": 1 << 20, "context_tokens": 64}
    script = Script(**full, max_context_tokens=64)
    assert (
        "--ctx-size 16384 fits the same memory with fewer expert slots" in cli.run("x", script=script).stderr
    )


def test_the_token_limit_ends_an_answer(cli):
    result = cli.run("hello", "-m", "2", "--json", script=Script(["a b c d e f"]))
    assert json.loads(result.stdout)["finish_reason"] == "length"


def test_figures_are_one_line_on_stderr_when_asked_for(cli):
    line = cli.run("hello", "--stats", "-R", script=THINKING).stderr.splitlines()[-1]
    assert " | decode " in line
    assert "hit 91%, waited 0.8 s | peak 17.0 GiB" in line
    assert cli.run("hello", "--stats", "-q", "-R", script=THINKING).stderr == ""


@pytest.mark.parametrize(
    ("kind", "code"), [("RecordCorrupt", 5), ("SourceChanged", 5), ("SourceFailed", 1), ("WorkerDied", 1)]
)
def test_an_error_while_decoding_keeps_what_was_said_and_tells_the_rest(cli, kind, code):
    script = Script(["</think>abc"], fail_in_decode=(kind, "layer 3 expert 7: short read at 4096"))
    result = cli.run("hello", script=script)
    assert result.exit_code == code
    assert result.stderr.endswith("error: layer 3 expert 7: short read at 4096\n\nhint: look at the disk\n")


def test_errors_are_documents_for_programs(cli):
    script = Script(fail_in_load=("RecordCorrupt", "broken"))
    for flag in ("--json", "--jsonl"):
        result = cli.run("hello", flag, script=script)
        assert result.exit_code == 5
        assert (len(result.stdout.splitlines()) == 1) is (flag == "--jsonl")
        assert json.loads(result.stdout) == {
            "error": {"type": "RecordCorrupt", "message": "broken", "hint": "look at the disk"}
        }
        assert result.stderr == ""


def test_usage_errors_are_documents_for_programs_too(cli):
    result = cli.run("hello", "--json", "--tmep", "1")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["type"] == "UsageError"


def test_an_internal_error_is_one_line_and_debug_shows_where(cli, monkeypatch):
    monkeypatch.setattr("cli.commands.run.play", lambda *_: 1 / 0)
    result = cli.run("hello")
    assert result.exit_code == 1
    assert "error: Internal error: ZeroDivisionError: division by zero" in result.stderr
    assert "Traceback" not in result.output
    assert "Traceback" in cli.run("hello", "--debug").stderr


def test_the_demo_notice_appears_once(cli, monkeypatch, checkpoint):
    monkeypatch.setattr("cli.model_path._demo_directory", lambda: checkpoint)
    first, second = cli("run", "hello", "-R"), cli("run", "hello", "-R")
    assert "this is the demo model" in first.stderr
    assert "--model DIRECTORY" in first.stderr
    assert len(first.stderr.splitlines()) == 1
    assert second.stderr == ""
    assert first.stdout == second.stdout == ""


def test_vision_that_is_not_read_is_said_once_of_each_checkpoint(cli):
    tower = ["model.visual.blocks.0.attn.qkv.weight", "model.visual.pos_embed.weight", "rotary.inv_freq"]
    first = cli.run("hello", script=Script(["Hi.<|im_end|>"], skipped=tower))
    assert "note: 2 vision tensors of this checkpoint are not read: flashnext reads text only" in first.stderr
    assert "vision" not in cli.run("hello", script=Script(["Hi.<|im_end|>"], skipped=tower)).stderr
    other = Script(["Hi.<|im_end|>"], skipped=tower, digest="e" * 64)
    assert "vision" not in cli.run("hello", "--quiet", script=other).stderr
    assert "2 vision tensors" in cli.run("hello", script=other).stderr
    assert "vision" not in cli.run("hello", script=Script(["Hi.<|im_end|>"], digest="f" * 64)).stderr


def test_what_mlx_raises_after_ctrl_c_is_the_interruption():
    """The press also ends the compiler that MLX has started for a fused kernel."""
    with Interrupts() as interrupts:
        with pytest.raises(RuntimeError, match="shared library"), _not_blaming(interrupts):
            raise RuntimeError("Could not load C++ shared library")
        interrupts._was_pressed = True
        with pytest.raises(KeyboardInterrupt), _not_blaming(interrupts):
            raise RuntimeError("Could not load C++ shared library")
        with pytest.raises(RecursionError), _not_blaming(interrupts):
            raise RecursionError  # a fault of our own stays one
