"""Under what conditions figures were taken: every fact that the report states, and what the words mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cli.html.figures import share, size
from cli.html.markup import Html, tag
from cli.html.reading import Node, exactly
from cli.html.section import Section

_WORDS: Final[Mapping[str, str]] = {
    "exposed wait": "wall time in which compute stood still for a record; a wake-up is part of it",
    "record": "one expert's bytes as they are stored",
    "exact, near, speculative": "why a read was issued: the router chose the expert; a predictor names it "
    "for a layer soon to come; a draft names it for a block that is not verified yet",
    "ticket": "one promised read of one record; it has exactly one fate",
    "compute bound": "the time of a token with every expert in memory",
    "storage bound": "required bytes over the bandwidth of this drive, measured in the same run",
    "attained": "the larger bound over the time that was measured",
    "hidden": "1 - waited for experts / time in which needed records were being read; none where waits, with "
    "their queueing and wake-ups, were longer than the reading",
    "cycle, block, anchor": "one propose-verify-commit turn; the rows it verifies; the first of them",
}


def conditions(report: Node, *, repetitions: int | None) -> Section:
    """Return what the figures rest on."""
    facts = [(key.replace("_", " "), _told(key, node)) for key, node in report["conditions"].members]
    left = report["page_cache"]["cached_share"].number
    if left is not None:
        facts.append(("pages in memory before the first repetition", f"{share(left)} of those sampled"))
    disk = report["disk"]
    if disk["bytes_per_s"].number is not None:
        told = f"{size(disk['bytes_per_s'].number)}/s with records of {size(disk['record_bytes'].number)}"
        facts.append(("drive under the storage bound", f"{told}, {disk['num_readers'].text} at a time"))
    if repetitions:
        facts.append(("repetitions", f"median of {repetitions}"))
    body = tag(
        "dl", *(part for name, fact in facts for part in (tag("dt", name), tag("dd", fact))), class_="facts"
    )
    words = tag(
        "dl",
        *(part for word, what in _WORDS.items() for part in (tag("dt", word), tag("dd", what))),
        class_="facts",
    )
    return Section(
        "conditions",
        "What these figures rest on",
        [
            "Figures of other machines, models, budgets or prompts are other figures. Where rows differ in "
            "budget, drafter or hints, what is said of those here is said of the first row."
        ],
        [body, tag("h3", "Words"), words],
    )


def notice(text: str) -> Html:
    """Return what must not be overlooked."""
    return tag("p", text, class_="notice", role="note")


def _told(key: str, node: Node) -> str:
    number = node.number
    if number is not None and key.endswith("_bytes"):
        return f"{size(number)} ({exactly(number)} bytes)"
    return node.text
