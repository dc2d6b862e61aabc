"""How long do guesses hold up exact demand, by how many of them may be on the wire at once? SIMULATED DISK.

    python -m bench.studies.guess_interference

A drive that needs LATENCY_S before a read and shares its bandwidth among readers, one record at a time; four
readers; a queue that never runs dry of guesses. Every now and then an exact demand of a few records, none of
them guessed, is waited for. Printed: the median wait against the same demand without guesses, and how many
guesses the drive delivered meanwhile, against the most it can. The choice for `PrefetchLimits.max_reads`.
"""

import argparse
import json
import statistics
import time

from expert_store.keys import Prefetch, ReadClass
from expert_store.layout import RecordLayout, Span
from expert_store.prefetch import PrefetchLimits
from expert_store.store import ExpertStore
from expert_store.testing import DictMemory, MemorySource, ThrottledSource

NUM_EXPERTS, NUM_SLOTS, NUM_READERS = 4096, 64, 4
LENGTH = 1000
RECORD_S = 0.004
LATENCY_S = 0.003  # short of one transfer: a second read in flight hides it, as on the drives of FIELD B.1
DEMANDS = 40
PAUSE_S = 0.03


def measure(max_reads: int, num_wanted: int) -> tuple[float, float]:
    """Return the median wait in seconds and the guesses delivered a second."""
    source = MemorySource([bytes(NUM_EXPERTS * LENGTH)])
    layout = RecordLayout.stacked(
        0, NUM_EXPERTS, [("part", Span(0, 0, NUM_EXPERTS * LENGTH))], file_sizes=source.file_sizes
    )
    drive = ThrottledSource(source, latency_s=LATENCY_S, bytes_per_s=LENGTH / RECORD_S)
    limits = PrefetchLimits(max_reads=max_reads, min_exact_slots=NUM_SLOTS // 2)
    memory = DictMemory(slot_lengths={0: (LENGTH,)})
    waits: list[float] = []
    with ExpertStore(
        {0: layout}, drive, memory, slots={0: NUM_SLOTS}, num_readers=NUM_READERS, limits=limits
    ) as store:
        began_s = time.monotonic()
        for number in range(DEMANDS):
            guesses = range(number * 40, number * 40 + 30)
            hints = [Prefetch(0, 2000 + guess % 2000, ReadClass.SPECULATIVE) for guess in guesses]
            store.prefetch(hints, owner=1, generation=number)
            time.sleep(PAUSE_S)
            started_s = time.monotonic()
            wanted = [number * num_wanted + index for index in range(num_wanted)]
            store.acquire(0, wanted, timeout_s=30).release()
            waits.append(time.monotonic() - started_s)
            store.advance(1, number + 1)
        seconds = time.monotonic() - began_s
        num_guesses = store.statistics().queue.num_predicted_reads
    return statistics.median(waits), num_guesses / seconds


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rows = []
    for num_wanted in (1, 4, 10):
        alone_s, _ = measure(0, num_wanted)
        for max_reads in (1, 2, NUM_READERS - 1, NUM_READERS):
            wait_s, rate = measure(max_reads, num_wanted)
            row = {
                "wanted": num_wanted,
                "guesses on the wire": max_reads,
                "wait/alone": round(wait_s / alone_s, 2),
                "delay in records": round((wait_s - alone_s) / RECORD_S, 1),
                "guesses a second": round(rate),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(
        json.dumps(
            {"study": "guess_interference", "simulated_disk": True, "readers": NUM_READERS, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
