"""What a running draft is watched for: proposals never kept, values that are no numbers, an idle selector.

Entry points: `LiveCounts`, `check_live`, `idle_selector`. A draft whose features are made wrongly still
runs; it is only never right.

Source: dflash2.md 1.10 (overrides), 7 (G22); defects 2, 4 and 38: what is counted is the proposed path.
"""

from __future__ import annotations

from dataclasses import dataclass

from drafter.reasons import Reason, Report

LIVE_CYCLES = 300
LEAST_CYCLES = 200
LEAST_ACCEPTED = 0.05
OVERRIDE_SLOTS = 200


@dataclass(frozen=True, slots=True)
class LiveCounts:
    """What a session's proposals came to.

    Attributes:
        num_cycles: proposals that were verified.
        num_proposed: tokens of them.
        num_accepted: tokens of them that stayed.
        num_slots: slots walked.
        num_overrides: slots where the selector took another token than the best logit.
        num_broken: proposals withheld because a value was not finite.
    """

    num_cycles: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_slots: int = 0
    num_overrides: int = 0
    num_broken: int = 0


def check_live(counts: LiveCounts) -> tuple[Reason, ...]:
    """Return why a running draft is to be disabled for the session (G22); nothing while it works.

    Args:
        counts: of the session so far. Beyond `LIVE_CYCLES` only broken values and an idle selector count.
    """
    report = Report()

    def disable(what: str, value: object, wanted: str, why: str) -> None:
        report.add(
            "G22", what, value, wanted, f"drafter disabled: {why}", hint="report this draft as defective"
        )

    if counts.num_broken:
        disable(
            "finite values",
            counts.num_broken,
            "0",
            f"{counts.num_broken} blocks had values that are no numbers",
        )
    if LEAST_CYCLES <= counts.num_cycles <= LIVE_CYCLES:
        mean = counts.num_accepted / counts.num_cycles
        if mean < LEAST_ACCEPTED:
            disable(
                "mean accepted",
                f"{mean:.3f}",
                f"{LEAST_ACCEPTED}",
                f"{mean:.3f} tokens a cycle accepted over {counts.num_cycles}: a defect, not a hard prompt",
            )
    return tuple(report.reasons)


def idle_selector(counts: LiveCounts) -> Reason | None:
    """Return the warning that a selector never chose anything but the best logit, if that is so."""
    if counts.num_slots < OVERRIDE_SLOTS or counts.num_overrides:
        return None
    report = Report()
    report.add(
        "G22",
        "selector overrides",
        0,
        "above 0",
        f"the selector changed none of {counts.num_slots} slots: the draft runs as if it had none",
        consequence="warn",
        hint="report this draft as defective",
    )
    return report.reasons[0]
