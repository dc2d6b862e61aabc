"""Does the store cost bandwidth? Random records through the store against a bare preadv loop, same threads.

Both move the same records, in the same order, with the same reads, into the same memory. The bare loop is
the bound: threads that take the next number and read, with no tickets, slots, pins or statistics. The store
has 48 layers and is asked layer by layer, ten distinct experts each, every book kept, a generation a token:

    queue kept full       the next layers are asked for before the first is waited for; the bare loop runs on
    one layer at a time   as an exact decode asks; the bare loop too waits for its ten records, then goes on

A/B/B/A; the ratio is the median over rounds and is quoted with its spread, processor time per record beside
it: on a machine that others use at the same time that is the steadier of the two. Bar: the store takes at
most 1.15 of the bare loop's time.

By default the file is dropped from the page cache before every run, so that the drive is what is measured.
With --warm a record is a copy in memory and the processor is: the harshest case for the store.

    python -m bench.studies.store_throughput [--warm] [--layout packed|stock] [--readers 4]
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from expert_store.layout import ReadOp, RecordLayout, Span, StackedComponent
from expert_store.lease import LeaseRequest
from expert_store.safetensors_index import FileInfo
from expert_store.source import FileSource
from expert_store.store import ExpertStore

COMPONENTS = (819_200, 51_200, 51_200) * 3  # weight, scales, biases of gate, up, down: 4 bits, groups of 64
RECORD_BYTES = sum(COMPONENTS)  # 2,764,800
PER_LAYER = 10  # experts a token misses in a layer at worst
NUM_LAYERS = 48
TARGET = 1 / 1.15


class Memory:
    """Slots in one bytearray, a view per component."""

    def __init__(self, num_slots: int) -> None:
        whole = memoryview(bytearray(num_slots * RECORD_BYTES))
        ends = list(itertools.accumulate(COMPONENTS, initial=0))
        self._views = [
            [whole[slot * RECORD_BYTES :][begin:end] for begin, end in itertools.pairwise(ends)]
            for slot in range(num_slots)
        ]

    def views(self, layer: int, slot: int) -> Sequence[memoryview]:
        """Return a slot's memory; layers share it, since nobody looks at what lands there."""
        return self._views[(layer * PER_LAYER + slot) % len(self._views)]


def make_file(path: Path, num_experts: int) -> FileInfo:
    """Write records of random bytes; real bytes, because a sparse file is no drive."""
    noise = random.Random(7).randbytes(RECORD_BYTES)
    with path.open("wb") as stream:
        for expert in range(num_experts):
            stream.write(expert.to_bytes(8, "little") + noise[8:])
        stream.flush()
        os.fsync(stream.fileno())
    status = path.stat()
    return FileInfo(path, status.st_size, status.st_mtime_ns, status.st_ino)


def make_layout(kind: str, info: FileInfo, num_experts: int) -> RecordLayout:
    """Packed: a record is one run, one read. Stock: nine stacks over all experts, nine reads."""
    if kind == "packed":
        begins = itertools.accumulate(COMPONENTS, initial=0)
        parts = [
            StackedComponent(f"part{number}", 0, 0, RECORD_BYTES, begin, length)
            for number, (begin, length) in enumerate(zip(begins, COMPONENTS, strict=False))
        ]
        return RecordLayout.stacked(0, num_experts, parts, file_sizes=[info.size])
    stacks = [length * num_experts for length in COMPONENTS]
    spans = [
        Span(0, begin, stack)
        for begin, stack in zip(itertools.accumulate(stacks, initial=0), stacks, strict=False)
    ]
    named = [(f"part{number}", span) for number, span in enumerate(spans)]
    return RecordLayout.stacked(0, num_experts, named, file_sizes=[info.size])


def forget(path: Path) -> None:
    """Drop the file from the page cache (Linux; elsewhere run with --warm)."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class Run(NamedTuple):
    """Seconds per record."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], None], num_records: int) -> Run:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Run((time.perf_counter() - wall) / num_records, (time.process_time() - cpu) / num_records)


