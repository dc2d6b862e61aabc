"""Separates reasoning from answer while text streams in.

Entry point: `ThinkingSplitter`.

Invariants:
1. No character of a `</think>` tag is ever shown, however the tag is cut over pieces.
2. The pieces, concatenated, do not depend on how the text was cut.

Source: qwen4exp.md 5.3. A thinking prompt ends inside the think block, so the generated text starts
inside it.
"""

from dataclasses import dataclass
from enum import Enum, auto

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became final: what belongs to the reasoning and what to the answer."""

    reasoning: str = ""
    answer: str = ""


class _Where(Enum):
    START = auto()
    INSIDE = auto()
    GAP = auto()
    ANSWER = auto()


class ThinkingSplitter:
    """Splits one answer's text."""

    def __init__(self, *, starts_inside: bool) -> None:
        """Begin at the first generated character.

        Args:
            starts_inside: the prompt ended inside a think block.
        """
        self._where = _Where.INSIDE if starts_inside else _Where.START
        self._held = ""

    @property
    def is_inside(self) -> bool:
        """Return whether the think block is still open."""
        return self._where is _Where.INSIDE

    def feed(self, text: str) -> Piece:
        """Return what `text` makes final."""
        self._held += text
        reasoning, answer = "", ""
        while True:
            before = self._where
            if before is _Where.START:
                self._start()
            elif before is _Where.INSIDE:
                reasoning += self._inside()
            elif before is _Where.GAP:
                self._gap()
            else:
                answer, self._held = answer + self._held, ""
            if self._where is before:
                return Piece(reasoning, answer)

    def flush(self) -> Piece:
        """Return what was held back, once no more text comes."""
        held, self._held = self._held, ""
        return Piece(reasoning=held) if self.is_inside else Piece(answer=held)

    def _start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._held = begun.removeprefix(OPEN)
            self._where = _Where.INSIDE
        elif not OPEN.startswith(begun):
            self._where = _Where.ANSWER

    def _inside(self) -> str:
        shown, found, rest = self._held.partition(CLOSE)
        if found:
            self._held = rest
            self._where = _Where.GAP
            return shown
        sizes = range(min(len(CLOSE) - 1, len(shown)), 0, -1)
        kept = next((size for size in sizes if shown.endswith(CLOSE[:size])), 0)
        self._held = shown[len(shown) - kept :]
        return shown[: len(shown) - kept]

    def _gap(self) -> None:
        # The template separates block and answer by newlines; they belong to neither.
        self._held = self._held.lstrip("\n")
        if self._held:
            self._where = _Where.ANSWER


def prompt_ends_inside(prompt: str) -> bool:
    """Return whether a rendered prompt leaves a think block open."""
    return prompt.rstrip().endswith(OPEN)
