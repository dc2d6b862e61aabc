"""A capture set: what a target build said and computed, on disk, for a trainer of drafts. Reads it.

Entry point: `CaptureSet.open`; `capture_writer.py` makes it. A document is one prompt with the answer that
this very target gave: its tokens, the features of every row that the target consumed, and the experts that
its routers chose. Only numpy and the standard library are used, so that trainers of any framework read it.

Invariants:
C1. Every shard is listed with its size and digest, and every place in it follows from the listed numbers:
    nothing in a shard is used as an offset. A shard is compared with its digest before anything of it is
    used.
C2. A document belongs to one split, decided by its prompt alone before anything is cut into windows.
C3. The last token of a document has no features: the target never consumed it.

The format is described in docs/FORMATS.md.
"""

# Shapes: S tokens, R = S - 1 rows, F features side by side, L routed layers, K experts of a row.

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from drafter.documents import DocumentRefused, check_version, parse_object, read_document, unusable
from drafter.errors import DamagedDocument, DrafterError
from drafter.files import naming
from drafter.reasons import shown

FORMAT = "flashnext-draft-capture"
VERSION = 1
MANIFEST, INDEX = "manifest.json", "index.jsonl"
TRAIN, HELD_OUT = "train", "held_out"
ITEMSIZE = {"float32": 4, "bfloat16": 2}

MAX_TOKENS = 1 << 22  # of a document
MAX_WIDTH = 1 << 20  # of a row of features
MAX_LAYERS, MAX_EXPERTS = 1 << 10, 1 << 16
MAX_LINE_BYTES = 1 << 26
MAX_SHARDS = 100_000
_SHARD = re.compile(r"shard-[0-9]{5}\.bin")
TEXT_LIMIT = 256
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class CaptureIdentity:
    """What a capture set was made of, field by field; two sets with equal identities may be joined.

    Attributes:
        target_name: what the model is called; for people.
        target_digest: of the build; as in a draft's contract.
        tokenizer_digest: as in a draft's contract.
        quantisation: of the build, in words.
        runtime_version: of the program that captured.
        vocab_size: V, padded.
        num_target_layers: of the target.
        taps: 0-based layers whose outputs stand side by side in a row of features.
        contraction: of the streams.
        hidden_size: H; a row of features is len(taps) * H wide.
        dtype: of stored features: `float32` or `bfloat16`, the target's own.
        route_layers: layers whose routes are kept; none if routes were not.
        top_k: experts of a row.
        sampling: how answers were drawn: temperature, top_p, top_k, min_p, seed.
        max_tokens: most tokens of an answer.
        prompts_digest: of the prompts and their order.
        held_out_every: one document in so many is held out, by the hash of its prompt.
    """

    target_name: str
    target_digest: str
    tokenizer_digest: str
    quantisation: str
    runtime_version: str
    vocab_size: int
    num_target_layers: int
    taps: tuple[int, ...]
    contraction: str
    hidden_size: int
    dtype: str
    route_layers: tuple[int, ...]
    top_k: int
    sampling: dict[str, float]
    max_tokens: int
    prompts_digest: str
    held_out_every: int

    @property
    def feature_width(self) -> int:
        """Return F."""
        return len(self.taps) * self.hidden_size

    def digest(self) -> str:
        """Return the SHA-256 of every field: what makes two sets one."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """One document of a shard, as its index says.

    Attributes:
        key: of the prompt: `document_key`.
        split: `train` or `held_out`.
        label: a genre, say; may be empty.
        num_prompt: tokens of the prompt.
        num_tokens: of prompt and answer.
        shard: where it lies.
        offset: of its first byte there.
    """

    key: str
    split: str
    label: str
    num_prompt: int
    num_tokens: int
    shard: str
    offset: int


@dataclass(frozen=True, slots=True)
class CapturedDocument:
    """One document.

    Attributes:
        tokens: int32 [S], prompt and answer.
        num_prompt: tokens of the prompt.
        features: float32 [R, F].
        routes: uint16 [R, L, K], experts as the routers handed them over.
        label: a genre, say.
    """

    tokens: NDArray[np.int32]
    num_prompt: int
    features: NDArray[np.float32]
    routes: NDArray[np.uint16]
    label: str = ""


def document_key(prompt: list[int] | tuple[int, ...]) -> str:
    """Return what names a document: the hash of its prompt's tokens."""
    return hashlib.sha256(np.asarray(prompt, np.int32).tobytes()).hexdigest()[:32]


def split_of(key: str, held_out_every: int) -> str:
    """Return the split that a document belongs to, by its key alone (C2)."""
    return HELD_OUT if held_out_every and int(key[:8], 16) % held_out_every == 0 else TRAIN


def document_bytes(identity: CaptureIdentity, num_tokens: int) -> tuple[int, int, int]:
    """Return the bytes of a document's tokens, features and routes."""
    rows = num_tokens - 1
    features = rows * identity.feature_width * ITEMSIZE[identity.dtype]
    return 4 * num_tokens, features, 2 * rows * len(identity.route_layers) * identity.top_k


