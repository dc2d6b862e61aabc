"""Everything people see: streams, numbers, tables, progress, errors.

The only formatter of numbers for people. stdout carries the answer or the document asked for, stderr
everything else; each stream is examined on its own, so a file or a pipe gets no colour and no cursor
movement. On a terminal, control characters of a model's text or of a file's names are made visible instead
of being obeyed.
"""

import contextlib
import json
import os
import shlex
import shutil
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from cli.errors import CommandError, Failure, code_of
from cli.settings import wants_colour, wants_progress

if TYPE_CHECKING:
    from mlx_flashnext.engine.stats import GenerationStatistics

ErrorForm = Literal["text", "json", "jsonl"]
PROGRESS_DELAY_S = 1.0
PROGRESS_INTERVAL_S = 0.1
# In a pipe progress is whole lines, fewer the longer it takes, but for a prompt, which is always heard of.
LINE_INTERVAL_S = 2.0
LINE_SHARE = 0.1
STEADY_INTERVAL_S = 1.0
PIPE_WIDTH = 160
OPENING = "opening the model"
"""What goes on until something can be counted."""
_UNLIMITED = 10_000
_DIM, _PLAIN, _CLEAR = "\x1b[2m", "\x1b[22m", "\r\x1b[K"
# C0 and C1 controls except tab and newline; what turns the direction of text round.
_TURNING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {
    **{code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))},
    **{code: f"\\u{code:04x}" for code in _TURNING},
}
_IN_ONE_LINE = {**_VISIBLE, ord("\n"): "\\x0a"}


def printable(text: str) -> str:
    """Return text that cannot move a terminal's cursor, change its state, or turn what follows round."""
    return text.translate(_VISIBLE)


def shell_word(word: str | os.PathLike[str]) -> str:
    """Return a word as a shell takes it, in one line: what does not print is written as bytes."""
    text = os.fspath(word)
    if text.isprintable():
        return shlex.quote(text)
    safe = (
        chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}"
        for byte in os.fsencode(text)
    )
    return f"$'{''.join(safe)}'"


