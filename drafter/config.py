"""What a DFlash or DFlash2 draft is: every dimension, and the tensors that follow from them.

Entry points: `DraftConfig` (validated), `expected_tensors`, `context_bytes`. `config_reader.py` makes a
`DraftConfig` from a `config.json`.

Source: dflash2.md 1.1 (fields), 1.3 (tensors), 1.9 (parameters).
"""

# Shapes: H hidden, D query width (heads * head_dim), E key width (kv_heads * head_dim), V vocabulary, n taps.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["dflash", "dflash2"]
LayerType = Literal["sliding_attention", "full_attention"]
FAMILIES: dict[str, Family] = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}
SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"
# Rows a sliding ring holds beyond its window, so that a few rows can be taken back and nothing is missing.
RING_SLACK = 64


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One draft. Made by `read_config`, which refuses what these fields could not honour.

    Attributes:
        family: `dflash` (v1) or `dflash2`: with convolutions and a path selector.
        hidden_size: width of features, of embedding rows and of the residual.
        num_heads: query heads; `num_heads * head_dim` need not be `hidden_size`.
        layer_types: of every draft layer.
        is_causal: of every draft layer, resolved: whether block rows see only rows before them.
        window: positions that a sliding layer looks back over, the row's own included; None if none slides.
        num_target_layers: layers of the target it was trained for.
        taps: 0-based target layers whose outputs are concatenated, in this order.
        block_size: slots of a block, the anchor's included.
        mask_token_id: id whose embedding fills the slots after the anchor; may be a padding row.
        conv_kernel: taps of the block convolutions; 0 for v1.
        conv_group: channels that share a dynamic coefficient; 0 for v1.
        rank: of the selector; 0 for v1.
        top_k: candidates of a slot; 0 for v1.
        selector_vocab_size: candidates lie below it; None for no limit.
        multiplier: of raw logits, before the cap.
        softcap: c of `c * tanh(logits / c)`; None for none.
        embedding_scale: of the block's embedding rows.
        max_positions: length it was trained for; longer ones go on with a notice. None if not said.
    """

    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    layer_types: tuple[LayerType, ...]
    is_causal: tuple[bool, ...]
    window: int | None
    rope_theta: float
    num_target_layers: int
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    conv_kernel: int = 0
    conv_group: int = 0
    rank: int = 0
    top_k: int = 0
    selector_vocab_size: int | None = None
    multiplier: float = 1.0
    softcap: float | None = None
    embedding_scale: float = 1.0
    max_positions: int | None = None

    @property
    def architecture(self) -> str:
        """Return the name in its config file."""
        return next(name for name, family in FAMILIES.items() if family == self.family)

    @property
    def has_selector(self) -> bool:
        """Return whether a path is walked over candidates: DFlash2."""
        return self.family == "dflash2"

    @property
    def all_slide(self) -> bool:
        """Return whether the last `window - 1` rows are all the context that is ever looked at."""
        return all(kind == SLIDING for kind in self.layer_types)

    @property
    def feature_width(self) -> int:
        """Return the width of concatenated features."""
        return len(self.taps) * self.hidden_size

    @property
    def max_proposals(self) -> int:
        """Return the most tokens of a proposal: slot 0 holds the anchor and proposes nothing."""
        return self.block_size - 1


def expected_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a draft, and of nothing else.

    Linear weights are [out, in]; there are no biases, no embedding and no head.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_width),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}self_attn.q_norm.weight": (head_dim,),
            f"{prefix}self_attn.k_norm.weight": (head_dim,),
            f"{prefix}mlp.gate_proj.weight": (config.intermediate_size, hidden),
            f"{prefix}mlp.up_proj.weight": (config.intermediate_size, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
        if config.family == "dflash2":
            coefficients = 2 * config.conv_kernel * (hidden // config.conv_group)
            for sublayer in ("attention_conv", "mlp_conv"):
                shapes[f"{prefix}{sublayer}.base_kernel"] = (2, config.conv_kernel, hidden)
                shapes[f"{prefix}{sublayer}.kernel_projection.weight"] = (coefficients, hidden)
    if config.has_selector:
        shapes |= {
            "candidate_selector.hidden_projection.weight": (config.rank, hidden),
            "candidate_selector.predecessor_codebook": (config.vocab_size, config.rank),
            "candidate_selector.successor_codebook": (config.vocab_size, config.rank),
        }
    return shapes


def num_parameters(config: DraftConfig) -> int:
    """Return the parameters of a draft, by the formula of the source and not by its tensor list."""
    hidden = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config.intermediate_size
    layer += 2 * hidden + 2 * config.head_dim
    outside = len(config.taps) * hidden**2 + 2 * hidden
    if config.family == "dflash2":
        wide = 2 * config.conv_kernel * hidden
        layer += 2 * (wide + wide // config.conv_group * hidden)
        outside += 2 * config.vocab_size * config.rank + config.rank * hidden
    return config.num_layers * layer + outside


def context_bytes(config: DraftConfig, context_tokens: int, itemsize: int, slack: int = RING_SLACK) -> int:
    """Return the most bytes that the context of one sequence takes: every ring, fused rows, one snapshot.

    Args:
        config: of the draft.
        context_tokens: that the sequence may have.
        itemsize: bytes of a stored value.
        slack: rows a ring holds beyond its window.
    """
    row = 2 * config.num_kv_heads * config.head_dim * itemsize + _POSITION_BYTES
    rings = 0
    for kind in config.layer_types:
        is_ring = kind == SLIDING and config.window is not None
        rings += row * (config.window - 1 + slack if is_ring and config.window else context_tokens)
    rows = config.window - 1 + slack if config.all_slide and config.window else context_tokens
    fused = rows * (2 * config.hidden_size * itemsize + _POSITION_BYTES)
    return rings + fused


_POSITION_BYTES = 4
