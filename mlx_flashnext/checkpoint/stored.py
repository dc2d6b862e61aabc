"""Where everything of a checkpoint lies, as frozen values: tensors, expert records, table rows, the whole.

Invariants:
1. Canonical names and logical shapes here; stored names and shapes only inside `TensorInfo`.
2. Every tensor of the table is in exactly one category of `Checkpoint.account()`.

Source: qwen4exp.md section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expert_store.layout import RecordLayout, RowLayout
from expert_store.safetensors_index import TensorInfo, TensorTable
from expert_store.verified import RecordDigests
from mlx_flashnext.config import Fp8Blocks, MatrixSpec, ModelConfig, QuantSpec

Layout = Literal["hf", "hf-fp8", "mlx", "pack"]
Role = Literal["matrix", "vector", "conv", "integer"]
Projection = Literal["gate", "up", "down"]

PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
BLOCK_SCALES = "weight_scale_inv"
"""The part of an FP8 matrix that holds one factor for each block, in spite of its name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the trunk or the MTP module.

    Attributes:
        name: Canonical name, without `.weight`.
        shape: Logical shape: unpacked, convolutions as [channels, taps].
        spec: How it is quantised, None if it is not.
        weight: The values, packed if quantised.
        scales: Scales of a quantised or FP8 matrix.
        biases: Biases of an affine matrix.
        role: What the model does with it. Only a matrix takes the compute dtype; vectors and convolutions are
            loaded as float32, integers are compared with the config and not kept.
    """

    name: str
    shape: tuple[int, ...]
    spec: MatrixSpec | None
    weight: TensorInfo
    scales: TensorInfo | None = None
    biases: TensorInfo | None = None
    role: Role = "matrix"

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """Return the stored tensors it consists of."""
        return tuple(part for part in (self.weight, self.scales, self.biases) if part is not None)

    @property
    def num_bytes(self) -> int:
        """Return its bytes on disk."""
        return sum(part.length for part in self.parts)

    def loaded_bytes(self, itemsize: int) -> int:
        """Return its bytes in memory.

        Args:
            itemsize: Bytes of one value of the compute dtype: 4 for float32, 2 for bfloat16.
        """
        if self.role == "integer":
            return 0
        if self.role != "matrix":
            return 4 * math.prod(self.shape)
        if self.spec is None or isinstance(self.spec, Fp8Blocks):  # FP8 is decoded when it is loaded
            return itemsize * math.prod(self.shape)
        factors = self.parts[1:]
        return self.weight.length + sum(
            part.length if part.dtype == "U8" else itemsize * math.prod(part.shape) for part in factors
        )


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a record: `gate_proj.weight`, its safetensors dtype tag, its shape in one record."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Routed experts of one layer.

    Attributes:
        record: Where each expert's bytes lie; its components are `components`, in the same order.
        components: Name, dtype and shape of each part.
        specs: Quantisation of each projection, None if it is stored as plain numbers.
        width: Stored expert width; at least `moe_intermediate_size`, more if the pack pads it.
    """

    record: RecordLayout
    components: tuple[Component, ...]
    specs: Mapping[Projection, MatrixSpec | None]
    width: int


@dataclass(frozen=True, slots=True)
class NgramLayout:
    """The n-gram table.

    Attributes:
        record: Where each row's bytes lie, parts in numeric order.
        components: `weight`, and `scales` and `biases` if quantised: dtype and shape of one row.
        spec: Quantisation of a row, None if it is stored as plain numbers (or FP8).
        num_rows: Rows of all parts.
        width: Values of a row.
        num_heads: Rows read per token.
        scale: The one scale of an FP8 table.
        numbers: What the checkpoint calls each part; None for a table in one piece.
    """

    record: RowLayout
    components: tuple[Component, ...]
    spec: QuantSpec | None
    num_rows: int
    width: int
    num_heads: int
    scale: TensorInfo | None = None
    numbers: tuple[int | None, ...] = (None,)

    @property
    def record_bytes(self) -> int:
        """Return the bytes of one row, all components."""
        return sum(self.record.component_lengths)


@dataclass(frozen=True, slots=True)
class AccountLine:
    """One category of a checkpoint's tensors."""

    category: str
    names: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every tensor has its place. Made by `open_checkpoint`.

    Attributes:
        directory: Where it is.
        config: Its checked configuration.
        table: Its files and tensors as stored.
        layout: Which layout the experts have.
        digest: Identity: SHA-256 of config.json, file names, sizes and headers.
        tensors: Trunk tensors by canonical name, in the order the model uses them.
        experts: Routed experts by layer.
        ngram: The n-gram table.
        mtp: MTP tensors by canonical name (`mtp.` in front); empty if the checkpoint has none.
        mtp_experts: Routed experts of the MTP layer, which counts as layer `num_hidden_layers`.
        skipped: Stored names this runtime has no use for: vision, rotary tables.
        accounts: See `account`.
        records: What the records of a pack must be; None for every other layout.
        build: Digest of the build that a pack was made of, whose tensors it holds: what was made with one is
            made with the other. None for every other layout, and for packs that do not say.
    """

    directory: Path
    config: ModelConfig
    table: TensorTable
    layout: Layout
    digest: str
    tensors: Mapping[str, StoredTensor]
    experts: Mapping[int, ExpertLayout]
    ngram: NgramLayout
    mtp: Mapping[str, StoredTensor]
    mtp_experts: ExpertLayout | None
    skipped: tuple[str, ...]
    accounts: tuple[AccountLine, ...]
    records: RecordDigests | None = None
    build: str | None = None

    def expert_layouts(self, *, mtp: bool) -> dict[int, ExpertLayout]:
        """Return the routed experts by layer, those of the MTP layer among them if asked for and there."""
        layouts = dict(self.experts)
        if mtp and self.mtp_experts is not None:
            layouts[self.config.num_hidden_layers] = self.mtp_experts
        return layouts

    def account(self) -> tuple[AccountLine, ...]:
        """Return every tensor of the table exactly once, by category.

        Returns:
            Lines named trunk, experts, ngram, mtp, mtp experts, vision, unused; empty ones left out.
        """
        return self.accounts
