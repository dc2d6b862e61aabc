"""Writes a capture set, shard by shard, so that a run that was cut short goes on where it stopped.

Entry point: `CaptureWriter`. A shard is written beside its name, flushed to the disk and renamed; only
then does the index get its line. So a kill at any moment loses at most the documents since the last shard,
and what a reader sees is whole.

Source of the format: docs/FORMATS.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from drafter.documents import DocumentRefused, unusable
from drafter.errors import DrafterError
from drafter.files import PARTIAL, naming, replace_file, replacing
from drafter.train.captures import (
    FORMAT,
    INDEX,
    MANIFEST,
    VERSION,
    CapturedDocument,
    CaptureIdentity,
    bytes_of,
    document_bytes,
    document_key,
    read_index,
    read_manifest,
    split_of,
)

SHARD_BYTES = 32 << 20


class CaptureWriter:
    """Appends documents to a capture set. Use as a context manager; leaving it well writes the last shard.

    Args:
        directory: made if it is not there; another set in it is continued if its identity is the same.
        identity: of the set.
        shard_bytes: after how many bytes a shard is written.

    Attributes:
        keys: of the documents that are safely on the disk.

    Raises:
        DrafterError: the directory holds something else, or a set of another identity.
    """

    def __init__(self, directory: Path, identity: CaptureIdentity, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory, self._identity, self._limit = directory, identity, shard_bytes
        self._pending: list[tuple[dict[str, Any], bytes]] = []
        self._pending_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / MANIFEST).exists():
            self._resume()
        else:
            self._begin()

    def add(self, document: CapturedDocument, features: bytes) -> None:
        """Append a document.

        Args:
            document: tokens and routes; its `features` are not looked at.
            features: the target's own values [R, F], little-endian, in the identity's type.

        Raises:
            DrafterError: lengths or numbers contradict each other.
        """
        identity, num_tokens = self._identity, len(document.tokens)
        sizes = document_bytes(identity, num_tokens)
        key = document_key(document.tokens[: document.num_prompt].tolist())
        tokens = np.ascontiguousarray(document.tokens, "<i4").tobytes()
        routes = np.ascontiguousarray(document.routes, "<u2").tobytes()
        if (len(tokens), len(features), len(routes)) != sizes or not 1 <= document.num_prompt < num_tokens:
            raise DrafterError(
                f"A document of {num_tokens} tokens has {len(features)} bytes of features and {len(routes)} "
                f"of routes, wanted {sizes[1]} and {sizes[2]}",
                hint="capture every row of a document once",
            )
        if key in self.keys or any(row["key"] == key for row, _ in self._pending):
            raise DrafterError(f"Document {key} comes twice", hint="give every prompt once")
        row = {
            "key": key,
            "split": split_of(key, identity.held_out_every),
            "label": document.label,
            "num_prompt": document.num_prompt,
            "num_tokens": num_tokens,
        }
        self._pending.append((row, tokens + features + routes))
        self._pending_bytes += sum(sizes)
        if self._pending_bytes >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last shard, and wait until the disk has it."""
        if not self._pending:
            return
        name = f"shard-{self._num_shards:05}.bin"
        digest = hashlib.sha256()
        with replacing(self._directory / name) as stream:
            for _, data in self._pending:
                stream.write(data)
                digest.update(data)
        rows = [row for row, _ in self._pending]
        line = {"file": name, "size": self._pending_bytes, "digest": digest.hexdigest(), "documents": rows}
        self._append(json.dumps(line).encode() + b"\n")
        self.keys |= {row["key"] for row in rows}
        self._num_shards += 1
        self._pending, self._pending_bytes = [], 0

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last shard; documents are whole, so also after an error."""
        self.flush()

    def _append(self, line: bytes) -> None:
        """Add a line to the index, whole or not at all: after half a line another would be lost too."""
        path = self._directory / INDEX
        with naming(path), path.open("ab", buffering=0) as stream:
            before = stream.tell()
            try:
                while line:
                    line = line[stream.write(line) :]
                os.fsync(stream.fileno())
            except OSError:
                with suppress(OSError):
                    stream.truncate(before)
                raise

    def _begin(self) -> None:
        index = self._directory / INDEX  # there before the manifest: what has a manifest can be opened
        others = [path for path in self._directory.iterdir() if not path.name.startswith(PARTIAL)]
        if others and (others != [index] or index.stat().st_size):
            raise DrafterError(
                f"{self._directory} is not empty and holds no capture set", hint="give a new directory"
            )
        self.keys: set[str] = set()
        self._num_shards = 0
        index.touch()
        document = {
            "format": FORMAT,
            "version": VERSION,
            "identity_digest": self._identity.digest(),
            **asdict(self._identity),
        }
        replace_file(self._directory / MANIFEST, json.dumps(document, indent=1).encode() + b"\n")

    def _resume(self) -> None:
        index = self._directory / INDEX
        try:
            found = read_manifest(bytes_of(self._directory / MANIFEST))
            data = bytes_of(index) if index.exists() else b""
            shards, documents = read_index(data, found)
        except DocumentRefused as error:
            what = f"No sound capture set in {self._directory}"
            raise unusable(what, error, hint="give a new directory") from None
        if found != self._identity:
            mine, theirs = asdict(self._identity), asdict(found)
            differing = ", ".join(name for name in mine if mine[name] != theirs[name])
            raise DrafterError(
                f"The capture set in {self._directory} has another {differing}", hint="give a new directory"
            )
        whole = data.rfind(b"\n") + 1
        if whole != len(data):  # a line that was being written when the run was killed
            os.truncate(index, whole)
        for path in self._directory.glob("shard-*"):
            if path.name not in shards:
                path.unlink()
        for path in self._directory.glob(f"{PARTIAL}*"):
            path.unlink()
        self.keys = {document.key for document in documents}
        self._num_shards = len(shards)
