"""Upper bound of what one forward pass holds at a time beside weights and state. Pure arithmetic.

The residual streams live through the whole pass; beside them one sublayer at a time. Counted from the
shapes in `mlx_flashnext/model`; the peak tests compare it with what MLX really held.
"""

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.geometry import FLOAT32_BYTES, qsa_workspace_bytes


def forward_workspace_bytes(config: ModelConfig, num_rows: int, context_tokens: int, itemsize: int) -> int:
    """Return the bytes of intermediate arrays of one block.

    Args:
        config: model geometry.
        num_rows: rows of the block.
        context_tokens: tokens visible to its last row.
        itemsize: bytes of the compute type.
    """
    wide = FLOAT32_BYTES
    # The stack before and after a sublayer, its normalised form, gate and product.
    streams = 5 * num_rows * config.stack_size * itemsize
    # Convolution input, window and output; q, k, v normalised in float32; decayed output and its gate.
    gdn = num_rows * (config.linear_conv_dim * (2 * itemsize + 3 * wide) + 3 * config.linear_value_dim * wide)
    heads = config.num_attention_heads * config.head_dim
    qsa = num_rows * 5 * heads * itemsize + qsa_workspace_bytes(config, num_rows, context_tokens, itemsize)
    # Every pair's input, gate, up and product, output, unsorted output and weighted output.
    pairs = num_rows * config.num_experts_per_tok
    moe = pairs * (4 * config.hidden_size * wide + 3 * config.moe_intermediate_size * itemsize)
    moe += 3 * num_rows * config.num_experts * wide
    ple = 5 * num_rows * config.stack_size * wide
    head = 3 * config.vocab_size * wide
    return streams + max(gdn, qsa, moe, ple, head)
