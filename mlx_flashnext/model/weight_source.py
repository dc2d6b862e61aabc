"""What the model asks of whoever has the weights.

Names are the official ones without prefix and without `.weight`: `layers.0.linear_attn.in_proj_qkv`,
`layers.0.linear_attn.A_log`, `embed_tokens`, `lm_head`, `mtp.fc_hidden`. Every name is asked for once.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mlx_flashnext.model.quant import Embedding, Linear


class WeightSource(Protocol):
    """Hands out checked weights by canonical name."""

    def array(self, name: str, shape: tuple[int, ...]) -> mx.array:
        """Return an unquantised tensor in float32.

        Zero-centred norm weights come as the official checkpoint stores them: the model adds the one.
        Convolutions come as [channels, taps].

        Raises:
            WeightMismatch: Missing, or of another shape.
        """
        ...

    def linear(self, name: str, out_features: int, in_features: int) -> Linear:
        """Return the product with a matrix [out_features, in_features] of any stored form.

        Raises:
            WeightMismatch: Missing, or of another shape.
        """
        ...

    def embedding(self, name: str, num: int, dim: int) -> Embedding:
        """Return the row look-up of a matrix [num, dim] of any stored form.

        Raises:
            WeightMismatch: Missing, or of another shape.
        """
        ...
