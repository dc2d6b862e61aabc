"""The parts of a conversion: what is read, piece by piece, and which tensors it becomes.

Entry points: `CopyWork`, `MatrixWork`, `ExpertsWork`, all of the protocol `Work`.

Invariant: the bytes of piece p + 1 follow those of piece p in every tensor of a work, so that a tensor is
written from its beginning to its end whatever the order of works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import mlx.core as mx
import numpy as np

from expert_store.safetensors_index import TensorInfo
from expert_store.source import ByteSource, cut_short
from mlx_flashnext.checkpoint import BLOCK_SCALES, ExpertLayout, Projection
from mlx_flashnext.config import Fp8Blocks, QuantSpec
from mlx_flashnext.conversion.values import (
    BYTES,
    Blocks,
    Decoder,
    Output,
    Plain,
    decode,
    encode,
    memory_of,
    outputs_of,
)
from mlx_flashnext.errors import ModelError

PIECE_BYTES: Final = 8 << 20
"""Stored bytes of a piece of a matrix: about those of one BF16 expert."""

Raw = tuple[memoryview, ...]


@dataclass(slots=True)
class Deviation:
    """How far what is stored is from what was read.

    Attributes:
        difference: Sum of squared differences.
        square: Sum of squared values.
    """

    difference: float = 0.0
    square: float = 0.0

    @property
    def relative(self) -> float:
        """Return the root of the ratio of the two sums; 0 where every value is 0."""
        return (self.difference / self.square) ** 0.5 if self.square else 0.0

    def add(self, values: mx.array, stored: mx.array) -> None:
        """Take a piece."""
        exact = values.astype(mx.float32)
        sums = mx.stack([mx.square(exact - stored).sum(), mx.square(exact).sum()])
        more, square = np.array(sums, np.float64)
        self.difference += float(more)
        self.square += float(square)


class Work(Protocol):
    """A part of a conversion.

    Attributes:
        group: `experts`, `trunk`, `table`, `embedding`, `head`, `mtp experts`, `mtp`, or `copied`.
        layer: Layer index, None for what belongs to no layer.
        outputs: The tensors it becomes.
        num_pieces: How many pieces it is read in.
    """

    @property
    def group(self) -> str:
        """Return the group."""
        ...

    @property
    def layer(self) -> int | None:
        """Return the layer."""
        ...

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Return the outputs."""
        ...

    @property
    def num_pieces(self) -> int:
        """Return the number."""
        ...

    def read(self, source: ByteSource, piece: int) -> Raw:
        """Return the stored bytes of a piece. May run on another thread than the rest.

        Raises:
            StoreError: They cannot be read, or end early.
        """
        ...

    def convert(self, piece: int, raw: Raw, deviation: Deviation | None = None) -> list[memoryview]:
        """Return the bytes that each output has for a piece, and note the deviation if asked to.

        Raises:
            WeightMismatch: A value is not finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class CopyWork:
    """A tensor that keeps its bytes; `transpose` moves the second axis to the end (a vision convolution)."""

    info: TensorInfo
    output: Output
    transpose: bool = False
    group: str = "copied"
    layer: int | None = None

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Return the tensor."""
        return (self.output,)

    @property
    def num_pieces(self) -> int:
        """Return the number of pieces."""
        return 1 if self.transpose else -(-self.info.length // PIECE_BYTES)

    def read(self, source: ByteSource, piece: int) -> Raw:
        """Return the stored bytes of a piece; see `Work`."""
        first = piece * PIECE_BYTES
        end = self.info.length if self.transpose else min(self.info.length, first + PIECE_BYTES)
        return (read_run(source, self.info, first, end - first),)

    def convert(self, piece: int, raw: Raw, deviation: Deviation | None = None) -> list[memoryview]:
        """Return them as they are; see `Work`."""
        del piece, deviation  # nothing is lost
        if not self.transpose:
            return list(raw)
        width = BYTES[self.info.dtype]
        stored = np.frombuffer(raw[0], f"V{width}").reshape(self.info.shape)
        return [memoryview(np.moveaxis(stored, 1, -1).tobytes())]


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """One matrix, in pieces of rows.

    Attributes:
        weight: Where it lies.
        scales: Where its block scales lie, if it has any.
        shape: Rows and columns.
        decoder: Reads a piece as values.
        spec: What it becomes.
    """

    stem: str
    weight: TensorInfo
    scales: TensorInfo | None
    shape: tuple[int, int]
    decoder: Decoder
    spec: QuantSpec | None
    group: str
    layer: int | None = None

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Return the tensors it becomes."""
        return outputs_of(self.stem, self.shape[:1], self.shape[1], self.spec, self.decoder.plain)

    @property
    def num_pieces(self) -> int:
        """Return the number of pieces."""
        return -(-self.shape[0] // self._piece_rows)

    def read(self, source: ByteSource, piece: int) -> Raw:
        """Return the rows of a piece, and the scales of their blocks; see `Work`."""
        first, end = self._rows(piece)
        row = self.weight.length // self.shape[0]
        raw = (read_run(source, self.weight, first * row, (end - first) * row),)
        if self.scales is None:
            return raw
        tall = self.decoder.blocks.rows if isinstance(self.decoder, Blocks) else 1
        row = self.scales.length // self.scales.shape[0]
        begin, stop = first // tall, -(-end // tall)
        return (*raw, read_run(source, self.scales, begin * row, (stop - begin) * row))

    def convert(self, piece: int, raw: Raw, deviation: Deviation | None = None) -> list[memoryview]:
        """Return the parts of a piece; see `Work`."""
        first, end = self._rows(piece)
        values = self.decoder(raw, (end - first, self.shape[1]))
        return _converted(values, self.spec, self.decoder.plain, deviation)

    @property
    def _piece_rows(self) -> int:
        rows = max(1, PIECE_BYTES * self.shape[0] // self.weight.length)
        if isinstance(self.decoder, Blocks):
            rows = -(-rows // self.decoder.blocks.rows) * self.decoder.blocks.rows
        return rows

    def _rows(self, piece: int) -> tuple[int, int]:
        rows = self._piece_rows
        return piece * rows, min(self.shape[0], (piece + 1) * rows)


class ExpertsWork:
    """The routed experts of one layer; a piece is one expert."""

    def __init__(
        self, stem: str, layout: ExpertLayout, spec: QuantSpec | None, hidden: int, group: str
    ) -> None:
        """Prepare a layer.

        Args:
            stem: What the stacks are called, without `.gate_proj` and the like.
            layout: Where the experts lie.
            spec: What all three projections become.
            hidden: Width of the residual stream.
            group: See `Work`.
        """
        self.group = group
        self.layer = layout.record.layer
        self.num_pieces = layout.record.num_experts
        self._layout = layout
        self.spec = spec
        places = {component.name: index for index, component in enumerate(layout.components)}
        self._shapes: dict[Projection, tuple[int, int]] = {
            "gate": (layout.width, hidden),
            "up": (layout.width, hidden),
            "down": (hidden, layout.width),
        }
        self._decoders: dict[Projection, Decoder] = {}
        self._parts: dict[Projection, tuple[int, ...]] = {}
        outputs: list[Output] = []
        for projection, shape in self._shapes.items():
            name = f"{projection}_proj"
            stored = layout.specs[projection]
            weight = places[f"{name}.weight"]
            if isinstance(stored, Fp8Blocks):
                scales = places[f"{name}.{BLOCK_SCALES}"]
                dtype = layout.components[scales].dtype
                self._parts[projection] = (weight, scales)
                self._decoders[projection] = Blocks(f"{stem}.{name}", stored, dtype)
            else:
                self._parts[projection] = (weight,)
                self._decoders[projection] = Plain(f"{stem}.{name}", layout.components[weight].dtype)
            plain = self._decoders[projection].plain
            outputs += outputs_of(f"{stem}.{name}", (self.num_pieces, shape[0]), shape[1], spec, plain)
        self.outputs = tuple(outputs)

    def read(self, source: ByteSource, piece: int) -> Raw:
        """Return the components of one expert; see `Work`."""
        record = self._layout.record
        whole = memoryview(bytearray(record.record_bytes))
        ends = [0]
        for length in record.component_lengths:
            ends.append(ends[-1] + length)
        views = [whole[begin:end] for begin, end in pairwise(ends)]
        runs = record.reads(piece)
        got = source.read_runs(runs, views)
        if got != record.record_bytes:
            what = f"expert {piece} of layer {record.layer}"
            raise cut_short(source, what, runs[0].file, runs[0].offset, record.record_bytes, got)
        return tuple(views)

    def convert(self, piece: int, raw: Raw, deviation: Deviation | None = None) -> list[memoryview]:
        """Return the parts of one expert; see `Work`."""
        del piece  # every expert is alike
        found: list[memoryview] = []
        for projection, shape in self._shapes.items():
            decoder = self._decoders[projection]
            values = decoder([raw[part] for part in self._parts[projection]], shape)
            found += _converted(values, self.spec, decoder.plain, deviation)
        return found


def convert_piece(work: Work, piece: int, raw: Raw, deviation: Deviation | None = None) -> list[memoryview]:
    """Return the bytes that each output of a work has for a piece.

    Raises:
        ModelError: MLX has no memory for it, or fails in another way; the tensor is named.
        WeightMismatch: A value is not finite.
    """
    try:
        return work.convert(piece, raw, deviation)
    except (RuntimeError, MemoryError) as error:
        name = work.outputs[0].name
        raise ModelError(
            f"Cannot convert piece {piece} of {name}: {error}",
            hint="close other programs, then run the same command again: it goes on from where it stopped",
            tensor=name,
        ) from error


def read_run(source: ByteSource, info: TensorInfo, first: int, length: int) -> memoryview:
    """Return some bytes of a stored tensor.

    Raises:
        RecordCorrupt: The file ended early.
    """
    view = memoryview(bytearray(length))
    got = source.read_into(info.file, info.offset + first, [view])
    if got != length:
        raise cut_short(source, info.name, info.file, info.offset + first, length, got)
    return view


def _converted(
    values: mx.array, spec: QuantSpec | None, plain: str, deviation: Deviation | None
) -> list[memoryview]:
    parts: Sequence[mx.array] = encode(values, spec, plain)
    if deviation is not None:
        deviation.add(values, decode(parts, spec))
    return memory_of(parts)
