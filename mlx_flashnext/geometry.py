"""Sizes that follow from the config alone: what a sequence carries, and what a block needs while it runs.

Entry points: `state_bytes`, `qsa_workspace_bytes`. Pure functions, no MLX: the memory plan is made of them.

Source: qwen4exp.md 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_flashnext.config import ModelConfig

# Rows a growing key/value buffer gains at a time (mlx-lm's step).
KV_STEP_ROWS = 256
# Query rows above the QSA budget that are gathered at a time: bounds the copies of selected keys.
QSA_SPARSE_ROWS = 16
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes a sequence carries, by kind: grows with context (`kv`), or does not (`recurrent`, `ple`)."""

    kv: int
    recurrent: int
    ple: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.kv + self.recurrent + self.ple


def buffer_rows(num_tokens: int, capacity_tokens: int | None) -> int:
    """Return the rows a key/value buffer holds for `num_tokens`, grown in steps or allocated at once."""
    if capacity_tokens is not None:
        return capacity_tokens
    return -(-num_tokens // KV_STEP_ROWS) * KV_STEP_ROWS


def qsa_layer_bytes(config: ModelConfig, rows: int, itemsize: int) -> int:
    """Return the bytes of one QSA layer with buffers of `rows` tokens: keys, values, index keys."""
    ratio = config.indexer_compress_ratio
    pair = 2 * config.num_key_value_heads * config.head_dim * itemsize
    pooled = -(-rows // ratio) * config.indexer_head_dim * FLOAT32_BYTES
    return rows * pair + pooled + (ratio - 1) * config.indexer_head_dim * itemsize


def gdn_layer_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of one GDN layer: recurrent matrices in float32 and the convolution window."""
    heads = config.linear_num_value_heads
    matrix = config.linear_value_head_dim * config.linear_key_head_dim
    window = (config.linear_conv_kernel_dim - 1) * config.linear_conv_dim
    return heads * matrix * FLOAT32_BYTES + window * itemsize


def state_bytes(
    config: ModelConfig,
    num_tokens: int,
    itemsize: int,
    *,
    capacity_tokens: int | None = None,
    mtp: bool = False,
) -> StateBytes:
    """Return what a sequence of `num_tokens` carries.

    Args:
        config: Model geometry.
        num_tokens: Tokens consumed.
        itemsize: Bytes of the compute type.
        capacity_tokens: Tokens allocated at once; None means grown in steps.
        mtp: Count the MTP layer's cache too.
    """
    rows = buffer_rows(num_tokens, capacity_tokens)
    num_qsa = len(config.qsa_layers) + (config.num_mtp_layers if mtp else 0)
    return StateBytes(
        kv=num_qsa * qsa_layer_bytes(config, rows, itemsize),
        recurrent=len(config.gdn_layers) * gdn_layer_bytes(config, itemsize),
        ple=config.ple_conv_rows * config.stack_size * itemsize,
    )


def qsa_workspace_bytes(config: ModelConfig, num_rows: int, context_tokens: int, itemsize: int) -> int:
    """Return an upper bound of what one QSA layer holds at a time for a block, apart from its projections.

    Args:
        config: Model geometry.
        num_rows: Rows of the block.
        context_tokens: Tokens visible to its last row.
        itemsize: Bytes of the compute type.
    """
    dense_rows = min(num_rows, config.max_dense_tokens)
    dense_keys = min(context_tokens, config.max_dense_tokens)
    # Backends without a fused kernel hold scores and probabilities of all heads.
    dense = 2 * dense_rows * dense_keys * config.num_attention_heads * FLOAT32_BYTES
    if context_tokens <= config.max_dense_tokens:
        return dense
    rows = min(num_rows, QSA_SPARSE_ROWS)
    attended = config.indexer_budget + config.indexer_compress_ratio
    gathered = 2 * 2 * rows * attended * config.num_key_value_heads * config.head_dim * itemsize
    scores = 2 * rows * attended * config.num_attention_heads * FLOAT32_BYTES
    blocks = context_tokens // config.indexer_compress_ratio
    ranking = rows * blocks * (config.indexer_n_heads + 6) * FLOAT32_BYTES
    sparse = gathered + scores + ranking
    return max(dense if num_rows > 1 else 0, sparse)
