"""Does anything hang, tear or leak when readers, requests, rows, evaluation and faults all happen at once?

    python -m bench.studies.stress_store --minutes 10

Threads ask for random experts of two layers of different record size, compare every byte on arrival and
again before release, give up some requests half-way, and survive planted read errors; one floods the store
with hints, right, wrong, stale and senseless, and ends their generations; another gathers rows;
the main thread evaluates MLX graphs over leased slots and synchronises, which once held the GIL while a
reader needed it (FIELD P09). A watchdog dumps every stack and ends the process if nothing moves. CI runs 20
s.
"""

import argparse
import errno
import faulthandler
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from expert_store.errors import RecordCorrupt, SlotsExhausted, SourceFailed, WouldBlock
from expert_store.keys import Prefetch, ReadClass
from expert_store.layout import RecordLayout, RowLayout, RowPart, Span
from expert_store.lease import Lease
from expert_store.prefetch import PrefetchLimits
from expert_store.rows import RowTable
from expert_store.safetensors_index import FileInfo
from expert_store.source import FileSource
from expert_store.stats import Fate, StoreStatistics
from expert_store.store import ExpertStore
from expert_store.testing import FaultySource, pattern

NUM_EXPERTS = 24
LENGTHS = {0: (40_000, 700), 1: (9_000, 90)}
SLOTS = {0: 14, 1: 9}
PER_REQUEST = 4
ROW_LENGTHS = (160, 16)
NUM_ROWS = 500
GRACE_S = 120.0
"""A run that overshoots by this much is stuck."""
WAIT_S = 60.0
"""A wait that lasts this long is a lost wake-up: nothing here reads more than a few kilobytes."""


class Bank:
    """Slots and row buffers in MLX arrays, written through their memory, as the engine does it."""

    num_buffers = 2
    rows_per_buffer = 64

    def __init__(self) -> None:
        self.parts = {
            layer: [mx.zeros((SLOTS[layer], length), mx.uint8) for length in lengths]
            for layer, lengths in LENGTHS.items()
        }
        self.rows = [
            [mx.zeros((self.rows_per_buffer, n), mx.uint8) for n in ROW_LENGTHS]
            for _ in range(self.num_buffers)
        ]
        mx.eval(self.parts, self.rows)
        self._slot_views = {
            layer: [memoryview(a).cast("B") for a in parts] for layer, parts in self.parts.items()
        }
        self._row_views = [[memoryview(a).cast("B") for a in parts] for parts in self.rows]

    def views(self, layer: int, slot: int) -> list[memoryview]:
        pairs = zip(self._slot_views[layer], LENGTHS[layer], strict=True)
        return [view[slot * length : (slot + 1) * length] for view, length in pairs]

    def row_views(self, buffer: int, index: int) -> list[memoryview]:
        pairs = zip(self._row_views[buffer], ROW_LENGTHS, strict=True)
        return [view[index * length : (index + 1) * length] for view, length in pairs]


def make_file(path: Path) -> tuple[FileInfo, dict[int, RecordLayout], RowLayout]:
    blob = bytearray()
    stacks: dict[int, list[tuple[str, Span]]] = {}
    for layer, lengths in LENGTHS.items():
        stacks[layer] = []
        for part, length in enumerate(lengths):
            stacks[layer].append((f"part{part}", Span(0, len(blob), length * NUM_EXPERTS)))
            for expert in range(NUM_EXPERTS):
                blob += pattern(layer, expert, part, length)
    row_spans = []
    for part, length in enumerate(ROW_LENGTHS):
        row_spans.append(Span(0, len(blob), length * NUM_ROWS))
        for row in range(NUM_ROWS):
            blob += pattern(99, row, part, length)
    path.write_bytes(blob)
    status = path.stat()
    info = FileInfo(path, status.st_size, status.st_mtime_ns, status.st_ino)
    sizes = [info.size]
    layouts = {
        n: RecordLayout.stacked(n, NUM_EXPERTS, parts, file_sizes=sizes) for n, parts in stacks.items()
    }
    return (
        info,
        layouts,
        RowLayout(["weight", "scale"], [RowPart(NUM_ROWS, tuple(row_spans))], file_sizes=sizes),
    )


