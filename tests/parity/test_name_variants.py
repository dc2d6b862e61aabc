"""One pack under the names and shapes of every fork: each opens, and answers like the pack it came from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.norms import is_zero_centred
from tests.parity.test_streamed_equals_resident import run
from tests.tampering import floats, load, rename, save, store
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of
from tests.tiny.safetensors_io import Stored
from tests.tiny.tokenizer import write_tokenizer

Tensors = dict[str, Stored]
TOKENS = prompt_of(25)
TRUNK = "language_model.model."
# The rule of qwen4exp.md 3.6 wants eight norms before it believes in the other convention.
OVERRIDES = {"num_hidden_layers": 8}


def arrays(stored: Stored) -> np.ndarray:
    kind = {"F32": "<f4", "U32": "<u4", "U8": "u1", "I64": "<i8"}[stored.dtype]
    return np.frombuffer(stored.data, kind).reshape(stored.shape)


def without_model(tensors: Tensors) -> Tensors:
    """JANGQ: `language_model.layers`, no `.model`; hash buffers and table right under `.ple`; 2-D convs."""
    out = rename(tensors, (TRUNK, "language_model."), (".ple.ple_embedding.", ".ple."))
    for name in [name for name in out if name.endswith(".conv1d.weight")]:
        stored = out.pop(name)
        flat = stored._replace(shape=(stored.shape[0], stored.shape[1]))
        out[name.replace(".conv1d.weight", ".conv1d_weight")] = flat
    return out


def fused(tensors: Tensors) -> Tensors:
    """Experts in one quantised stack, gate rows before up rows."""
    out: Tensors = {}
    for name, stored in tensors.items():
        if ".switch_mlp.up_proj." in name:
            continue
        if ".switch_mlp.gate_proj." in name:
            up = arrays(tensors[name.replace("gate_proj", "up_proj")])
            both = store(np.concatenate([arrays(stored), up], axis=1))
            out[name.replace("switch_mlp.gate_proj", "experts.gate_up_proj")] = both
        else:
            out[name.replace("switch_mlp.down_proj", "experts.down_proj")] = stored
    return out


def listed(tensors: Tensors) -> Tensors:
    """One tensor per expert and part, as converters see quantised experts before they stack them."""
    out: Tensors = {}
    for name, stored in tensors.items():
        if ".switch_mlp." not in name:
            out[name] = stored
            continue
        for expert, value in enumerate(arrays(stored)):
            out[name.replace(".switch_mlp.", f".experts.{expert}.")] = store(value)
    return out


def whole_table(tensors: Tensors) -> Tensors:
    """The table in one piece."""
    out = {name: stored for name, stored in tensors.items() if ".ngram_embedding." not in name}
    stem = f"{TRUNK}layers.1.ple.ple_embedding.ngram_embedding"
    for part in ("weight", "scales", "biases"):
        pieces = [arrays(tensors[f"{stem}.shards.{i}.{part}"]) for i in range(8)]
        out[f"{stem}.{part}"] = store(np.concatenate(pieces))
    return out


def ones_centred(tensors: Tensors) -> Tensors:
    """Vontra: norm weights stored as 1 + w."""
    return {
        name: store(floats(stored) + np.float32(1))
        if is_zero_centred(name.removesuffix(".weight")) and stored.dtype == "F32"
        else stored
        for name, stored in tensors.items()
    }


VARIANTS: dict[str, Callable[[Tensors], Tensors]] = {
    "no .model in front": without_model,
    "official names for the trunk": lambda t: rename(t, (TRUNK, "model.language_model.")),
    "bare names": lambda t: rename(t, (TRUNK, "model.")),
    "head without prefix": lambda t: rename(t, ("language_model.lm_head", "lm_head")),
    "table parts as shard_S": lambda t: rename(t, (".shards.", ".shard_")),
    "mtp without prefix": lambda t: rename(t, ("language_model.mtp.", "mtp.")),
    "mtp under model": lambda t: rename(t, ("language_model.mtp.", "model.language_model.mtp.")),
    "fused experts": fused,
    "an expert a tensor": listed,
    "table in one piece": whole_table,
    "ones-centred norms": ones_centred,
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensors, dict[str, Any], mx.array]:
    directory = build_mlx(tmp_path_factory.mktemp("pack") / "model", overrides=OVERRIDES)
    return (*load(directory), logits(directory))


def logits(directory: Path) -> mx.array:
    with open_tiny(directory, slots=5) as engine:
        return run(engine.target.model, TOKENS, 9, engine.target.experts)[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_spelling_of_a_pack_gives_its_logits(
    tmp_path: Path, pack: tuple[Tensors, dict[str, Any], mx.array], name: str
) -> None:
    """P65."""
    tensors, config, expected = pack
    directory = save(tmp_path / "variant", VARIANTS[name](tensors), config)
    write_tokenizer(directory, vocab_size=config["text_config"]["vocab_size"])
    checkpoint = open_checkpoint(directory)
    names = [tensor for line in checkpoint.account() for tensor in line.names]
    assert sorted(names) == sorted(checkpoint.table.tensors)
    assert checkpoint.mtp_experts is not None
    got = logits(directory)
    if name == "ones-centred norms":  # 1 + w is rounded, so w comes back a little different
        assert mx.allclose(got, expected, rtol=1e-3, atol=1e-3)
    else:
        assert mx.array_equal(got, expected)


def test_ones_centred_norms_taken_as_they_are_would_give_other_logits(
    tmp_path: Path, pack: tuple[Tensors, dict[str, Any], mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control (mlx-vlm issue 2041: fluent noise)."""
    tensors, config, expected = pack
    monkeypatch.setattr("mlx_flashnext.weights.norm_convention", lambda means: "zero-centred")
    directory = save(tmp_path / "variant", ones_centred(tensors), config)
    write_tokenizer(directory, vocab_size=config["text_config"]["vocab_size"])
    assert not mx.allclose(logits(directory), expected, rtol=1e-1, atol=1e-1)
