"""Numbers, progress and terminals as people see them."""

import itertools
import threading

import pytest

from cli import console as console_module
from cli.console import Console, printable, size, statistics_line
from cli.settings import wants_colour, wants_progress
from mlx_flashnext.engine.stats import DraftStatistics, GenerationStatistics


def statistics(**changes) -> GenerationStatistics:
    values = {
        "prompt_tokens": 812,
        "reused_tokens": 0,
        "prefill_ns": 8_440_000_000,
        "output_tokens": 256,
        "decode_ns": 22_650_000_000,
        "cycles": 256,
        "read_bytes": int(8.1 * (1 << 20) * 256),
        "prefill_read_bytes": 0,
        "hit_rate": 0.91,
        "exposed_wait_ns": 800_000_000,
        "peak_bytes": int(17.2 * (1 << 30)),
        "num_syncs": 9,
    }
    return GenerationStatistics(**{**values, **changes})


def test_the_figures_of_an_answer():
    assert statistics_line(statistics()) == (
        "prefill 812 tok 96.2 tok/s | decode 256 tok 11.3 tok/s | reads 8.1 MiB/tok, hit 91%, waited 0.8 s"
        " | peak 17.2 GiB"
    )
    assert "prefill 12 tok" in statistics_line(statistics(reused_tokens=800))
    assert "(+800 reused)" in statistics_line(statistics(reused_tokens=800))


@pytest.mark.parametrize(
    ("draft", "text"),
    [
        (DraftStatistics(), "11.3 tok/s | reads"),
        (
            DraftStatistics("mtp", "mtp", num_cycles=75, num_proposed=225, num_accepted=180),
            "11.3 tok/s, draft mtp 3.41 tok/cycle, 80% accepted | reads",
        ),
        (
            DraftStatistics("mtp", "mtp", "failed: E: x", num_cycles=9, num_proposed=20, num_accepted=5),
            "11.3 tok/s, draft mtp 3.41 tok/cycle, 25% accepted, then no draft: mtp failed: E: x | reads",
        ),
        (
            DraftStatistics("lookup", "none", "does not pay here"),
            "11.3 tok/s, no draft: lookup does not pay here | reads",
        ),
    ],
)
def test_who_drafted_and_why_nobody_did_is_in_the_line(draft, text):
    """Defect 33: what was asked for and what was used are two things."""
    assert text in statistics_line(statistics(cycles=75, draft=draft))


def test_figures_of_nothing_divide_by_nothing():
    line = statistics_line(statistics(output_tokens=0, decode_ns=0, prefill_ns=0, cycles=0, hit_rate=None))
    assert "tok/s" not in line
    assert "hit" not in line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (8 << 20, "8.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (2 << 40, "2048.0 GiB"),
    ],
)
def test_sizes(value, text):
    assert size(value) == text


def test_text_that_could_drive_a_terminal_is_made_visible():
    assert printable("a\x1b[2J\r\x00\x9bz\t\n\u20ac") == "a\\x1b[2J\\x0d\\x00\\x9bz\t\n\u20ac"


def test_text_cannot_turn_round_what_follows_nor_begin_a_line_of_a_report(capsys):
    assert printable("a\u202eb\u2066c") == "a\\u202eb\\u2066c"
    assert printable("\u05d0\u200f") == "\u05d0\u200f", "what Hebrew needs stays"
    Console().line("machine  a\nflashnext: done")
    assert capsys.readouterr().out == "machine  a\\x0aflashnext: done\n"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _with_progress(monkeypatch):
    monkeypatch.delenv("FLASHNEXT_NO_PROGRESS")


