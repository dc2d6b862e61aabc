"""Our own record format: every expert one aligned run of bytes, a digest each. Entry: `read_manifest`.

A pack is a directory that opens like any checkpoint. Its shards are valid safetensors:
    experts-LLL.safetensors   one U8 tensor for each expert of a layer, in order; data on a boundary of
                              `ALIGNMENT`, each tensor a multiple of it: the components of the record in the
                              order of the manifest, then zeros;
    rows-NNN.safetensors      one U8 tensor [rows, bytes] for each part of a quantised n-gram table: weight,
                              scales and biases of a row side by side, so that a row is one read of one page
                              and not three of three;
    other-NNN.safetensors     every other tensor of the source, byte for byte;
beside them the source's config and tokenizer, and `manifest.json`.

Invariants:
    K1  the manifest's identity is the SHA-256 of its own content, which holds a digest of every record and of
        every other file: two packs of one identity hold the same records, tensors and
        documents (the headers of the records' shards, which are compared field by field, have none);
    K2  a layer's records lie in one file, `stride` apart, so that the layout of a layer is one rule;
    K3  nothing in a pack is executed, and no number of the manifest is used before it has been compared with
        the headers of the files.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Final

import msgspec

from expert_store.errors import CheckpointCorrupt, PackVersionUnsupported, shown
from expert_store.layout import RecordLayout, StackedComponent
from expert_store.safetensors_file import MAX_HEADER_BYTES, TensorInfo, open_regular, read_exactly
from expert_store.safetensors_header import corrupt, parse_json
from expert_store.safetensors_index import TensorTable

FORMAT = "flashnext-pack"
VERSION = 3
"""2 added rows, 3 the build. Earlier packs are read; tables of version 1 lie among the other tensors."""
MANIFEST_NAME: Final = "manifest.json"
ALIGNMENT: Final = 16384
"""Page size of Apple Silicon: a read of a record touches no page of its neighbours."""

_REPACK: Final = "the pack is damaged: make it again with flashnext pack"
_MAX_COMPONENTS: Final = 64
_DIGEST: Final = re.compile("[0-9a-f]{32}")
_BUILD: Final = re.compile("[0-9a-f]{64}")
_FILE_NAME: Final = re.compile(r"(?!\.)[^/\\\x00-\x1f]{1,255}")


class PackComponent(msgspec.Struct, frozen=True):
    """One part of every record of a layer: where it comes in the record is the sum of those before it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    length: int


class PackLayer(msgspec.Struct, frozen=True):
    """The records of one layer.

    Attributes:
        layer: Layer index; the MTP module's is the number of the others.
        file: Name of the shard.
        stride: Bytes from one record to the next.
        components: In the order in which they lie in a record.
        digests: XXH3-128 of each record without its padding, as hexadecimal text.
    """

    layer: int
    file: str
    stride: int
    components: tuple[PackComponent, ...]
    digests: tuple[str, ...]

    @property
    def record_bytes(self) -> int:
        """Return the bytes of a record without padding."""
        return sum(component.length for component in self.components)

    @property
    def num_experts(self) -> int:
        """Return how many records there are."""
        return len(self.digests)


class PackRowPart(msgspec.Struct, frozen=True):
    """Consecutive rows: `number` as the source counts its parts, null for a table in one piece."""

    number: int | None
    num_rows: int


class PackRows(msgspec.Struct, frozen=True):
    """The n-gram table, its rows in one piece each.

    Attributes:
        components: In the order in which they lie in a row.
        parts: In row order.
    """

    components: tuple[PackComponent, ...]
    parts: tuple[PackRowPart, ...]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return sum(component.length for component in self.components)


class PackFile(msgspec.Struct, frozen=True):
    """Any other file of a pack, and the XXH3-128 of all of it."""

    name: str
    size: int
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """What `manifest.json` holds.

    Attributes:
        source: Digest of the checkpoint it was made from.
        layers: Layers with routed experts, in order.
        files: All other files, in name order.
        identity: SHA-256 of everything else here (K1).
        rows: The n-gram table if its rows have several components; unset also in version 1.
        build: `build_digest` of the source, by which drafts and captures know it; unset before version 3.
    """

    format: str
    version: int
    source: str
    layers: tuple[PackLayer, ...]
    files: tuple[PackFile, ...]
    identity: str = ""
    rows: PackRows | msgspec.UnsetType = msgspec.UNSET  # and so in no identity of version 1
    build: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def build_of_source(self) -> str | None:
        """Return the build it says it was made of, if it does."""
        return None if isinstance(self.build, msgspec.UnsetType) else self.build

    def computed_identity(self) -> str:
        """Return the identity that the content gives."""
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, identity=""))).hexdigest()

    def sealed(self) -> Manifest:
        """Return the manifest with its identity."""
        return msgspec.structs.replace(self, identity=self.computed_identity())


