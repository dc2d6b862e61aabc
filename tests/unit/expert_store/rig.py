"""A store over files in memory, with every part at hand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from expert_store.layout import RecordLayout, Span
from expert_store.prefetch import PrefetchLimits
from expert_store.reader import Reader
from expert_store.source import ByteSource
from expert_store.store import ExpertStore
from expert_store.testing import CountingSource, DictMemory, ManualClock, MemorySource, StepReader, pattern


def record_bytes(layer: int, expert: int, lengths: Sequence[int]) -> bytes:
    return b"".join(pattern(layer, expert, part, length) for part, length in enumerate(lengths))


def stacked_files(
    num_experts: int, lengths: Mapping[int, Sequence[int]]
) -> tuple[MemorySource, dict[int, RecordLayout]]:
    """One file per layer; each component a stack over experts, foreign bytes before, between and after."""
    files: list[bytes] = []
    places: dict[int, list[tuple[str, Span]]] = {}
    for layer, parts in lengths.items():
        blob = bytearray(b"\xee" * 16)
        places[layer] = []
        for part, length in enumerate(parts):
            span = Span(len(files), len(blob), length * num_experts)
            places[layer].append((f"part{part}", span))
            for expert in range(num_experts):
                blob += pattern(layer, expert, part, length)
            blob += b"\xee" * 16
        files.append(bytes(blob))
    source = MemorySource(files)
    layouts = {
        layer: RecordLayout.stacked(layer, num_experts, components, file_sizes=source.file_sizes)
        for layer, components in places.items()
    }
    return source, layouts


@dataclass
class Rig:
    store: ExpertStore
    reader: StepReader
    memory: DictMemory
    counting: CountingSource
    clock: ManualClock
    lengths: Mapping[int, Sequence[int]]

    def holds(self, layer: int, expert: int, slot: int) -> bool:
        """Whether a slot holds exactly the record of an expert, and no guard byte was touched."""
        self.memory.check_guards()
        return self.memory.record(layer, slot) == record_bytes(layer, expert, self.lengths[layer])

    def load(self, layer: int, experts: Sequence[int]) -> tuple[int, ...]:
        """Bring experts in and let them go again; return their slots."""
        request = self.store.request(layer, experts)
        self.reader.run()
        with request.wait_nowait() as lease:
            return lease.slots


def make_rig(
    *,
    num_experts: int = 8,
    slots: int | Mapping[int, int] = 4,
    lengths: Mapping[int, Sequence[int]] | None = None,
    policy: str = "lru",
    wrap: Callable[[ByteSource], ByteSource] = lambda source: source,
    reader: Reader | None = None,
    limits: PrefetchLimits | None = None,
    num_readers: int = 1_000,
) -> Rig:
    lengths = lengths or {0: (24, 8), 1: (24, 8)}
    source, layouts = stacked_files(num_experts, lengths)
    counting = CountingSource(wrap(source))
    memory = DictMemory(slot_lengths=lengths)
    clock = ManualClock()
    step = StepReader(num_readers=num_readers)
    store = ExpertStore(
        layouts,
        counting,
        memory,
        slots=slots if isinstance(slots, Mapping) else dict.fromkeys(lengths, slots),
        policy=policy,
        reader=step if reader is None else reader,
        limits=limits,
        clock=clock,
    )
    return Rig(store, step, memory, counting, clock, lengths)