@pytest.fixture
def at_terminal(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(console_module, "time", clock)
    monkeypatch.setattr(console_module, "_is_terminal", lambda _: True)
    monkeypatch.setenv("COLUMNS", "60")
    return clock


def test_progress_appears_after_a_moment_is_renewed_and_removed(at_terminal, capsys):
    console = Console()
    console.progress("loading trunk", 1 << 20, 4 << 20, is_bytes=True)
    assert capsys.readouterr().err == ""
    at_terminal.now += 1.5
    console.progress("loading trunk", 2 << 20, 4 << 20, is_bytes=True)
    assert capsys.readouterr().err == "\r\x1b[Kloading trunk  50%  2.0 MiB of 4.0 MiB"
    at_terminal.now += 0.01
    console.progress("loading trunk", 3 << 20, 4 << 20, is_bytes=True)
    assert capsys.readouterr().err == "", "not more often than ten times a second"
    console.answer("x")
    assert capsys.readouterr().err == "\r\x1b[K"


def test_what_was_begun_is_shown_after_a_moment_though_it_is_silent(at_terminal, capsys, monkeypatch):
    timers = []

    class Timer:
        def __init__(self, seconds, call):
            self.seconds, self.call, self.state = seconds, call, "made"
            timers.append(self)

        def start(self):
            self.state = "started"

        def cancel(self):
            self.state = "cancelled"

    monkeypatch.setattr(console_module.threading, "Timer", Timer)
    console = Console()
    console.progress("opening the model", 0, 0)
    console.progress("pp512", 0, 6)
    (timer,) = timers
    assert (timer.seconds, timer.state, timer.daemon) == (1.0, "started", True)
    timer.call()
    assert capsys.readouterr().err == "\r\x1b[Kpp512   0%  0 of 6"
    timer.call()
    assert capsys.readouterr().err == "", "it is drawn already"
    console.end_progress()
    assert (capsys.readouterr().err, timer.state) == ("\r\x1b[K", "cancelled")
    timer.call()
    assert capsys.readouterr().err == "", "it is over"
    console.progress("again", 0, 0)
    timers[-1].call()
    assert capsys.readouterr().err == "\r\x1b[Kagain"


def test_what_is_over_within_a_moment_draws_nothing(at_terminal, capsys, monkeypatch):
    monkeypatch.setattr(console_module, "PROGRESS_DELAY_S", 0.05)
    console = Console()
    console.progress("opening the model", 0, 0)
    console.end_progress()
    threading.Event().wait(0.2)
    assert capsys.readouterr().err == ""
    console.progress("opening the model", 0, 0)
    threading.Event().wait(0.2)
    assert capsys.readouterr().err == "\r\x1b[Kopening the model", "the control"
    console.end_progress()


@pytest.mark.parametrize(
    "say", [lambda console: console.line("made"), lambda console: console.table(("a",), [("b",)])]
)
def test_what_is_reported_ends_the_progress_line(at_terminal, capsys, say):
    """A command that opens a model and forgets to say that it is open would write behind what goes on."""
    console = Console()
    console.progress("opening the model", 0, 0)
    at_terminal.now += 2
    console.progress("opening the model", 0, 0)
    assert capsys.readouterr().err.endswith("opening the model")
    say(console)
    assert capsys.readouterr().err == "\r\x1b[K"
    assert console._first_line is None


def test_progress_never_wraps(at_terminal, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    console = Console()
    console.progress("reading the prompt", 1, 1_000_000)
    at_terminal.now += 2
    console.progress("reading the prompt", 123_456, 1_000_000)
    assert len(capsys.readouterr().err.removeprefix("\r\x1b[K")) < 40
    console.end_progress()


@pytest.mark.parametrize(
    "forbid", [{"quiet": True}, {"progress": False}, {"FLASHNEXT_NO_PROGRESS": "1"}, {"TERM": "dumb"}]
)
def test_progress_can_be_forbidden(at_terminal, capsys, monkeypatch, forbid):
    flags = {name: value for name, value in forbid.items() if not isinstance(value, str)}
    for name, value in forbid.items():
        if isinstance(value, str):
            monkeypatch.setenv(name, value)
    console = Console(**flags)
    for _ in range(3):
        console.progress("loading", 1, 2)
        at_terminal.now += 5
    assert capsys.readouterr().err == ""


def test_progress_in_a_pipe_is_whole_lines_and_fewer_the_longer_it_takes(capsys, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(console_module, "time", clock)
    monkeypatch.setenv("TERM", "dumb")
    console = Console()
    began, moments = clock.now, []
    for done in range(20_000):
        console.progress("converting", done, 20_000)
        if said := capsys.readouterr().err:
            assert said == f"converting {100 * done // 20_000:3d}%  {done} of 20000\n"
            moments.append(clock.now - began)
        clock.now += 0.1
    gaps = [later - earlier for earlier, later in zip([0.0, *moments], moments, strict=False)]
    assert gaps[0] == pytest.approx(2.0, abs=0.11)
    assert max(gaps) < 0.12 * moments[-1]
    assert len(moments) < 80, "half an hour"
    console.end_progress()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("step", [0.05, 0.3, 0.99, 1.3])
def test_p80_a_prompt_in_a_pipe_is_heard_of_every_two_seconds_however_long_it_takes(
    capsys, monkeypatch, step
):
    clock = Clock()
    monkeypatch.setattr(console_module, "time", clock)
    console = Console()
    began, heard = clock.now, [0.0]
    while clock.now - began < 900:
        console.progress("reading the prompt", 1, 2, steady=True)
        if capsys.readouterr().err:
            heard.append(clock.now - began)
        clock.now += step
    assert max(later - earlier for earlier, later in itertools.pairwise(heard)) <= 2.0


@pytest.mark.parametrize("forbid", [{"quiet": True}, {"progress": False}])
def test_progress_in_a_pipe_can_be_forbidden(capsys, monkeypatch, forbid):
    Console(**forbid).progress("reading the prompt", 1, 2, now=True)
    monkeypatch.setenv("FLASHNEXT_NO_PROGRESS", "1")
    Console().progress("reading the prompt", 1, 2, now=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("environment", "is_terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour_follows_the_terminal_and_the_variables(environment, is_terminal, colour):
    assert wants_colour(is_terminal=is_terminal, environment=environment) is colour


def test_progress_follows_the_variables():
    assert wants_progress({"TERM": "xterm"})
    assert not wants_progress({"FLASHNEXT_NO_PROGRESS": "1"})


def test_a_note_after_a_piped_answer_begins_a_line_of_its_own_at_a_terminal(capsys, monkeypatch):
    console = Console()
    monkeypatch.setattr(console, "err_is_terminal", True)
    console.answer("It is 20.")
    console.note("prefill 18 tok")
    console.note("more")
    assert capsys.readouterr() == ("It is 20.", "\nprefill 18 tok\nmore\n")


def test_notes_break_between_words_at_a_terminal_and_nowhere_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    words = "every word of this note is whole"
    console = Console()
    console.note(words)
    assert capsys.readouterr().err == words + "\n"
    monkeypatch.setattr(console, "err_is_terminal", True)
    console.note(words)
    assert capsys.readouterr().err == "every word of this\nnote is whole\n"


@pytest.mark.parametrize("columns", [120, 40])
@pytest.mark.parametrize("is_coloured", [False, True])
def test_a_table_that_a_terminal_would_cut_is_told_line_by_line(capsys, monkeypatch, columns, is_coloured):
    """Columns vanished from a terminal of 80: two kinds of hints could not be told apart."""
    monkeypatch.setattr(console_module, "_terminal_width", lambda: columns)
    console = Console()
    console.out_is_terminal, console._out_has_colour = True, is_coloured
    rows = [("laptop", "off", "118.87 tokens a second"), ("laptop", "oracle", "131.20 tokens a second")]
    headings = ("machine", "hints", "rate without anything else")
    console.table(headings, rows, right=(1, 2))
    out, told = capsys.readouterr()
    assert all(cell in out for row in rows for cell in row)
    assert bool(told) is (columns == 40)
    if columns == 40:
        wide = int(told.removeprefix("a terminal of ").removesuffix(" columns shows this as a table\n"))
        console.table(headings, rows, right=(1, 2))
        assert capsys.readouterr() == (out, ""), "it is said once"
        monkeypatch.setattr(console_module, "_terminal_width", lambda: wide)
        console.table(headings, rows, right=(1, 2))
        assert len(capsys.readouterr().out.splitlines()) == 4, "heads, a line and a row each"
        assert out.splitlines()[:3] == [
            "machine                     laptop",
            "hints                       off",
            "rate without anything else  118.87 tokens a second",
        ]
        assert out.splitlines()[3] == ""
    else:
        assert sum("118.87" in line and "laptop" in line for line in out.splitlines()) == 1
