"""Records compared with their digests as they are read. Entry: `VerifiedSource`.

Wraps the source of a pack; the store knows nothing of it. The comparison runs on the reader thread that read
the record, outside every lock, right after the read: the bytes are still in the processor's cache.

Invariant: no record reaches a slot's owner before its digest was compared, the first time it is read
(`first`) or each time (`every`); one that differs is `RecordCorrupt` with layer, expert, file and offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol

from xxhash import xxh3_128

from expert_store.errors import RecordCorrupt
from expert_store.layout import ReadOp
from expert_store.source import ByteSource

VerifyReads = Literal["first", "every"]
VERIFY_READS: Final[tuple[VerifyReads, ...]] = ("first", "every")


class Digest(Protocol):
    """What a hash object can do."""

    def update(self, data: memoryview, /) -> None:
        """Take more bytes."""
        ...

    def digest(self) -> bytes:
        """Return the value for all bytes so far."""
        ...


class _Shelf:
    """The records of one file: where they lie and what they must be."""

    __slots__ = ("base", "digests", "is_checked", "layer", "record_bytes", "stride")

    def __init__(self, layer: int, base: int, stride: int, record_bytes: int, digests: Sequence[str]) -> None:
        self.layer = layer
        self.base = base
        self.stride = stride
        self.record_bytes = record_bytes
        self.digests = [bytes.fromhex(digest) for digest in digests]
        self.is_checked = bytearray(len(digests))

    def unchecked(self) -> _Shelf:
        """Return the same records, none of them checked yet."""
        digests = [digest.hex() for digest in self.digests]
        return _Shelf(self.layer, self.base, self.stride, self.record_bytes, digests)


class RecordDigests:
    """What every record of a pack must be, by file. Immutable but for what was checked."""

    def __init__(self) -> None:
        self._shelves: dict[int, _Shelf] = {}

    def add(
        self, file: int, layer: int, base: int, stride: int, record_bytes: int, digests: Sequence[str]
    ) -> None:
        """Take the records of one layer.

        Args:
            file: Index of the file they lie in, alone.
            layer: Layer index, for messages.
            base: First byte of record 0.
            stride: Bytes from one record to the next.
            record_bytes: Bytes of a record.
            digests: XXH3-128 of each, hexadecimal.
        """
        self._shelves[file] = _Shelf(layer, base, stride, record_bytes, digests)

    def renumbered(self, numbers: Mapping[int, int]) -> RecordDigests:
        """Return the same digests for copies of the files, to be compared on their own.

        Args:
            numbers: index of the copy by the index of a file; records of files without one are left out.
        """
        copied = RecordDigests()
        for file, shelf in self._shelves.items():
            if file in numbers:
                copied._shelves[numbers[file]] = shelf.unchecked()
        return copied

    @property
    def shelves(self) -> Mapping[int, _Shelf]:
        """Return the records by file."""
        return self._shelves


class VerifiedSource(ByteSource):
    """A source whose records are compared with their digests; everything else passes through."""

    def __init__(
        self,
        source: ByteSource,
        digests: RecordDigests,
        *,
        verify: VerifyReads = "first",
        hasher: Callable[[], Digest] = xxh3_128,
    ) -> None:
        """Wrap a source, which this closes.

        Args:
            source: Where the bytes come from.
            digests: What the records must be.
            verify: Compare a record the first time it is read, or every time.
            hasher: Makes a hash object; for tests.
        """
        self._source = source
        self._shelves = digests.shelves
        self._every = verify == "every"
        self._hasher = hasher

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        """Fill the views from one run, and compare it if it is a record; see `ByteSource`."""
        got = self._source.read_into(file, offset, views)
        shelf = self._shelves.get(file)
        if shelf is not None:
            self._compare(shelf, file, offset, got, views)
        return got

    def read_runs(self, runs: Sequence[ReadOp], views: Sequence[memoryview]) -> int:
        """Do the reads of one record, and compare it; see `ByteSource`."""
        got = self._source.read_runs(runs, views)
        shelf = self._shelves.get(runs[0].file)
        if shelf is not None:
            self._compare(shelf, runs[0].file, runs[0].offset, got, views)
        return got

    def name(self, file: int) -> str:
        """Return what messages call a file."""
        return self._source.name(file)

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def _compare(self, shelf: _Shelf, file: int, offset: int, got: int, views: Sequence[memoryview]) -> None:
        expert, rest = divmod(offset - shelf.base, shelf.stride)
        if rest or got != shelf.record_bytes:
            return  # a part of a record, or one that came short: whoever asked for it judges the length
        if shelf.is_checked[expert] and not self._every:
            return
        digest = self._hasher()
        for view in views:
            digest.update(view)
        if digest.digest() != shelf.digests[expert]:
            name = self._source.name(file)
            raise RecordCorrupt(
                f"Record is damaged: expert {expert} of layer {shelf.layer} in {name} at {offset}: "
                f"its digest is {digest.digest().hex()}, the pack says {shelf.digests[expert].hex()}",
                hint="flashnext verify lists what is damaged; make the pack again",
                layer=shelf.layer,
                expert=expert,
                file=name,
                offset=offset,
            )
        shelf.is_checked[expert] = 1
