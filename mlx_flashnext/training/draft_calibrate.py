"""Finds out how a draft's features are to be made, by trying every way on text that the target wrote itself.

Entry point: `calibrate`. One pass of the target gives every tapped stack; each contraction, and taps moved
by one layer either way, is then judged at the same positions. What settles it is for
`drafter/calibration.py` to say.

Source: dflash2.md 1.14.
"""

# Shapes: R rows, G streams, H hidden.

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np

from drafter import calibration
from drafter.calibration import MIN_TOKENS, CalibrationRecord, Trial, judge
from drafter.errors import DrafterError
from drafter.train.captures import CaptureSet
from drafter.train.evaluate import Judged, summarise
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.prefill import prefill
from mlx_flashnext.model.flashnext import Contraction
from mlx_flashnext.model.host import fence
from mlx_flashnext.training import draft_training
from mlx_flashnext.training.draft_capture import CONTRACTIONS, FeatureTap, facts_of
from mlx_flashnext.training.draft_training import LoadedDraft

EVERY: Final = 8
SHIFTS: Final = (0, -1, 1)
Way = tuple[str, int]


def calibrate(
    engine: Engine,
    draft: LoadedDraft,
    captures: CaptureSet,
    *,
    min_tokens: int = MIN_TOKENS,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[CalibrationRecord, list[str]]:
    """Try every contraction and return the record of it, and why it does not settle the matter, if so.

    Args:
        engine: the target build that will be served.
        draft: loaded with any contraction.
        captures: of this build; only tokens are used, held-out documents first.
        min_tokens: of text; fewer than the rule demands settle nothing.
        progress: called with (tokens tried, tokens wanted).

    Raises:
        TargetDiffers: the capture set is of another build.
        DrafterError: it holds too little text.
    """
    draft_training.check_build(engine, captures.identity.target_digest, "capture set")
    num_there = sum(document.num_tokens for document in captures.documents)
    if num_there < min_tokens:
        raise DrafterError(
            f"The capture set holds {num_there} tokens, {min_tokens} are needed", hint="capture more prompts"
        )
    facts, config, num_layers = facts_of(engine), draft.config, engine.config.num_hidden_layers
    ways = [
        (contraction, shift)
        for contraction in CONTRACTIONS
        for shift in SHIFTS
        if config.taps[0] + shift >= 0 and config.taps[-1] + shift < num_layers
    ]
    judged: dict[Way, list[Judged]] = {way: [] for way in ways}
    num_tokens = 0
    for info in sorted(captures.documents, key=lambda document: document.split != "held_out"):
        if num_tokens >= min_tokens:
            break
        progress(num_tokens, min_tokens)
        document = captures.read(info)
        stacks = _stacks(engine, document.tokens.tolist(), sorted(_layers(config.taps, ways)))
        for way in ways:
            features = _features(engine, stacks, config.taps, way)
            judged[way].append(
                draft_training.judge(engine, draft, replace(document, features=features), every=EVERY)
            )
        num_tokens += len(document.tokens)
    progress(min_tokens, min_tokens)
    trials = [_trial(way, judged[way], config.max_proposals) for way in ways]
    best = max((trial for trial in trials if trial.tap_shift == 0), key=lambda trial: trial.agreement[0])
    assert facts.row_digest is not None
    record = CalibrationRecord(
        format=calibration.FORMAT,
        version=calibration.VERSION,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        runtime_version=facts.runtime_version,
        draft_digest=draft.verdict.digest,
        target_digest=facts.digest,
        tokenizer_digest=facts.tokenizer_digest,
        mask_row_digest=facts.row_digest(config.mask_token_id),
        taps=list(config.taps),
        contraction=best.contraction,
        num_tokens=num_tokens,
        trials=trials,
    )
    return record, judge(record, config.taps, num_layers, config.max_proposals)


def _trial(way: Way, judged: list[Judged], num_slots: int) -> Trial:
    found: dict[str, Any] = summarise(judged, num_slots)
    return Trial(way[0], way[1], found["best_logit_by_slot"], found["mean_prefix"])


def _layers(taps: tuple[int, ...], ways: list[Way]) -> set[int]:
    return {tap + shift for tap in taps for _, shift in ways}


def _stacks(engine: Engine, tokens: list[int], layers: list[int]) -> Mapping[int, mx.array]:
    """Return the output stacks [R, G, H] of some layers for a document that is read as a prompt."""
    # Without a contraction a pass gives whole stacks, side by side.
    tap = FeatureTap(tuple(layers), cast("Any", None))
    timeline = engine.new_timeline(tap, Governor(0))
    for _ in prefill(timeline, tokens, engine.plan.prefill_step, lambda: False, lambda: None):
        pass
    timeline.rest()
    parts = mx.split(tap.features(), len(layers), axis=-1)
    return dict(zip(layers, parts, strict=True))


def _features(engine: Engine, stacks: Mapping[int, mx.array], taps: tuple[int, ...], way: Way) -> Any:
    """Return float32 features [R, n * H] made in one way."""
    contraction, shift = cast("Contraction", way[0]), way[1]
    model = engine.target.model
    rows = [model.contract(tap + shift, stacks[tap + shift], contraction) for tap in taps]
    features = mx.concatenate(rows, axis=-1).astype(mx.float32)
    fence(engine.target.sync, features)
    return cast("Any", np.array(features))
