"""The gate: whether a draft may propose for this target, as reasons that a person can act on.

Entry points: `check_draft` (before any weight is used), `check_sidecar` (route hints). A running
session is watched by live.py. Fail closed: what is not known to fit does not run.

Invariants:
G1. Nothing stops at the first fault: the answer to a draft of another target is the whole list.
G2. Nothing is cut, padded, repeated, renamed or guessed so that something fits. The one alias is `.weight` on
    the two codebooks, and a file with both spellings is refused.
G3. Without a contraction that the author declared or a calibration settled, nothing is loaded (G14).

Source: dflash2.md 7, where the codes are from. G00 is ours: a document that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from drafter.calibration import CALIBRATE, CalibrationRecord, judge, read_record
from drafter.comparisons import (
    compare_ids,
    compare_memory,
    compare_sizes,
    compare_taps,
    compare_tensors,
    state_licence,
)
from drafter.config import DraftConfig
from drafter.config_reader import read_config
from drafter.contract import DraftContract, compare_contract, read_contract
from drafter.documents import DocumentRefused, parse_object
from drafter.facts import DraftListing, SidecarFacts, TargetFacts
from drafter.promotion import Promotion, read_promotion
from drafter.reasons import Reason, Report, shown

# SHA-256 over name and digest of every golden file, in name order: what `TargetFacts.parity_digest` must be.
GOLDEN_DIGEST = "bd2018156d43393ab3e229316c3f1dc8cab58293e74d19968f695b02813d7b54"


PROMOTE = "run: flashnext draft promote DIR, or delete flashnext-promotion.json"

Document = TypeVar("Document")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found.

    Attributes:
        reasons: all of them, refusals included.
        config: of the draft; None if it could not be read.
        contraction: how features are to be made; None if nothing settles it.
        max_proposals: that may be asked for; 0 if the draft is refused.
        weight_bytes: that its parameters take here.
        context_bytes: that the context of one sequence takes at most.
        digest: of the draft's files.
    """

    reasons: tuple[Reason, ...]
    config: DraftConfig | None = None
    contraction: str | None = None
    max_proposals: int = 0
    weight_bytes: int = 0
    context_bytes: int = 0
    digest: str = ""

    @property
    def refusals(self) -> tuple[Reason, ...]:
        """Return why the draft is not loaded; nothing if it may be."""
        return tuple(reason for reason in self.reasons if reason.consequence == "refuse")

    @property
    def is_damaged(self) -> bool:
        """Return whether a document of the draft is none (G00), whatever else is wrong."""
        return any(reason.code == "G00" for reason in self.refusals)

    def as_document(self) -> dict[str, object]:
        """Return it as plain values, for `--json`."""
        return {
            "digest": self.digest,
            "config": None if self.config is None else asdict(self.config),
            "contraction": self.contraction,
            "max_proposals": self.max_proposals,
            "weight_bytes": self.weight_bytes,
            "context_bytes": self.context_bytes,
            "reasons": [reason.as_row() for reason in self.reasons],
        }


def check_draft(listing: DraftListing, target: TargetFacts, *, wanted: int | None = None) -> Verdict:
    """Hold a draft against a target.

    Args:
        listing: of the draft's directory; nothing of it is loaded.
        target: that is loaded.
        wanted: proposals a cycle that somebody asked for; None for what fits.
    """
    report = Report()
    config = None
    try:
        config = read_config(parse_object(listing.config, "config.json"), report)
    except DocumentRefused as error:
        _unreadable(report, "config.json", error)
    contract = _document(report, "contract", listing.contract, read_contract)
    record = _document(report, "calibration", listing.calibration, read_record)
    if config is None:
        _compare_what_is_readable(listing, target, report)
        state_licence(listing.licence or (contract.draft.licence if contract else None), report)
        _contraction_source(contract, record, report)
        return Verdict(tuple(report.reasons), digest=listing.digest)
    compare_sizes(config.hidden_size, config.num_target_layers, config.vocab_size, target, report)
    compare_taps(config, listing, target, report)
    compare_ids(config, contract, record, target, report)
    compare_tensors(config, listing.tensors, report)
    if contract is not None:
        compare_contract(contract, config, listing, target, report)
    if record is not None:
        _compare_record(record, config, listing, target, report, is_needed=contract is None)
    contraction = _contraction(config, contract, record, listing, target, report)
    state_licence(listing.licence or (contract.draft.licence if contract else None), report)
    _parity(target, report)
    weights, context = compare_memory(config, target, report)
    allowed = _proposals(config, record, target, wanted, report)
    return Verdict(
        tuple(report.reasons),
        config,
        contraction,
        0 if report.refusals else allowed,
        weights,
        context,
        listing.digest,
    )