_DECODER: Final = msgspec.json.Decoder(Manifest)


def record_name(layer: int, expert: int) -> str:
    """Return what a shard calls the tensor of one record."""
    return f"flashnext.layers.{layer}.experts.{expert}"


def rows_name(part: int) -> str:
    """Return what a shard calls the tensor of one part of the n-gram table."""
    return f"flashnext.rows.parts.{part}"


def padded(num_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def has_manifest(directory: Path) -> bool:
    """Return whether a directory is a pack, or claims to be one."""
    return os.path.lexists(directory / MANIFEST_NAME)


def read_manifest(directory: Path) -> Manifest:
    """Read and check a pack's manifest; the files it speaks of are not looked at.

    Raises:
        PackVersionUnsupported: A later version.
        CheckpointCorrupt: Not a manifest, or its identity is not that of its content.
        SourceFailed: The operating system refused to read it.
    """
    path = directory / MANIFEST_NAME
    with open_regular(path, MANIFEST_NAME) as (stream, status):
        if status.st_size > MAX_HEADER_BYTES:
            raise _corrupt(f"Manifest is larger than {MAX_HEADER_BYTES} bytes: {status.st_size}")
        text = read_exactly(stream, status.st_size, MANIFEST_NAME, 0)
    document = parse_json(text, MANIFEST_NAME)
    if document.get("format") != FORMAT:
        raise _corrupt(f"Not a pack: {MANIFEST_NAME} has format {shown(document.get('format'))}")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _corrupt(f"Pack has no version: {shown(version)}")
    if version > VERSION:
        raise PackVersionUnsupported(
            f"The pack has version {shown(version)}, this program reads up to {VERSION}",
            hint="upgrade flashnext, or make the pack again",
            version=version,
        )
    try:
        manifest = _DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _corrupt(f"Manifest is malformed: {error}") from error
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name):
            raise _corrupt(
                f"Manifest lists a file that is not a plain name: {shown(file.name)}", file=file.name
            )
    if manifest.build_of_source is not None and not _BUILD.fullmatch(manifest.build_of_source):
        raise _corrupt(f"Manifest names no build: {shown(manifest.build_of_source)}")
    if manifest.computed_identity() != manifest.identity:
        raise _corrupt(
            f"Manifest was altered: its content gives {manifest.computed_identity()[:16]}, "
            f"it says {manifest.identity[:16]!r}"
        )
    return manifest


def record_tensors(manifest: Manifest, table: TensorTable) -> dict[int, tuple[TensorInfo, ...]]:
    """Return the stored tensor of every record, by layer, compared with the headers of the shards (K3).

    Raises:
        CheckpointCorrupt: A layer twice; a record that is missing, elsewhere, or of another size; a file that
            the manifest lists and the folder lacks; a tensor for which it has no digest (K1).
    """
    for file in manifest.files:
        if not (table.directory / file.name).is_file():
            raise _corrupt(f"Pack lacks a file of its manifest: {file.name}", file=file.name)
    found: dict[int, tuple[TensorInfo, ...]] = {}
    for layer in manifest.layers:
        if layer.layer < 0:
            raise _corrupt(f"Manifest lists layer {layer.layer}", layer=layer.layer)
        if layer.layer in found:
            raise _corrupt(f"Manifest lists layer {layer.layer} twice", layer=layer.layer)
        found[layer.layer] = _tensors(layer, table)
    _check_digests(manifest, table, {info.name for infos in found.values() for info in infos})
    return found


def _check_digests(manifest: Manifest, table: TensorTable, records: Set[str]) -> None:
    """Refuse a tensor whose bytes nobody compares: it is no record, and its file has no digest (K1)."""
    listed = {file.name for file in manifest.files}
    is_listed = [_place(table, number) in listed for number in range(len(table.files))]
    for info in table.tensors.values():
        if not is_listed[info.file] and info.name not in records:
            raise _corrupt(
                f"Manifest has no digest for {shown(info.name)} of {_place(table, info.file)}",
                tensor=info.name,
            )


def _place(table: TensorTable, file: int) -> str:
    """Return where a file lies in its pack: a namesake in a folder of it is another file."""
    return table.files[file].path.relative_to(table.directory).as_posix()


