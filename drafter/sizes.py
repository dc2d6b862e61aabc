"""What a draft takes beside its parameters: bytes of one sequence's context, of a snapshot, of a proposal.

Entry point: `DraftSizes`. A plan adds these before anything is allocated; tests hold them against MLX's own
peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from drafter.config import RING_SLACK, SLIDING, DraftConfig, context_bytes

FLOAT32_BYTES = 4
# Logits of a block while they are masked, partitioned and looked through: 2.6 copies measured in float32, 3.0
# in bfloat16.
LOGITS_COPIES = 4
# Rows of a chunk on their way into the context: fused (2.4 copies measured), and in every layer projected,
# normed and turned (6.7). All layers are submitted together.
ROW_COPIES = 3
KEY_COPIES = 7


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Bytes of one draft in one computation type.

    Attributes:
        config: of the draft.
        itemsize: bytes of a stored value.
        slack: rows a ring holds beyond its window.
    """

    config: DraftConfig
    itemsize: int
    slack: int = RING_SLACK

    def snapshot(self, context_tokens: int) -> int:
        """Return the most bytes of one snapshot: fused rows of the window, or of everything."""
        config = self.config
        rows = context_tokens
        if config.all_slide and config.window is not None:
            rows = config.window - 1 + self.slack
        return rows * config.hidden_size * self.itemsize

    def context(self, context_tokens: int) -> int:
        """Return the most bytes of one sequence's rings and fused rows."""
        both = context_bytes(self.config, context_tokens, self.itemsize, self.slack)
        return both - self.snapshot(context_tokens)

    @property
    def candidates(self) -> int:
        """Return the most bytes of a proposal's logits and candidates."""
        return LOGITS_COPIES * self.config.max_proposals * self.config.vocab_size * FLOAT32_BYTES

    def block(self, context_tokens: int) -> int:
        """Return the most bytes of a pass over a block: keys and values of one layer, scores, rows."""
        config = self.config
        slots, keys = config.block_size, config.num_kv_heads * config.head_dim
        slides = config.all_slide and config.window is not None
        seen = (config.window - 1 + self.slack if slides and config.window else context_tokens) + slots
        rows = 3 * config.intermediate_size + 8 * config.hidden_size + 4 * config.num_heads * config.head_dim
        scores = 2 * config.num_heads * slots * seen
        return 2 * keys * seen * self.itemsize + FLOAT32_BYTES * (scores + slots * rows)

    def chunk_row(self) -> int:
        """Return the bytes of one row of a chunk on its way into the context."""
        config = self.config
        keys = config.num_layers * config.num_kv_heads * config.head_dim
        return self.itemsize * (ROW_COPIES * config.hidden_size + KEY_COPIES * keys)

    def growth(self, context_tokens: int) -> int:
        """Return the bytes of what is copied while layers that keep everything grow; 0 if all slide."""
        config = self.config
        growing = sum(kind != SLIDING for kind in config.layer_types)
        row = 2 * growing * config.num_kv_heads * config.head_dim
        return context_tokens * self.itemsize * (row + (0 if config.all_slide else config.hidden_size))
