"""Lines a person or a pipe feeds into `chat`.

On a terminal: line editing through the standard readline, history in memory only (nothing typed is
written to disk). Otherwise: plain lines, strictly UTF-8. The prompt is shown only to people, and never in
a redirected stdout.
"""

import importlib
import sys

from cli.console import Console
from cli.prompts import decode_utf8

PROMPT, CONTINUATION, FENCE = "> ", ". ", '"""'


class LineInput:
    """Reads messages; a message between two lines of three quotes may have several lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_interactive = sys.stdin is not None and sys.stdin.isatty()
        self._edits = self.is_interactive and console.out_is_terminal
        self._num_lines = 0
        if self._edits:
            # Importing it gives input() line editing.
            importlib.import_module("readline")

    def read_message(self) -> str | None:
        """Return the next message, None at the end of input.

        Raises:
            KeyboardInterrupt: Ctrl-C at the prompt.
            UsageProblem: a line is not UTF-8.
        """
        line = self._read_line(PROMPT)
        if line is None or not line.startswith(FENCE):
            return line
        lines = [line.removeprefix(FENCE)]
        while not lines[-1].endswith(FENCE):
            more = self._read_line(CONTINUATION)
            if more is None:
                break
            lines.append(more)
        lines[-1] = lines[-1].removesuffix(FENCE)
        return "\n".join(lines).strip("\n")

    def _read_line(self, prompt: str) -> str | None:
        self._num_lines += 1
        if self._edits:
            try:
                return decode_utf8(input(prompt).encode("utf-8", "surrogateescape"), "The line")
            except EOFError:
                self._console.prompt("\n")
                return None
        if self.is_interactive:
            self._console.prompt(prompt)
        data = b"" if sys.stdin is None else sys.stdin.buffer.readline()
        return decode_utf8(data, f"Line {self._num_lines} of the input").rstrip("\r\n") if data else None