def bare(
    path: Path,
    reads: Sequence[tuple[ReadOp, ...]],
    memory: Memory,
    num_slots: int,
    num_readers: int,
    at_a_time: int | None,
) -> Run:
    """Do nothing but read; `at_a_time` records are waited for before the next are begun, None for all."""
    descriptor = os.open(path, os.O_RDONLY)
    size = at_a_time or len(reads)
    # next() of a range's iterator is atomic: threads share one.
    parts = [iter(range(start, min(start + size, len(reads)))) for start in range(0, len(reads), size)]
    together = threading.Barrier(num_readers)

    def work() -> None:
        for part in parts:
            together.wait()
            for number in part:
                views = memory.views(0, number % num_slots)
                for operation in reads[number]:
                    wanted = views[operation.first : operation.end]
                    assert os.preadv(descriptor, wanted, operation.offset) == operation.length

    def all_threads() -> None:
        threads = [threading.Thread(target=work) for _ in range(num_readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run = timed(all_threads, len(reads))
    os.close(descriptor)
    return run


def through_store(
    info: FileInfo,
    layout: RecordLayout,
    order: Sequence[Sequence[int]],
    memory: Memory,
    num_readers: int,
    ahead: int,
) -> Run:
    """Read the same records through the store; `ahead` layers are asked for before one is waited for."""
    with FileSource([info]) as source:
        layers = range(NUM_LAYERS)
        store = ExpertStore(
            dict.fromkeys(layers, layout),
            source,
            memory,
            slots=dict.fromkeys(layers, 2 * PER_LAYER),
            num_readers=num_readers,
        )

        def ask() -> None:
            waiting: deque[LeaseRequest] = deque()
            for number, experts in enumerate(order, start=1):
                waiting.append(store.request((number - 1) % NUM_LAYERS, experts))
                if len(waiting) > ahead:
                    waiting.popleft().wait().release()
                if number % NUM_LAYERS == 0:
                    store.advance(0, number // NUM_LAYERS)
            while waiting:
                waiting.popleft().wait().release()

        run = timed(ask, 1)
        got = store.statistics()
        store.close()
    assert got.physical_bytes == got.exact_bytes == got.num_misses * RECORD_BYTES
    return Run(run.wall_s / got.num_misses, run.cpu_s / got.num_misses)  # the few hits moved nothing


def compare(first: Callable[[], Run], second: Callable[[], Run], repeats: int) -> tuple[list[Run], list[Run]]:
    """Run A/B/B/A after one warm-up each."""
    first(), second()
    a: list[Run] = []
    b: list[Run] = []
    for _ in range(repeats):
        a.append(first())
        b.append(second())
        b.append(second())
        a.append(first())
    return a, b


def summary(bound: list[Run], store: list[Run]) -> dict[str, object]:
    """Take one ratio per A/B/B/A round: neighbours in time, so that a drifting machine cancels."""
    rounds = [
        (bound[i].wall_s + bound[i + 1].wall_s) / (store[i].wall_s + store[i + 1].wall_s)
        for i in range(0, len(bound), 2)
    ]
    return {
        "ratio": round(statistics.median(rounds), 3),
        "spread": [round(min(rounds), 3), round(max(rounds), 3)],
        "store_GiB_per_s": round(RECORD_BYTES / statistics.median(run.wall_s for run in store) / 2**30, 2),
        "bound_GiB_per_s": round(RECORD_BYTES / statistics.median(run.wall_s for run in bound) / 2**30, 2),
        "store_cpu_us_per_record": round(1e6 * statistics.median(run.cpu_s for run in store)),
        "bound_cpu_us_per_record": round(1e6 * statistics.median(run.cpu_s for run in bound)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=320, help="records in the file")
    parser.add_argument("--records", type=int, default=960, help="records per run")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9, help="A/B/B/A rounds")
    parser.add_argument("--layout", choices=["packed", "stock"], default="stock")
    parser.add_argument("--warm", action="store_true", help="leave the file in the page cache")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where the file is made; default the temporary folder"
    )
    options = parser.parse_args()
    num_slots = 4 * PER_LAYER
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        path = Path(folder) / "records"
        info = make_file(path, options.experts)
        layout = make_layout(options.layout, info, options.experts)
        # A random order without repeats within reach of the slots: nearly every demand is a miss.
        rng = random.Random(11)
        deck: list[int] = []
        while len(deck) < options.records:
            deck += rng.sample(range(options.experts), options.experts)
        order = [deck[i : i + PER_LAYER] for i in range(0, options.records, PER_LAYER)]
        order = [list(dict.fromkeys(experts)) for experts in order]
        flat = [layout.reads(expert) for experts in order for expert in experts]
        memory = Memory(num_slots)

        def prepared(measure: Callable[[], Run]) -> Callable[[], Run]:
            def run() -> Run:
                if not options.warm:
                    forget(path)
                return measure()

            return run

        def bare_loop(at_a_time: int | None) -> Callable[[], Run]:
            return lambda: bare(path, flat, memory, num_slots, options.readers, at_a_time)

        def store_ahead(ahead: int) -> Callable[[], Run]:
            return lambda: through_store(info, layout, order, memory, options.readers, ahead)

        report: dict[str, dict[str, object]] = {}
        for name, ahead, at_a_time in (
            ("queue kept full", 2, None),
            ("one layer at a time", 0, PER_LAYER),
        ):
            bare_run, store_run = prepared(bare_loop(at_a_time)), prepared(store_ahead(ahead))
            report[name] = summary(*compare(bare_run, store_run, options.repeats))
            print(f"{name}: {json.dumps(report[name])}", flush=True)
            ratio = report[name]["ratio"]
            assert isinstance(ratio, float)
            print(
                f"{1 / ratio:.3f} of the bare loop's time: {'met' if ratio >= TARGET else 'MISSED'}, bar 1.15"
            )
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        conditions = {
            "study": "store_throughput",
            "commit": commit,
            "machine": f"{platform.machine()} {os.cpu_count()} cpus load {os.getloadavg()[0]:.1f}",
            "page_cache": "warm" if options.warm else "cold, dropped before every run",
            "layout": options.layout,
            "record_bytes": RECORD_BYTES,
            "records": len(flat),
            "readers": options.readers,
            "rounds": options.repeats,
        }
        print(json.dumps(conditions | {"result": report}))


if __name__ == "__main__":
    main()