def check_sidecar(sidecar: SidecarFacts, draft_digest: str, target: TargetFacts) -> Verdict:
    """Hold a route sidecar against target and draft (G20): a mismatch refuses its hints and nothing else."""
    report = Report()
    for name, said, found in (
        ("router", sidecar.router_digest, target.router_digest),
        ("layers", sidecar.num_layers, target.num_layers),
        ("experts", sidecar.num_experts, target.num_experts),
        ("draft", sidecar.draft_digest, draft_digest),
    ):
        if said != found:
            report.add(
                "G20",
                f"sidecar {name}",
                said,
                found,
                f"route hints were trained for {name} {shown(said)}, this is {shown(found)}",
                consequence="refuse hints",
                hint="train the sidecar again",
            )
    return Verdict(tuple(report.reasons), digest=draft_digest)


def _unreadable(report: Report, name: str, error: DocumentRefused) -> None:
    report.add(
        "G00", name, "unreadable", "a document of a known version", str(error), hint="fetch the draft again"
    )


def _document(
    report: Report, name: str, data: bytes | None, read: Callable[[bytes], Document]
) -> Document | None:
    """Return the document of a file, or None with a reason."""
    if data is None:
        return None
    try:
        return read(data)
    except DocumentRefused as error:
        _unreadable(report, name, error)
        return None


def _compare_what_is_readable(listing: DraftListing, target: TargetFacts, report: Report) -> None:
    """Hold single fields of a config that is not whole against the target: the whole list, not half of it."""
    try:
        document = parse_object(listing.config, "config.json")
    except DocumentRefused:
        return

    def whole(name: str) -> int | None:
        value = document.get(name)
        return value if type(value) is int else None

    compare_sizes(whole("hidden_size"), whole("num_target_layers"), whole("vocab_size"), target, report)


def _compare_record(
    record: CalibrationRecord,
    config: DraftConfig,
    listing: DraftListing,
    target: TargetFacts,
    report: Report,
    *,
    is_needed: bool,
) -> None:
    def stale(code: str, what: str, said: object, found: object, *, refuse: bool) -> None:
        if said != found:
            report.add(
                code,
                f"calibration {what}",
                said,
                found,
                f"calibrated with {what} {said}, this is {found}",
                consequence="refuse" if refuse else "warn",
                hint=CALIBRATE,
            )

    stale("G14", "draft", record.draft_digest, listing.digest, refuse=True)
    stale("G14", "target build", record.target_digest, target.digest, refuse=is_needed)
    if record.target_digest != target.digest:
        stale("G19", "target build", record.target_digest, target.digest, refuse=False)
    stale("G06", "tokenizer", record.tokenizer_digest, target.tokenizer_digest, refuse=True)
    stale("G04", "taps", record.taps, list(config.taps), refuse=True)
    stale("G19", "runtime", record.runtime_version, target.runtime_version, refuse=False)
    if target.row_digest is not None and config.mask_token_id < target.vocab_size:
        stale(
            "G08",
            "mask embedding",
            record.mask_row_digest,
            target.row_digest(config.mask_token_id),
            refuse=False,
        )
    acceptance = record.acceptance
    measured = (
        "" if acceptance is None else f": {acceptance.tokens_per_cycle} a cycle on {acceptance.prompt_set}"
    )
    report.add(
        "G19",
        "calibration",
        record.date,
        "",
        f"calibrated on {record.date} with {record.num_tokens} tokens{measured}",
        consequence="info",
    )