def row_tensors(rows: PackRows, table: TensorTable) -> tuple[TensorInfo, ...]:
    """Return the stored tensor of every part of the n-gram table, compared with the headers (K3).

    Raises:
        CheckpointCorrupt: A part that is missing or of another size.
    """
    _check_components("the rows", rows.components)
    if not rows.parts:
        raise _corrupt("Manifest lists rows without parts")
    infos: list[TensorInfo] = []
    for number, part in enumerate(rows.parts):
        name = rows_name(number)
        info = table.tensors.get(name)
        if info is None:
            raise _corrupt(f"Pack lacks a part of its table: {name}", tensor=name)
        if (info.dtype, info.shape) != ("U8", (part.num_rows, rows.row_bytes)):
            raise _corrupt(
                f"Rows are not what the manifest says: {name} is {info.dtype} {list(info.shape)}, "
                f"U8 [{part.num_rows}, {rows.row_bytes}] was expected",
                tensor=name,
            )
        infos.append(info)
    return tuple(infos)


def _check_components(where: str, components: Sequence[PackComponent]) -> None:
    if not 0 < len(components) <= _MAX_COMPONENTS:
        raise _corrupt(f"Manifest gives {where} {len(components)} parts")
    for component in components:
        if component.length < 1 or min(component.shape, default=1) < 0 or math.prod(component.shape) < 1:
            raise _corrupt(f"{component.name} of {where} has {component.length} bytes, {component.shape}")


def _tensors(layer: PackLayer, table: TensorTable) -> tuple[TensorInfo, ...]:
    where = f"layer {layer.layer}"
    _check_components(where, layer.components)
    if not layer.digests:
        raise _corrupt(f"Manifest gives {where} no records")
    for digest in layer.digests:
        if not _DIGEST.fullmatch(digest):
            raise _corrupt(f"Manifest gives {where} a digest that is none: {shown(digest)}")
    if layer.stride != padded(layer.record_bytes):
        raise _corrupt(
            f"Records of {where} are {layer.stride} bytes apart, {padded(layer.record_bytes)} were expected"
        )
    infos: list[TensorInfo] = []
    for expert in range(layer.num_experts):
        name = record_name(layer.layer, expert)
        info = table.tensors.get(name)
        if info is None:
            raise _corrupt(f"Pack lacks a record: {name}", tensor=name)
        expected = infos[0].offset + expert * layer.stride if infos else info.offset
        if (info.dtype, info.shape, info.offset) != ("U8", (layer.stride,), expected) or (
            _place(table, info.file) != layer.file
        ):
            raise _corrupt(
                f"Record is not where the manifest puts it: {name} is {info.dtype} {list(info.shape)} at "
                f"{info.offset} of {_place(table, info.file)}",
                tensor=name,
            )
        infos.append(info)
    if infos[0].offset % ALIGNMENT:
        raise _corrupt(f"Records of {where} begin at {infos[0].offset}, not on a boundary of {ALIGNMENT}")
    return tuple(infos)


def record_layout(layer: PackLayer, first: TensorInfo, file_sizes: tuple[int, ...]) -> RecordLayout:
    """Return where the records of a layer lie: one rule, one read each (K2).

    Args:
        layer: The manifest's entry, checked by `record_tensors`.
        first: The tensor of record 0.
        file_sizes: Bytes of every file of the table.
    """
    parts: list[StackedComponent] = []
    at = 0
    for component in layer.components:
        parts.append(
            StackedComponent(component.name, first.file, first.offset, layer.stride, at, component.length)
        )
        at += component.length
    return RecordLayout.stacked(layer.layer, layer.num_experts, parts, file_sizes=file_sizes)


def shard_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], *, aligned: bool, origin: str = "pt"
) -> bytes:
    """Return the first bytes of a safetensors file, up to where its data begin.

    Args:
        tensors: Name to (dtype tag, shape, bytes), in the order in which the data follow.
        aligned: Let the data begin on a boundary of `ALIGNMENT`; else of 8.
        origin: What the metadata call the format: readers tell the layouts of `pt` and `mlx` apart by it.
    """
    entries: dict[str, object] = {"__metadata__": {"format": origin}}
    at = 0
    for name, (dtype, shape, length) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + length)}
        at += length
    text = msgspec.json.encode(entries)
    boundary = ALIGNMENT if aligned else 8
    text += b" " * (-(8 + len(text)) % boundary)
    return len(text).to_bytes(8, "little") + text


def _corrupt(message: str, **context: object) -> CheckpointCorrupt:
    return corrupt(message, hint=_REPACK, **context)
