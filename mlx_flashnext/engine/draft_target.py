"""The target as a draft sees it: embedding and head to borrow, and the facts that the gate holds it against.

Entry points: `DraftTarget` (a `HeadView`), `target_facts`. Nothing here is copied or loaded: the draft
computes with the target's own modules, in whatever form they are stored.

Source: dflash2.md 1.8 (head), 7 (facts and cheap digests).
"""

# Shapes: T rows, D hidden, V vocabulary.

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from drafter.api import HeadView
from drafter.facts import TargetFacts
from expert_store.source import FileSource
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.checkpoint.build import build_digest
from mlx_flashnext.config import read_config_file
from mlx_flashnext.engine.conditions import quantisation_of
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.model.host import HostSync, to_host
from mlx_flashnext.regular_file import read_regular
from mlx_flashnext.tokenizer import Tokenizer


class DraftTarget(HeadView):
    """See `HeadView`.

    Args:
        model: the target; it must outlive this.
        sync: counts the waits for the device.
    """

    def __init__(self, model: FlashNext, sync: HostSync) -> None:
        self._model = model
        self._sync = sync

    def embed(self, ids_T: mx.array) -> mx.array:
        """Return raw embedding rows [T, D]."""
        return self._model.embed(ids_T)

    def head(self, hidden_TD: mx.array) -> mx.array:
        """Return logits [T, V] by the output head alone."""
        return self._model.unembed(hidden_TD)

    def to_host(self, array: mx.array) -> Any:
        """Wait for `array` and return its values."""
        return to_host(self._sync, array)

    def row_digest(self, token_id: int) -> str:
        """Return the digest of an embedding row as float32 values; waits for the device."""
        row = self.to_host(self.embed(mx.array([token_id], mx.int32)).astype(mx.float32))
        return hashlib.sha256(json.dumps(row).encode()).hexdigest()


def target_facts(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    target: DraftTarget | None,
    *,
    name: str,
    contractions: Sequence[str],
    runtime_version: str,
    itemsize: int,
    context_tokens: int,
    memory_left: int | None,
    pad_id: int | None = None,
) -> TargetFacts:
    """Return what the gate is told of a target.

    Args:
        checkpoint: the target's.
        tokenizer: that came with it.
        target: the loaded target; None, to inspect a draft without one: the mask embedding is not compared.
        name: what the model is called.
        contractions: that the engine can compute.
        runtime_version: of this program.
        itemsize: bytes of a stored value in computation.
        context_tokens: that were planned.
        memory_left: bytes before experts get less than their least, or None.
        pad_id: the padding token, if the checkpoint names one.

    Raises:
        StoreError: a file could not be read, or changed since it was indexed.
        OSError: the tokenizer's file could not be read.
    """
    config = checkpoint.config
    digest = checkpoint.build
    if digest is None:
        with FileSource(checkpoint.table.files) as source:
            digest = build_digest(read_config_file(checkpoint.directory), checkpoint.table, source)
    return TargetFacts(
        name=name,
        revision=_revision(checkpoint),
        digest=digest,
        quantisation=quantisation_of(checkpoint),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_streams=config.hc_count,
        contractions=tuple(contractions),
        vocab_size=config.vocab_size,
        num_ids=tokenizer.num_ids,
        stop_ids=tokenizer.eos_ids,
        pad_id=pad_id,
        tokenizer_revision=_revision(checkpoint),
        tokenizer_digest=tokenizer_digest(read_regular(checkpoint.directory / "tokenizer.json")),
        runtime_version=runtime_version,
        itemsize=itemsize,
        context_tokens=context_tokens,
        row_digest=None if target is None else target.row_digest,
        memory_left=memory_left,
        num_experts=config.num_experts,
    )


def tokenizer_digest(tokenizer: bytes) -> str:
    """Return the digest of what decides ids: vocabulary by id, merges, added tokens.

    Args:
        tokenizer: `tokenizer.json`, which a tokenizer was already opened from.
    """
    whole = cast("dict[str, Any]", json.loads(tokenizer))
    model = cast("dict[str, Any]", whole.get("model", {}))
    vocabulary = sorted(cast("dict[str, int]", model.get("vocab", {})).items(), key=lambda item: item[1])
    pairs = cast("list[str | list[str]]", model.get("merges", []))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    said = [vocabulary, merges, whole.get("added_tokens", [])]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _revision(checkpoint: Checkpoint) -> str:
    """Return the revision of a model in a Hub cache, else nothing: no other place tells it."""
    directory = checkpoint.directory.resolve()
    return directory.name if directory.parent.name == "snapshots" else ""
