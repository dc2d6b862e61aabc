"""RMS normalisation as this model uses it: float32 inside, one rounding at the end.

Source: qwen4exp.md statements 3 and 4. All norms but the GDN output norm are zero-centred: they multiply by 1
+ w.
"""

# Shapes: T positions, G residual streams, D width of one norm.

from __future__ import annotations

import mlx.core as mx

from mlx_flashnext.model.weight_source import WeightSource


class ZeroCentredNorm:
    """RMS norm over the last axis, times 1 + w."""

    def __init__(self, weights: WeightSource, name: str, width: int, eps: float) -> None:
        self._scale_D = 1.0 + weights.array(name, (width,))
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """Return the normalised array in the type of `x`."""
        # A float32 weight makes the kernel compute and return float32, so a bfloat16 input is rounded once.
        return mx.fast.rms_norm(x, self._scale_D, self._eps).astype(x.dtype)


class StreamNorm:
    """RMS norm of each residual stream by itself, times 1 + w with its own w per stream."""

    def __init__(self, weights: WeightSource, name: str, streams: int, width: int, eps: float) -> None:
        self._scale_GD = 1.0 + weights.array(name, (streams * width,)).reshape(streams, width)
        self._eps = eps

    def __call__(self, x_TGD: mx.array) -> mx.array:
        """Return the normalised stack in the type of `x_TGD`."""
        unit_TGD = mx.fast.rms_norm(x_TGD.astype(mx.float32), None, self._eps)
        return (unit_TGD * self._scale_GD).astype(x_TGD.dtype)
