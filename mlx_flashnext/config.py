"""What a `qwen4_exp` checkpoint says about itself, read once, checked and frozen. No MLX here.

Entry points: `read_config(directory)`, `ModelConfig.from_dict`.

Invariants:
1. Every field that shapes the model must be in the file; only `seed` and `norm_topk_prob` have defaults,
   because the official file omits exactly those two. The reference's class defaults describe another, smaller
   model.
   Fields for training alone (initialisation, dropout, auxiliary loss, `use_cache`, `dtype`) are not read.
2. A value this port does not implement is refused by name and value here, before a byte of weights is read.
3. The n-gram separator comes from `text_config` alone, never from `generation_config.json`: hashing with the
   turn end as separator gives fluent, wrong text after the first turn.

Source: qwen4exp.md 1.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from mlx_flashnext.config_fields import Fields
from mlx_flashnext.errors import DocumentCorrupt, UnsupportedCheckpoint
from mlx_flashnext.ngram import NgramConstants, ngram_constants
from mlx_flashnext.regular_file import document_failed, read_regular

LayerKind = Literal["gdn", "qsa"]

# The reference renames `full_attention` after loading, mlx-vlm renames it differently: all three mean QSA.
LAYER_KINDS: Mapping[str, LayerKind] = {
    "linear_attention": "gdn",
    "full_attention": "qsa",
    "indexed_attention": "qsa",
    "qwen_sparse_attention": "qsa",
}
QUANT_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
DEFAULT_SEED, MAX_SEED = 1234, (1 << 64) - 1
DEFAULT_NORM_TOPK_PROB = True
# Bounds the search for primes: the real model has 16 heads of 3-grams.
MAX_NGRAM_SIZE, MAX_NGRAM_HEADS = 64, 1024


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How a matrix is quantised: MLX mode, bits per weight, weights per scale."""

    mode: str
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.mode not in QUANT_MODES:
            raise UnsupportedCheckpoint(
                f"Unknown quantisation mode {self.mode!r}",
                hint=f"known modes: {', '.join(QUANT_MODES)}",
                mode=self.mode,
            )


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """How an FP8 matrix is stored: E4M3 values, one scale for each block of `rows` x `columns`."""

    rows: int
    columns: int


MatrixSpec = QuantSpec | Fp8Blocks


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The text model and its MTP module, under the names of the checkpoint's config."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_kinds: tuple[LayerKind, ...]
    hc_count: int
    hc_lowrank: int
    rms_norm_eps: float
    max_position_embeddings: int
    # QSA
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    # GDN
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    # MoE
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    # PLE: the layer index is zero-based here; the file counts from one
    ple_layer: int
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    split_ngram_parts: int
    ngram: NgramConstants
    # Tokens and the MTP module
    eos_token_ids: tuple[int, ...]
    ngram_separator: int
    bos_token_id: int | None
    num_mtp_layers: int

    @property
    def stack_size(self) -> int:
        """Return the width of the flattened residual stack, streams times hidden."""
        return self.hc_count * self.hidden_size

    @property
    def linear_key_dim(self) -> int:
        """Return the width of all GDN keys (and of all queries) of one token."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Return the width of all GDN values of one token."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_dim(self) -> int:
        """Return the channels of the GDN convolution: queries, keys and values."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def num_select_blocks(self) -> int:
        """Return how many QSA blocks a query may select."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def max_dense_tokens(self) -> int:
        """Return the largest number of visible tokens at which QSA attends to everything."""
        return self.indexer_budget + self.indexer_compress_ratio - 1

    @property
    def ple_conv_rows(self) -> int:
        """Return how many earlier rows the dilated PLE convolution reaches back to."""
        return (self.ple_conv_kernel_size - 1) * self.ngram_size

    @property
    def qsa_layers(self) -> tuple[int, ...]:
        """Return the indices of the sparse attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "qsa")

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Return the indices of the gated delta net layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "gdn")

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> ModelConfig:
        """Parse and check the content of a `config.json`.

        Args:
            data: The whole file, or its `text_config` alone.

        Raises:
            UnsupportedCheckpoint: A field is missing, of the wrong type, inconsistent, or names something not
                implemented.
        """
        top = Fields(data, "")
        if "text_config" in data:
            top.choice("model_type", ("qwen4_exp",))
            text = Fields(top.mapping("text_config"), "text_config.")
        else:
            text = top
        text.choice("model_type", ("qwen4_exp_text",))
        return _parse(text)


