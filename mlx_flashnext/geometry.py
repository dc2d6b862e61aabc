"""Sizes that follow from the config alone: what a sequence carries, and what a block needs while it runs.

Entry points: `state_bytes`, `forward_workspace_bytes`. Pure functions, no MLX: the memory plan is made of
them.

Source: qwen4exp.md 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_flashnext.config import ModelConfig

# Rows a growing key/value buffer gains at a time (mlx-lm's step).
KV_STEP_ROWS = 256
# Query rows within the QSA budget attended at a time: bounds the scores of backends without a fused kernel.
QSA_DENSE_ROWS = 128
# Rows of a causal convolution multiplied at a time: bounds the products of all taps.
CONV_ROWS = 64
# Rows of the GDN recurrence in one call: a backend without a kernel keeps the state of every row of a call.
GDN_ROWS = 32
# The same where a block may be cut: the state after each call is kept, and less than a call is run again. Up
# to 8 rows every backend computes row by row. 4 keeps a cut under a tenth of a one-token step on the CPU
# backend, and no state is kept for up to 3 proposals (bench/studies/gdn_rollback.py).
GDN_STEP_ROWS = 4
# Query rows above the QSA budget that are gathered at a time: bounds the copies of selected keys.
QSA_SPARSE_ROWS = 16
# Rows up to which the pieces of a pass are replayed instead of described: a token and its proposals. Each
# number of rows is a description that is kept, and with more of them products are nearly all of the time
# (bench/studies/replay_gain.py).
TRACED_ROWS = 8
FLOAT32_BYTES = 4
# Small arrays of the parts queued ahead: what a one-row step needs beyond the sizes below (measured, rounded
# up).
QUEUE_BYTES = 1 << 20


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


def block_bytes(config: ModelConfig, num_rows: int, itemsize: int, *, revocable: bool) -> int:
    """Return an upper bound of what a block holds beside the sequence's state until it is closed.

    The states after it that are not shared with those before, and if it may be cut, what that takes: rows
    that entered the convolutions, inputs of the recurrence, its state every `GDN_STEP_ROWS` rows, raw index
    keys.

    Args:
        config: Model geometry.
        num_rows: Rows of the block.
        itemsize: Bytes of the compute type.
        revocable: Whether fewer rows than all may be committed.
    """
    ratio, index_row = config.indexer_compress_ratio, config.indexer_head_dim * itemsize
    num_gdn, num_qsa = len(config.gdn_layers), len(config.qsa_layers)
    ple_row = config.stack_size * itemsize
    held = num_gdn * gdn_layer_bytes(config, itemsize) + config.ple_conv_rows * ple_row
    held += num_qsa * (ratio - 1) * index_row
    if not revocable or num_rows == 1:
        # A slice of a short window is kept with its window.
        return held + num_gdn * config.linear_conv_dim * itemsize + ple_row + num_qsa * index_row
    conv_rows = config.linear_conv_kernel_dim - 1 + num_rows
    # Values are a part of all that was mixed, which they keep; keys are normalised apart.
    inputs = config.linear_conv_dim + config.linear_key_dim + 2 * config.linear_num_value_heads
    states = (num_rows - 1) // GDN_STEP_ROWS
    matrix = config.linear_num_value_heads * config.linear_value_head_dim * config.linear_key_head_dim
    gdn = conv_rows * config.linear_conv_dim * itemsize
    gdn += (num_rows * inputs + states * matrix) * FLOAT32_BYTES
    ple = (config.ple_conv_rows + num_rows) * ple_row
    return held + num_gdn * gdn + ple + num_qsa * (ratio - 1 + num_rows) * index_row


def forward_workspace_bytes(config: ModelConfig, num_rows: int, context_tokens: int, itemsize: int) -> int:
    """Return an upper bound of the intermediate arrays alive at a time while a block runs.

    Without the logits of more than one row, the new state, and the widening of a bank of another type.

    Args:
        config: Model geometry.
        num_rows: Rows of the block.
        context_tokens: Tokens visible to its last row.
        itemsize: Bytes of the compute type.

    Source: the arrays of each part, checked against MLX's peak on the CPU backend. A backend queues the next
    part before the last has finished, so the largest part and half of the second largest are counted
    together.
    """
    stack = num_rows * config.stack_size
    hyper = stack * (3 * FLOAT32_BYTES + itemsize)
    ple = stack * 8 * FLOAT32_BYTES + num_rows * config.ple_embed_dim * itemsize
    parts = sorted(
        (
            ple,
            _gdn_workspace_bytes(config, num_rows),
            _qsa_workspace_bytes(config, num_rows, context_tokens, itemsize),
            _moe_workspace_bytes(config, num_rows, itemsize),
            hyper,
        )
    )
    return 3 * stack * itemsize + parts[-1] + parts[-2] // 2 + QUEUE_BYTES


def _gdn_workspace_bytes(config: ModelConfig, num_rows: int) -> int:
    channels = config.linear_conv_dim
    rows = num_rows * (4 * channels + 2 * config.linear_value_dim)
    products = min(num_rows, CONV_ROWS) * config.linear_conv_kernel_dim * channels
    matrix = config.linear_num_value_heads * config.linear_value_head_dim * config.linear_key_head_dim
    return (rows + products + 2 * min(num_rows, GDN_ROWS) * matrix) * FLOAT32_BYTES


def _qsa_workspace_bytes(config: ModelConfig, num_rows: int, context_tokens: int, itemsize: int) -> int:
    heads = config.num_attention_heads
    projected = 6 * num_rows * heads * config.head_dim * itemsize
    # Backends without a fused kernel hold scores and probabilities of all heads.
    dense_keys = min(context_tokens, config.max_dense_tokens)
    dense = 2 * min(num_rows, QSA_DENSE_ROWS) * dense_keys * heads * FLOAT32_BYTES
    if context_tokens <= config.max_dense_tokens:
        return projected + dense
    rows = min(num_rows, QSA_SPARSE_ROWS)
    attended = config.indexer_budget + config.indexer_compress_ratio
    gathered = 2 * rows * attended * config.num_key_value_heads * config.head_dim * itemsize
    scores = rows * attended * heads * FLOAT32_BYTES
    blocks = context_tokens // config.indexer_compress_ratio
    ranking = rows * blocks * (config.indexer_n_heads + 6) * FLOAT32_BYTES
    # Two sub-blocks: one computed, one queued; keys and values twice, gathered and laid out for the product.
    return projected + max(dense if num_rows > 1 else 0, 2 * (2 * gathered + scores + ranking))


def _moe_workspace_bytes(config: ModelConfig, num_rows: int, itemsize: int) -> int:
    pairs = num_rows * config.num_experts_per_tok
    outputs = pairs * config.hidden_size * (itemsize + 3 * FLOAT32_BYTES)
    inner = 3 * pairs * config.moe_intermediate_size * itemsize
    return outputs + inner + 6 * num_rows * config.num_experts * FLOAT32_BYTES
