"""Which tensors a config asks for, with the config fields behind every dimension.

Entry points: `trunk_tensors`, `mtp_tensors`, `describe`. Routed experts and the n-gram table are not here:
they have layouts of their own. Source: qwen4exp.md 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mlx_flashnext.checkpoint.stored import Role
from mlx_flashnext.config import ModelConfig


class Size(NamedTuple):
    """One dimension: its value and the fields of config.json it is computed from."""

    value: int
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor the config asks for."""

    name: str
    role: Role
    sizes: tuple[Size, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""
        return tuple(size.value for size in self.sizes)


def describe(size: Size, text: Mapping[str, object]) -> str:
    """Return the fields behind a dimension with their values, as config.json spells them."""
    return ", ".join(f"{name} = {text.get(name)!r}" for name in size.fields)


def trunk_tensors(config: ModelConfig) -> Iterator[Expected]:
    """Yield the trunk's tensors: embedding, layers, final mixer, head."""
    sizes = Sizes(config)
    vocabulary = Size(config.vocab_size, ("vocab_size",))
    yield Expected("embed_tokens", "matrix", (vocabulary, sizes.hidden))
    for layer, kind in enumerate(config.layer_kinds):
        prefix = f"layers.{layer}."
        if layer == config.ple_layer:
            yield from _ple(sizes, prefix + "ple.")
        yield from _layer(sizes, prefix, is_qsa=kind == "qsa")
    yield from _hyper(sizes, "hyper_connection_mixer.", inject=False)
    yield Expected("lm_head", "matrix", (vocabulary, sizes.hidden))


def mtp_tensors(config: ModelConfig) -> Iterator[Expected]:
    """Yield the tensors of the MTP module, names with `mtp.` in front."""
    sizes = Sizes(config)
    yield Expected("mtp.pre_fc_norm_embedding", "vector", (sizes.hidden,))
    yield Expected("mtp.pre_fc_norm_hidden", "vector", (sizes.stack,))
    yield Expected("mtp.fc_embedding", "matrix", (sizes.hidden, sizes.hidden))
    yield Expected("mtp.fc_hidden", "matrix", (sizes.hidden, sizes.hidden))
    yield from _layer(sizes, "mtp.layers.0.", is_qsa=True)
    yield from _hyper(sizes, "mtp.hyper_connection_mixer.", inject=False)


class Sizes:
    """Dimensions shared by several tensors."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.hidden = Size(config.hidden_size, ("hidden_size",))
        self.stack = Size(config.stack_size, ("hc_count", "hidden_size"))
        self.streams = Size(config.hc_count, ("hc_count",))
        self.lowrank = Size(config.hc_lowrank, ("hc_lowrank",))
        self.experts = Size(config.num_experts, ("num_experts",))
        self.shared = Size(config.shared_expert_intermediate_size, ("shared_expert_intermediate_size",))
        self.embed = Size(config.ple_embed_dim, ("ple_embed_dim",))
        heads = ("ngram_size", "heads_per_ngram")
        self.ngram_heads = Size(config.ngram.num_heads, heads)
        self.ngram_order = Size(config.ngram_size, ("ngram_size",))
        self.row_width = Size(config.ngram.width, ("ple_embed_dim", *heads))


def _hyper(sizes: Sizes, prefix: str, *, inject: bool = True) -> Iterator[Expected]:
    yield Expected(prefix + "hc_norm", "vector", (sizes.stack,))
    yield Expected(prefix + "input_mix_weight_down", "matrix", (sizes.lowrank, sizes.stack))
    yield Expected(prefix + "input_mix_weight_up", "matrix", (sizes.stack, sizes.lowrank))
    if inject:
        yield Expected(prefix + "block_inject_weight", "matrix", (sizes.streams, sizes.stack))


def _layer(sizes: Sizes, prefix: str, *, is_qsa: bool) -> Iterator[Expected]:
    yield from _hyper(sizes, prefix + "attn_hyper_connection.")
    yield from _qsa(sizes, prefix + "self_attn.") if is_qsa else _gdn(sizes, prefix + "linear_attn.")
    yield from _hyper(sizes, prefix + "mlp_hyper_connection.")
    one = Size(1, ())
    yield Expected(prefix + "mlp.gate", "matrix", (sizes.experts, sizes.hidden))
    yield Expected(prefix + "mlp.shared_expert_gate", "matrix", (one, sizes.hidden))
    yield Expected(prefix + "mlp.shared_expert.gate_proj", "matrix", (sizes.shared, sizes.hidden))
    yield Expected(prefix + "mlp.shared_expert.up_proj", "matrix", (sizes.shared, sizes.hidden))
    yield Expected(prefix + "mlp.shared_expert.down_proj", "matrix", (sizes.hidden, sizes.shared))


def _gdn(sizes: Sizes, prefix: str) -> Iterator[Expected]:
    config, hidden = sizes.config, sizes.hidden
    heads = Size(config.linear_num_value_heads, ("linear_num_value_heads",))
    head_dim = Size(config.linear_value_head_dim, ("linear_value_head_dim",))
    values = Size(config.linear_value_dim, ("linear_num_value_heads", "linear_value_head_dim"))
    channels = Size(
        config.linear_conv_dim,
        ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"),
    )
    taps = Size(config.linear_conv_kernel_dim, ("linear_conv_kernel_dim",))
    yield Expected(prefix + "A_log", "vector", (heads,))
    yield Expected(prefix + "dt_bias", "vector", (heads,))
    yield Expected(prefix + "norm", "vector", (head_dim,))
    yield Expected(prefix + "conv1d", "conv", (channels, taps))
    yield Expected(prefix + "in_proj_qkv", "matrix", (channels, hidden))
    yield Expected(prefix + "in_proj_z", "matrix", (values, hidden))
    yield Expected(prefix + "in_proj_b", "matrix", (heads, hidden))
    yield Expected(prefix + "in_proj_a", "matrix", (heads, hidden))
    yield Expected(prefix + "out_proj", "matrix", (hidden, values))


def _qsa(sizes: Sizes, prefix: str) -> Iterator[Expected]:
    config, hidden = sizes.config, sizes.hidden
    head_dim = Size(config.head_dim, ("head_dim",))
    queries = Size(config.num_attention_heads * config.head_dim, ("num_attention_heads", "head_dim"))
    keys = Size(config.num_key_value_heads * config.head_dim, ("num_key_value_heads", "head_dim"))
    index_dim = Size(config.indexer_head_dim, ("indexer_head_dim",))
    # One key head: the config reader refuses any other number of indexer_kv_heads.
    index_rows = Size(
        (config.indexer_n_heads + 1) * config.indexer_head_dim, ("indexer_n_heads", "indexer_head_dim")
    )
    yield Expected(prefix + "q_norm", "vector", (head_dim,))
    yield Expected(prefix + "k_norm", "vector", (head_dim,))
    yield Expected(prefix + "q_proj", "matrix", (Size(2 * queries.value, queries.fields), hidden))
    yield Expected(prefix + "k_proj", "matrix", (keys, hidden))
    yield Expected(prefix + "v_proj", "matrix", (keys, hidden))
    yield Expected(prefix + "o_proj", "matrix", (hidden, queries))
    yield Expected(prefix + "indexer.q_layernorm", "vector", (index_dim,))
    yield Expected(prefix + "indexer.k_layernorm", "vector", (index_dim,))
    yield Expected(prefix + "indexer.index_qk_proj", "matrix", (index_rows, hidden))


def _ple(sizes: Sizes, prefix: str) -> Iterator[Expected]:
    buffers = prefix + "ple_embedding."
    taps = Size(sizes.config.ple_conv_kernel_size, ("ple_conv_kernel_size",))
    yield Expected(buffers + "layer_multipliers", "integer", (sizes.ngram_order,))
    yield Expected(buffers + "ngram_heads_vocab_sizes", "integer", (sizes.ngram_heads,))
    yield Expected(buffers + "ngram_heads_offsets", "integer", (sizes.ngram_heads,))
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield Expected(prefix + norm, "vector", (sizes.stack,))
    yield Expected(prefix + "conv1d", "conv", (sizes.stack, taps))
    yield Expected(prefix + "key_proj", "matrix", (sizes.stack, sizes.embed))
    yield Expected(prefix + "value_proj", "matrix", (sizes.hidden, sizes.embed))