def size(num_bytes: float) -> str:
    """Return a size: `17.2 GiB`, `8.1 MiB`, `512 B`."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 turn`, `2 turns`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def statistics_line(statistics: "GenerationStatistics") -> str:
    """Return the one line of figures after an answer. Prefill and decode are never mixed."""
    fresh = statistics.prompt_tokens - statistics.reused_tokens
    prefill = f"prefill {fresh} tok"
    if statistics.prefill_ns > 0:
        prefill += f" {fresh / statistics.prefill_ns * 1e9:.1f} tok/s"
    if statistics.reused_tokens:
        prefill += f" (+{statistics.reused_tokens} reused)"
    decode = f"decode {statistics.output_tokens} tok"
    if statistics.decode_ns > 0:
        decode += f" {statistics.output_tokens / statistics.decode_ns * 1e9:.1f} tok/s"
    decode += _draft_figures(statistics)
    reads = f"reads {size(statistics.read_bytes / max(1, statistics.output_tokens))}/tok"
    if statistics.hit_rate is not None:
        reads += f", hit {statistics.hit_rate * 100:.0f}%"
    reads += f", waited {statistics.exposed_wait_ns / 1e9:.1f} s"
    return " | ".join((prefill, decode, reads, f"peak {size(statistics.peak_bytes)}"))


def _draft_figures(statistics: "GenerationStatistics") -> str:
    """Return who proposed and with what success; or why nobody did, if somebody was asked to."""
    draft = statistics.draft
    if draft.drafter == "none":
        return ""
    figures = ""
    if draft.num_proposed and statistics.acceptance_length is not None:
        share = draft.num_accepted / draft.num_proposed
        figures = f", draft {draft.used} {statistics.acceptance_length:.2f} tok/cycle, {share:.0%} accepted"
    if draft.reason is not None:
        figures += f", {'then ' if figures else ''}no draft: {draft.drafter} {draft.reason}"
    return figures


class Console:
    """The two streams of one command."""

    def __init__(self, *, colour: bool = True, quiet: bool = False, progress: bool = True) -> None:
        """Examine the streams as they are now.

        Args:
            colour: False forbids colour.
            quiet: no notes, no progress, no statistics.
            progress: False forbids progress lines.
        """
        self.is_quiet = quiet
        self.out_is_terminal = _is_terminal(sys.stdout)
        self.err_is_terminal = _is_terminal(sys.stderr)
        self._has_colour = colour and wants_colour(is_terminal=self.err_is_terminal)
        self._out_has_colour = colour and wants_colour(is_terminal=self.out_is_terminal)
        self._may_progress = progress and not quiet and wants_progress(is_terminal=self.err_is_terminal)
        self._progress_since: float | None = None
        self._progress_drawn = 0.0
        self._progress_text = ""
        self._progress_lock = threading.RLock()  # protects whether a line is drawn, and drawing it
        self._first_line: threading.Timer | None = None
        self._reasoning_tail = ""
        self._is_line_open = False
        self._is_width_told = False

    def answer(self, text: str) -> None:
        """Write text to stdout now.

        Raises:
            BrokenPipeError: the reader has gone.
            CommandError: the text cannot be written.
        """
        self.end_progress()
        self._end_reasoning()
        _write(sys.stdout, printable(text) if self.out_is_terminal else text)
        if text:
            self._is_line_open = not text.endswith("\n")

    def reasoning(self, text: str) -> None:
        """Write reasoning to stderr now, dimmed where there is colour."""
        if not text:
            return
        self.end_progress()
        shown = printable(text) if self.err_is_terminal else text
        _write(sys.stderr, f"{_DIM}{shown}{_PLAIN}" if self._has_colour else shown)
        self._reasoning_tail = text

    def note(self, text: str) -> None:
        """Write a line to stderr, unless the command is to be quiet."""
        if not self.is_quiet:
            self.end_progress()
            self._end_reasoning()
            # An answer that went through a pipe may stand on this terminal all the same, its line still open.
            lead = "\n" if self._is_line_open and self.err_is_terminal and not self.out_is_terminal else ""
            self._is_line_open = False
            _write(sys.stderr, lead + self._folded(printable(text)) + "\n")

    def prompt(self, text: str) -> None:
        """Write a prompt to stderr, without a line end."""
        _write(sys.stderr, text)

    def failure(self, failure: Failure, *, form: ErrorForm = "text") -> None:
        """Report an error: a line and a hint on stderr, or for programs a JSON document or line on stdout."""
        self.end_progress()
        self._end_reasoning()
        if form != "text":
            self.document(failure.to_dict(), in_one_line=form == "jsonl")
            return
        text = self._folded(f"error: {printable(' '.join(failure.message.split()))}") + "\n"
        if failure.hint:
            text += "\n" + self._folded(f"hint: {printable(failure.hint)}") + "\n"
        _write(sys.stderr, text)

    def document(self, value: object, *, in_one_line: bool = False) -> None:
        """Write one JSON document to stdout."""
        self.end_progress()
        text = json.dumps(value, ensure_ascii=True, indent=None if in_one_line else 2)
        _write(sys.stdout, text + "\n")

    def table(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
    ) -> None:
        """Write a table to stdout, as wide as the terminal; cells wrap.

        Where words would be cut, each row is a paragraph instead, a line a column.

        Args:
            headings: of the columns.
            rows: cells as text.
            right: columns to align to the right.
        """
        from rich.box import SIMPLE_HEAD
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        width = _terminal_width() if self.out_is_terminal else PIPE_WIDTH
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
        for column, heading in enumerate(headings):
            justify = "right" if column in right else "left"
            table.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=column in right)
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))

        def drawn(columns: int, *, has_colour: bool = False) -> str:
            console = RichConsole(
                width=columns,
                no_color=not has_colour,
                highlight=False,
                force_terminal=has_colour,
                legacy_windows=False,
            )
            with console.capture() as capture:
                console.print(table)
            return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"

        self.end_progress()
        whole = drawn(_UNLIMITED)
        if _words(drawn(width)) == _words(whole):
            _write(sys.stdout, drawn(width, has_colour=self._out_has_colour))
        else:
            longest = max(map(len, headings))
            blocks = (
                [f"{heading:{longest}}  {cell}" for heading, cell in zip(headings, row, strict=True) if cell]
                for row in rows
            )
            _write(sys.stdout, printable("\n\n".join(map("\n".join, blocks))) + "\n")
            if self.out_is_terminal and not self._is_width_told:
                self._is_width_told = True
                self.note(f"a terminal of {max(map(len, whole.splitlines()))} columns shows this as a table")

    def line(self, text: str = "") -> None:
        """Write a line of a report to stdout; what would begin another is made visible."""
        self.end_progress()
        _write(sys.stdout, text.translate(_IN_ONE_LINE) + "\n")

    def wrapped(self, text: str) -> None:
        """Write a sentence of a report to stdout; on a terminal no word is cut in two."""
        lines = [text]
        if self.out_is_terminal:
            lines = textwrap.wrap(printable(text), _terminal_width(), break_long_words=False) or [""]
        for line in lines:
            self.line(line)

    def progress(
        self,
        label: str,
        done: int,
        total: int,
        *,
        is_bytes: bool = False,
        steady: bool = False,
        now: bool = False,
    ) -> None:
        """Show how far something has come, once it takes longer than a moment.

        On a terminal one line is drawn again and again, the first after a moment though nobody calls again;
        elsewhere lines are written.

        Args:
            label: what goes on.
            done: of it.
            total: of it; 0 if nobody knows.
            is_bytes: show sizes.
            steady: elsewhere too a line a second, however long it takes.
            now: elsewhere too a line now: nothing was heard for long.
        """
        if not self._may_progress:
            return
        share = f"{100 * done // max(1, total):3d}%"
        of = f"{size(done)} of {size(total)}" if is_bytes else f"{done} of {total}"
        self._progress_text = text = printable(f"{label} {share}  {of}" if total else label)
        moment = time.monotonic()
        if self._progress_since is None:
            self._progress_since = moment
            if self.err_is_terminal:
                self._first_line = threading.Timer(PROGRESS_DELAY_S, self._draw_first)
                self._first_line.daemon = True
                self._first_line.start()
        elapsed, silent = (
            moment - self._progress_since,
            moment - (self._progress_drawn or self._progress_since),
        )
        if self.err_is_terminal:
            is_due = elapsed >= PROGRESS_DELAY_S and moment - self._progress_drawn >= PROGRESS_INTERVAL_S
        else:
            interval = STEADY_INTERVAL_S if steady else max(LINE_INTERVAL_S, LINE_SHARE * elapsed)
            is_due = now or silent >= interval
        if not is_due:
            return
        if self.err_is_terminal:
            self._draw(text, moment)
        else:
            self._progress_drawn = moment
            _write(sys.stderr, f"{text}\n")

    def end_progress(self) -> None:
        """Remove the progress line, if there is one."""
        with self._progress_lock:
            if self._progress_drawn and self.err_is_terminal:
                _write(sys.stderr, _CLEAR)
            self._progress_since, self._progress_drawn = None, 0.0
            if self._first_line is not None:
                self._first_line.cancel()
                self._first_line = None

    def _draw(self, text: str, moment: float) -> None:
        with self._progress_lock:
            self._progress_drawn = moment
            _write(sys.stderr, f"{_CLEAR}{text[: max(8, _terminal_width() - 1)]}")

    def _draw_first(self) -> None:
        """Draw what is going on, on a thread of its own: what was begun may not be heard of for long."""
        with self._progress_lock, contextlib.suppress(OSError, CommandError):
            if self._progress_since is not None and not self._progress_drawn:
                self._draw(self._progress_text, time.monotonic())

    def _folded(self, text: str) -> str:
        """Return text broken between words for a terminal; files and pipes get it in one line."""
        if not self.err_is_terminal:
            return text
        width = shutil.get_terminal_size().columns
        lines = text.split("\n")
        return "\n".join(
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            if len(line) > width
            else line
            for line in lines
        )

    def _end_reasoning(self) -> None:
        """Leave an empty line between reasoning and what follows."""
        if self._reasoning_tail:
            _write(sys.stderr, "\n" if self._reasoning_tail.endswith("\n") else "\n\n")
            self._reasoning_tail = ""


def prepare_streams() -> None:
    """Make the standard streams UTF-8 and present, whatever the locale and the caller left open."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # A file opened later must not become somebody's stdout.
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def discard_output(*streams: TextIO) -> None:
    """Send what is left in streams (default: both) to nowhere: the exit must stay quiet."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in streams or (sys.stdout, sys.stderr):
        try:
            os.dup2(null, stream.fileno())
        except (OSError, ValueError):
            continue
    os.close(null)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_output(stream)
        raise CommandError(
            f"Cannot write: {error.strerror or error}", hint="free some space", code=code_of(error)
        ) from error


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False


def _words(table: str) -> Counter[str]:
    """Return the words of a drawn table, wherever its lines break between them."""
    return Counter(word for word in table.split() if any(map(str.isalnum, word)))


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size((80, 24)).columns


def as_json_value(value: Any) -> Any:
    """Return a JSON value for what statistics and plans carry."""
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        return {str(key): as_json_value(item) for key, item in mapping.items()}
    if isinstance(value, list | tuple):
        return [as_json_value(item) for item in cast("Sequence[object]", value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