class CaptureSet:
    """An open capture set.

    Attributes:
        directory: where it lies.
        identity: what it was made of.
        documents: of all shards, in order.
    """

    def __init__(
        self,
        directory: Path,
        identity: CaptureIdentity,
        shards: Mapping[str, tuple[int, str]],
        documents: list[DocumentInfo],
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.documents = documents
        self._shards = dict(shards)
        self._sound: set[str] = set()

    @classmethod
    def open(cls, directory: Path) -> CaptureSet:
        """List a capture set; shards are compared with their digests when first read.

        Raises:
            DrafterError: it is none, of another version, or its documents contradict each other or the files.
        OSError: a file of it cannot be read.
        """
        try:
            identity = read_manifest(bytes_of(directory / MANIFEST))
            shards, documents = read_index(bytes_of(directory / INDEX), identity)
        except DocumentRefused as error:
            raise unusable(f"No sound capture set in {directory}", error, hint="capture again") from None
        for name, (size, _) in shards.items():
            found = _size_of(directory / name)
            if found != size:
                raise DamagedDocument(
                    f"{directory / name} has {found} bytes, its index says {size}",
                    hint="delete the set and capture again",
                )
        return cls(directory, identity, shards, documents)

    def of_split(self, split: str) -> list[DocumentInfo]:
        """Return the documents of `train` or `held_out`."""
        return [document for document in self.documents if document.split == split]

    def digest(self) -> str:
        """Return the digest of identity and of every shard's digest: what a training run names."""
        whole = hashlib.sha256(self.identity.digest().encode())
        for name, (_, digest) in self._shards.items():
            whole.update(f"{name} {digest}\n".encode())
        return whole.hexdigest()

    def read(self, info: DocumentInfo) -> CapturedDocument:
        """Return a document.

        Raises:
            DrafterError: its shard is not what was written, or holds values that cannot be.
        """
        self._compare(info.shard)
        identity, rows = self.identity, info.num_tokens - 1
        parts, data = document_bytes(identity, info.num_tokens), b""
        path = self.directory / info.shard
        with naming(path), path.open("rb") as stream:
            stream.seek(info.offset)
            data = stream.read(sum(parts))
        if len(data) != sum(parts):
            raise DamagedDocument(f"{info.shard} is cut short", hint="delete the set and capture again")
        tokens = np.frombuffer(data, "<i4", info.num_tokens)
        raw = np.frombuffer(
            data, "<u2" if identity.dtype == "bfloat16" else "<f4", rows * identity.feature_width, parts[0]
        )
        if identity.dtype == "bfloat16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        routes = np.frombuffer(data, "<u2", offset=parts[0] + parts[1])
        features = raw.reshape(rows, identity.feature_width)
        if tokens.min() < 0 or tokens.max() >= identity.vocab_size or not np.isfinite(features).all():
            raise DamagedDocument(
                f"A document of {info.shard} holds tokens or features that cannot be", hint="capture again"
            )
        return CapturedDocument(
            tokens.astype(np.int32),
            info.num_prompt,
            features,
            routes.reshape(rows, len(identity.route_layers), identity.top_k),
            info.label,
        )

    def _compare(self, shard: str) -> None:
        if shard in self._sound:
            return
        size, digest = self._shards[shard]
        found = file_digest(self.directory / shard)
        if found != digest:
            raise DamagedDocument(
                f"{shard} is damaged: {size} bytes with digest {found[:12]}, written with {digest[:12]!a}",
                hint="delete the set and capture again",
            )
        self._sound.add(shard)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with naming(path), path.open("rb") as stream:
        while piece := stream.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def read_manifest(data: bytes) -> CaptureIdentity:
    """Return the identity that a manifest states.

    Raises:
        DocumentRefused: it is no manifest of this version, or a field of it cannot be.
    """
    document = parse_object(data, MANIFEST)
    check_version(MANIFEST, (document.pop("format", None), document.pop("version", None)), (FORMAT, VERSION))
    said = document.pop("identity_digest", None)
    names = {field.name: str(field.type) for field in fields(CaptureIdentity)}
    if document.keys() != names.keys():
        wrong = sorted(document.keys() ^ names.keys())
        raise DocumentRefused(f"{MANIFEST} lacks or adds {shown(', '.join(wrong))}")
    values = {name: _value(name, kind, document[name]) for name, kind in names.items()}
    identity = CaptureIdentity(**cast("dict[str, Any]", values))
    _check_identity(identity)
    if said != identity.digest():
        raise DocumentRefused(f"{MANIFEST} does not have the digest that it states")
    return identity


def read_index(
    data: bytes, identity: CaptureIdentity
) -> tuple[dict[str, tuple[int, str]], list[DocumentInfo]]:
    """Return the shards (size, digest) and documents of an index; a last line without end counts for nothing.

    Raises:
        DocumentRefused: a line is not one of an index, or contradicts itself or an earlier one.
    """
    shards: dict[str, tuple[int, str]] = {}
    documents: list[DocumentInfo] = []
    seen: set[str] = set()
    for line in data.split(b"\n")[:-1]:
        row = parse_object(line, INDEX, max_bytes=MAX_LINE_BYTES)
        name = f"shard-{len(shards):05}.bin"
        if row.get("file") != name or len(shards) >= MAX_SHARDS:
            raise DocumentRefused(f"{INDEX} lists {shown(row.get('file'))!r} where {name} comes")
        offset = 0
        listed = row.get("documents")
        if not isinstance(listed, list) or not listed:
            raise DocumentRefused(f"{INDEX} lists no documents of {name}")
        for entry in cast("list[object]", listed):
            info = _document(entry, name, offset, identity)
            if info.key in seen:
                raise DocumentRefused(f"{INDEX} lists document {info.key} twice")
            seen.add(info.key)
            documents.append(info)
            offset += sum(document_bytes(identity, info.num_tokens))
        digest = row.get("digest")
        if (
            row.get("size") != offset
            or not isinstance(digest, str)
            or not re.fullmatch("[0-9a-f]{64}", digest)
        ):
            raise DocumentRefused(
                f"{INDEX} says {shown(row.get('size'))} bytes of {name}; its documents have {offset}"
            )
        shards[name] = (offset, digest)
    return shards, documents


def _document(entry: object, shard: str, offset: int, identity: CaptureIdentity) -> DocumentInfo:
    if not isinstance(entry, dict):
        raise DocumentRefused(f"{INDEX} lists a document that is none")
    row = cast("dict[str, object]", entry)
    key, split, label = row.get("key"), row.get("split"), row.get("label", "")
    prompt, tokens = row.get("num_prompt"), row.get("num_tokens")
    is_sound = isinstance(key, str) and re.fullmatch("[0-9a-f]{32}", key) and isinstance(label, str)
    if (
        not is_sound
        or len(cast("str", label)) > TEXT_LIMIT
        or type(prompt) is not int
        or type(tokens) is not int
    ):
        raise DocumentRefused(f"{INDEX} lists a document without key, label or lengths in {shard}")
    if not 1 <= prompt < tokens <= MAX_TOKENS:
        raise DocumentRefused(
            f"{INDEX} lists a document of {shown(tokens)} tokens, {shown(prompt)} of them prompt"
        )
    if split != split_of(cast("str", key), identity.held_out_every):
        raise DocumentRefused(f"{INDEX} lists document {key} as {shown(split)!r}, which its key contradicts")
    return DocumentInfo(
        cast("str", key), cast("str", split), cast("str", label), prompt, tokens, shard, offset
    )


def _value(name: str, kind: str, value: object) -> object:
    """Return a field of the manifest as the identity holds it."""
    if kind == "str" and isinstance(value, str) and len(value) <= TEXT_LIMIT:
        return value
    if kind == "int" and type(value) is int:
        return value
    if kind.startswith("tuple") and isinstance(value, list):
        items = cast("list[object]", value)
        if len(items) <= MAX_LAYERS and all(type(item) is int for item in items):
            return tuple(cast("list[int]", items))
    if kind.startswith("dict") and isinstance(value, dict):
        table = cast("dict[str, object]", value)
        if len(table) <= TEXT_LIMIT and all(type(item) in (int, float) for item in table.values()):
            with suppress(OverflowError):
                return {key: float(cast("float", item)) for key, item in table.items()}
    raise DocumentRefused(f"{MANIFEST} has a {name} that cannot be: {shown(value)!r}")


def _check_identity(identity: CaptureIdentity) -> None:
    num_layers = identity.num_target_layers
    for is_so, what in (
        (identity.dtype in ITEMSIZE, "a known dtype"),
        (1 <= num_layers <= MAX_LAYERS, "a number of layers"),
        (bool(identity.taps) and _are_layers(identity.taps, num_layers), "taps in order"),
        (_are_layers(identity.route_layers, num_layers), "routed layers in order"),
        (identity.hidden_size >= 1 and identity.feature_width <= MAX_WIDTH, "a width of features"),
        (1 <= identity.vocab_size < 1 << 31, "a vocabulary"),
        (0 <= identity.top_k <= MAX_EXPERTS and identity.held_out_every >= 0, "counts"),
        (1 <= identity.max_tokens <= MAX_TOKENS, "a length of answers"),
    ):
        if not is_so:
            raise DocumentRefused(f"{MANIFEST} does not state {what}")


def _are_layers(layers: tuple[int, ...], num_layers: int) -> bool:
    """Return whether these are ascending layers. Never a range of what a stranger says: it may be endless."""
    is_ascending = all(one < other for one, other in pairwise(layers))
    return is_ascending and all(0 <= layer < num_layers for layer in layers)


def bytes_of(path: Path) -> bytes:
    """Return the bytes of a document of a set.

    Raises:
        DrafterError: there is none.
        DocumentRefused: it is no plain file, or absurdly large.
        OSError: it cannot be read.
    """
    try:
        return read_document(path, MAX_LINE_BYTES * 16)
    except FileNotFoundError:
        raise DrafterError(
            f"No capture set: {path} is missing", hint="run: flashnext draft capture"
        ) from None


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
