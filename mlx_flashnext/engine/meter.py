"""Measures one answer: clocks, store counters and device waits, as differences of snapshots."""

import time
from collections.abc import Callable

from expert_store.stats import StoreStatistics
from mlx_flashnext.engine.machine import peak_resident_bytes
from mlx_flashnext.engine.stats import DraftStatistics, GenerationStatistics
from mlx_flashnext.model.host import HostSync


class Meter:
    """Call `begin_prefill`, `begin_decode`, `count_cycle`..., `finish`, in this order.

    Args:
        statistics: takes a snapshot of the store.
        sync: counter of waits for the device.
        clock: nanoseconds.
    """

    def __init__(
        self,
        statistics: Callable[[], StoreStatistics],
        sync: HostSync,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._statistics = statistics
        self._sync = sync
        self._clock = clock
        self._prompt_tokens = self._reused_tokens = 0
        self._cycles = self._output_tokens = 0
        self._prefill_start = self._decode_start = clock()
        self._before_prefill = self._before_decode = statistics()
        self._syncs_before_decode = sync.num_syncs

    def begin_prefill(self, prompt_tokens: int, reused_tokens: int) -> None:
        """Start the prefill of a prompt of which the state has already consumed a part."""
        self._prompt_tokens, self._reused_tokens = prompt_tokens, reused_tokens
        self._prefill_start, self._before_prefill = self._clock(), self._statistics()

    def begin_decode(self) -> None:
        """End the prefill and start the cycles."""
        self._decode_start, self._before_decode = self._clock(), self._statistics()
        self._syncs_before_decode = self._sync.num_syncs

    def count_cycle(self, num_tokens: int) -> None:
        """Count one cycle that committed `num_tokens` tokens."""
        self._cycles += 1
        self._output_tokens += num_tokens

    def finish(self, draft: DraftStatistics) -> GenerationStatistics:
        """Return the figures of the answer.

        Args:
            draft: what speculation did for it.
        """
        now, then, start = self._statistics(), self._before_decode, self._before_prefill
        hits, misses = now.num_hits - then.num_hits, now.num_misses - then.num_misses
        return GenerationStatistics(
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            prefill_ns=self._decode_start - self._prefill_start,
            output_tokens=self._output_tokens,
            decode_ns=self._clock() - self._decode_start,
            cycles=self._cycles,
            read_bytes=now.physical_bytes - then.physical_bytes,
            prefill_read_bytes=then.physical_bytes - start.physical_bytes,
            hit_rate=hits / (hits + misses) if hits + misses else None,
            exposed_wait_ns=now.exposed_wait_ns - then.exposed_wait_ns,
            peak_bytes=peak_resident_bytes(),
            draft=draft,
            num_syncs=self._sync.num_syncs - self._syncs_before_decode,
        )
