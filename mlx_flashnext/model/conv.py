"""Causal depthwise convolution with carried history.

A strided view and a short sum instead of a convolution kernel: each output is the same few products in the
same order whatever the block size, in float32, on either backend. On the CPU backend it is also faster than
`mx.conv1d` (10,240 channels, 4 taps: 0.06 against 0.47 ms for one row).

Source: qwen4exp.md 2.3.3 and 2.4: the last tap multiplies the current token; rows before the start are zero.
"""

# Shapes: T positions, C channels, J taps, H history rows ((J - 1) * dilation).

from __future__ import annotations

import mlx.core as mx

from mlx_flashnext.geometry import CONV_ROWS
from mlx_flashnext.model.order import after, joined, row_blocks


class CausalConv:
    """Depthwise convolution over positions.

    Args:
        weight_CJ: float32 taps of each channel, oldest first.
        dilation: Positions between taps.
    """

    def __init__(self, weight_CJ: mx.array, dilation: int = 1) -> None:
        self._taps_JC = mx.contiguous(weight_CJ.T)
        self._dilation = dilation

    def __call__(self, x_TC: mx.array, history_HC: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve a block.

        Args:
            x_TC: The block's rows.
            history_HC: The rows before it.

        Returns:
            y_TC in float32, and the window [H + T, C] of history and block; `rows_before` cuts from it the
            history of whatever comes after any of the rows.
        """
        T, C = x_TC.shape
        window = mx.concatenate([history_HC, x_TC])
        strides = (C, self._dilation * C, 1)
        parts: list[mx.array] = []
        for first, end in row_blocks(0, T, CONV_ROWS):
            shape = (end - first, self._taps_JC.shape[0], C)
            view_RJC = mx.as_strided(after(parts, window), shape, strides, offset=first * C)
            parts.append((view_RJC * self._taps_JC).sum(axis=1))
        return joined(parts), window


def rows_before(window: mx.array, end: int, count: int) -> mx.array:
    """Return the `count` rows before row `end` without keeping a long block's buffer alive.

    A slice shares the whole buffer, so it is used only where that costs less than twice the rows.
    """
    start = end - count
    if window.shape[0] < 2 * count:
        return window[start:end]
    return mx.take(window, mx.arange(start, end), axis=0)
