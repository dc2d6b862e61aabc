"""One self-contained page of a report. Entry: `render_page`, from what `--json` prints to a document.

No script, no request: a policy in the page forbids both, whatever a report says. The same report makes the
same page, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cli.html.acceptance import Accepted, acceptance
from cli.html.budget import wait_against_budget
from cli.html.conditions import conditions, notice
from cli.html.drafters import accepted, best_drafter, memory, name_of, phases, rates
from cli.html.fates import ticket_fates
from cli.html.figures import UNKNOWN, ms, plain, share, size, total
from cli.html.layers import wait_by_layer
from cli.html.markup import Html, join, tag
from cli.html.predictors import bars, in_service, recall_by_bytes, recall_by_place
from cli.html.reading import Node
from cli.html.recall import bytes_against_recall
from cli.html.section import Section
from cli.html.style import STYLE
from cli.html.token_time import token_time
from cli.html.variants import Variant, variants_of
from cli.html.waterfall import waterfalls

GENERATOR: Final = "flashnext page"
"""How a page says what it is; nothing else is ever written over."""
TITLES: Final[Mapping[str, str]] = {
    "flashnext-ssd-wait": "How long compute waits for the drive",
    "flashnext-predictors": "What each source of hints knows, and when",
    "flashnext-draft-report": "What each drafter costs and brings",
}
"""Formats of reports that there are pages of."""
VERSIONS: Final[Mapping[str, int]] = {
    "flashnext-ssd-wait": 3,
    "flashnext-predictors": 1,
    "flashnext-draft-report": 1,
}
"""The latest of each; earlier ones lack parts, which are left out."""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

Tile = tuple[str, str]


def render_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report.

    Args:
        report: a document of one of the formats of `TITLES`, as `--json` prints it. Parts that are missing or
            are not what they should be are left out, or shown as not known.

    Raises:
        ValueError: it is of no such format.
    """
    node = Node(report)
    name = node["format"].text
    if name not in TITLES:
        raise ValueError(f"no page of this format: {name[:80] or 'none given'}")
    source = node["wait"] if name == "flashnext-predictors" and node["wait"] else node
    disk = source["conditions"]["disk"].text
    is_simulated = disk not in ("", "real")
    tiles, sections, notices = _PARTS[name](node)
    model = source["conditions"]["model"].text or UNKNOWN
    suffix = " (simulated disk)" if is_simulated else ""
    if is_simulated:
        notices = [f"{disk}; nothing below is a figure of the drive in this machine.", *notices]
    shown = [section for section in sections if section is not None]
    repetitions = source["variants"][0]["repetitions"].whole
    shown.append(conditions(source, repetitions=repetitions))
    title = TITLES[name] + suffix
    return _document(f"{title}: {model}", title, _under(source, model), tiles, notices, shown, suffix)


