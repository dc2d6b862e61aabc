"""Small capture sets, and a target that a small draft can learn: the next token is a function of the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from drafter.train.capture_writer import CaptureWriter
from drafter.train.captures import CapturedDocument, CaptureIdentity

VOCAB, HIDDEN, TAPS, PROMPT = 128, 32, (1, 3, 6), 4
LAYERS, TOP_K = (0, 1, 2), 2


def identity(**changes: Any) -> CaptureIdentity:
    """Return what a small capture set is."""
    values: dict[str, Any] = {
        "target_name": "tiny",
        "target_digest": "t" * 64,
        "tokenizer_digest": "k" * 64,
        "quantisation": "float32",
        "runtime_version": "0.1.0",
        "vocab_size": VOCAB,
        "num_target_layers": 8,
        "taps": TAPS,
        "contraction": "mean",
        "hidden_size": HIDDEN,
        "dtype": "float32",
        "route_layers": LAYERS,
        "top_k": TOP_K,
        "sampling": {"temperature": 0.0},
        "max_tokens": 64,
        "prompts_digest": "p",
        "held_out_every": 4,
    }
    return CaptureIdentity(**(values | changes))


def document(number: int, num_tokens: int = 40) -> CapturedDocument:
    """Return a document whose tokens follow a rule and whose features tell its first tokens apart."""
    generator = np.random.default_rng(number)
    tokens = [int(token) for token in generator.integers(0, 100, PROMPT)]
    while len(tokens) < num_tokens:
        tokens.append((tokens[-1] * 3 + tokens[-2] + 7) % 100)
    rows = num_tokens - 1
    ids = np.asarray(tokens, np.int32)
    table = np.random.default_rng(99).standard_normal((VOCAB, HIDDEN * len(TAPS))).astype(np.float32)
    routes = generator.integers(0, 8, (rows, len(LAYERS), TOP_K)).astype(np.uint16)
    return CapturedDocument(ids, PROMPT, table[ids[:-1]], routes, f"kind {number % 2}")


def write(directory: Path, num_documents: int, *, shard_bytes: int = 1 << 14, **changes: Any) -> None:
    """Write a capture set of `document(0)`, `document(1)`, ..."""
    with CaptureWriter(directory, identity(**changes), shard_bytes) as writer:
        for number in range(num_documents):
            one = document(number)
            writer.add(one, one.features.tobytes())


class TableHead:
    """A frozen target: fixed embedding and head."""

    def __init__(self) -> None:
        generator = np.random.default_rng(1)
        self.table = mx.array(generator.standard_normal((VOCAB, HIDDEN)).astype(np.float32))
        self.matrix = mx.array(0.5 * generator.standard_normal((VOCAB, HIDDEN)).astype(np.float32))

    def embed(self, ids_T: mx.array) -> mx.array:
        return self.table[ids_T]

    def head(self, hidden_TD: mx.array) -> mx.array:
        return hidden_TD @ self.matrix.T


def to_host(array: mx.array) -> Any:
    """Wait for an array."""
    return array.tolist()
