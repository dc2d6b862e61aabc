"""Every tensor of a `qwen4_exp` checkpoint by official name and logical shape, with how its values are drawn.

Entry points: `text_tensors`, `vision_tensors`. Written out from qwen4exp.md 3.1 on purpose, not derived from
the loader's own table: it is what the loader is tested against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["matrix", "experts", "table", "norm", "conv", "decay", "integer", "vision"]

TRUNK = "model.language_model."


@dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor.

    `name` is official but without `.weight`; for experts it names one projection, which the official layout
    does not store on its own. `std` is that of the values, `centre` their mean; `diagonal` times the identity
    is added to a square matrix.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    std: float = 0.0
    centre: float = 0.0
    diagonal: float = 0.0
    integers: tuple[int, ...] = ()


def text_tensors(text: Mapping[str, Any], *, mtp: bool, is_mtp_apt: bool = False) -> Iterator[Tensor]:
    """Yield every text tensor: embedding, layers in order, final mixer, head, MTP.

    An apt MTP module sees a token's embedding nearly as it is, so that it often proposes the successor which
    `values.Head` has the target prefer.
    """
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    yield Tensor(TRUNK + "embed_tokens", "matrix", (vocab, hidden), 1.0)
    for layer, kind in enumerate(text["layer_types"]):
        prefix = f"{TRUNK}layers.{layer}"
        yield from _layer(text, prefix, is_linear=kind == "linear_attention")
        if layer + 1 in text["ple_layer_ids"]:
            yield from _ple(text, prefix + ".ple", text["ple_layer_ids"].index(layer + 1))
    yield from _hyper(text, TRUNK + "hyper_connection_mixer", inject=False)
    yield Tensor("lm_head", "matrix", (vocab, hidden), 1 / math.sqrt(hidden))
    if mtp:
        yield Tensor("mtp.pre_fc_norm_embedding", "norm", (hidden,), 0.02)
        yield Tensor("mtp.pre_fc_norm_hidden", "norm", (text["hc_count"] * hidden,), 0.02)
        noise, diagonal = (0.1, 1.5) if is_mtp_apt else (1.0, 0.0)
        std = noise / math.sqrt(hidden)
        yield Tensor("mtp.fc_embedding", "matrix", (hidden, hidden), std, diagonal=diagonal)
        yield Tensor("mtp.fc_hidden", "matrix", (hidden, hidden), 0.3 / math.sqrt(hidden))
        yield from _layer(text, "mtp.layers.0", is_linear=False)
        yield from _hyper(text, "mtp.hyper_connection_mixer", inject=False)


def _matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> Tensor:
    return Tensor(name, "matrix", (rows, columns), gain / math.sqrt(columns))


def _hyper(text: Mapping[str, Any], prefix: str, *, inject: bool = True) -> Iterator[Tensor]:
    wide = text["hc_count"] * text["hidden_size"]
    yield Tensor(prefix + ".hc_norm", "norm", (wide,), 0.1)
    yield _matrix(prefix + ".input_mix_weight_down", text["hc_lowrank"], wide)
    yield _matrix(prefix + ".input_mix_weight_up", wide, text["hc_lowrank"])
    if inject:
        yield _matrix(prefix + ".block_inject_weight", text["hc_count"], wide)


def _layer(text: Mapping[str, Any], prefix: str, *, is_linear: bool) -> Iterator[Tensor]:
    yield from (
        _linear_attention(text, prefix + ".linear_attn")
        if is_linear
        else _full_attention(text, prefix + ".self_attn")
    )
    yield from _moe(text, prefix + ".mlp")
    yield from _hyper(text, prefix + ".attn_hyper_connection")
    yield from _hyper(text, prefix + ".mlp_hyper_connection")


def _linear_attention(text: Mapping[str, Any], prefix: str) -> Iterator[Tensor]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    yield Tensor(prefix + ".A_log", "decay", (heads,))
    yield Tensor(prefix + ".dt_bias", "norm", (heads,), 0.1, centre=1.0)
    yield Tensor(prefix + ".conv1d", "conv", (2 * keys + values, text["linear_conv_kernel_dim"]), 0.5)
    yield Tensor(prefix + ".norm", "norm", (text["linear_value_head_dim"],), 0.1, centre=1.0)
    yield _matrix(prefix + ".in_proj_qkv", 2 * keys + values, hidden)
    yield _matrix(prefix + ".in_proj_z", values, hidden)
    yield _matrix(prefix + ".in_proj_b", heads, hidden)
    yield _matrix(prefix + ".in_proj_a", heads, hidden)
    yield _matrix(prefix + ".out_proj", hidden, values, 0.5)


def _full_attention(text: Mapping[str, Any], prefix: str) -> Iterator[Tensor]:
    hidden, heads, dim = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    kv_rows, index_dim = text["num_key_value_heads"] * dim, text["indexer_head_dim"]
    index_rows = (text["indexer_n_heads"] + text["indexer_kv_heads"]) * index_dim
    yield _matrix(prefix + ".q_proj", 2 * heads * dim, hidden)
    yield _matrix(prefix + ".k_proj", kv_rows, hidden)
    yield _matrix(prefix + ".v_proj", kv_rows, hidden)
    yield _matrix(prefix + ".o_proj", hidden, heads * dim, 0.5)
    yield Tensor(prefix + ".q_norm", "norm", (dim,), 0.1)
    yield Tensor(prefix + ".k_norm", "norm", (dim,), 0.1)
    yield _matrix(prefix + ".indexer.index_qk_proj", index_rows, hidden)
    yield Tensor(prefix + ".indexer.q_layernorm", "norm", (index_dim,), 0.1)
    yield Tensor(prefix + ".indexer.k_layernorm", "norm", (index_dim,), 0.1)


def _moe(text: Mapping[str, Any], prefix: str) -> Iterator[Tensor]:
    hidden, experts = text["hidden_size"], text["num_experts"]
    width, shared = text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
    yield _matrix(prefix + ".gate", experts, hidden, 3.0)
    yield _matrix(prefix + ".shared_expert_gate", 1, hidden)
    yield _matrix(prefix + ".shared_expert.gate_proj", shared, hidden)
    yield _matrix(prefix + ".shared_expert.up_proj", shared, hidden)
    yield _matrix(prefix + ".shared_expert.down_proj", hidden, shared, 0.5)
    wide = 2.0 / math.sqrt(hidden)
    yield Tensor(prefix + ".experts.gate_proj", "experts", (experts, width, hidden), wide)
    yield Tensor(prefix + ".experts.up_proj", "experts", (experts, width, hidden), wide)
    yield Tensor(prefix + ".experts.down_proj", "experts", (experts, hidden, width), 2.0 / math.sqrt(width))


def _ple(text: Mapping[str, Any], prefix: str, index: int) -> Iterator[Tensor]:
    hidden, wide, dim = text["hidden_size"], text["hc_count"] * text["hidden_size"], text["ple_embed_dim"]
    multipliers, sizes, offsets, num_rows = ngram_integers(text, index)
    buffers = prefix + ".ple_embedding"
    yield Tensor(buffers + ".layer_multipliers", "integer", (len(multipliers),), integers=multipliers)
    yield Tensor(buffers + ".ngram_heads_vocab_sizes", "integer", (len(sizes),), integers=sizes)
    yield Tensor(buffers + ".ngram_heads_offsets", "integer", (len(offsets),), integers=offsets)
    parts = text["split_ngram_parts"]
    if num_rows % parts:
        raise SystemExit(f"{num_rows} n-gram rows do not divide into {parts} parts (split_ngram_parts)")
    for part in range(parts):
        shape = (num_rows // parts, dim // len(sizes))
        yield Tensor(f"{buffers}.ngram_embedding.shard_{part}", "table", shape, 1.0)
    yield _matrix(prefix + ".key_proj", wide, dim)
    yield _matrix(prefix + ".value_proj", hidden, dim)
    for name in ("norm_key", "norm_query", "norm_conv"):
        yield Tensor(f"{prefix}.{name}", "norm", (wide,), 0.1)
    yield Tensor(prefix + ".conv1d", "conv", (wide, text["ple_conv_kernel_size"]), 0.3)


def ngram_integers(
    text: Mapping[str, Any], index: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Return multipliers, head sizes, head offsets and padded rows of the table (qwen4exp.md 2.3.1)."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    primes: list[int] = []
    number = text["ngram_vocab_size_base"]
    while len(primes) < heads * (index + 1):
        if number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1)):
            primes.append(number)
        number += 1
    sizes = tuple(primes[heads * index :])
    offsets = tuple(sum(sizes[:h]) for h in range(heads))
    half = max(1, (((1 << 63) - 1) // text["vocab_size"]) // 2)
    multipliers: list[int] = []
    for i in range(text["ngram_size"]):
        v = (text.get("seed", 1234) + 10007 * index + golden * (i + 1) + golden) & mask
        v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & mask
        v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & mask
        multipliers.append(2 * ((v ^ (v >> 31)) % half) + 1)
    divisor = text["make_ngram_vocab_size_divisible_by"]
    return tuple(multipliers), sizes, offsets, -(-sum(sizes) // divisor) * divisor


def vision_tensors(vision: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the 333 vision tensors; names carry their own `.weight` or `.bias`."""
    dim, inner = vision["hidden_size"], vision["intermediate_size"]
    patch = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    merged = dim * vision["spatial_merge_size"] ** 2

    def linear(name: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield Tensor(f"model.visual.{name}.weight", "vision", (rows, columns), 0.02)
        yield Tensor(f"model.visual.{name}.bias", "vision", (rows,), 0.02)

    def norm(name: str, length: int) -> Iterator[Tensor]:
        yield Tensor(f"model.visual.{name}.weight", "vision", (length,), 0.02, centre=1.0)
        yield Tensor(f"model.visual.{name}.bias", "vision", (length,), 0.02)

    for block in range(vision["depth"]):
        prefix = f"blocks.{block}."
        yield from linear(prefix + "attn.qkv", 3 * dim, dim)
        yield from linear(prefix + "attn.proj", dim, dim)
        yield from linear(prefix + "mlp.linear_fc1", inner, dim)
        yield from linear(prefix + "mlp.linear_fc2", dim, inner)
        yield from norm(prefix + "norm1", dim)
        yield from norm(prefix + "norm2", dim)
    yield from norm("merger.norm", dim)
    yield from linear("merger.linear_fc1", merged, merged)
    yield from linear("merger.linear_fc2", vision["out_hidden_size"], merged)
    yield Tensor("model.visual.patch_embed.proj.weight", "vision", (dim, *patch), 0.02)
    yield Tensor("model.visual.patch_embed.proj.bias", "vision", (dim,), 0.02)
    yield Tensor("model.visual.pos_embed.weight", "vision", (vision["num_position_embeddings"], dim), 0.02)
