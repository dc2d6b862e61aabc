"""What a plan lets one expect: bytes a token, the storage bound, a range of speeds, each with its arithmetic.

Entry point: `expect`. Nothing here is measured on this machine, but for the two rates that the caller gives.
The rest is geometry and published figures, named where they are used, so that a person can redo every line:
the ends of a range are far apart because they are honest.

Words as in METRICS.md: the storage bound is required bytes a token by the bandwidth of the drive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.engine.plan import Plan

PUBLISHED_HITS: Final = ((0.0, 0.0), (0.0625, 0.595), (0.25, 0.827), (0.29, 0.83), (1.0, 1.0))
"""Share of the experts in memory and the best hit rate that anybody published for it: 16 and 64 of 256 of
Qwen3.5-35B (anemll-flash-mlx), and 0.816 at 0.29 of this model (slotstream). Linear in between."""
UNIQUE_EXPONENT: Final = 0.73
"""A block of B rows asks for about top_k x B^0.73 distinct experts of a layer: 22.4 of 30 at B = 3
(slotstream); beyond, it is extrapolation."""
BEST_TOKENS: Final = {"lookup": (5, 5.0), "mtp": (4, 2.05), "dflash2": (4, 2.74)}
"""Rows of a block and the tokens a cycle commits at best: lookup where a text repeats itself; mtp as vLLM
gains from 3 proposals; dflash2 as the DFlash draft of this model was served. At worst one token a cycle:
drafting is then switched off."""
LAYER_EVENT_S: Final = 0.38e-3
MISSED_RECORD_S: Final = 0.21e-3
"""What coordination cost another runtime a layer and a missed record, beside reading (slotstream, M5 Pro)."""
PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Span:
    """The worse and the better end of something."""

    worse: float
    better: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """What to expect of one plan.

    Attributes:
        share: of the experts in memory.
        hit_rate: routed experts found in memory.
        tokens_per_cycle: what a drafter makes of one pass.
        token_bytes: bytes read a token.
        storage_s: those by the bandwidth; None without one.
        token_s: seconds a token; None without a bandwidth.
        tokens_per_s: their inverse.
        counts_computing: a rate of computing was given, so that it is in `token_s`.
        popular_share: of what earlier runs of this model here asked for, what was among the most used experts
            of a layer, as many as there are slots; None without earlier runs.
        steps: the arithmetic, in words and numbers.
    """

    share: float
    hit_rate: Span
    tokens_per_cycle: Span
    token_bytes: Span
    storage_s: Span | None
    token_s: Span | None
    tokens_per_s: Span | None
    counts_computing: bool
    popular_share: float | None
    steps: tuple[str, ...]


def expect(
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    bytes_per_s: float | None = None,
    resident_tokens_per_s: float | None = None,
    demands: Mapping[int, Sequence[float]] | None = None,
) -> Expectation:
    """Return what a plan lets one expect.

    Args:
        checkpoint: the model, or one that is imagined.
        plan: of it.
        bytes_per_s: what the drive gives, measured or as told.
        resident_tokens_per_s: tokens a second with every expert in memory, as `bench` measures them.
        demands: how often earlier runs asked for each expert of each layer, if that is known.
    """
    config = checkpoint.config
    top_k, num_layers = config.num_experts_per_tok, len(checkpoint.experts)
    record = sum(one.record.record_bytes for one in checkpoint.experts.values()) / num_layers
    share = plan.slots_per_layer / plan.num_experts
    hits = Span(share, max(share, published_hits(share)))
    rows, best_tokens = BEST_TOKENS.get(plan.draft, (1, 1.0))
    cost = rows**UNIQUE_EXPONENT / best_tokens
    # A draft that costs more bytes than it brings is switched off.
    tokens = Span(1.0, best_tokens)
    pages = PAGE_BYTES * checkpoint.ngram.record.reads_per_row
    table = checkpoint.ngram.num_heads * max(pages, checkpoint.ngram.record_bytes)
    routed = num_layers * top_k * record
    read = Span(routed * (1 - hits.worse) + table, routed * min(1.0, cost) * (1 - hits.better) + table)
    steps = [
        f"experts in memory   {plan.slots_per_layer} of {plan.num_experts} = {share:.3f}",
        f"found there         {hits.worse:.3f} if every expert were as likely as any other, "
        f"{hits.better:.3f} as the best published",
        f"read a token        {num_layers} layers x {top_k} experts x {_bytes(record)} "
        f"x (1 - {hits.worse:.3f}) + {_bytes(table)} of rows = {_bytes(read.worse)} at worst",
        f"                    {_better_step(num_layers, top_k, record, hits.better, rows, best_tokens, cost)}"
        f" + {_bytes(table)} of rows = {_bytes(read.better)} at best",
    ]
    if rows > 1:
        unique, plain = top_k * rows**UNIQUE_EXPONENT, top_k * best_tokens
        steps.append(
            f"drafting in bytes   a block asks a layer for U_B = {top_k} x {rows}^{UNIQUE_EXPONENT} = "
            f"{unique:.1f} experts, plain steps for top_k x tau, {plain:.1f} at the best tau of "
            f"{best_tokens:g}: it saves some from {unique / top_k:.2f} tokens a cycle on"
        )
    popular = None if demands is None else _popular_share(demands, plan.slots_per_layer)
    if popular is not None:
        steps.append(
            f"in earlier runs     {popular:.3f} of what they asked for was among the {plan.slots_per_layer} "
            f"most used of a layer: {_bytes(routed * (1 - popular) + table)} a token if those were kept"
        )
    storage = None if bytes_per_s is None else Span(read.worse / bytes_per_s, read.better / bytes_per_s)
    seconds = None
    if storage is not None and bytes_per_s is not None:
        misses = num_layers * top_k * (1 - hits.worse)
        waits = LAYER_EVENT_S * num_layers + MISSED_RECORD_S * misses
        compute = 0.0 if resident_tokens_per_s is None else 1 / resident_tokens_per_s
        seconds = Span(storage.worse + compute + waits, max(storage.better, compute / best_tokens))
        steps += [
            f"storage bound       {_bytes(read.worse)} / {_bytes(bytes_per_s)}/s = "
            f"{1e3 * storage.worse:.1f} ms a token, {1e3 * storage.better:.1f} ms at best",
            f"a token at worst    {1e3 * storage.worse:.1f} ms read + {1e3 * compute:.1f} ms computed "
            f"+ {1e3 * waits:.1f} ms coordinated ({num_layers} x 0.38 + {misses:.0f} x 0.21) "
            f"= {1e3 * seconds.worse:.1f} ms",
            f"a token at best     the longer of {1e3 * storage.better:.1f} ms read and "
            f"{1e3 * compute / best_tokens:.1f} ms computed = {1e3 * seconds.better:.1f} ms",
        ]
        if resident_tokens_per_s is None:
            steps.append("                    computing is not counted: --resident-rate gives its speed")
    speed = None if seconds is None else Span(1 / seconds.worse, 1 / seconds.better)
    return Expectation(
        share,
        hits,
        tokens,
        read,
        storage,
        seconds,
        speed,
        resident_tokens_per_s is not None,
        popular,
        tuple(steps),
    )


def _popular_share(demands: Mapping[int, Sequence[float]], slots: int) -> float | None:
    """Return the share of all demands that went to the `slots` most used experts of their layer."""
    total = sum(sum(counts) for counts in demands.values())
    if not total:
        return None
    return sum(sum(sorted(counts, reverse=True)[:slots]) for counts in demands.values()) / total


def _bytes(count: float) -> str:
    """Return a number of bytes in the units that drives are sold in."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.1 * scale:
            return f"{count / scale:.3f} {unit}"
    return f"{count:.0f} B"


def published_hits(share: float) -> float:
    """Return the best published hit rate at a share of the experts in memory."""
    for (left, low), (right, high) in pairwise(PUBLISHED_HITS):
        if share <= right:
            return low + (high - low) * (share - left) / (right - left)
    return 1.0


def _better_step(
    num_layers: int, top_k: int, record: float, hit: float, rows: int, tokens: float, cost: float
) -> str:
    step = f"{num_layers} x {top_k} x {_bytes(record)} x (1 - {hit:.3f})"
    if rows > 1 and cost < 1:
        step += f" x {rows}^{UNIQUE_EXPONENT} / {tokens:g} tokens a cycle"
    return step