def _document(
    full_title: str,
    title: str,
    under: str,
    tiles: Sequence[Tile],
    notices: Sequence[str],
    sections: Sequence[Section],
    suffix: str,
) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="generator", content=GENERATOR),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", full_title),
        tag("style", Html(STYLE)),
    )
    links = [tag("li", tag("a", one.title, href=f"#{one.identity}")) for one in sections]
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in tiles]
    top = tag(
        "header",
        tag("h1", title),
        tag("p", under, class_="under"),
        *(notice(text) for text in notices),
        tag("dl", *facts, class_="tiles") if facts else Html(""),
        tag("nav", tag("ul", *links), aria_label="Parts of this page"),
    )
    body = tag(
        "main", join((one.html(suffix if one.identity != "conditions" else "") for one in sections), "\n")
    )
    foot = tag("footer", tag("p", "Made by flashnext bench. This page needs no network and runs no script."))
    document = tag("html", head, tag("body", top, "\n", body, foot), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


def _under(source: Node, model: str) -> str:
    facts = source["conditions"]
    parts = [model, facts["quantisation"].text, facts["machine"].text, facts["backend"].text]
    return " · ".join(part for part in parts if part)


def _ssd_wait(report: Node) -> tuple[list[Tile], list[Section | None], list[str]]:
    variants = variants_of(report)
    return (
        _wait_tiles(variants),
        [
            token_time(variants),
            waterfalls(variants),
            wait_against_budget(variants),
            bytes_against_recall(variants),
            ticket_fates(variants),
            _accepted(variants),
            wait_by_layer(variants),
        ],
        _wait_notices(variants),
    )


def _predictors(report: Node) -> tuple[list[Tile], list[Section | None], list[str]]:
    variants = variants_of(report["wait"])
    sections = [recall_by_bytes(report), recall_by_place(report), in_service(report), bars(report)]
    sections += [
        token_time(variants),
        waterfalls(variants),
        bytes_against_recall(variants),
        ticket_fates(variants),
        wait_by_layer(variants),
    ]
    return _wait_tiles(variants), sections, [*_texts(report["notices"]), *_wait_notices(variants)]


def _drafts(report: Node) -> tuple[list[Tile], list[Section | None], list[str]]:
    variants = report["variants"].rows
    left_out = [f"Left out: {one['draft'].text}: {one['why'].text}" for one in report["left_out"].items]
    known = [one for one in variants if one["tokens_per_s"].number is not None]
    tiles: list[Tile] = []
    if known:
        best = best_drafter(known)
        most = best_drafter(known, "tokens_per_cycle")
        tiles = [
            ("target-only, tokens a second", str(plain(known[0]["tokens_per_s"].number))),
            (f"fastest: {name_of(best)}, tokens a second", str(plain(best["tokens_per_s"].number))),
            (f"most tokens a cycle: {name_of(most)}", str(plain(most["tokens_per_cycle"].number))),
        ]
    sections = [rates(variants), accepted(variants), phases(variants), memory(variants)]
    return tiles, sections, [*left_out, *_texts(report["notices"])]


_PARTS: Final = {
    "flashnext-ssd-wait": _ssd_wait,
    "flashnext-predictors": _predictors,
    "flashnext-draft-report": _drafts,
}


def _wait_tiles(variants: Sequence[Variant]) -> list[Tile]:
    known = [one for one in variants if one.node["token_ns"].number]
    if not known:
        return []
    streamed = [one for one in known if one.node["physical_bytes"].number] or known
    best = min(streamed, key=lambda one: one.node["token_ns"].number or 0.0)
    node = best.node
    timely = total([node["resident_recall"].number, node["prefetched_recall"].number])
    return [
        (f"a token takes, in the fastest row that reads: {best.name}", f"{ms(node['token_ns'].number)} ms"),
        ("of it, compute stood still", f"{ms(node['exposed_wait_ns'].number)} ms"),
        ("records there in time", str(share(timely))),
        ("read for a token", str(size(node["physical_bytes"].number))),
    ]


def _wait_notices(variants: Sequence[Variant]) -> list[str]:
    wrong = [one.name for one in variants if one.node["books_add_up"].flag is False]
    found = [f"THE BOOKS DO NOT ADD UP, so these figures are void: {'; '.join(wrong)}"] if wrong else []
    stopped = [(one.name, one.node["hints_stopped"].text) for one in variants]
    return found + [f"{name}: hints were stopped: {why}" for name, why in stopped if why]


def _accepted(variants: Sequence[Variant]) -> Section | None:
    """Return acceptance of rows that speculate; those of one drafter propose the same, so one line each."""
    rows = [
        Accepted(
            one.name,
            one.node["per_position_acceptance"].numbers,
            one.node["acceptance_length"].number,
            (plain(one.node["unique_experts"].number, 1), plain(one.node["break_even_experts"].number, 1)),
        )
        for one in variants
        if one.node["per_position_acceptance"].items
    ]
    firsts = {one.draft: row for one, row in reversed(list(zip(_speculating(variants), rows, strict=True)))}
    lines = [Accepted(draft, row.by_slot, row.tokens) for draft, row in reversed(list(firsts.items()))]
    return acceptance(lines, rows, ("distinct experts of a layer in a block", "break even"))


def _speculating(variants: Sequence[Variant]) -> list[Variant]:
    return [one for one in variants if one.node["per_position_acceptance"].items]


def _texts(node: Node) -> list[str]:
    return [item.text for item in node.items if item.text]
