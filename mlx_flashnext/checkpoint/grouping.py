"""Stored tensors sorted by what they belong to. Entry point: `group_tensors`.

Invariant: every tensor of the table is in exactly one group; a second tensor for a taken place is kept apart
as a duplicate, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from expert_store.pack import PackLayer, PackRows
from expert_store.safetensors_index import TensorInfo
from mlx_flashnext.names import NGRAM_TABLE, TensorName, layer_of, parse_name

MTP_LAYER = -1

Parts = dict[str, TensorInfo]


class Duplicate(NamedTuple):
    """Two stored tensors that both claim one place."""

    module: str
    kept: TensorInfo
    other: TensorInfo


class PackedRecords(NamedTuple):
    """Records of one layer of a pack: the manifest's entry, and the tensor of each record."""

    layer: PackLayer
    tensors: tuple[TensorInfo, ...]


class PackedRows(NamedTuple):
    """The n-gram table of a pack: the manifest's entry, and the tensor of each part."""

    rows: PackRows
    tensors: tuple[TensorInfo, ...]


@dataclass(slots=True)
class ExpertGroup:
    """Routed experts of one layer as stored: stacks, one tensor per expert and part, or a pack's records.

    `stacked["gate_up_proj"]["scales"]`; `listed["gate_proj", "weight"][expert]`.
    """

    stacked: dict[str, Parts] = field(default_factory=dict)
    listed: dict[tuple[str, str], dict[int, TensorInfo]] = field(default_factory=dict)
    packed: PackedRecords | None = None

    def tensors(self) -> list[TensorInfo]:
        """Return everything in the group."""
        stacks = [info for parts in self.stacked.values() for info in parts.values()]
        listed = [info for infos in self.listed.values() for info in infos.values()]
        return stacks + listed + list(self.packed.tensors if self.packed else ())


@dataclass(slots=True)
class TensorGroups:
    """All tensors of a table.

    Attributes:
        modules: Plain tensors of trunk and MTP by canonical module, then part.
        experts: Routed experts by layer; `MTP_LAYER` for those of the MTP module.
        table: Parts of the n-gram table by their number, None for one that is whole.
        packed_table: The same of a pack, whose rows lie in one piece.
        table_layers: Layers whose names hold table parts.
        vision: Vision tensors.
        unused: Rotary tables that some exporters leave in.
        duplicates: Tensors for a place that was taken.
    """

    modules: dict[str, Parts] = field(default_factory=dict)
    experts: dict[int, ExpertGroup] = field(default_factory=dict)
    table: dict[int | None, Parts] = field(default_factory=dict)
    packed_table: PackedRows | None = None
    table_layers: set[int] = field(default_factory=set)
    vision: list[TensorInfo] = field(default_factory=list)
    unused: list[TensorInfo] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)

    def table_tensors(self) -> list[TensorInfo]:
        """Return every tensor of the n-gram table."""
        apart = [info for parts in self.table.values() for info in parts.values()]
        return apart + list(self.packed_table.tensors if self.packed_table else ())


def group_tensors(tensors: Mapping[str, TensorInfo]) -> TensorGroups:
    """Sort a table's tensors by canonical place."""
    groups = TensorGroups()
    # The FP8 layout has 150,528 names of the form HEAD.mlp.experts.TAIL: 49 heads times 3072 tails, each
    # parsed once.
    heads: dict[str, ExpertGroup] = {}
    tails: dict[str, tuple[tuple[str, str], int]] = {}
    for stored, info in tensors.items():
        head, _, tail = stored.partition(".mlp.experts.")
        group, place = heads.get(head), tails.get(tail)
        if group is None or place is None:
            name = parse_name(stored)
            if name.expert is None:
                _place(groups, name, info)
                continue
            group = heads[head] = _expert_group(groups, name)
            place = tails[tail] = ((name.module.rpartition(".")[2], name.part), name.expert)
        key, expert = place
        listed = group.listed.get(key)
        if listed is None:
            listed = group.listed[key] = {}
        if listed.setdefault(expert, info) is not info:
            module = f"{parse_name(stored).module} of expert {expert}"
            groups.duplicates.append(Duplicate(module, listed[expert], info))
    return groups


def _place(groups: TensorGroups, name: TensorName, info: TensorInfo) -> None:
    module = name.module
    if name.space == "vision":
        groups.vision.append(info)
    elif ".mlp.experts." in module:
        parts = _expert_group(groups, name).stacked.setdefault(module.rpartition(".")[2], {})
        _put(groups, parts, module, name.part, info)
    elif module.endswith("." + NGRAM_TABLE):
        groups.table_layers.add(layer_of(module) or 0)
        _put(groups, groups.table.setdefault(name.table_part, {}), module, name.part, info)
    elif module.endswith(".inv_freq"):
        groups.unused.append(info)
    else:
        _put(groups, groups.modules.setdefault(module, {}), module, name.part, info)


def _expert_group(groups: TensorGroups, name: TensorName) -> ExpertGroup:
    layer = MTP_LAYER if name.space == "mtp" else layer_of(name.module) or 0
    return groups.experts.setdefault(layer, ExpertGroup())


def _put(groups: TensorGroups, parts: Parts, module: str, part: str, info: TensorInfo) -> None:
    if parts.setdefault(part, info) is not info:
        groups.duplicates.append(Duplicate(module, parts[part], info))
