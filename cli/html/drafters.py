"""What each drafter brings and costs: rates against plain decode, phases of a cycle, memory."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cli.html.acceptance import Accepted, acceptance
from cli.html.drawing import Picture, legend, swatch, tick_text, ticks
from cli.html.figures import count, ms, plain, share, size
from cli.html.reading import Node
from cli.html.section import Section, figure
from cli.html.tables import Value, table

_ROW, _BAR = 40, 14
_PHASES = (
    ("draft_ns", "propose", "s3"),
    ("verify", "verify", "f-compute"),
    ("commit_ns", "commit", "s4"),
    ("observe_ns", "take in", "s2"),
)


def name_of(one: Node) -> str:
    """Return a drafter's name."""
    tokens = one["num_draft_tokens"].whole
    return f"{one['draft'].text} {tokens}" if tokens else "target-only"


def best_drafter(known: Sequence[Node], by: str = "tokens_per_s") -> Node:
    """Return the drafter with the most of a figure; the oracle only where nothing else was measured."""
    drafters = [one for one in known if not _is_oracle(one)] or known
    return max(drafters, key=lambda one: one[by].number or 0.0)


def rates(variants: Sequence[Node]) -> Section | None:
    """Return tokens a second of every drafter; None if none are known."""
    known = [one for one in variants if one["tokens_per_s"].number is not None]
    if not known:
        return None
    picture = Picture(
        "p-rates",
        "Tokens a second by drafter",
        "A bar for every drafter with a line from its slowest to its fastest repetition, and across each a "
        "vertical line at the rate of target-only.",
        "t-rates",
    )
    most = max(
        max(one["tokens_per_s"].number or 0, one["tokens_per_s_range"][1].number or 0) for one in known
    )
    across = ticks(most)
    y, plain_rate = 4.0, known[0]["tokens_per_s"].number or 0.0
    for one in known:
        rate = one["tokens_per_s"].number or 0.0
        picture.text(0, y + 12, f"{name_of(one)}: {rate:.2f} tokens/s{_against(one)}", kind="label")
        picture.bar("f-exact", 0, rate / across[-1], y + 18, _BAR, f"{name_of(one)}: {rate:.2f} tokens/s")
        low, high = (one["tokens_per_s_range"][place].number for place in (0, 1))
        if low is not None and high is not None:
            picture.line("whisker", low / across[-1], y + 25, high / across[-1], y + 25)
        # Across the bar alone: on a narrow page it would go through the names.
        picture.upright("bound", plain_rate / across[-1], y + 15, y + 21 + _BAR)
        y += _ROW
    _axis(picture, across, y, "tokens a second")
    headings = ("drafter", "tokens/s", "from", "to", "over target-only", "prefill, ms/token", "read a token",
                "waited, ms/token")  # fmt: skip
    best = best_drafter(known)
    said = f"Fastest: {name_of(best)} with {plain(best['tokens_per_s'].number)} tokens/s"
    if best is not known[0]:
        said += f", {name_of(known[0])} {plain(plain_rate)}"
    return Section(
        "rates",
        "What is said in a second",
        [
            "Every drafter gave the same answers, token by token, on the same weights and prompts; only the "
            "time differs. The governor is off, so a drafter that does not pay is seen not to pay.",
            f"{said}.",
            *(
                f"{name_of(one)} is no drafter: it proposes what a recorded run said, "
                "the most that a drafter of so many proposals could bring."
                for one in known
                if _is_oracle(one)
            ),
        ],
        [
            figure(
                picture.html(y + 40, kind="bars"),
                caption="Bar: the median. Thin line across its end: the slowest and the fastest repetition. "
                "Upright line: target-only, plain decode without a draft. Multiples of it are medians of "
                "ratios within a repetition, not ratios of the medians.",
            ),
            table("t-rates", "Rates by drafter", headings, [_rate_cells(one) for one in known]),
        ],
    )


def accepted(variants: Sequence[Node]) -> Section | None:
    """Return acceptance by slot of every drafter."""
    rows = [
        Accepted(
            name_of(one),
            one["acceptance_by_slot"].numbers,
            one["tokens_per_cycle"].number,
            (share(one["proposing_share"].number), share(one["accepted_share"].number)),
        )
        for one in variants
        if one["num_draft_tokens"].whole
    ]
    return acceptance(rows, rows, ("cycles proposing", "proposals accepted"))


def phases(variants: Sequence[Node]) -> Section | None:
    """Return what the phases of a cycle cost; None if nothing is known of them."""
    known = [one for one in variants if one["costs"]["verify_ns"].members]
    if not known:
        return None
    drawn = [one for one in known if _verified(one) is not None]
    picture = Picture(
        "p-phases",
        "Phases of a cycle by drafter",
        "A bar for every drafter, divided into proposing, verifying, committing and taking in.",
        "t-phases",
    )
    across = ticks(max((sum(value for _, _, value in _parts(one)) for one in drawn), default=0.0) / 1e6)
    y = 4.0
    for one in drawn:
        parts = _parts(one)
        total_ms = sum(value for _, _, value in parts) / 1e6
        told = f"{name_of(one)}: {total_ms:.2f} ms for {_tokens_when_proposing(one)}"
        picture.text(0, y + 12, told, kind="label")
        start = 0.0
        for name, kind, value in parts:
            end = start + value / 1e6 / across[-1]
            picture.bar(kind, start, end, y + 18, _BAR, f"{name_of(one)}: {name} {ms(value)} ms")
            start = end
        y += _ROW
    _axis(picture, across, y, "ms a cycle")
    headings = ("drafter", "propose", "verify 1 row", "verify m rows", "m", "verify(m)/verify(1)", "commit",
                "rollback", "take in", "tokens a cycle")  # fmt: skip
    return Section(
        "phases",
        "What a cycle costs",
        [
            "A cycle proposes, verifies a block in one forward pass, commits, and shows the drafter what "
            "stays. A bar is a cycle in which the drafter proposed; one in which it did not is like "
            "target-only's. A drafter pays if its bar is longer by less than its tokens are more.",
            "Taken in a run of its own, in which each phase waits for its own work: phases cannot run beside "
            "each other there, so they add up to more than a cycle takes in service.",
        ],
        [
            figure(
                legend([(swatch(kind), name) for _, name, kind in _PHASES]), picture.html(y + 40, kind="bars")
            ),
            table(
                "t-phases", "Phases of a cycle, ms, medians", headings, [_phase_cells(one) for one in known]
            ),
        ],
    )


