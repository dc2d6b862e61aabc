"""What one answer cost, in the words of METRICS.md. Frozen snapshots; prefill and decode are never mixed."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DraftStatistics:
    """What speculation did for one answer.

    Attributes:
        drafter: who was to propose.
        used: who did; `none` if nobody ever proposed anything.
        reason: why it stopped or never began; None if it was in use to the end.
        rule: how proposals were verified.
        num_cycles: cycles with at least one proposal.
        num_proposed: tokens proposed.
        num_accepted: of those, tokens the target agreed with.
        accepted_by_slot: of every slot, in how many cycles its proposal was accepted.
        proposed_by_slot: of every slot, in how many cycles there was a proposal.
        num_failures: errors of the drafter.
    """

    drafter: str = "none"
    used: str = "none"
    reason: str | None = None
    rule: str = "coupled"
    num_cycles: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    accepted_by_slot: tuple[int, ...] = ()
    proposed_by_slot: tuple[int, ...] = ()
    num_failures: int = 0


@dataclass(frozen=True, slots=True)
class GenerationStatistics:
    """One answer's figures.

    Attributes:
        prompt_tokens: tokens of the rendered prompt.
        reused_tokens: prompt tokens that the state had already consumed.
        prefill_ns: wall time of the prefill.
        output_tokens: tokens committed, the stop token included.
        decode_ns: wall time of the cycles.
        cycles: propose-verify-commit turns.
        read_bytes: physical bytes of expert records read while decoding.
        prefill_read_bytes: the same during prefill.
        hit_rate: share of expert demands while decoding that found their record resident; None without
            demands.
        exposed_wait_ns: time decode stood still for an expert record; the row table counts waits for n-gram
            rows.
        peak_bytes: the largest resident size of the process so far.
        num_syncs: waits for the device while decoding.
        draft: what speculation did.
    """

    prompt_tokens: int
    reused_tokens: int
    prefill_ns: int
    output_tokens: int
    decode_ns: int
    cycles: int
    read_bytes: int
    prefill_read_bytes: int
    hit_rate: float | None
    exposed_wait_ns: int
    peak_bytes: int
    num_syncs: int
    draft: DraftStatistics = field(default_factory=DraftStatistics)

    @property
    def acceptance_length(self) -> float | None:
        """Return tau: committed tokens per cycle, the bonus included; None without a cycle."""
        return self.output_tokens / self.cycles if self.cycles else None