def read_config(directory: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint directory.

    Raises:
        UnsupportedCheckpoint: The file is absent, or describes something not implemented.
        DocumentCorrupt: It is there and is no JSON object.
    """
    return ModelConfig.from_dict(parse_config(read_config_file(directory), directory))


def read_config_file(directory: Path) -> bytes:
    """Return the bytes of `config.json`.

    Raises:
        UnsupportedCheckpoint: The file is absent.
        DocumentCorrupt, DocumentUnreadable: It cannot be read.
    """
    path = directory / "config.json"
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise UnsupportedCheckpoint(
            f"No config.json in {directory}",
            hint="give the directory that holds the checkpoint's config.json",
        ) from None
    except OSError as error:
        raise document_failed(error, path) from None


def parse_config(raw: bytes, directory: Path) -> Mapping[str, object]:
    """Return the object in the bytes of a `config.json`.

    Raises:
        DocumentCorrupt: They are not JSON, or hold something else than an object.
    """
    path = directory / "config.json"
    try:
        data: object = json.loads(raw)
        if b"\\u" in raw:
            json.dumps(data, ensure_ascii=False).encode()  # no half of a surrogate pair: nothing can show it
    except (ValueError, RecursionError) as error:
        raise DocumentCorrupt(f"Cannot read {path}: {error}", hint="download the checkpoint again") from None
    if not isinstance(data, dict):
        raise DocumentCorrupt(
            f"{path} holds a {type(data).__name__}, not an object", hint="download it again"
        )
    return cast("Mapping[str, object]", data)


def _parse(text: Fields) -> ModelConfig:
    for name, value in {
        "hidden_act": "silu",
        "output_gate_type": "sigmoid",
        "mamba_ssm_dtype": "float32",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "mtp_use_dedicated_embeddings": False,
        "indexer_kv_heads": 1,
    }.items():
        text.choice(name, (value,))

    vocab_size = text.integer("vocab_size")
    kinds = _layer_kinds(text)
    rotary_dim, rope_theta = _rope(text)
    eos_token_ids, separator, bos_token_id = _token_ids(text)
    ple_layer = _ple_layer(text, len(kinds))
    ngram_size = text.integer("ngram_size", 2, MAX_NGRAM_SIZE)
    heads_per_ngram = text.integer("heads_per_ngram")
    ple_embed_dim = text.integer("ple_embed_dim")
    num_heads = (ngram_size - 1) * heads_per_ngram
    text.require(
        num_heads <= MAX_NGRAM_HEADS,
        "heads_per_ngram",
        f"at most {MAX_NGRAM_HEADS} n-gram heads are implemented",
    )
    text.require(
        ple_embed_dim % num_heads == 0,
        "ple_embed_dim",
        f"not divisible by (ngram_size - 1) * heads_per_ngram = {num_heads}",
    )
    ngram = ngram_constants(
        vocab_size=vocab_size,
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        vocab_size_base=text.integer("ngram_vocab_size_base"),
        divisor=text.integer("make_ngram_vocab_size_divisible_by"),
        embed_dim=ple_embed_dim,
        seed=text.integer("seed", 0, MAX_SEED) if text.has("seed") else DEFAULT_SEED,
    )
    norm_topk_prob = DEFAULT_NORM_TOPK_PROB
    if text.has("norm_topk_prob"):
        text.choice("norm_topk_prob", (True, False))
        norm_topk_prob = text.get("norm_topk_prob") is True

    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size"),
        num_hidden_layers=len(kinds),
        layer_kinds=kinds,
        hc_count=text.integer("hc_count"),
        hc_lowrank=text.integer("hc_lowrank"),
        rms_norm_eps=text.number("rms_norm_eps"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        num_attention_heads=text.integer("num_attention_heads"),
        num_key_value_heads=text.integer("num_key_value_heads"),
        head_dim=text.integer("head_dim"),
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        indexer_n_heads=text.integer("indexer_n_heads"),
        indexer_head_dim=text.integer("indexer_head_dim"),
        indexer_budget=text.integer("indexer_budget"),
        indexer_compress_ratio=text.integer("indexer_compress_ratio"),
        linear_num_key_heads=text.integer("linear_num_key_heads"),
        linear_num_value_heads=text.integer("linear_num_value_heads"),
        linear_key_head_dim=text.integer("linear_key_head_dim"),
        linear_value_head_dim=text.integer("linear_value_head_dim"),
        linear_conv_kernel_dim=text.integer("linear_conv_kernel_dim", 2),
        num_experts=text.integer("num_experts"),
        num_experts_per_tok=text.integer("num_experts_per_tok"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        shared_expert_intermediate_size=text.integer("shared_expert_intermediate_size"),
        norm_topk_prob=norm_topk_prob,
        ple_layer=ple_layer,
        ple_embed_dim=ple_embed_dim,
        ple_conv_kernel_size=text.integer("ple_conv_kernel_size", 2),
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        split_ngram_parts=text.integer("split_ngram_parts"),
        ngram=ngram,
        eos_token_ids=eos_token_ids,
        ngram_separator=separator,
        bos_token_id=bos_token_id,
        num_mtp_layers=_mtp_layers(text, rope_theta),
    )
    _check_sizes(text, config)
    return config


def _layer_kinds(text: Fields) -> tuple[LayerKind, ...]:
    num_layers = text.integer("num_hidden_layers")
    types = text.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers:
        raise text.refuse("layer_types", f"a list of num_hidden_layers = {num_layers} names was expected")
    kinds: list[LayerKind] = []
    for index, name in enumerate(cast("list[object]", types)):
        kind = _layer_kind(name)
        if kind is None:
            raise text.refuse("layer_types", f"unknown type {name!r} at index {index}")
        kinds.append(kind)
    return tuple(kinds)


def _layer_kind(name: object) -> LayerKind | None:
    return LAYER_KINDS.get(name) if isinstance(name, str) else None


def _rope(text: Fields) -> tuple[int, float]:
    """Return the rotary dims of the main heads and the base; a factor stored twice must agree with itself."""
    rope = Fields(text.mapping("rope_parameters"), "text_config.rope_parameters.")
    rope.choice("rope_type", ("default",))
    factor = rope.number("partial_rotary_factor") if rope.has("partial_rotary_factor") else None
    if factor is None or text.has("partial_rotary_factor"):
        outer = text.number("partial_rotary_factor")
        text.require(factor in (None, outer), "partial_rotary_factor", f"rope_parameters says {factor}")
        factor = outer
    text.require(factor <= 1, "partial_rotary_factor", "a share of head_dim was expected")
    rotary_dim = int(text.integer("head_dim") * factor)
    text.require(
        0 < rotary_dim <= min(text.integer("head_dim"), text.integer("indexer_head_dim"))
        and rotary_dim % 2 == 0,
        "head_dim",
        f"it gives {rotary_dim} rotary dims, which must be even and fit head_dim and indexer_head_dim",
    )
    return rotary_dim, rope.number("rope_theta")


def _token_ids(text: Fields) -> tuple[tuple[int, ...], int, int | None]:
    """Return the stop ids of the text config, the n-gram separator among them, and the bos id."""
    bos = text.integer("bos_token_id", 0) if text.get("bos_token_id") is not None else None
    value = text.get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    eos = tuple(i for i in listed if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
    if not eos or len(eos) != len(listed):
        raise text.refuse("eos_token_id", "a token id or a list of token ids was expected")
    vocab_size = text.integer("vocab_size")
    text.require(max(eos) < vocab_size, "eos_token_id", f"outside the vocabulary of {vocab_size}")
    # Some loaders replace the id by a list that starts with the turn end; the real separator is also the bos.
    separator = bos if bos is not None and bos in eos else eos[0]
    return eos, separator, bos


def _ple_layer(text: Fields, num_layers: int) -> int:
    ids = text.get("ple_layer_ids")
    if not isinstance(ids, list) or len(ids) != 1:
        raise text.refuse("ple_layer_ids", "a list of exactly one layer is implemented")
    if isinstance(ids[0], bool) or not isinstance(ids[0], int) or not 1 <= ids[0] <= num_layers:
        raise text.refuse("ple_layer_ids", f"layers are counted from 1 to {num_layers}")
    return ids[0] - 1


def _mtp_layers(text: Fields, rope_theta: float) -> int:
    count = text.integer("mtp_num_hidden_layers", 0)
    text.require(count <= 1, "mtp_num_hidden_layers", "at most one MTP layer is implemented")
    if count:
        mtp = Fields(text.mapping("mtp"), "text_config.mtp.")
        types = mtp.get("layer_types")
        if not isinstance(types, list) or [*map(_layer_kind, cast("list[object]", types))] != ["qsa"]:
            raise mtp.refuse("layer_types", "one attention layer was expected")
        mtp.choice("num_hidden_layers", (1,))
        mtp.choice("mtp_use_hidden_state_from_layer", (None,))
        mtp.require(mtp.number("rope_theta") == rope_theta, "rope_theta", f"the trunk's is {rope_theta}")
    return count


def _check_sizes(text: Fields, config: ModelConfig) -> None:
    for name, other in {
        "num_attention_heads": "num_key_value_heads",
        "linear_num_value_heads": "linear_num_key_heads",
        "indexer_budget": "indexer_compress_ratio",
    }.items():
        divisor = text.integer(other)
        text.require(text.integer(name) % divisor == 0, name, f"not divisible by {other} = {divisor}")
    text.require(
        config.num_experts_per_tok <= config.num_experts,
        "num_experts_per_tok",
        f"of {config.num_experts} experts",
    )
    parts = config.split_ngram_parts
    text.require(
        config.ngram.num_rows % parts == 0, "split_ngram_parts", f"of {config.ngram.num_rows} table rows"
    )
