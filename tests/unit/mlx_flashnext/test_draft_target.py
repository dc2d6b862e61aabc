"""What a draft borrows of the target is the target's own, and what the gate is told of it is so."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.engine.draft_target import DraftTarget, target_facts, tokenizer_digest
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.tokenizer import Tokenizer
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel


@pytest.fixture(scope="module", params=["hf", "mlx"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    build = build_hf if request.param == "hf" else build_mlx
    return build(tmp_path_factory.mktemp("target") / request.param)


def test_embedding_and_head_are_the_targets_whatever_they_are_stored_as(directory: pathlib.Path) -> None:
    tiny = TinyModel.open(directory)
    sync = HostSync()
    view = DraftTarget(tiny.model, sync)
    last = tiny.config.vocab_size - 1  # a padding row: a mask id may be one
    rows = view.embed(mx.array([3, last]))
    assert rows.shape == (2, tiny.config.hidden_size)
    stack = mx.repeat(rows[:1, None], tiny.config.hc_count, axis=1)
    mixed = tiny.model._mixer(stack)
    assert mx.array_equal(view.head(mixed), tiny.model.head(stack))
    out = advance(tiny.model, [3], tiny.model.new_state(), logits="all")
    assert out.logits is not None
    assert mx.array_equal(view.head(tiny.model._mixer(out.stack)), out.logits)
    assert sync.num_syncs == 0
    assert view.to_host(rows[0, 0]) == float(np.array(rows)[0, 0])
    assert sync.num_syncs == 1
    assert view.row_digest(3) == view.row_digest(3) != view.row_digest(4)


def test_the_facts_are_those_of_the_checkpoint(directory: pathlib.Path) -> None:
    checkpoint, tokenizer = open_checkpoint(directory), Tokenizer.open(directory)
    view = DraftTarget(TinyModel.open(directory).model, HostSync())

    def facts(target: DraftTarget | None = view):
        return target_facts(
            open_checkpoint(directory),
            tokenizer,
            target,
            name="tiny",
            contractions=("mean",),
            runtime_version="0.1.0",
            itemsize=4,
            context_tokens=100,
            memory_left=None,
        )

    first = facts()
    config = checkpoint.config
    assert (first.num_layers, first.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (first.num_streams, first.vocab_size) == (config.hc_count, config.vocab_size)
    assert (first.num_ids, first.stop_ids) == (tokenizer.num_ids, tokenizer.eos_ids)
    assert first.revision == ""
    assert first.row_digest is not None
    assert dataclasses.replace(facts(None), row_digest=first.row_digest) == first
    path = sorted(directory.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    try:
        assert facts().digest != first.digest
        assert facts().tokenizer_digest == first.tokenizer_digest
    finally:
        data[-1] ^= 1
        path.write_bytes(data)
    assert facts().digest == first.digest


def test_the_tokenizer_digest_sees_ids_merges_and_added_tokens_and_nothing_else() -> None:
    good = {"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}, "added_tokens": [{"id": 2}]}

    def digest(**changes: object) -> str:
        return tokenizer_digest(json.dumps({**good, **changes}).encode())

    assert digest() == digest(normalizer=None)
    assert digest() == digest(model={"merges": [["a", "b"]], "vocab": {"b": 1, "a": 0}})
    others = [
        digest(model={"vocab": {"a": 1, "b": 0}, "merges": ["a b"]}),
        digest(model={"vocab": {"a": 0, "b": 1}, "merges": []}),
        digest(added_tokens=[]),
    ]
    assert len({digest(), *others}) == 4
