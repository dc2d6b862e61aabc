"""Where records and rows lie in files: pure arithmetic, no I/O. Entry: `RecordLayout`, `RowLayout`.

A record is one expert's bytes: named components in a fixed order, each one run of bytes in one file. The
store never sees a dtype. Two shapes of checkpoint are covered:
    stacked   one tensor per component for all experts: MLX packs, and the fused HF tensors, where a component
              is a fixed part of each expert's stride (gate and up inside gate_up);
    listed    one tensor per component and expert: the official FP8 layout.

Invariants:
    L1  every span lies inside its file; checked here, once, at construction, so no later read can leave it;
    L2  components of all records of a layer have the same lengths, so that a slot fits any of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import msgspec

from expert_store.errors import CheckpointCorrupt


class Placed(Protocol):
    """A run of bytes in a file: `Span` and `TensorInfo` are such."""

    @property
    def file(self) -> int:
        """Index of the file."""
        ...

    @property
    def offset(self) -> int:
        """First byte, from the start of the file."""
        ...

    @property
    def length(self) -> int:
        """Bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """A run of `length` bytes of one file, from `offset`."""

    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StackedComponent:
    """A component whose experts repeat every `stride` bytes from `base`.

    Expert e has `length` bytes at base + e * stride + offset.
    """

    name: str
    file: int
    base: int
    stride: int
    offset: int
    length: int


class ReadOp(msgspec.Struct, frozen=True, gc=False):
    """One read: a run of a file that fills the components `first` up to, not including, `end`."""

    file: int
    offset: int
    length: int
    first: int
    end: int


class _Rule(NamedTuple):
    """Stacked places of one component: expert e lies at start + e * stride."""

    file: int
    start: int
    stride: int


class _List(NamedTuple):
    """Listed places of one component, flat integers because there can be 150 k of them."""

    files: array[int]
    offsets: array[int]


