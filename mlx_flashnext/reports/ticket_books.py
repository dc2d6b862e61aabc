"""What became of every ticket of a measured stretch, in records and bytes. Entry: `books_of`.

(T6) Every ticket has exactly one fate: `Books.add_up` says whether these do, and reports print it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from expert_store.keys import ReadClass
from expert_store.stats import Fate, FateCount, StoreStatistics

_PREDICTED: Final = (ReadClass.NEAR, ReadClass.SPECULATIVE)


@dataclass(frozen=True, slots=True)
class Tickets:
    """Tickets of one class, over all repetitions, and what became of them."""

    issued: FateCount
    fates: Mapping[str, FateCount]


@dataclass(frozen=True, slots=True)
class Books:
    """Every ticket, over all repetitions. Nothing is in flight at either end of one.

    Attributes:
        classes: by the class under which they were issued.
        unused: predicted ones that went on waiting in their slots, less those that waited before.
    """

    classes: Mapping[str, Tickets]
    unused: FateCount

    @property
    def issued(self) -> FateCount:
        """All that were issued."""
        return _total(one.issued for one in self.classes.values())

    @property
    def ended(self) -> FateCount:
        """All that have a fate."""
        return _total(fate for one in self.classes.values() for fate in one.fates.values())

    @property
    def add_up(self) -> bool:
        """Return whether every ticket has exactly one fate, in records and bytes (T6)."""
        exact = self.classes[ReadClass.EXACT.name.lower()]
        return (
            _total([self.ended, self.unused]) == self.issued and _total(exact.fates.values()) == exact.issued
        )

    def predicted(self, *fates: Fate) -> FateCount:
        """Return the predicted tickets of these fates."""
        kinds = [self.classes[one.name.lower()].fates for one in _PREDICTED]
        return _total(kind[fate.name.lower()] for kind in kinds for fate in fates)


def books_of(stores: Sequence[StoreStatistics]) -> Books:
    """Return what was issued and what became of it."""

    def tickets(read_class: ReadClass) -> Tickets:
        classes = [store.classes[read_class] for store in stores]
        fates = {fate.name.lower(): _total(one.fates[fate] for one in classes) for fate in Fate}
        return Tickets(_total(FateCount(one.num, one.num_bytes) for one in classes), fates)

    return Books(
        {one.name.lower(): tickets(one) for one in ReadClass},
        _total(FateCount(store.num_unused, store.unused_bytes) for store in stores),
    )


def used_shares(books: Books, stores: Sequence[StoreStatistics]) -> tuple[float | None, float | None]:
    """Return what native routes used of the predicted records that were read: in records, and in bytes.

    Luck counts: a record whose generation had ended and that was demanded later all the same.
    """
    used = books.predicted(Fate.IN_TIME, Fate.JOINED, Fate.LATE)
    read = _total([used, books.predicted(Fate.STALE, Fate.EVICTED_UNUSED), books.unused])
    lucky = _total(FateCount(store.num_stale_used, store.stale_used_bytes) for store in stores)
    if not read.num:
        return None, None
    return (used.num + lucky.num) / read.num, (used.num_bytes + lucky.num_bytes) / read.num_bytes


def _total(counts: Iterable[FateCount]) -> FateCount:
    every = list(counts)
    return FateCount(sum(one.num for one in every), sum(one.num_bytes for one in every))