def memory(variants: Sequence[Node]) -> Section | None:
    """Return what drafters take of the memory for experts; None if nothing is known of it."""
    known = [one for one in variants if one["budget"].members]
    if not known:
        return None
    headings = ("drafter", "planned", "of the drafter", "peak of arrays", "experts",
                "experts at equal memory", "experts lost")  # fmt: skip
    rows: list[list[Value]] = []
    for one in known:
        budget = one["budget"]
        rows.append(
            [
                name_of(one),
                size(budget["planned_bytes"].number),
                size(budget["draft_bytes"].number),
                size(one["peak_array_bytes"].number),
                count(budget["slots"].number),
                count(budget["slots_at_same_memory"].number),
                count(budget["slots_lost"].number),
            ]
        )
    return Section(
        "memory",
        "What a drafter takes",
        [
            "A drafter lives in the same memory as the experts. Under one target, its bytes are paid in "
            "experts of every layer that no longer fit; a dash says that it does not fit at all."
        ],
        [table("t-memory", "Memory, and what it costs in experts of each layer", headings, rows)],
    )


def _against(one: Node) -> str:
    known = [value for value in one["ratios"].numbers if value is not None]
    return f", {median(known):.2f} times target-only" if known and one["num_draft_tokens"].whole else ""


def _rate_cells(one: Node) -> list[Value]:
    known = [value for value in one["ratios"].numbers if value is not None]
    return [
        name_of(one),
        plain(one["tokens_per_s"].number),
        *(plain(one["tokens_per_s_range"][place].number) for place in (0, 1)),
        plain(median(known) if known else None),
        ms(one["prefill_ns_per_token"].number),
        size(one["read_bytes_per_token"].number),
        ms(one["exposed_wait_ns_per_token"].number),
    ]


def _verified(one: Node) -> float | None:
    """Return what verifying a proposal's block takes, a row where nobody proposes; None if not known."""
    costs = one["costs"]
    if not one["num_draft_tokens"].whole or not one["proposing_share"].number:
        return costs["verify_ns"]["1"].number
    if costs["verify_rows"].whole is not None:
        return costs["verify_ns"][costs["verify_rows"].text].number
    # No block was common enough for a median of its own: the widest that there was.
    measured = costs["verify_ns"].members
    blocks = {int(rows): value.number for rows, value in measured if rows.isdecimal() and len(rows) < 10}
    widest = max(blocks, default=1)
    return blocks[widest] if widest > 1 else None


def _tokens_when_proposing(one: Node) -> str:
    tokens, proposing = one["tokens_per_cycle"].number, one["proposing_share"].number
    if tokens is None or not proposing:
        told = f"{plain(tokens)} tokens"
        return f"{told}: it never proposed" if one["num_draft_tokens"].whole and proposing == 0 else told
    # A cycle without a proposal says one token.
    told = f"{plain((tokens - (1.0 - proposing)) / proposing)} tokens"
    return told if proposing > 0.995 else f"{told}, in {share(proposing)} of cycles"


def _is_oracle(one: Node) -> bool:
    return one["draft"].text == "oracle"


def _parts(one: Node) -> list[tuple[str, str, float]]:
    found: list[tuple[str, str, float]] = []
    for key, name, kind in _PHASES:
        value = _verified(one) if key == "verify" else one["costs"][key].number
        if value and (key == "verify" or one["num_draft_tokens"].whole or key == "commit_ns"):
            found.append((name, kind, value))
    return found


def _phase_cells(one: Node) -> list[Value]:
    costs = one["costs"]
    rows = costs["verify_rows"].whole
    drafts = bool(one["num_draft_tokens"].whole)
    return [
        name_of(one),
        ms(costs["draft_ns"].number if drafts else None),
        ms(costs["verify_ns"]["1"].number),
        ms(None if rows is None else costs["verify_ns"][str(rows)].number),
        count(rows),
        plain(costs["verify_ratio"].number),
        ms(costs["commit_ns"].number),
        ms(costs["rollback_ns"].number),
        ms(costs["observe_ns"].number if drafts else None),
        plain(one["tokens_per_cycle"].number),
    ]


def _axis(picture: Picture, across: Sequence[float], y: float, title: str) -> None:
    for value in across:
        picture.line("grid", value / across[-1], 4, value / across[-1], y)
        picture.text(value / across[-1], y + 15, tick_text(value), kind="tick", anchor="middle")
    picture.text(1, y + 33, title, kind="axis", anchor="end")
