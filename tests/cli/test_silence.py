"""P80: no silence while a prompt is read, and no exit without a reason."""

import json
import re
import signal
import threading
import time

import pytest

from cli.pulse import EVERY_S, Pulse
from tests.cli.scripted import Script


def test_the_pulse_is_at_most_two_seconds():
    assert EVERY_S <= 2.0


def test_p80_a_reader_of_lines_hears_of_a_prompt_that_takes_long(spawn):
    """The engine says nothing for longer than two pulses; Ctrl-C ends it, with a reason."""
    process = spawn(Script(["abc<|im_end|>"], hang_in="prefill"), "run", "hello", "--jsonl")
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == "waiting" and [event["event"] for event in events].count("waiting") == 2:
            process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    waiting = [event for event in events if event["event"] == "waiting"]
    moments = [event["waited_s"] for event in waiting]
    assert all(later - earlier <= 2.5 for earlier, later in zip([0.0, *moments], moments, strict=False))
    prefill = next(event for event in events if event["event"] == "prefill")
    assert {event["done"] for event in waiting} == {prefill["done"]}
    assert process.returncode == 130
    assert events[-1]["event"] == "finished"
    assert events[-1]["finish_reason"] == "cancelled"


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_p80_a_pipe_without_events_hears_of_a_prompt_that_takes_long(spawn, flags):
    """stderr of a script or a log file: whole lines, and a reason at the end."""
    script = Script(["abc<|im_end|>"], hang_in="prefill")
    process = spawn(script, "run", "hello", *flags, env={"FLASHNEXT_NO_PROGRESS": ""})
    moments, began = [], time.monotonic()
    for line in process.stderr:
        if line.startswith(b"HANGING"):
            began = time.monotonic()
        elif line.startswith(b"reading the prompt, "):
            assert re.fullmatch(rb"reading the prompt, \d+ s +\d+%  \d+ of \d+\n", line), line
            moments.append(time.monotonic() - began)
            if len(moments) == 2:
                process.send_signal(signal.SIGINT)
                break
    process.communicate(timeout=60)
    assert all(later - earlier <= 2.5 for earlier, later in zip([0.0, *moments], moments, strict=False))
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("script", "flags", "code", "reason"),
    [
        (Script(fail_in_load=("SourceFailed", "the drive is gone")), [], 1, "the drive is gone"),
        (Script(fail_in_decode=("RecordCorrupt", "record 7 is damaged")), [], 5, "record 7 is damaged"),
        (Script(end="context"), [], 0, "the context is full"),
        (Script(context_tokens=4), [], 4, "the planned context holds 4"),
    ],
)
def test_p80_every_end_that_is_not_the_models_own_has_a_reason_on_stderr(cli, script, flags, code, reason):
    result = cli.run("hello", *flags, script=script)
    assert result.exit_code == code, result.output
    assert reason in result.stderr


def test_a_pulse_beats_while_nothing_comes_and_not_while_it_is_held_or_stopped():
    beats: list[float] = []
    enough = threading.Event()

    def beat(waited_s: float) -> None:
        beats.append(waited_s)
        if len(beats) == 3:
            enough.set()

    with Pulse(beat, every_s=0.02) as pulse:
        assert enough.wait(30)
        with pulse.held():
            before = len(beats)
            threading.Event().wait(0.1)
            assert len(beats) == before
        pulse.stop()
        before = len(beats)
        threading.Event().wait(0.1)
        assert len(beats) == before
    assert beats == sorted(beats)


def test_a_stream_that_is_gone_ends_the_pulse_and_nothing_else():
    reached = threading.Event()

    def beat(_waited_s: float) -> None:
        reached.set()
        raise BrokenPipeError

    with Pulse(beat, every_s=0.02) as pulse:
        assert reached.wait(30)
        pulse._thread.join(30)
        assert not pulse._thread.is_alive()