class RecordLayout:
    """The records of one layer.

    Attributes:
        layer: Layer index, as the store's callers count.
        num_experts: Records are numbered 0 to num_experts - 1.
        component_names: Names, in component order.
        component_lengths: Bytes of each component, the same for every record (L2).
        record_bytes: Their sum.
    """

    __slots__ = (
        "_groups",
        "_places",
        "component_lengths",
        "component_names",
        "layer",
        "num_experts",
        "record_bytes",
    )

    def __init__(
        self,
        layer: int,
        num_experts: int,
        names: Sequence[str],
        lengths: Sequence[int],
        places: Sequence[_Rule | _List],
        file_sizes: Sequence[int],
    ) -> None:
        """Use `stacked` or `listed` instead."""
        self.layer = layer
        self.num_experts = num_experts
        self.component_names = tuple(names)
        self.component_lengths = tuple(lengths)
        self.record_bytes = sum(lengths)
        self._places = tuple(places)
        if num_experts < 1 or not names or min(lengths) < 1:
            parts = dict(zip(names, lengths, strict=True))
            raise _corrupt(f"layer {layer} has {num_experts} experts of {parts}", layer=layer)
        self._check_bounds(file_sizes)
        self._groups = self._join_rules()

    @classmethod
    def stacked(
        cls,
        layer: int,
        num_experts: int,
        components: Sequence[tuple[str, Placed] | StackedComponent],
        *,
        file_sizes: Sequence[int],
    ) -> RecordLayout:
        """Describe a layer whose components are stacked over experts.

        Args:
            layer: Layer index.
            num_experts: Experts in each stack.
            components: Either (name, whole stack), split evenly over the experts, or a `StackedComponent`.
            file_sizes: Bytes of every file, by index.

        Raises:
            CheckpointCorrupt: A stack is not a multiple of the experts, or leaves its file (L1).
        """
        names: list[str] = []
        lengths: list[int] = []
        places: list[_Rule] = []
        for component in components:
            if isinstance(component, StackedComponent):
                part = component
            else:
                name, whole = component
                length, rest = divmod(whole.length, max(num_experts, 1))
                if rest:
                    raise _corrupt(f"{name} of layer {layer}: {whole.length} bytes for {num_experts} experts")
                part = StackedComponent(name, whole.file, whole.offset, length, 0, length)
            if part.offset < 0 or part.length < 0 or part.offset + part.length > part.stride:
                raise _corrupt(f"{part.name} of layer {layer}: a part that leaves its stride: {part}")
            names.append(part.name)
            lengths.append(part.length)
            places.append(_Rule(part.file, part.base + part.offset, part.stride))
        return cls(layer, num_experts, names, lengths, places, file_sizes)

    @classmethod
    def listed(
        cls, layer: int, components: Sequence[tuple[str, Sequence[Placed]]], *, file_sizes: Sequence[int]
    ) -> RecordLayout:
        """Describe a layer with one tensor per component and expert.

        Args:
            layer: Layer index.
            components: (name, place of expert 0, 1, ...) in component order.
            file_sizes: Bytes of every file, by index.

        Raises:
            CheckpointCorrupt: Lengths differ between experts (L2), lists differ in length, or L1 is broken.
        """
        num_experts = len(components[0][1]) if components else 0
        lengths: list[int] = []
        places: list[_List] = []
        for name, spans in components:
            if len(spans) != num_experts:
                raise _corrupt(f"{name} of layer {layer}: {len(spans)} experts, others have {num_experts}")
            length = spans[0].length if spans else 0
            for expert, span in enumerate(spans):
                if span.length != length:
                    fault = f"{span.length} bytes in expert {expert}, {length} in expert 0"
                    raise _corrupt(f"{name} of layer {layer}: {fault}")
            lengths.append(length)
            places.append(_List(array("q", (s.file for s in spans)), array("q", (s.offset for s in spans))))
        return cls(layer, num_experts, [name for name, _ in components], lengths, places, file_sizes)

    @property
    def files(self) -> frozenset[int]:
        """Return the files that records of the layer lie in."""
        found: set[int] = set()
        for place in self._places:
            found.update((place.file,) if isinstance(place, _Rule) else place.files)
        return frozenset(found)

    def spans(self, expert: int) -> tuple[Span, ...]:
        """Return where the components of one record lie, in component order."""
        return tuple(Span(*self._place(index, expert)) for index in range(len(self._places)))

    def reads(self, expert: int) -> tuple[ReadOp, ...]:
        """Return the reads that fetch one record; neighbours in a file become one read."""
        if not 0 <= expert < self.num_experts:
            raise self._no_such(expert)
        if self._groups is None:
            return _coalesce([self._place(index, expert) for index in range(len(self._places))])
        return tuple(
            [
                ReadOp(file, start + expert * stride, length, first, end)
                for file, start, stride, length, first, end in self._groups
            ]
        )

    def _place(self, index: int, expert: int) -> tuple[int, int, int]:
        if not 0 <= expert < self.num_experts:
            raise self._no_such(expert)
        place = self._places[index]
        if isinstance(place, _Rule):
            return place.file, place.start + expert * place.stride, self.component_lengths[index]
        return place.files[expert], place.offsets[expert], self.component_lengths[index]

    def _no_such(self, expert: int) -> IndexError:
        return IndexError(f"expert {expert} of {self.num_experts} in layer {self.layer}")

    def _join_rules(self) -> list[tuple[int, int, int, int, int, int]] | None:
        """Join stacks that are neighbours for every expert: the reads of a record are then a few sums.

        Returns:
            (file, start, stride, length, first component, end) of each read; None if places are listed.
        """
        groups: list[tuple[int, int, int, int, int, int]] = []
        for index, (place, more) in enumerate(zip(self._places, self.component_lengths, strict=True)):
            if not isinstance(place, _Rule):
                return None
            if groups:
                file, start, stride, length, first, _ = groups[-1]
                if (file, start + length, stride) == place:
                    groups[-1] = (file, start, stride, length + more, first, index + 1)
                    continue
            groups.append((place.file, place.start, place.stride, more, index, index + 1))
        return groups

    def _check_bounds(self, file_sizes: Sequence[int]) -> None:
        for name, length, place in zip(
            self.component_names, self.component_lengths, self._places, strict=True
        ):
            if isinstance(place, _Rule):  # a stack grows with the expert, so its two ends bound it
                ends = (place.start, place.start + (self.num_experts - 1) * place.stride)
                where = zip((place.file, place.file), ends, strict=True)
            else:
                where = zip(place.files, place.offsets, strict=True)
            for file, offset in where:
                if not (0 <= file < len(file_sizes) and 0 <= offset <= file_sizes[file] - length):
                    raise _corrupt(
                        f"{name} of layer {self.layer}: {length} bytes at {offset} leave file {file}",
                        layer=self.layer,
                        file=file,
                        offset=offset,
                    )


@dataclass(frozen=True, slots=True)
class RowPart:
    """Consecutive rows of a table.

    Attributes:
        num_rows: How many.
        spans: Per component one run of `num_rows` equal rows; or, with `lengths`, one run of whole rows.
        lengths: Bytes of each component of a row, side by side in the one span; empty if they lie apart.
    """

    num_rows: int
    spans: tuple[Placed, ...]
    lengths: tuple[int, ...] = ()


