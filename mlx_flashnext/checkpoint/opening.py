"""Open a checkpoint from its headers. Entry points: `open_checkpoint`, `inspect_checkpoint`.

Invariants:
1. No tensor data is read; a full-size checkpoint opens in about a second.
2. What opens is complete: every tensor the config asks for is there once, with its shape; nothing is left
   over.

Source: qwen4exp.md 3.5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from expert_store.errors import StoreError
from expert_store.pack import Manifest, has_manifest, read_manifest, record_tensors, row_tensors
from expert_store.safetensors_index import TensorInfo, TensorTable, read_tensor_table
from expert_store.verified import RecordDigests
from mlx_flashnext.checkpoint.expected import Expected, mtp_tensors, trunk_tensors
from mlx_flashnext.checkpoint.expert_layouts import FUSED, ExpertReader
from mlx_flashnext.checkpoint.grouping import (
    MTP_LAYER,
    ExpertGroup,
    PackedRecords,
    PackedRows,
    TensorGroups,
    group_tensors,
)
from mlx_flashnext.checkpoint.matching import Match, match_tensors
from mlx_flashnext.checkpoint.ngram_layout import ngram_layout
from mlx_flashnext.checkpoint.quantization import Quantization
from mlx_flashnext.checkpoint.refusals import AGAIN, AGAIN_OF_PACK
from mlx_flashnext.checkpoint.stored import AccountLine, Checkpoint, ExpertLayout, Layout, NgramLayout
from mlx_flashnext.checkpoint.structure import structure_problems
from mlx_flashnext.config import ModelConfig, parse_config, read_config_file
from mlx_flashnext.errors import ModelError, WeightMismatch
from mlx_flashnext.names import NGRAM_TABLE

Problem = ModelError | StoreError


@dataclass(frozen=True)
class Inspection:
    """All there is to say about a checkpoint, even one that does not open.

    Attributes:
        directory: Where it is.
        config: Its checked configuration.
        table: Its files and tensors as stored.
        layout: Which layout the experts have.
        missing: Names of what the config asks for and the files lack.
        unknown: Stored names that belong nowhere.
        accounts: Every tensor of the table exactly once, by category; unknown ones under `unknown`.
        problems: Why it does not open, the cause that explains most first; empty if it does.
        checkpoint: The opened checkpoint, None if there is a problem.
    """

    directory: Path
    config: ModelConfig
    table: TensorTable
    layout: Layout
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    accounts: tuple[AccountLine, ...]
    problems: tuple[Problem, ...]
    checkpoint: Checkpoint | None


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a checkpoint directory as it is, in any layout.

    Args:
        directory: Holds config.json and safetensors files.

    Raises:
        UnsupportedCheckpoint: config.json asks for something this port does not implement.
        WeightMismatch: Tensors are missing, unknown, or not what config.json says.
        StoreError: The files are damaged or absent.
    """
    inspection = inspect_checkpoint(directory)
    if inspection.checkpoint is None:
        raise inspection.problems[0]
    return inspection.checkpoint


def inspect_checkpoint(directory: Path) -> Inspection:
    """Look at a checkpoint and collect what is wrong with it instead of stopping at the first fault.

    Args:
        directory: Holds config.json and safetensors files.

    Raises:
        UnsupportedCheckpoint: config.json cannot be read or asks for something not implemented.
        StoreError: The files are damaged or absent.
    """
    raw = read_config_file(directory)
    whole = parse_config(raw, directory)
    config = ModelConfig.from_dict(whole)
    quantization = Quantization.from_config(whole)
    text = cast("Mapping[str, object]", whole.get("text_config", whole))
    manifest = read_manifest(directory) if has_manifest(directory) else None
    table = read_tensor_table(directory)
    return _Opening(directory, config, raw, text, quantization, table, manifest).inspect()


