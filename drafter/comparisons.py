"""The gate's single comparisons: sizes, taps, ids, tensors, licence, memory. See compat.py for their order.

Each notes what does not fit and returns; none raises.

Source: dflash2.md 7.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from drafter.calibration import CalibrationRecord
from drafter.config import DraftConfig, context_bytes, expected_tensors
from drafter.contract import DraftContract
from drafter.facts import DraftListing, TargetFacts, TensorFacts
from drafter.loading import FLOATING, canonical_name
from drafter.reasons import Consequence, Report

# A code of Creative Commons that stands alone: NC forbids commercial use, ND any changed copy.
_RESTRICTED = re.compile(r"(?<![a-z])(nc|nd)(?![a-z])", re.IGNORECASE)
_FREE = re.compile(r"apache|mit\b|bsd|cc0|cc-by-4", re.IGNORECASE)
_NAMED = 6


def compare_sizes(
    hidden: int | None, depth: int | None, vocabulary: int | None, target: TargetFacts, report: Report
) -> None:
    """Hold width, depth and vocabulary against the target's (G02, G03, G05); None is left out."""
    other = "use a draft that was trained for this target"
    if hidden is not None and hidden != target.hidden_size:
        said = f"draft expects {hidden}-wide features, target provides {target.hidden_size}"
        report.add("G02", "width", hidden, target.hidden_size, said, hint=other)
    if depth is not None and depth != target.num_layers:
        said = f"draft was trained for a {depth}-layer target, this one has {target.num_layers}"
        report.add("G03", "depth", depth, target.num_layers, said, hint=other)
    if vocabulary is not None and vocabulary != target.vocab_size:
        said = f"vocabulary {vocabulary} vs {target.vocab_size}"
        report.add("G05", "vocabulary", vocabulary, target.vocab_size, said, hint=other)


def compare_taps(config: DraftConfig, listing: DraftListing, target: TargetFacts, report: Report) -> None:
    """Hold taps against the target's layers and the width of `fc` (G04)."""
    fused = listing.tensors.get("fc.weight")
    width = fused.shape[1] if fused is not None and len(fused.shape) == 2 else config.feature_width
    if max(config.taps) >= target.num_layers or width != config.feature_width:
        report.add(
            "G04",
            "taps",
            list(config.taps),
            f"{target.num_layers} layers, fc width {width}",
            f"tap list {list(config.taps)} does not fit {target.num_layers} layers / fc width {width}",
        )


def compare_ids(
    config: DraftConfig,
    contract: DraftContract | None,
    record: CalibrationRecord | None,
    target: TargetFacts,
    report: Report,
) -> None:
    """Hold the mask id against the target's ids (G07), and ask for a tokenizer digest (G06)."""
    mask = config.mask_token_id
    if contract is None and record is None:
        report.add(
            "G06",
            "tokenizer",
            "not stored",
            target.tokenizer_digest,
            "no tokenizer digest is stored with the draft",
            consequence="warn",
        )
    if mask >= target.vocab_size:
        said = f"mask id {mask} is outside the embedding of {target.vocab_size} rows"
        report.add("G07", "mask id", mask, f"below {target.vocab_size}", said)
    elif mask in target.stop_ids:
        report.add("G07", "mask id", mask, "no stop id", f"mask id {mask} is a stop token")
    elif mask == target.pad_id and (contract is None or contract.tokenizer.pad_id != mask):
        report.add("G07", "mask id", mask, "not the padding id", f"mask id {mask} is the padding token")
    elif mask >= target.num_ids:
        said = f"mask id {mask} is an unused row: its embedding must never be changed"
        report.add("G07", "mask id", mask, f"{target.num_ids} ids", said, consequence="info")


def compare_tensors(config: DraftConfig, stored: Mapping[str, TensorFacts], report: Report) -> None:
    """Refuse any tensor set but the exact one (G10), codebooks of another vocabulary by G05."""
    wanted = expected_tensors(config)
    found: dict[str, TensorFacts] = {}
    twice: list[str] = []
    for name, facts in stored.items():
        plain = canonical_name(name)
        if plain in found:
            twice.append(plain)
        found[plain] = facts
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    shapes = [
        f"{name} is {list(found[name].shape)}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    types = [
        f"{name} is {found[name].dtype}"
        for name in wanted
        if name in found and found[name].dtype not in FLOATING
    ]
    for what, names in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("stored under two names", twice),
        ("shape of", shapes),
        ("not a floating type:", types),
    ):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            report.add(
                "G10",
                f"tensors {what}".rstrip(":"),
                f"{len(names)}",
                "0",
                f"{what} {', '.join(names[:_NAMED])}{more}",
                hint="use the original files; quantised or converted copies are not read",
            )
    for name in ("predecessor", "successor"):
        facts = found.get(f"candidate_selector.{name}_codebook")
        if facts is not None and facts.shape and facts.shape[0] != config.vocab_size:
            said = f"vocabulary {config.vocab_size}; the {name} codebook has {facts.shape[0]} rows"
            report.add("G05", "codebook", facts.shape[0], config.vocab_size, said)


def state_licence(licence: str | None, report: Report) -> None:
    """Say the licence, once and aloud unless it is a free one (G23)."""
    consequence: Consequence = "warn"
    if licence is None:
        said = "the draft states no licence"
    elif _RESTRICTED.search(licence):
        said = f"licence {licence}: no commercial use, or no converted or quantised copies"
    else:
        said, consequence = f"licence {licence}", "info" if _FREE.search(licence) else "warn"
    report.add("G23", "licence", licence or "not stated", "", said, consequence=consequence)


def compare_memory(config: DraftConfig, target: TargetFacts, report: Report) -> tuple[int, int]:
    """Return the bytes of weights and of one sequence's context, held against what is left (G24)."""
    weights = target.itemsize * sum(math.prod(shape) for shape in expected_tensors(config).values())
    context = context_bytes(config, target.context_tokens, target.itemsize)
    left = target.memory_left
    if left is not None and weights + context > left:
        said = f"draft needs {_gib(weights + context)} GiB, {_gib(left)} GiB left before experts"
        report.add(
            "G24",
            "memory",
            weights + context,
            left,
            said,
            hint="use a larger budget, a shorter context, or --draft mtp",
        )
    if config.max_positions is not None and target.context_tokens > config.max_positions:
        said = f"positions beyond {config.max_positions} are longer than the draft was trained for"
        report.add("G15", "positions", config.max_positions, target.context_tokens, said, consequence="warn")
    if not config.all_slide:
        said = "full-attention layers read the whole context every cycle and keep all of it"
        report.add("G24", "full layers", len(config.layer_types), "all sliding", said, consequence="info")
    return weights, context


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
