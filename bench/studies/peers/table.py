"""Tables and bars from the runs of a comparison. Entry points: `table`, `judge`.

Medians over rounds; a ratio is formed within a round, and its median is shown with the least and
the greatest. Where tokens differ from the first contender's, the row says so and from which place on.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from bench.studies.peers.legs import LEGS, NEXT_PROMPT, Leg

Run = dict[str, Any]

OURS: Final = "flashnext"
PEERS: Final = {"resident": "mlx-vlm", "half": "mlx-vlm moe_offload", "two fifths": "mlx-vlm moe_offload",
                "slow drive": "mlx-vlm moe_offload", "mtp": "mlx-vlm moe_offload"}  # fmt: skip
BARS: Final = (
    ("resident", "decode", 1.1), ("half", "decode", 1.4), ("two fifths", "decode", 1.4),
    ("half", "prefill", 1.2), ("two fifths", "prefill", 1.2), ("slow drive", "decode", 2.0),
)  # fmt: skip
"""Leg, figure, and how many times the peer's it is to be."""
OF_RESIDENT: Final = 0.95
MTP: Final = ", MTP"
"""How the names of those end that speculate."""


def decode_rate(run: Run) -> float:
    """Return tokens a second of the second answer."""
    return len(run["next"]["steps"]) / run["next"]["decode_s"]


def first_decode_rate(run: Run) -> float:
    """Return tokens a second of the first answer, which found nothing in memory."""
    return len(run["first"]["steps"]) / run["first"]["decode_s"]


def prefill_rate(run: Run) -> float:
    """Return prompt tokens a second of the second answer."""
    return NEXT_PROMPT / run["next"]["prefill_s"]


def token_bytes(run: Run) -> float:
    """Return the bytes from the drive for a token of the second answer."""
    return run["next"]["decode_bytes"] / len(run["next"]["steps"])


def fetched_bytes(run: Run) -> float:
    """Return the bytes of experts that its store fetched for a token of the second answer, from wherever."""
    return run["next"]["fetched_bytes"] / run["next"]["pass_tokens"]


def startup_s(run: Run) -> float:
    """Return the seconds from the call to load until the first token of the first answer."""
    return run["load_s"] + run["first"]["prefill_s"]


FIGURES: Final[dict[str, Callable[[Run], float]]] = {
    "decode": decode_rate, "prefill": prefill_rate, "bytes": token_bytes, "startup": startup_s,
    "first decode": first_decode_rate,
}  # fmt: skip


def of(runs: Sequence[Run], leg: str, name: str) -> dict[int, Run]:
    """Return a contender's runs in a leg, by round."""
    return {run["round"]: run for run in runs if (run["leg"], run["name"]) == (leg, name)}


def ratio(over: dict[int, Run], under: dict[int, Run], figure: str) -> tuple[float, float, float] | None:
    """Return median, least and greatest of a figure's ratio over the rounds that both have."""
    both = sorted(over.keys() & under.keys())
    each = [FIGURES[figure](over[number]) / FIGURES[figure](under[number]) for number in both]
    return (statistics.median(each), min(each), max(each)) if each else None


def agreement(one: dict[int, Run], other: dict[int, Run]) -> str:
    """Return in words whether two contenders said the same tokens."""
    count = 0
    for number in sorted(one.keys() & other.keys()):
        for answer in ("first", "next"):
            pairs = zip(one[number][answer]["tokens"], other[number][answer]["tokens"], strict=True)
            for place, (left, right) in enumerate(pairs):
                if left != right:
                    return f"part in round {number}, {answer}, token {place}"
                count += 1
    return f"all {count} equal" if count else "-"


def table(runs: Sequence[Run]) -> str:
    """Return every leg as a markdown table, then the bars."""
    lines = []
    for leg, conditions in LEGS.items():
        ours = of(runs, leg, OURS)
        head, row = (_HEAD, _row) if conditions.expert_share is None else (_MTP_HEAD, partial(_mtp_row, runs))
        rows = [row(of(runs, leg, one.name), one.name, ours) for one in conditions.contenders]
        if not any(rows):
            continue
        any_run = next(run for run in runs if run["leg"] == leg)
        lines += [
            "",
            f"**{leg}**: {_conditions(any_run, conditions)}",
            "",
            head,
            "|" + " --- |" * head.count(" | ") + " --- |",
        ]
        lines += [row for row in rows if row]
    lines += ["", "| bar | asked | found | |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {asked} | {found} | {verdict} |" for name, asked, found, verdict in _bars(runs)]
    return "\n".join(lines[1:])


_HEAD: Final = (
    "| engine | rounds | decode tok/s | first answer tok/s | MB/token | prefill tok/s | to first token s "
    "| CPU s/token | peak GB | decode, flashnext over it | tokens against flashnext |"
)


