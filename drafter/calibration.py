"""The calibration record beside a draft: what was measured when its features were tried on one target build.

Entry points: `read_record`, `judge`. No config says how a draft's author contracted the streams, and a
wrong guess drafts badly without any error. So every candidate is tried on text that the target wrote itself,
and one is taken only if it wins clearly; the record holds the figures, which are judged again at every load.

Source: dflash2.md 1.14 (rule), 7 (contents).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated

import msgspec

from drafter.documents import DocumentRefused, check_version, parse_object

FORMAT = "flashnext-draft-calibration"
VERSION = 1
FILE = "flashnext-calibration.json"

MIN_TOKENS = 4000
MIN_AGREEMENT = 0.5
MIN_LEAD = 1.5
CALIBRATE = "run: flashnext draft calibrate DIR --captures SET"

# `fc` is linear and the norm after it removes a common factor: sum and mean cannot be told apart.
_SAME = {"sum": "mean"}

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to make features, tried at the same positions as every other.

    Attributes:
        contraction: of the streams.
        tap_shift: -1, 0 or 1: layers by which every tap was moved.
        agreement: for every slot, how often its best logit was the target's token.
        mean_prefix: mean length of the agreeing prefix.
    """

    contraction: str
    tap_shift: Annotated[int, msgspec.Meta(ge=-1, le=1)]
    agreement: Annotated[list[Share], msgspec.Meta(min_length=1, max_length=32)]
    mean_prefix: Annotated[float, msgspec.Meta(ge=0, le=32)]


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Served acceptance on a named set of prompts: committed tokens by cycles."""

    prompt_set: str
    tokens_per_cycle: Annotated[float, msgspec.Meta(ge=1, le=33)]


class CalibrationRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document. Digests are SHA-256 in hexadecimal; see docs/FORMATS.md."""

    format: str
    version: int
    date: str
    runtime_version: str
    draft_digest: str
    target_digest: str
    tokenizer_digest: str
    mask_row_digest: str
    taps: list[Count]
    contraction: str
    num_tokens: Count
    trials: Annotated[list[Trial], msgspec.Meta(max_length=64)]
    acceptance: Acceptance | None = None


def read_record(data: bytes) -> CalibrationRecord:
    """Return the record of a file.

    Raises:
        DocumentRefused: it is no such document, or of another version.
    """
    try:
        record = msgspec.convert(parse_object(data, FILE), CalibrationRecord, strict=True)
        datetime.date.fromisoformat(record.date)
    except (msgspec.ValidationError, ValueError) as error:
        raise DocumentRefused(f"{FILE} is no calibration record: {error}") from None
    check_version(FILE, (record.format, record.version), (FORMAT, VERSION))
    return record


def judge(
    record: CalibrationRecord, taps: Sequence[int], num_target_layers: int, num_slots: int
) -> list[str]:
    """Return why the figures do not settle the contraction; nothing if they do.

    Args:
        record: of the draft.
        taps: of the draft.
        num_target_layers: of the target.
        num_slots: proposals of a full block: every trial has a figure for each.
    """
    if record.num_tokens < MIN_TOKENS:
        return [f"{record.num_tokens} tokens were tried, at least {MIN_TOKENS} are needed"]
    if any(len(trial.agreement) != num_slots for trial in record.trials):
        return [f"a trial has no figure for each of {num_slots} slots"]
    best: dict[tuple[str, int], float] = {}
    for trial in record.trials:
        key = (_SAME.get(trial.contraction, trial.contraction), trial.tap_shift)
        best[key] = max(best.get(key, 0.0), trial.agreement[0])
    chosen = _SAME.get(record.contraction, record.contraction)
    mine = best.get((chosen, 0))
    if mine is None:
        return [f"{record.contraction} was not tried at the draft's own taps"]
    faults: list[str] = []
    others = {key[0]: value for key, value in best.items() if key[1] == 0 and key[0] != chosen}
    if not others:
        faults.append("only one contraction was tried")
    for name, value in others.items():
        if mine < MIN_LEAD * value:
            faults.append(f"{record.contraction} agrees {mine:.3f}, {name} {value:.3f}: not {MIN_LEAD} times")
    if mine <= MIN_AGREEMENT:
        faults.append(f"{record.contraction} agrees {mine:.3f} at the first slot, not above {MIN_AGREEMENT}")
    for shift in (-1, 1):
        if min(taps) + shift < 0 or max(taps) + shift >= num_target_layers:
            continue
        value = best.get((chosen, shift))
        if value is None:
            faults.append(f"taps shifted by {shift:+d} were not tried")
        elif value >= mine:
            faults.append(f"taps shifted by {shift:+d} agree {value:.3f}, not less than {mine:.3f}")
    return faults