class _Opening:
    """The steps of one inspection, sharing config, groups and the list of problems."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        raw_config: bytes,
        text: Mapping[str, object],
        quantization: Quantization,
        table: TensorTable,
        manifest: Manifest | None,
    ) -> None:
        self._directory = directory
        self._config = config
        self._raw_config = raw_config
        self._text = text
        self._quantization = quantization
        self._table = table
        self._manifest = manifest
        self._groups = _groups(config, table, manifest)
        self._problems: list[Problem] = []

    def inspect(self) -> Inspection:
        groups, config = self._groups, self._config
        self._problems += structure_problems(config, groups, self._text)
        for module, kept, other in groups.duplicates:
            self._refuse(f"Tensor stored twice: {module} as {kept.name} and as {other.name}", other.name)
        trunk = self._match(trunk_tensors(config))
        has_mtp = MTP_LAYER in groups.experts or any(module.startswith("mtp.") for module in groups.modules)
        mtp = self._match(mtp_tensors(config) if has_mtp and config.num_mtp_layers else ())
        experts = {
            layer: self._experts(
                layer, f"layers.{layer}.mlp.experts", groups.experts.get(layer, ExpertGroup())
            )
            for layer in range(config.num_hidden_layers)
        }
        mtp_experts = None
        if mtp.tensors:
            group = groups.experts.get(MTP_LAYER, ExpertGroup())
            mtp_experts = self._experts(config.num_hidden_layers, "mtp.layers.0.mlp.experts", group)
        ngram = self._ngram()

        self._refuse_all("Tensor missing", trunk.missing + mtp.missing)
        missing = trunk.missing + mtp.missing
        missing += [str(error.context["missing"]) for error in self._problems if "missing" in error.context]
        lines = self._account(trunk, mtp)
        unknown = [name for line in lines if line.category == "unknown" for name in line.names]
        self._refuse_all("Tensor not known", unknown)

        if self._manifest is not None:
            for problem in self._problems:
                problem.hint = problem.hint.replace(AGAIN, AGAIN_OF_PACK)

        layout = _layout(groups)
        checkpoint = None
        if not self._problems:
            identity = self._manifest.identity if self._manifest else ""
            parts = self._table.digest.encode() + self._raw_config + identity.encode()
            digest = hashlib.sha256(parts).hexdigest()
            checkpoint = Checkpoint(
                directory=self._directory,
                config=config,
                table=self._table,
                layout=layout,
                digest=digest,
                tensors=trunk.tensors,
                experts={layer: layers for layer, layers in experts.items() if layers is not None},
                ngram=cast("NgramLayout", ngram),
                mtp=mtp.tensors,
                mtp_experts=mtp_experts,
                skipped=tuple(info.name for info in (*groups.vision, *groups.unused)),
                accounts=lines,
                records=_record_digests(groups) if self._manifest else None,
                build=self._manifest.build_of_source if self._manifest else None,
            )
        return Inspection(
            self._directory,
            config,
            self._table,
            layout,
            tuple(missing),
            tuple(unknown),
            lines,
            tuple(self._problems),
            checkpoint,
        )

    def _match(self, expected: Iterable[Expected]) -> Match:
        match = match_tensors(expected, self._groups.modules, self._quantization, self._text)
        self._problems += match.problems
        return match

    def _experts(self, layer: int, prefix: str, group: ExpertGroup) -> ExpertLayout | None:
        reader = ExpertReader(self._config, self._quantization, self._text, self._table.file_sizes)
        try:
            return reader.layout(layer, prefix, group)
        except (ModelError, StoreError) as error:
            self._problems.append(error)
            return None

    def _ngram(self) -> NgramLayout | None:
        module = f"layers.{self._config.ple_layer}.ple.ple_embedding.{NGRAM_TABLE}"
        try:
            return ngram_layout(
                module,
                self._groups.table,
                self._groups.packed_table,
                self._config,
                self._quantization,
                self._text,
                self._table.file_sizes,
            )
        except (ModelError, StoreError) as error:
            self._problems.append(error)
            return None

    def _account(self, trunk: Match, mtp: Match) -> tuple[AccountLine, ...]:
        groups, count = self._groups, self._config.num_hidden_layers
        routed = {layer: group.tensors() for layer, group in groups.experts.items()}
        categories: dict[str, list[TensorInfo]] = {
            "trunk": trunk.used,
            "experts": [info for layer in range(count) for info in routed.get(layer, ())],
            "ngram": groups.table_tensors(),
            "mtp": mtp.used,
            "mtp experts": routed.get(MTP_LAYER, []) if mtp.tensors else [],
            "vision": groups.vision,
            "unused": groups.unused,
        }
        placed = {info.name for infos in categories.values() for info in infos}
        categories["unknown"] = [info for name, info in self._table.tensors.items() if name not in placed]
        lines = tuple(
            AccountLine(category, tuple(info.name for info in infos), sum(info.length for info in infos))
            for category, infos in categories.items()
            if infos
        )
        assert sum(len(line.names) for line in lines) == len(self._table.tensors)
        return lines

    def _refuse_all(self, what: str, names: Sequence[str]) -> None:
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._refuse(f"{what}: {names[0]}{more}", names[0])

    def _refuse(self, message: str, tensor: str) -> None:
        hint = f"flashnext show {self._directory} lists every tensor; {AGAIN}"
        self._problems.append(WeightMismatch(message, hint=hint, tensor=tensor))


def _groups(config: ModelConfig, table: TensorTable, manifest: Manifest | None) -> TensorGroups:
    """Sort the tensors of a table, and the records of a pack to their layers."""
    if manifest is None:
        return group_tensors(table.tensors)
    records = record_tensors(manifest, table)
    rows = None if isinstance(manifest.rows, msgspec.UnsetType) else manifest.rows
    packed = () if rows is None else row_tensors(rows, table)
    names = {info.name for infos in (*records.values(), packed) for info in infos}
    groups = group_tensors({name: info for name, info in table.tensors.items() if name not in names})
    for layer in manifest.layers:
        number = MTP_LAYER if layer.layer == config.num_hidden_layers else layer.layer
        group = groups.experts.setdefault(number, ExpertGroup())
        group.packed = PackedRecords(layer, records[layer.layer])
    if rows is not None:
        groups.packed_table = PackedRows(rows, packed)
    return groups


def _record_digests(groups: TensorGroups) -> RecordDigests:
    digests = RecordDigests()
    for group in groups.experts.values():
        if group.packed is not None:
            layer, (first, *_) = group.packed
            digests.add(
                first.file, layer.layer, first.offset, layer.stride, layer.record_bytes, layer.digests
            )
    return digests


def _layout(groups: TensorGroups) -> Layout:
    if any(group.packed for group in groups.experts.values()):
        return "pack"
    listed = [infos for group in groups.experts.values() for infos in group.listed.values()]
    if listed:
        return (
            "hf-fp8" if any(one.dtype == "F8_E4M3" for infos in listed for one in infos.values()) else "mlx"
        )
    for group in groups.experts.values():
        for projection, parts in group.stacked.items():
            if len(parts) > 1 or (projection != "down_proj" and projection != FUSED):
                return "mlx"
    return "hf"