def _row(its: dict[int, Run], name: str, ours: dict[int, Run]) -> str:
    if not its:
        return ""
    middle = {key: statistics.median(map(figure, its.values())) for key, figure in FIGURES.items()}
    peak = statistics.median(run["next"]["box_peak_bytes"] for run in its.values()) / 1e9
    over = ratio(ours, its, "decode")
    said = "-" if over is None or name == OURS else _ratio(over)
    cells = (
        name, len(its), f"{middle['decode']:.3f}", f"{middle['first decode']:.3f}",
        f"{middle['bytes'] / 1e6:.1f}", f"{middle['prefill']:.2f}", f"{middle['startup']:.1f}",
        f"{_cpu_s(its):.2f}",
        f"{peak:.2f}", said, "-" if name == OURS else agreement(ours, its),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


_MTP_HEAD: Final = (
    "| engine | rounds | decode tok/s | tokens a pass | MB of experts a token | prefill tok/s "
    "| CPU s/token | decode, flashnext over it, drafting alike | decode over its own without MTP "
    "| tokens against flashnext |"
)


def _mtp_row(runs: Sequence[Run], its: dict[int, Run], name: str, ours: dict[int, Run]) -> str:
    if not its:
        return ""
    leg = next(iter(its.values()))["leg"]
    like = OURS + (MTP if name.endswith(MTP) else "")
    over = ratio(of(runs, leg, like), its, "decode")
    own = ratio(its, of(runs, leg, name.removesuffix(MTP)), "decode")
    cells = (
        name, len(its), f"{_middle(its, decode_rate):.3f}", f"{_tokens_a_pass(its):.2f}",
        f"{_middle(its, fetched_bytes) / 1e6:.1f}", f"{_middle(its, prefill_rate):.2f}", f"{_cpu_s(its):.2f}",
        "-" if over is None or name == like else _ratio(over),
        "-" if own is None or not name.endswith(MTP) else _ratio(own),
        "-" if name == OURS else agreement(ours, its),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _tokens_a_pass(its: dict[int, Run]) -> float:
    """Return tokens over passes of all rounds: an answer begins and ends within a pass."""
    tokens, passes = (sum(run["next"][name] for run in its.values()) for name in ("pass_tokens", "passes"))
    return tokens / passes


def _middle(its: dict[int, Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(map(figure, its.values()))


def _cpu_s(its: dict[int, Run]) -> float:
    return _middle(its, lambda run: run["next"]["decode_cpu_s"] / len(run["next"]["steps"]))


def _conditions(run: Run, leg: Leg) -> str:
    size = f"checkpoint {run['checkpoint_bytes'] / 1e9:.2f} GB"
    cap = "no cap" if run["cap_bytes"] is None else f"cap {run['cap_bytes'] / 1e9:.2f} GB"
    drive = "" if not run["bytes_per_s"] else f", drive at {run['bytes_per_s'] / 1e6:.0f} MB/s while decoding"
    held = "" if leg.expert_share is None else f", {leg.expert_share:g} of the experts each"
    return f"{size}, {cap}{drive}{held}"


def _ratio(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.2f} [{found[1]:.2f} to {found[2]:.2f}]"


def _bars(runs: Sequence[Run]) -> list[tuple[str, str, str, str]]:
    rows = []
    for leg, figure, least in BARS:
        found = ratio(of(runs, leg, OURS), of(runs, leg, PEERS[leg]), figure)
        if found is not None:
            met = "met" if found[0] >= least else "**missed**"
            rows.append((f"{leg}: {figure} over {PEERS[leg]}", f">= {least}", _ratio(found), met))
    for leg in ("half", "two fifths"):
        ours = of(runs, leg, OURS)
        found = ratio(ours, of(runs, "resident", OURS), "decode")
        if found is not None:
            met = "met" if found[0] >= OF_RESIDENT else "**missed**"
            rows.append((f"{leg}: decode over our own resident", f">= {OF_RESIDENT}", _ratio(found), met))
        peer = of(runs, leg, PEERS[leg])
        if ours and peer:
            few, many = (statistics.median(map(token_bytes, its.values())) for its in (ours, peer))
            met = "met" if few < many else "**missed**"
            rows.append((f"{leg}: MB a token", "fewer", f"{few / 1e6:.1f} against {many / 1e6:.1f}", met))
    return rows + _mtp_bars(runs)


def _mtp_bars(runs: Sequence[Run]) -> list[tuple[str, str, str, str]]:
    """Return what both do with the same MTP module, and what it does to each."""
    ours, peer = (of(runs, "mtp", name + MTP) for name in (OURS, PEERS["mtp"]))
    found = ratio(ours, peer, "decode")
    if found is None:
        return []
    rows = [("mtp: decode over mlx-vlm moe_offload, both with MTP", found[0] >= 1, ">= 1", _ratio(found))]
    tokens = [_tokens_a_pass(its) for its in (ours, peer)]
    said = f"{tokens[0]:.2f} against {tokens[1]:.2f}"
    rows.append(("mtp: tokens a pass", tokens[0] >= tokens[1], "as many", said))
    fetched = [_middle(its, fetched_bytes) for its in (ours, peer)]
    said = f"{fetched[0] / 1e6:.1f} against {fetched[1] / 1e6:.1f}"
    rows.append(("mtp: MB of experts a token", fetched[0] < fetched[1], "fewer", said))
    return [(name, asked, what, "met" if met else "**missed**") for name, met, asked, what in rows]


def judge(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the bars as plain values."""
    rows = _bars(runs)
    return {"runs": len(runs), "bars": [{"bar": name, "asked": asked, "found": found, "met": verdict == "met"}
            for name, asked, found, verdict in rows]}  # fmt: skip
