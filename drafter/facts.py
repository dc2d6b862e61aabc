"""What the gate is told of both sides: plain values, read by whoever may read files.

Entry points: `DraftListing`, `TargetFacts`, `SidecarFacts`. The gate opens nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class TensorFacts(NamedTuple):
    """One stored tensor: safetensors dtype tag and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftListing:
    """A draft directory, listed and not loaded.

    Attributes:
        config: bytes of `config.json`.
        contract: bytes of the contract, or None.
        calibration: bytes of the calibration record, or None.
        tensors: every tensor of its files, by stored name; headers were checked against the files.
        digest: of the files; see docs/FORMATS.md.
        licence: as the draft's card states it, or None.
        promotion: bytes of the promotion record, or None.
    """

    config: bytes
    contract: bytes | None
    calibration: bytes | None
    tensors: Mapping[str, TensorFacts]
    digest: str
    licence: str | None = None
    promotion: bytes | None = None


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target that is loaded, the tokenizer it came with, and what is left for a draft.

    Attributes:
        name: what the model is called; may be empty.
        revision: of the model's files; empty if not known.
        digest: of the build: config, headers, ends of every file.
        quantisation: in words, for example `bf16` or `4 bits, groups of 64`.
        num_layers: decoder layers.
        hidden_size: width of features after contraction, and of embedding rows.
        num_streams: residual streams.
        contractions: that the target can compute.
        vocab_size: rows of embedding and head, padding included.
        num_ids: ids that are tokens.
        stop_ids: that end an answer.
        pad_id: the padding token, if there is one.
        tokenizer_revision: empty if not known.
        tokenizer_digest: over vocabulary with ids, merges and added tokens.
        runtime_version: of this program.
        itemsize: bytes of a stored value in its computation.
        context_tokens: that a sequence may have.
        row_digest: digest of the embedding row of an id, as values; None if it cannot be had.
        memory_left: bytes that remain before experts get less than their least; None if not planned.
        num_experts: routed experts of a layer.
        router_digest: over router weights and expert order; empty if not known.
        parity_digest: digest of the golden set that this build passed, or None.
        is_release: whether this is a release build.
    """

    name: str
    revision: str
    digest: str
    quantisation: str
    num_layers: int
    hidden_size: int
    num_streams: int
    contractions: tuple[str, ...]
    vocab_size: int
    num_ids: int
    stop_ids: tuple[int, ...]
    pad_id: int | None
    tokenizer_revision: str
    tokenizer_digest: str
    runtime_version: str
    itemsize: int
    context_tokens: int
    row_digest: Callable[[int], str] | None = None
    memory_left: int | None = None
    num_experts: int = 0
    router_digest: str = ""
    parity_digest: str | None = None
    is_release: bool = False


@dataclass(frozen=True, slots=True)
class SidecarFacts:
    """What a route sidecar says of the target and draft it was trained with."""

    router_digest: str
    draft_digest: str
    num_layers: int
    num_experts: int
