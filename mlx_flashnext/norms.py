"""Are a checkpoint's norm weights stored around zero or around one?

Entry points: `norm_convention`, `is_zero_centred`. The model multiplies by 1 + w. Some packs store 1 + w
instead, and run through this model they give fluent noise from the first token.

Source: qwen4exp.md 3.6 (the thresholds are a choice, not a standard); statement 3 (which norms).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

from mlx_flashnext.errors import UnsupportedCheckpoint

NormConvention = Literal["zero-centred", "ones-centred"]

ZERO_CENTRED = frozenset(
    {
        "hc_norm",
        "q_norm",
        "k_norm",
        "q_layernorm",
        "k_layernorm",
        "norm_key",
        "norm_query",
        "norm_conv",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
    }
)
# Enough tensors that their means speak for the whole checkpoint; fewer may only confirm the official
# convention.
MIN_TENSORS = 8
ONES_MEAN = 0.5


def is_zero_centred(name: str) -> bool:
    """Return whether the model multiplies by 1 + w with this tensor; the GDN output norm multiplies by w."""
    return name.rpartition(".")[2] in ZERO_CENTRED


def is_evidence(name: str) -> bool:
    """Return whether a trunk tensor's mean counts: the norm in front of each layer's attention half."""
    return name.endswith(".attn_hyper_connection.hc_norm")


def norm_convention(means: Sequence[float]) -> NormConvention:
    """Decide from the means of the tensors of `is_evidence`.

    Raises:
        UnsupportedCheckpoint: They are around neither zero nor one.
    """
    middle = median(means)
    if len(means) >= MIN_TENSORS:
        share = sum(mean > ONES_MEAN for mean in means) / len(means)
        if share >= 0.9 and 0.75 <= middle <= 1.5:
            return "ones-centred"
    if -0.5 <= middle <= 0.25:
        return "zero-centred"
    raise UnsupportedCheckpoint(
        f"Norm weights are around neither 0 nor 1: the median of {len(means)} means is {middle:.3f}",
        hint="use an official or mlx-community conversion",
        median=middle,
        num_tensors=len(means),
    )