def _contraction_source(
    contract: DraftContract | None, record: CalibrationRecord | None, report: Report
) -> None:
    if contract is None and record is None:
        report.add(
            "G14",
            "contraction",
            "not declared",
            "a contract or a calibration record",
            "no known stream contraction for this draft",
            hint=CALIBRATE,
        )


def _contraction(
    config: DraftConfig,
    contract: DraftContract | None,
    record: CalibrationRecord | None,
    listing: DraftListing,
    target: TargetFacts,
    report: Report,
) -> str | None:
    """Return the contraction that author and measurement agree on (G14)."""
    _contraction_source(contract, record, report)
    if record is not None:
        for fault in judge(record, config.taps, target.num_layers, config.max_proposals):
            said = f"the calibration settles nothing: {fault}"
            report.add("G14", "calibration", fault, "a clear winner", said, hint=CALIBRATE)
    declared = contract.features.contraction if contract is not None else None
    measured = record.contraction if record is not None else None
    if declared is not None and measured is not None and declared != measured:
        said = f"the author declares {declared}, the calibration found {measured}"
        report.add("G14", "contraction", declared, measured, said, hint=CALIBRATE)
    if declared is not None and measured is None:
        _declared(declared, listing, target, report)
    contraction = declared or measured
    if contraction is None:
        return None
    if contraction not in target.contractions:
        said = f"contraction {contraction} is not one that this target computes"
        report.add("G14", "contraction", contraction, ", ".join(target.contractions), said, hint=CALIBRATE)
        return None
    if contraction == "next_attn_mix" and max(config.taps) >= target.num_layers - 1:
        said = f"contraction next_attn_mix is undefined after the last layer, {target.num_layers - 1}"
        report.add("G14", "contraction", contraction, list(config.taps), said, hint=CALIBRATE)
        return None
    return contraction


def _declared(contraction: str, listing: DraftListing, target: TargetFacts, report: Report) -> None:
    """State whether the author's word on the contraction is all there is, or was tried on this very build."""
    promotion: Promotion | None = None
    if listing.promotion is not None:
        try:
            promotion = read_promotion(listing.promotion)
        except DocumentRefused as error:
            said = f"the promotion record is no evidence: {error}"
            report.add("G14", "promotion", "unreadable", "", said, consequence="warn", hint=PROMOTE)
    if promotion is not None and promotion.confirms(contraction, listing.digest, target.digest):
        said = (
            f"contraction {contraction} is its author's word; with it the draft gave this target "
            f"{promotion.tokens_per_cycle:.2f} tokens a cycle of held-out text, {promotion.date}"
        )
        report.add("G14", "contraction", contraction, "promoted here", said, consequence="info")
        return
    report.add(
        "G14",
        "contraction",
        contraction,
        "not measured here",
        f"contraction {contraction} is its author's word and was not measured on this target",
        consequence="warn",
        hint=CALIBRATE,
    )


def _parity(target: TargetFacts, report: Report) -> None:
    if target.parity_digest == GOLDEN_DIGEST:
        return
    report.add(
        "G21",
        "parity",
        target.parity_digest or "not run",
        GOLDEN_DIGEST,
        "the golden set of drafts was not passed by this build",
        consequence="refuse" if target.is_release else "info",
        hint="run: pytest tests/parity/test_dflash2_golden.py",
    )


def _proposals(
    config: DraftConfig,
    record: CalibrationRecord | None,
    target: TargetFacts,
    wanted: int | None,
    report: Report,
) -> int:
    """Return the proposals a cycle that may be asked for (G16, G19)."""
    most = config.max_proposals
    if record is not None and record.target_digest != target.digest:
        most = max(1, most // 2)
        said = f"at most {most} proposals a cycle until this build is calibrated"
        report.add("G19", "proposals", config.max_proposals, most, said, consequence="clamp", hint=CALIBRATE)
    if wanted is not None and wanted > most:
        said = f"{wanted} proposals a cycle were asked for, the draft gives {most}"
        report.add("G16", "proposals", most, wanted, said, consequence="clamp")
    return most if wanted is None else min(wanted, most)
