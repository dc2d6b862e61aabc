"""A small draft that fits a small target, as the gate is told of both; and its tensors.

Entry points: `draft_config`, `listing`, `target_facts`, `contract`, `record`, `random_parameters`, and for
the promises of all drafters `self_feeding`.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from drafter import calibration
from drafter.calibration import CalibrationRecord, Trial
from drafter.config import DraftConfig, expected_tensors
from drafter.config_reader import read_config
from drafter.contract import DraftContract, contract_of
from drafter.dflash2 import Dflash2Drafter, Dflash2Options
from drafter.facts import DraftListing, TargetFacts, TensorFacts
from drafter.reasons import Report

DRAFT: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": 16,
    "use_sliding_window": True,
    "vocab_size": 128,
    "num_target_layers": 8,
    "is_causal": False,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 125,
        "target_layer_ids": [1, 3, 6],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 5,
    },
}


def document(changes: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return the config with some fields changed: `a.b` is inside `a`, the value `...` takes it away."""
    config = copy.deepcopy(DRAFT)
    for path, value in (changes or {}).items():
        *outer, name = path.split(".")
        place = config
        for part in outer:
            place = place[part]
        if value is ...:
            place.pop(name, None)
        else:
            place[name] = value
    return config


def draft_config(changes: Mapping[str, object] | None = None) -> DraftConfig:
    """Return the draft of a changed config, which must be good."""
    report = Report()
    config = read_config(document(changes), report)
    assert config is not None, report.refusals
    return config


def row_digest(token_id: int) -> str:
    """Return a digest that tells rows apart."""
    return hashlib.sha256(f"row {token_id}".encode()).hexdigest()


def target_facts(**changes: Any) -> TargetFacts:
    """Return the facts of a target that the draft was made for."""
    facts = TargetFacts(
        name="tiny",
        revision="r1",
        digest="t" * 64,
        quantisation="bf16",
        num_layers=8,
        hidden_size=32,
        num_streams=4,
        contractions=("mean", "next_attn_mix", "final_mix", "stream0"),
        vocab_size=128,
        num_ids=124,
        stop_ids=(120, 121),
        pad_id=119,
        tokenizer_revision="r1",
        tokenizer_digest="k" * 64,
        runtime_version="0.1.0",
        itemsize=2,
        context_tokens=1000,
        row_digest=row_digest,
    )
    return dataclasses.replace(facts, **changes)


def listing(
    changes: Mapping[str, object] | None = None,
    *,
    contract: DraftContract | Mapping[str, Any] | bytes | None = None,
    record: CalibrationRecord | Mapping[str, Any] | bytes | None = None,
    tensors: Mapping[str, TensorFacts] | None = None,
    licence: str | None = "apache-2.0",
) -> DraftListing:
    """Return a directory with the given documents; tensors are those of the unchanged config."""
    if tensors is None:
        tensors = {n: TensorFacts("BF16", shape) for n, shape in expected_tensors(draft_config()).items()}
    raw = json.dumps(document(changes)).encode()
    return DraftListing(raw, encoded(contract), encoded(record), tensors, "d" * 64, licence)


def encoded(value: Any) -> bytes | None:
    """Return the bytes of a document."""
    return value if value is None or isinstance(value, bytes) else msgspec.json.encode(value)


def contract(contraction: str = "mean") -> DraftContract:
    """Return the contract that the draft has with its target."""
    return contract_of(
        draft_config(), listing(), target_facts(), contraction=contraction, licence="apache-2.0"
    )


def record(**changes: Any) -> CalibrationRecord:
    """Return a record whose figures settle on `mean`."""

    def trial(name: str, shift: int, first: float) -> Trial:
        return Trial(name, shift, [first] + [first / 2] * 6, 2 * first)

    good = CalibrationRecord(
        format=calibration.FORMAT,
        version=calibration.VERSION,
        date="2026-11-29",
        runtime_version="0.1.0",
        draft_digest="d" * 64,
        target_digest="t" * 64,
        tokenizer_digest="k" * 64,
        mask_row_digest=row_digest(125),
        taps=[1, 3, 6],
        contraction="mean",
        num_tokens=4096,
        trials=[
            trial("mean", 0, 0.7),
            trial("sum", 0, 0.69),
            trial("mean", -1, 0.4),
            trial("mean", 1, 0.45),
            trial("next_attn_mix", 0, 0.2),
            trial("final_mix", 0, 0.3),
            trial("stream0", 0, 0.1),
        ],
    )
    return msgspec.structs.replace(good, **changes)


def random_parameters(config: DraftConfig, seed: int = 0) -> dict[str, mx.array]:
    """Return parameters that are near what training leaves: norms near 1, kernels near the identity."""
    generator = np.random.default_rng(seed)
    params = {}
    for name, shape in expected_tensors(config).items():
        value = generator.standard_normal(shape)
        if name.endswith("norm.weight"):
            value = 1 + 0.1 * value
        elif name.endswith("base_kernel"):
            value = 0.1 * value
            value[:, 0] += 1
        elif "codebook" not in name:
            value = value * shape[-1] ** -0.5
        params[name] = mx.array(value.astype(np.float32))
    return params


class SelfFeeding(Dflash2Drafter):
    """A drafter that makes features of the tokens themselves, and asks at its own position."""

    def observe(self, tokens, next_token, stack_TGD=None, *, features_RF=None) -> None:
        width = self._config.feature_width
        features = [[((7 * token + 3 * i) % 11 - 5) / 3 for i in range(width)] for token in tokens]
        super().observe(tokens, next_token, stack_TGD, features_RF=mx.array(features))

    def propose(self, k, sampling):
        return super().propose(k, dataclasses.replace(sampling, position=self._context.end + 1))


class TableTarget:
    """A pretend target: fixed embedding and head."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        generator = np.random.default_rng(1)
        shape = (vocab_size, hidden_size)
        self._table = mx.array(generator.standard_normal(shape).astype(np.float32))
        self._matrix = mx.array(0.4 * generator.standard_normal(shape).astype(np.float32))

    def embed(self, ids_T: mx.array) -> mx.array:
        return self._table[ids_T]

    def head(self, hidden_TD: mx.array) -> mx.array:
        return hidden_TD @ self._matrix.T

    def to_host(self, array: mx.array) -> Any:
        return array.tolist()


def self_feeding(num_ids: int, kinds: str) -> SelfFeeding:
    """Return a drafter over a vocabulary of `num_ids` and three padding rows; layers are `kinds`."""
    config = draft_config(
        {
            "vocab_size": num_ids + 3,
            "dflash_config.mask_token_id": num_ids + 1,
            "layer_types": [f"{kinds}_attention"] * 2,
        }
    )
    return SelfFeeding(
        random_parameters(config),
        config,
        TableTarget(config.vocab_size, config.hidden_size),
        lambda scores, seed, position: mx.random.categorical(
            scores, key=mx.random.key(1000 * seed + position)
        ),
        dtype=mx.float32,
        contraction="mean",
        options=Dflash2Options(num_ids=num_ids),
        digest="d",
    )
