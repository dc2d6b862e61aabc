"""Random tiny `qwen4_exp` checkpoints, written without torch in the Hugging Face and the MLX layouts.

Entry points: `build_hf`, `build_mlx`; `tiny_tensors` gives the float32 tensors both are written from.

Invariants:
1. Every tensor is drawn from a generator seeded by (seed, crc32(official name)), exactly as
   `tests/parity/golden/make_tiny_hf_qwen4exp.py` does, so committed goldens fit the rebuilt checkpoint.
2. Norms, convolutions, A_log and dt_bias are non-trivial on purpose: the reference's own initialisation makes
   most of them no-ops and hides bugs.

Source: make_tiny_hf_qwen4exp.py (names, shapes, gains); qwen4exp.md 3.1 (official), 3.3 and 3.4 (MLX packs).
"""

from __future__ import annotations

import copy
import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny.safetensors_io import Stored, bfloat16_bits, write_safetensors
from tests.tiny.tokenizer import IM_END, write_tokenizer

TRUNK = "model.language_model."

TINY_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 120,
    "dtype": "float32",
    "eos_token_id": 120,
    "full_attention_interval": 4,
    "hc_count": 4,
    "hc_lowrank": 32,
    "head_dim": 64,
    "heads_per_ngram": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 32,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 4,
    "initializer_range": 0.02,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 32,
    "make_ngram_vocab_size_divisible_by": 16,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "model_type": "qwen4_exp_text",
    "moe_intermediate_size": 64,
    "mtp": {
        "hybrid": True,
        "layer_types": ["full_attention"],
        "mtp_use_hidden_state_from_layer": None,
        "num_hidden_layers": 1,
        "rope_theta": 10000000,
    },
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "ngram_size": 3,
    "ngram_vocab_size_base": 300,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_gate_type": "sigmoid",
    "output_router_logits": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": 384,
    "ple_layer_ids": [2],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 64,
    "split_ngram_parts": 8,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 128,
}

TINY_VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [],
    "depth": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "model_type": "qwen4_exp",
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def tiny_text_config(overrides: Mapping[str, Any] | None = None, *, dtype: str = "float32") -> dict[str, Any]:
    """Return the tiny text config with fields replaced, layer types filled in from their number."""
    text = copy.deepcopy(TINY_TEXT)
    text.update(copy.deepcopy(dict(overrides or {})))
    text["dtype"] = dtype
    if text["layer_types"] is None:
        interval = text["full_attention_interval"]
        text["layer_types"] = [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention"
            for i in range(text["num_hidden_layers"])
        ]
    return text


SHALLOW: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
"""Overrides: a layer of each kind, for tests that decode thousands of tokens and ask nothing of depth."""


def tiny_config(overrides: Mapping[str, Any] | None = None, *, dtype: str = "float32") -> dict[str, Any]:
    """Return a whole `config.json` with the nesting and key names of the real checkpoint."""
    text = tiny_text_config(overrides, dtype=dtype)
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "image_token_id": 121,
        "language_model_only": False,
        "model_type": "qwen4_exp",
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_id": 122,
        "vision_config": {**TINY_VISION, "out_hidden_size": text["hidden_size"]},
        "vision_end_token_id": 124,
        "vision_start_token_id": 123,
    }


# ---------------------------------------------------------------- integer side of the n-gram table
def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _splitmix(v: int) -> int:
    mask = (1 << 64) - 1
    v = (v + 0x9E3779B97F4A7C15) & mask
    v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & mask
    v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & mask
    return v ^ (v >> 31)


