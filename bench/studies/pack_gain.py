"""What does a pack gain over reading the checkpoint as it is, and what do its digests cost?

Packs a checkpoint, then reads the same random records from both with the store's own call and the same
number of threads, A/B/B/A, each run from a cold page cache (Linux; with --warm a read is a copy in memory).
Then the pack alone: without digests, with every record hashed at its first read, with every read hashed, and
with digests compared before, from a source held to --source-rate. At 3 GB/s the bar is 0.98 of hashing
off; it means something only if the source, not the processor, is what limits: processor time is printed too.

    python -m bench.synth medium CHECKPOINT
    python -m bench.studies.pack_gain CHECKPOINT [--warm] [--readers 4]
"""

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from expert_store.layout import RecordLayout
from expert_store.source import ByteSource, FileSource
from expert_store.testing import ThrottledSource
from expert_store.verified import VerifiedSource
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.packing import pack_checkpoint

TARGET = 0.98

Order = Sequence[tuple[RecordLayout, int]]


def forget(checkpoint: Checkpoint) -> None:
    """Drop a checkpoint's files from the page cache."""
    for info in checkpoint.table.files:
        descriptor = os.open(info.path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Run(NamedTuple):
    """Seconds of all records together."""

    wall_s: float
    cpu_s: float


def read_all(source: ByteSource, order: Order, num_readers: int) -> Run:
    """Read all records with so many threads."""
    numbers = iter(range(len(order)))
    lock = threading.Lock()

    def work() -> None:
        memory = [memoryview(bytearray(length)) for length in order[0][0].component_lengths]
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            layout, expert = order[number]
            assert source.read_runs(layout.reads(expert), memory) == layout.record_bytes

    threads = [threading.Thread(target=work) for _ in range(num_readers)]
    wall, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Run(time.perf_counter() - wall, time.process_time() - cpu)


def draw(checkpoint: Checkpoint, count: int) -> Order:
    """Return random records, each once as long as there are enough."""
    records = [
        (layout.record, expert)
        for layout in checkpoint.experts.values()
        for expert in range(layout.record.num_experts)
    ]
    return random.Random(5).sample(records, min(count, len(records)))


def compare(first: Callable[[], Run], second: Callable[[], Run], rounds: int) -> dict[str, object]:
    """Return how much faster the second is, by A/B/B/A rounds."""
    first(), second()
    ratios: list[float] = []
    runs: tuple[list[Run], list[Run]] = ([], [])
    for _ in range(rounds):
        a, b, c, d = first(), second(), second(), first()
        ratios.append((a.wall_s + d.wall_s) / (b.wall_s + c.wall_s))
        runs[0].extend((a, d))
        runs[1].extend((b, c))
    return {
        "ratio": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "wall_s": [round(statistics.median(run.wall_s for run in each), 3) for each in runs],
        "cpu_s": [round(statistics.median(run.cpu_s for run in each), 3) for each in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--records", type=int, default=200, help="records per run")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--source-rate", type=float, default=3.0, help="GB/s of the held source")
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--pack", type=Path, help="a pack made before of this checkpoint")
    parser.add_argument("--digests", action="store_true", help="what digests cost, nothing else")
    options = parser.parse_args()
    plain = open_checkpoint(options.checkpoint)
    with tempfile.TemporaryDirectory(dir=options.checkpoint.parent) as folder:
        began = time.perf_counter()
        directory = options.pack or pack_checkpoint(options.checkpoint, Path(folder) / "pack").directory
        pack_s = time.perf_counter() - began
        packed = open_checkpoint(directory)
        orders = {True: draw(packed, options.records), False: draw(plain, options.records)}
        record_bytes = orders[True][0][0].record_bytes

        def read(checkpoint: Checkpoint) -> Callable[[], Run]:
            def run() -> Run:
                if not options.warm:
                    forget(checkpoint)
                with FileSource(checkpoint.table.files) as source:
                    return read_all(source, orders[checkpoint is packed], options.readers)

            return run

        def throttled(verify: str) -> Callable[[], Run]:
            def run() -> Run:
                source: ByteSource = ThrottledSource(
                    FileSource(packed.table.files), bytes_per_s=options.source_rate * 1e9
                )
                if verify:
                    fresh = open_checkpoint(directory).records
                    assert fresh is not None
                    source = VerifiedSource(source, fresh, verify="every" if verify == "every" else "first")
                    if verify == "warm":  # every record was compared before: what is left is one look
                        read_all(source, orders[True], options.readers)
                taken = read_all(source, orders[True], options.readers)
                source.close()
                return taken

            return run

        result: dict[str, object] = {}
        if not options.digests:
            name = "pack over the checkpoint as it is"
            result[name] = compare(read(plain), read(packed), options.rounds)
            print(f"{name}: {json.dumps(result[name])}", flush=True)
        for verify in ("first", "every", "warm"):
            name = f"digests at {verify} read over none" if verify != "warm" else "digests compared before"
            result[name] = compare(throttled(""), throttled(verify), options.rounds)
            print(f"{name}: {json.dumps(result[name])}", flush=True)
    print(f"target for digests: {TARGET} of none, from a source of 3 GB/s")
    print(
        json.dumps(
            {
                "study": "pack_gain",
                "machine": f"{platform.machine()} {os.cpu_count()} cpus load {os.getloadavg()[0]:.1f}",
                "page_cache": "warm" if options.warm else "cold, dropped before every run",
                "layout": plain.layout,
                "reads_per_record": max(len(one.record.reads(0)) for one in plain.experts.values()),
                "record_bytes": record_bytes,
                "source_gb_per_s": options.source_rate,
                "records": len(orders[True]),
                "readers": options.readers,
                "rounds": options.rounds,
                "pack_s": round(pack_s, 1),
                "pack_bytes": sum(packed.table.file_sizes),
                "result": result,
            }
        )
    )


if __name__ == "__main__":
    main()