class Stress:
    """One run: its store, its threads, and what they counted."""

    def __init__(
        self, folder: Path, seconds: float, *, seed: int = 0, fault_every: int = 400, policy: str = "lru"
    ) -> None:
        info, layouts, row_layout = make_file(folder / "records")
        self.bank = Bank()
        self.files = FileSource([info])
        source = FaultySource(self.files, lambda number, *_: self._fault(number, fault_every))
        limits = PrefetchLimits(max_queued=16, min_exact_slots=2 * PER_REQUEST, budget_bytes=500_000)
        self.store = ExpertStore(
            layouts, source, self.bank, slots=SLOTS, policy=policy, num_readers=3, limits=limits
        )
        self.table = RowTable(row_layout, self.files, self.bank, num_readers=2)
        self.expected = {
            (layer, expert): [pattern(layer, expert, part, n) for part, n in enumerate(lengths)]
            for layer, lengths in LENGTHS.items()
            for expert in range(NUM_EXPERTS)
        }
        self.sums = {key: sum(map(sum, parts)) for key, parts in self.expected.items()}
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._lock = threading.Lock()  # protects counts and failures
        self._generations = [0, 0]  # of the owners whose guesses are made up; the guessing thread's alone
        self._seed = seed
        self._ends_at = time.monotonic() + seconds

    def run(self) -> dict[str, object]:
        """Run until the time is over; raise what any thread raised."""
        jobs: list[Callable[[random.Random], None]] = [self.ask, self.ask, self.gather, self.guess]
        threads = [
            threading.Thread(target=self._repeat, args=(job, self._seed + number), name=f"stress-{number}")
            for number, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        self._repeat(self.evaluate, self._seed + 100)
        for thread in threads:
            thread.join()
        try:
            if self.failures:
                raise self.failures[0]
            self.store.wait_idle(WAIT_S)
            got = self.store.statistics()
        finally:
            self.table.close()
            self.store.close()
            self.files.close()
        for shelf in self.store._shelves.values():
            shelf.table.check()
        for read_class, books in got.classes.items():
            num_open = got.num_unused if read_class is not ReadClass.EXACT else 0
            assert 0 <= books.num - books.num_ended <= num_open, (read_class, books.num, books.num_ended)
        ended = sum(count.num for count in got.fates.values())
        issued = sum(books.num for books in got.classes.values())
        assert ended + got.num_unused == issued, f"{issued} tickets issued, {ended} ended"
        assert sum(got.hints.values()) == self.counts["hints"]
        assert got.num_demands == got.num_hits + got.num_joined + got.num_misses
        return {
            "counts": dict(self.counts),
            "demands": got.num_demands,
            "hits": got.num_hits,
            "joined": got.num_joined,
            "misses": got.num_misses,
            "evictions": got.num_evictions,
            "failed": got.fates[Fate.FAILED].num,
            "guessed": {fate.name: num for fate, num in _guesses(got).items() if num},
            "hints": {outcome.name: num for outcome, num in got.hints.items() if num},
            "rows": self.table.statistics().num_rows,
        }

    def ask(self, rng: random.Random) -> None:
        """Lease some experts, compare them twice."""
        layer, experts = self._choose(rng)
        if rng.random() < 0.05:
            self.store.request(layer, experts).cancel()
            self._count("cancelled")
            return
        if rng.random() < 0.05:
            self._glance(layer, experts)
            return
        with self._lease(layer, experts, owner=rng.randrange(3)) as lease:
            self._compare(layer, experts, lease.slots)
            if rng.random() < 0.3:
                time.sleep(0)  # let others run while it is held
            self._compare(layer, experts, lease.slots)
        self._count("leases")

    def guess(self, rng: random.Random) -> None:
        """Hand over hints of every kind, and end their generation now and then."""
        owner = rng.randrange(2)
        generation = self._generations[owner]
        if rng.random() < 0.3:
            generation = self._generations[owner] = generation + 1
            self.store.advance(-2 - owner, generation)
        hints = [
            Prefetch(
                rng.randrange(3),  # there are two layers
                rng.randrange(NUM_EXPERTS + 1),
                rng.choice([ReadClass.NEAR, ReadClass.SPECULATIVE]),
                rng.random(),
                rng.randrange(8),
            )
            for _ in range(rng.randrange(12))
        ]
        self.store.prefetch(hints, owner=-2 - owner, generation=generation - (rng.random() < 0.1))
        with self._lock:
            self.counts["hints"] += len(hints)
        time.sleep(0.001)  # a token brings hints a layer at a time, not one flood

    def evaluate(self, rng: random.Random) -> None:
        """Compute over leased slots on the thread that owns MLX, and wait for the device in two ways."""
        layer, experts = self._choose(rng)
        masks = [rng.randrange(1, 8) for _ in experts] if rng.random() < 0.5 else None
        with self._lease(layer, experts, owner=7, row_masks=masks) as lease:
            slots = mx.array(lease.slots)
            totals = [
                mx.take(part, slots, axis=0).astype(mx.int32).sum(axis=1) for part in self.bank.parts[layer]
            ]
            total = totals[0] + totals[1]
            mx.async_eval(total)
            if rng.random() < 0.5:
                mx.synchronize()
            got = total.tolist()
        assert got == [self.sums[layer, expert] for expert in experts], (layer, experts, got)
        generation = self.counts["evaluated"] + 1
        self._count("evaluated")
        self.store.advance(7, generation, num_rows=rng.choice([None, 0, 1, 2, 3]))

    def gather(self, rng: random.Random) -> None:
        """Gather rows, compare them."""
        rows = [rng.randrange(NUM_ROWS) for _ in range(rng.randrange(1, 40))]
        batch = self.table.gather(rows)
        batch.wait(WAIT_S)
        for row, place in zip(rows, batch.index, strict=True):
            for part, view in enumerate(self.bank.row_views(batch.buffer, place)):
                assert view == pattern(99, row, part, ROW_LENGTHS[part]), row
        self._count("batches")

    def _lease(
        self, layer: int, experts: Sequence[int], owner: int, row_masks: Sequence[int] | None = None
    ) -> Lease:
        try:
            return self.store.acquire(layer, experts, owner=owner, row_masks=row_masks, timeout_s=WAIT_S)
        except WouldBlock as late:
            raise AssertionError(f"lost wake-up: {late}") from late

    def _glance(self, layer: int, experts: Sequence[int]) -> None:
        """Take what is resident, or go away."""
        try:
            with self.store.acquire_nowait(layer, experts) as lease:
                self._compare(layer, experts, lease.slots)
            self._count("glances that hit")
        except WouldBlock:
            self._count("glances that missed")

    def _choose(self, rng: random.Random) -> tuple[int, list[int]]:
        layer = rng.randrange(2)
        # Skewed, so that there are hits, joins and evictions.
        reach = NUM_EXPERTS if rng.random() < 0.4 else NUM_EXPERTS // 3
        return layer, rng.sample(range(reach), rng.randrange(1, PER_REQUEST + 1))

    def _compare(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        for expert, slot in zip(experts, slots, strict=True):
            for view, wanted in zip(self.bank.views(layer, slot), self.expected[layer, expert], strict=True):
                assert view == wanted, f"layer {layer} expert {expert} slot {slot} holds something else"

    def _repeat(self, job: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self._ends_at and not self.failures:
            try:
                job(rng)
            except (SourceFailed, RecordCorrupt):
                self._count("failed requests")
            except SlotsExhausted:
                self._count("slots exhausted")
            except BaseException as failure:  # noqa: BLE001 - raised by `run`, on the main thread
                with self._lock:
                    self.failures.append(failure)
                return

    def _fault(self, number: int, every: int) -> str | BaseException | None:
        if number % every == every - 1:
            return OSError(errno.EIO, os.strerror(errno.EIO)) if number % 2 else "short"
        return None

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _guesses(got: StoreStatistics) -> dict[Fate, int]:
    return {
        fate: sum(got.classes[c].fates[fate].num for c in (ReadClass.NEAR, ReadClass.SPECULATIVE))
        for fate in Fate
    }


def stress(seconds: float, *, seed: int = 0, policy: str = "lru") -> dict[str, object]:
    """Run for some seconds under a watchdog; raise on the first thing that is not as it should be."""
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Stress(Path(folder), seconds, seed=seed, policy=policy).run()
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for number, policy in enumerate(("lru", "slru")):
        report = stress(options.minutes * 30, seed=options.seed + number, policy=policy)
        print(
            json.dumps({"study": "stress_store", "policy": policy, "seconds": options.minutes * 30, **report})
        )


if __name__ == "__main__":
    main()