def ngram_constants(text: Mapping[str, Any], ple_index: int = 0) -> dict[str, Any]:
    """Return multipliers, head sizes, offsets, padded rows and row width of one n-gram table."""
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    primes: list[int] = []
    n = text["ngram_vocab_size_base"]
    while len(primes) < heads * (ple_index + 1):
        if _is_prime(n):
            primes.append(n)
        n += 1
    sizes = primes[heads * ple_index :]
    half = max(1, (((1 << 63) - 1) // max(text["vocab_size"], 1)) // 2)
    base = text.get("seed", 1234) + 10007 * ple_index
    multipliers = [
        2 * (_splitmix((base + 0x9E3779B97F4A7C15 * (i + 1)) & ((1 << 64) - 1)) % half) + 1
        for i in range(text["ngram_size"])
    ]
    divisor = text["make_ngram_vocab_size_divisible_by"]
    return {
        "multipliers": multipliers,
        "sizes": sizes,
        "offsets": [sum(sizes[:h]) for h in range(heads)],
        "rows": -(-sum(sizes) // divisor) * divisor,
        "width": text["ple_embed_dim"] // heads,
    }


# ---------------------------------------------------------------- float32 tensors, official names
class _Maker:
    def __init__(self, text: Mapping[str, Any], seed: int) -> None:
        self.text = text
        self.seed = seed
        self.tensors: dict[str, np.ndarray] = {}

    def rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        draw = self.rng(name).standard_normal(shape) * gain / math.sqrt(shape[-1])
        self.tensors[name] = draw.astype(np.float32)

    def norm(self, name: str, length: int, centre: float = 0.0) -> None:
        self.tensors[name] = (centre + 0.2 * self.rng(name).standard_normal(length)).astype(np.float32)

    def conv(self, name: str, channels: int, kernel: int) -> None:
        self.tensors[name] = (0.4 * self.rng(name).standard_normal((channels, 1, kernel))).astype(np.float32)

    def hyper(self, p: str, *, inject: bool = True) -> None:
        t = self.text
        wide = t["hc_count"] * t["hidden_size"]
        self.norm(p + ".hc_norm.weight", wide)
        self.matrix(p + ".input_mix_weight_down.weight", t["hc_lowrank"], wide, gain=4.0)
        self.matrix(p + ".input_mix_weight_up.weight", wide, t["hc_lowrank"], gain=2.0)
        if inject:
            self.matrix(p + ".block_inject_weight.weight", t["hc_count"], wide, gain=4.0)

    def qsa(self, p: str) -> None:
        t = self.text
        hidden, heads, kv_heads, dim = (
            t["hidden_size"],
            t["num_attention_heads"],
            t["num_key_value_heads"],
            t["head_dim"],
        )
        index_dim = t["indexer_head_dim"]
        self.matrix(p + ".q_proj.weight", heads * dim * 2, hidden)
        self.matrix(p + ".k_proj.weight", kv_heads * dim, hidden)
        self.matrix(p + ".v_proj.weight", kv_heads * dim, hidden)
        self.matrix(p + ".o_proj.weight", hidden, heads * dim)
        self.norm(p + ".q_norm.weight", dim)
        self.norm(p + ".k_norm.weight", dim)
        self.matrix(
            p + ".indexer.index_qk_proj.weight",
            (t["indexer_n_heads"] + t["indexer_kv_heads"]) * index_dim,
            hidden,
        )
        self.norm(p + ".indexer.q_layernorm.weight", index_dim)
        self.norm(p + ".indexer.k_layernorm.weight", index_dim)

    def gdn(self, p: str) -> None:
        t = self.text
        hidden, value_heads = t["hidden_size"], t["linear_num_value_heads"]
        key_dim = t["linear_num_key_heads"] * t["linear_key_head_dim"]
        value_dim = value_heads * t["linear_value_head_dim"]
        self.matrix(p + ".in_proj_qkv.weight", 2 * key_dim + value_dim, hidden)
        self.matrix(p + ".in_proj_z.weight", value_dim, hidden)
        self.matrix(p + ".in_proj_b.weight", value_heads, hidden)
        self.matrix(p + ".in_proj_a.weight", value_heads, hidden)
        self.matrix(p + ".out_proj.weight", hidden, value_dim)
        self.conv(p + ".conv1d.weight", 2 * key_dim + value_dim, t["linear_conv_kernel_dim"])
        decay = self.rng(p + ".A_log").uniform(0.05, 4.0, value_heads)
        self.tensors[p + ".A_log"] = np.log(decay).astype(np.float32)
        self.tensors[p + ".dt_bias"] = (
            self.rng(p + ".dt_bias").standard_normal(value_heads).astype(np.float32)
        )
        self.norm(p + ".norm.weight", t["linear_value_head_dim"], centre=1.0)

    def moe(self, p: str) -> None:
        t = self.text
        hidden, experts, width = t["hidden_size"], t["num_experts"], t["moe_intermediate_size"]
        shared = t["shared_expert_intermediate_size"]
        self.matrix(p + ".gate.weight", experts, hidden, gain=2.0)
        self.matrix(p + ".experts.gate_up_proj", experts, 2 * width, hidden)
        self.matrix(p + ".experts.down_proj", experts, hidden, width)
        self.matrix(p + ".shared_expert.gate_proj.weight", shared, hidden)
        self.matrix(p + ".shared_expert.up_proj.weight", shared, hidden)
        self.matrix(p + ".shared_expert.down_proj.weight", hidden, shared)
        self.matrix(p + ".shared_expert_gate.weight", 1, hidden)

    def ple(self, p: str, ple_index: int) -> None:
        t = self.text
        wide = t["hc_count"] * t["hidden_size"]
        constants = ngram_constants(t, ple_index)
        self.matrix(p + ".key_proj.weight", wide, t["ple_embed_dim"])
        self.matrix(p + ".value_proj.weight", t["hidden_size"], t["ple_embed_dim"])
        for name in ("key", "query", "conv"):
            self.norm(f"{p}.norm_{name}.weight", wide)
        self.conv(p + ".conv1d.weight", wide, t["ple_conv_kernel_size"])
        e = p + ".ple_embedding"
        self.tensors[e + ".layer_multipliers"] = np.array(constants["multipliers"], np.int64)
        self.tensors[e + ".ngram_heads_vocab_sizes"] = np.array(constants["sizes"], np.int64)
        self.tensors[e + ".ngram_heads_offsets"] = np.array(constants["offsets"], np.int64)
        table = (
            self.rng(e + ".table").standard_normal((constants["rows"], constants["width"])).astype(np.float32)
        )
        for part, block in enumerate(np.split(table, t["split_ngram_parts"])):
            self.tensors[f"{e}.ngram_embedding.shard_{part}.weight"] = block


def tiny_tensors(text: Mapping[str, Any], seed: int, *, vision: bool = False) -> dict[str, np.ndarray]:
    """Return every tensor under its official name: float32, and int64 for the hash constants."""
    maker = _Maker(text, seed)
    hidden, wide = text["hidden_size"], text["hc_count"] * text["hidden_size"]
    embed = maker.rng("embed").standard_normal((text["vocab_size"], hidden))
    maker.tensors[TRUNK + "embed_tokens.weight"] = embed.astype(np.float32)
    maker.matrix("lm_head.weight", text["vocab_size"], hidden, gain=2.0)
    for i, kind in enumerate(text["layer_types"]):
        p = f"{TRUNK}layers.{i}"
        maker.hyper(p + ".attn_hyper_connection")
        maker.hyper(p + ".mlp_hyper_connection")
        if kind == "linear_attention":
            maker.gdn(p + ".linear_attn")
        else:
            maker.qsa(p + ".self_attn")
        maker.moe(p + ".mlp")
        if i + 1 in text["ple_layer_ids"]:
            maker.ple(p + ".ple", text["ple_layer_ids"].index(i + 1))
    maker.hyper(TRUNK + "hyper_connection_mixer", inject=False)
    if text["mtp_num_hidden_layers"]:
        maker.norm("mtp.pre_fc_norm_embedding.weight", hidden)
        maker.norm("mtp.pre_fc_norm_hidden.weight", wide)
        maker.matrix("mtp.fc_embedding.weight", hidden, hidden)
        maker.matrix("mtp.fc_hidden.weight", hidden, hidden)
        maker.hyper("mtp.layers.0.attn_hyper_connection")
        maker.hyper("mtp.layers.0.mlp_hyper_connection")
        maker.qsa("mtp.layers.0.self_attn")
        maker.moe("mtp.layers.0.mlp")
        maker.hyper("mtp.hyper_connection_mixer", inject=False)
    if vision:
        for part in ("attn.qkv", "mlp.linear_fc1"):
            maker.matrix(f"model.visual.blocks.0.{part}.weight", 96, 32)
            maker.norm(f"model.visual.blocks.0.{part}.bias", 96)
    return maker.tensors


# ---------------------------------------------------------------- the two layouts on disk
def build_hf(
    directory: Path,
    *,
    seed: int = 2,
    overrides: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    shards: int = 3,
    vision: bool = False,
    tokenizer: bool = True,
) -> Path:
    """Write a checkpoint in the official Hugging Face layout and return its directory.

    Args:
        directory: Made if absent; files in it are overwritten.
        seed: Seed of every tensor. Seeds 2 and 3 have no tied QSA scores with the default config.
        overrides: Fields of `text_config` to replace.
        dtype: "float32" or "bfloat16" for every float tensor.
        shards: Number of safetensors files, tensors dealt round-robin by name, with an index. 1 writes
            `model.safetensors` without an index.
        vision: Also write a few vision tensors, which a text runtime must skip.
        tokenizer: Also write the tiny tokenizer and chat template.
    """
    text = tiny_text_config(overrides, dtype=dtype)
    tensors = {name: _stored(value, dtype) for name, value in tiny_tensors(text, seed, vision=vision).items()}
    _write(directory, tiny_config(overrides, dtype=dtype), tensors, shards, tokenizer)
    return directory


def build_mlx(
    directory: Path,
    *,
    seed: int = 2,
    overrides: Mapping[str, Any] | None = None,
    bits: int | None = 4,
    group_size: int = 32,
    mode: str = "affine",
    scale_dtype: str = "float32",
    quant_overrides: Mapping[str, Mapping[str, Any] | bool] | None = None,
    quantise: Callable[[str], bool] | None = None,
    mtp: bool = True,
    shards: int = 2,
    tokenizer: bool = True,
) -> Path:
    """Write the same tensors as an MLX pack, quantised as mlx-vlm's default predicate does.

    Args:
        directory: Made if absent; files in it are overwritten.
        seed: As in `build_hf`.
        overrides: Fields of `text_config` to replace.
        bits: Bits per weight, or None for an unquantised pack.
        group_size: Weights per scale. Matrices whose input width it does not divide stay unquantised.
        mode: "affine", "mxfp4", "mxfp8" or "nvfp4".
        scale_dtype: Of affine scales and biases and of every unquantised tensor: "float32" or "bfloat16".
        quant_overrides: Per module, keyed by the pack's module path without prefix
            (`layers.0.mlp.switch_mlp.down_proj`): a {"bits", "group_size", "mode"} mapping, or False.
            Written to the config under the pack's full path.
        quantise: Further filter on the pack's module path without prefix.
        mtp: Include the MTP module under `language_model.mtp.` (oMLX does, mlx-community packs do not).
        shards: Number of safetensors files.
        tokenizer: Also write the tiny tokenizer and chat template.
    """
    text = tiny_text_config(overrides, dtype=scale_dtype)
    given = dict(quant_overrides or {})
    stored: dict[str, Stored] = {}
    config_overrides: dict[str, Any] = {}
    default = {"group_size": group_size, "bits": bits, "mode": mode}
    for name, value in _pack_tensors(text, seed, mtp=mtp).items():
        module = (
            name.removesuffix(".weight").removeprefix("language_model.model.").removeprefix("language_model.")
        )
        spec = _pack_spec(module, value, default, given) if bits else None
        if spec is None or (quantise is not None and not quantise(module)):
            stored[name] = _stored(value, scale_dtype)
            if bits and _is_matrix(module, value):
                config_overrides[name.removesuffix(".weight")] = False
            continue
        stored.update(_quantised(name.removesuffix(".weight"), value, spec, scale_dtype))
        if spec != default:
            config_overrides[name.removesuffix(".weight")] = spec
    config = tiny_config(overrides, dtype=scale_dtype)
    if bits:
        config["quantization"] = {**default, **config_overrides}
        config["quantization_config"] = copy.deepcopy(config["quantization"])
    _write(directory, config, stored, shards, tokenizer)
    return directory


def _pack_tensors(text: Mapping[str, Any], seed: int, *, mtp: bool) -> dict[str, np.ndarray]:
    """Rename and reshape the official tensors as MLX packs do (qwen4exp.md 3.3)."""
    width = text["moe_intermediate_size"]
    out: dict[str, np.ndarray] = {}
    for official, value in tiny_tensors(text, seed).items():
        if official.startswith("mtp."):
            if not mtp:
                continue
            name = "language_model." + official
        elif official.startswith("lm_head."):
            name = "language_model." + official
        else:
            name = official.replace("model.language_model.", "language_model.model.")
        if name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            out[stem + "gate_proj.weight"] = value[:, :width]
            out[stem + "up_proj.weight"] = value[:, width:]
        elif name.endswith(".experts.down_proj"):
            out[name.removesuffix("experts.down_proj") + "switch_mlp.down_proj.weight"] = value
        elif name.endswith(".conv1d.weight"):
            out[name] = value.transpose(0, 2, 1)
        else:
            out[name.replace(".shard_", ".shards.")] = value
    return out


def _is_matrix(module: str, value: np.ndarray) -> bool:
    return value.dtype == np.float32 and value.ndim >= 2 and not module.endswith("conv1d")


def _pack_spec(
    module: str, value: np.ndarray, default: Mapping[str, Any], given: Mapping[str, Mapping[str, Any] | bool]
) -> dict[str, Any] | None:
    if not _is_matrix(module, value):
        return None
    override = given.get(module)
    if override is False:
        return None
    if isinstance(override, Mapping):
        spec = {**default, **override}
    elif module.endswith((".mlp.gate", ".mlp.shared_expert_gate")):
        spec = {"group_size": 64, "bits": 8, "mode": "affine"}
    elif ".ngram_embedding." in module and default["group_size"] == 64:
        spec = {**default, "group_size": 32}
    else:
        spec = dict(default)
    return spec if value.shape[-1] % spec["group_size"] == 0 else None


def _quantised(stem: str, value: np.ndarray, spec: Mapping[str, Any], scale_dtype: str) -> dict[str, Stored]:
    import mlx.core as mx

    dense = mx.array(np.ascontiguousarray(value))
    if scale_dtype == "bfloat16":
        dense = dense.astype(mx.bfloat16)
    # One matrix at a time: mx.quantize takes any number of leading axes, the result is the same.
    packed = mx.quantize(dense, group_size=spec["group_size"], bits=spec["bits"], mode=spec["mode"])
    out: dict[str, Stored] = {}
    for part, array in zip(("weight", "scales", "biases"), packed, strict=False):
        mx.eval(array)
        tag = {mx.uint32: "U32", mx.uint8: "U8", mx.float32: "F32", mx.bfloat16: "BF16"}[array.dtype]
        out[f"{stem}.{part}"] = Stored(tag, tuple(array.shape), bytes(memoryview(array).cast("B")))
    return out


def _stored(value: np.ndarray, dtype: str) -> Stored:
    if value.dtype == np.int64:
        return Stored("I64", value.shape, np.ascontiguousarray(value).tobytes())
    if dtype == "bfloat16":
        return Stored("BF16", value.shape, bfloat16_bits(value).tobytes())
    if dtype != "float32":
        raise ValueError(f"tiny checkpoints are float32 or bfloat16, not {dtype!r}")
    return Stored("F32", value.shape, np.ascontiguousarray(value, np.float32).tobytes())


def _write(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored], shards: int, tokenizer: bool
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
    else:
        weight_map: dict[str, str] = {}
        for j in range(shards):
            file = f"model-{j + 1:05d}-of-{shards:05d}.safetensors"
            part = names[j::shards]
            write_safetensors(directory / file, {name: tensors[name] for name in part})
            weight_map.update(dict.fromkeys(part, file))
        total = sum(len(t.data) for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    text = config["text_config"]
    # As in the real file, the turn end comes first in this list and is NOT the n-gram separator.
    generation = {
        "bos_token_id": text["bos_token_id"],
        "do_sample": True,
        "eos_token_id": [IM_END, text["eos_token_id"]],
        "pad_token_id": text["eos_token_id"],
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))
    if tokenizer:
        write_tokenizer(directory, vocab_size=text["vocab_size"])
