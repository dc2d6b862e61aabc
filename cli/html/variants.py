"""The rows of a report about waiting: budgets, drafters, sources of hints. Entry: `variants_of`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cli.html.figures import UNKNOWN
from cli.html.reading import MOST_COLUMNS, Node


@dataclass(frozen=True, slots=True)
class Variant:
    """One row.

    Attributes:
        node: everything that was found of it.
        slots: experts of each layer in memory.
        num_experts: of each layer in all.
        draft: who proposes, with the most proposals of a cycle.
        hints: who says what to read ahead.
    """

    node: Node
    slots: int | None
    num_experts: int | None
    draft: str
    hints: str

    @property
    def budget(self) -> str:
        """Return the experts in memory, in words."""
        slots = UNKNOWN if self.slots is None else str(self.slots)
        return f"{slots} of {self.num_experts} experts" if self.num_experts else f"{slots} experts"

    @property
    def name(self) -> str:
        """Return the row's name."""
        return f"{self.budget}, {self.draft}, hints {self.hints}"


def variants_of(report: Node) -> list[Variant]:
    """Return the rows of a report of format flashnext-ssd-wait."""
    num_experts = report["conditions"]["num_experts"].whole
    return [_variant(node, num_experts) for node in report["variants"].rows]


def draft_name(kind: str, num_tokens: int | None) -> str:
    """Return a drafter's name with the most proposals of a cycle."""
    if kind in ("", "none"):
        return "no draft"
    return f"draft {kind} {num_tokens}" if num_tokens else f"draft {kind}"


def drafts_among(variants: Sequence[Variant]) -> list[str]:
    """Return the drafters, each once, in the order of the rows."""
    return list(dict.fromkeys(one.draft for one in variants))


def names_among(variants: Sequence[Variant], key: str) -> list[str]:
    """Return what the objects of some rows have, in the order in which it comes up; no more than columns."""
    names = dict.fromkeys(name for one in variants for name, _ in one.node[key].members)
    return list(names)[:MOST_COLUMNS]


def hints_among(variants: Sequence[Variant]) -> list[str]:
    """Return the sources of hints, each once, in the order of the rows."""
    return list(dict.fromkeys(one.hints for one in variants))


def _variant(node: Node, num_experts: int | None) -> Variant:
    named = node["variant"]
    draft = draft_name(named["draft"].text, named["num_draft_tokens"].whole)
    return Variant(node, named["slots"].whole, num_experts, draft, named["hints"].text or UNKNOWN)
