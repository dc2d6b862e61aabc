"""Why a draft may or may not run here: one line per comparison, with both values and what follows.

Entry points: `Reason`, `Report`. A gate that answers yes or no teaches nobody anything.

Source: dflash2.md 7.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

Consequence = Literal["refuse", "refuse hints", "clamp", "warn", "info"]
# A hostile file may put anything of any length where a number belongs.
_MOST_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Reason:
    """One comparison of the gate.

    Attributes:
        code: G01 to G24, as in the table of docs/FORMATS.md.
        compared: what, in words.
        draft: the draft's value, for people.
        target: the value it was held against.
        consequence: `refuse`: the draft is not loaded. `refuse hints`: only its route hints are not.
            `clamp`: a setting is lowered. `warn`, `info`: it is loaded and this is said.
        message: one line that states the fact.
        hint: what to do; may be empty.
    """

    code: str
    compared: str
    draft: str
    target: str
    consequence: Consequence
    message: str
    hint: str = ""

    def as_row(self) -> dict[str, str]:
        """Return it as plain values, for `--json` and diagnostics."""
        return asdict(self)


@dataclass(slots=True)
class Report:
    """Reasons in the order they were found."""

    reasons: list[Reason] = field(default_factory=list[Reason])

    @property
    def refusals(self) -> tuple[Reason, ...]:
        """Return the reasons that keep the draft out."""
        return tuple(reason for reason in self.reasons if reason.consequence == "refuse")

    def add(
        self,
        code: str,
        compared: str,
        draft: object,
        target: object,
        message: str,
        *,
        consequence: Consequence = "refuse",
        hint: str = "",
    ) -> None:
        """Note one reason; values are shortened for people."""
        self.reasons.append(
            Reason(code, compared, shown(draft), shown(target), consequence, one_line(message), hint)
        )

    def codes(self, consequence: Consequence | None = None) -> set[str]:
        """Return the codes noted, all or of one consequence."""
        return {r.code for r in self.reasons if consequence in (None, r.consequence)}


def shown(value: object) -> str:
    """Return a value for people: one line, shorter than a sentence that quotes it."""
    text = one_line(value if isinstance(value, str) else repr(value))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def one_line(text: str) -> str:
    """Return text without control characters, cut to a length that a terminal can bear."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= 4 * _MOST_SHOWN else f"{clean[: 4 * _MOST_SHOWN]}..."
