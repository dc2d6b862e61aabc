"""What one answer cost, in the words of METRICS.md. Frozen snapshots; prefill and decode are never mixed."""

from dataclasses import dataclass


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