class RowLayout:
    """A table of small rows in parts, in row order (parts sorted by their number, not by their name).

    Components of a row lie apart, as in a checkpoint, or side by side, as in a pack.

    Attributes:
        num_rows: Rows of all parts.
        component_names: Names, in component order (weight, scales, biases for a quantised table).
        component_lengths: Bytes of one row of each component.
        row_bytes: Their sum.
        reads_per_row: Runs that a row lies in, at most.
        parts: The parts, as given.
    """

    __slots__ = (
        "_places", "_starts", "component_lengths", "component_names", "num_rows", "parts", "reads_per_row",
        "row_bytes",
    )  # fmt: skip

    def __init__(
        self, component_names: Sequence[str], parts: Sequence[RowPart], *, file_sizes: Sequence[int]
    ) -> None:
        """Check and keep the parts.

        Raises:
            CheckpointCorrupt: A part that is not whole rows, rows of differing length, bytes outside a file.
        """
        self.component_names = tuple(component_names)
        self.parts = tuple(parts)
        starts: list[int] = []
        places: list[tuple[_RowRule, ...]] = []
        total = 0
        lengths: tuple[int, ...] = ()
        for number, part in enumerate(parts):
            num_spans = 1 if part.lengths else len(self.component_names)
            if part.num_rows < 1 or len(part.spans) != num_spans:
                raise _corrupt(
                    f"part {number} of a row table: {part.num_rows} rows, {len(part.spans)} components"
                )
            steps = tuple(_row_length(number, part.num_rows, span, file_sizes) for span in part.spans)
            found = part.lengths or steps
            if len(found) != len(self.component_names) or min(found) < 1 or sum(found) != sum(steps):
                raise _corrupt(
                    f"part {number} of a row table: components of {found} bytes in rows of {sum(steps)}"
                )
            places.append(_rules(part, steps))
            if number and found != lengths:
                raise _corrupt(f"part {number} of a row table: rows of {found} bytes, part 0 has {lengths}")
            lengths = found
            starts.append(total)
            total += part.num_rows
        if not total:
            raise _corrupt("a row table without rows")
        self._starts = array("q", starts)
        self._places = tuple(places)
        self.num_rows = total
        self.component_lengths = lengths
        self.row_bytes = sum(lengths)
        self.reads_per_row = max(len(part.spans) for part in parts)

    def spans(self, row: int) -> tuple[Span, ...]:
        """Return where the components of one row lie."""
        number, local = self.locate(row)
        return tuple(
            Span(rule.file, rule.start + local * rule.step, length)
            for rule, length in zip(self._places[number], self.component_lengths, strict=True)
        )

    def locate(self, row: int) -> tuple[int, int]:
        """Return the part of a row and its number within the part."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]


class _RowRule(NamedTuple):
    """A component whose rows repeat every `step` bytes from `start`."""

    file: int
    start: int
    step: int


def _rules(part: RowPart, steps: Sequence[int]) -> tuple[_RowRule, ...]:
    if not part.lengths:
        return tuple(
            _RowRule(span.file, span.offset, step) for span, step in zip(part.spans, steps, strict=True)
        )
    (span,) = part.spans
    starts = accumulate(part.lengths[:-1], initial=span.offset)
    return tuple(_RowRule(span.file, start, steps[0]) for start in starts)


def _row_length(number: int, num_rows: int, span: Placed, file_sizes: Sequence[int]) -> int:
    length, rest = divmod(span.length, num_rows)
    if rest or not length:
        raise _corrupt(f"part {number} of a row table: {span.length} bytes for {num_rows} rows")
    if not _is_inside(span.file, span.offset, span.length, file_sizes):
        raise _corrupt(
            f"part {number} of a row table: {span.length} bytes at {span.offset} leave file {span.file}"
        )
    return length


def _coalesce(places: Sequence[tuple[int, int, int]]) -> tuple[ReadOp, ...]:
    """Join runs that follow each other in one file."""
    operations: list[ReadOp] = []
    file, offset, length = places[0]
    first = 0
    for index in range(1, len(places)):
        next_file, next_offset, next_length = places[index]
        if next_file == file and next_offset == offset + length:
            length += next_length
        else:
            operations.append(ReadOp(file, offset, length, first, index))
            file, offset, length, first = next_file, next_offset, next_length, index
    operations.append(ReadOp(file, offset, length, first, len(places)))
    return tuple(operations)


def _is_inside(file: int, offset: int, length: int, file_sizes: Sequence[int]) -> bool:
    return 0 <= file < len(file_sizes) and offset >= 0 and length >= 0 and offset + length <= file_sizes[file]


def _corrupt(message: str, **context: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"Layout does not fit the files: {message}", hint="fetch the checkpoint again", **context
    )
