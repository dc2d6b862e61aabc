"""What each part of the model carries from token to token, and what a block leaves of it before it is kept.

Entry points: `GdnState`, `QsaState`, `PleState` (values), `RowBuffer` (their only shared memory), `Staged`.

Invariants:
L1. States are immutable values; a part never changes the one it was given.
L2. Key/value buffers are shared between states and written only at rows that no committed token owns: rows
    below the number of committed tokens never change, so going back is a matter of counting.

Source: qwen4exp.md 4.1; what has to be cut where: dflash2.md 2.7.
"""

# Shapes: g key/value heads, N buffer rows, d head width, c index width, j value heads, v value width, k key
# width.

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import mlx.core as mx

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.errors import StateError
from mlx_flashnext.geometry import buffer_rows


class RowBuffer:
    """Rows appended along one axis, in an array that grows in steps or has its final size from the start.

    Args:
        shape: Of the array at its initial size.
        axis: The axis of rows.
        dtype: Of the array.
        growth: Rows gained at a time; 0 means the size is final.
    """

    def __init__(self, shape: tuple[int, ...], axis: int, dtype: mx.Dtype, growth: int) -> None:
        self.array = mx.zeros(shape, dtype)
        self._axis = axis
        self._before = (slice(None),) * axis
        self._growth = growth

    def write(self, rows: mx.array, start: int) -> mx.array:
        """Put `rows` at `start` and return the whole new array.

        Nothing else may hold the old array: then an evaluated buffer is updated in place, not copied.

        Raises:
            StateError: They do not fit a buffer of final size.
        """
        end = start + rows.shape[self._axis]
        if end > self.array.shape[self._axis]:
            self._grow(end)
        # A place known on the host: Metal has read places given as arrays too early (ml-explore/mlx#3880).
        self.array[(*self._before, slice(start, end))] = rows.astype(self.array.dtype)
        return self.array

    def first(self, count: int) -> mx.array:
        """Return the first `count` rows."""
        return mx.take(self.array, mx.arange(count), axis=self._axis)

    def _grow(self, end: int) -> None:
        held = self.array.shape[self._axis]
        if not self._growth:
            raise StateError(
                f"A state allocated for {held} rows cannot hold {end}",
                hint="allocate a larger context",
                rows=end,
            )
        shape = list(self.array.shape)
        shape[self._axis] = -(-end // self._growth) * self._growth - held
        self.array = mx.concatenate([self.array, mx.zeros(shape, self.array.dtype)], axis=self._axis)


@dataclass(frozen=True, slots=True)
class GdnState:
    """A GDN layer's matrices [1, j, v, k] in float32, and the last rows that entered its convolution."""

    recurrent: mx.array
    conv_window: mx.array

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        return [self.recurrent, self.conv_window]


@dataclass(frozen=True, slots=True)
class QsaState:
    """A QSA layer's cache.

    Keys (normalised and rotated) and values [g, N, d], pooled index keys [N / r, c] in float32, and the raw
    index keys of the group still open.
    """

    keys: RowBuffer
    values: RowBuffer
    pooled: RowBuffer
    open_keys: mx.array

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        return [self.keys.array, self.values.array, self.pooled.array, self.open_keys]


@dataclass(frozen=True, slots=True)
class PleState:
    """The last `ngram_size - 1` token ids, oldest first, and the rows that entered the PLE convolution."""

    history: tuple[int, ...]
    conv_rows: mx.array

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        return [self.conv_rows]


LayerState = GdnState | QsaState
S = TypeVar("S", GdnState, QsaState, PleState)
S_co = TypeVar("S_co", covariant=True)


class Journal(Protocol[S_co]):
    """What a block has to keep so that a part can return to any of its rows."""

    def state_after(self, rows: int) -> S_co:
        """Return the state after the first `rows` rows, without projections or experts."""
        ...

    def arrays(self) -> list[mx.array]:
        """Return every array kept."""
        ...


@dataclass(frozen=True, slots=True)
class Staged(Generic[S]):
    """What a block left of one part, before anything is committed.

    Attributes:
        final: The state after all rows.
        journal: The way back to earlier rows; None if the block cannot be cut.
    """

    final: S
    journal: Journal[S] | None = None

    def arrays(self) -> list[mx.array]:
        """Return every array that a wait for the block has to complete."""
        return self.final.arrays() + ([] if self.journal is None else self.journal.arrays())


def empty_gdn(config: ModelConfig, dtype: mx.Dtype) -> GdnState:
    """Return a GDN layer's state before the first token."""
    heads, value, key = (
        config.linear_num_value_heads,
        config.linear_value_head_dim,
        config.linear_key_head_dim,
    )
    return GdnState(
        recurrent=mx.zeros((1, heads, value, key)),
        conv_window=mx.zeros((config.linear_conv_kernel_dim - 1, config.linear_conv_dim), dtype),
    )


def empty_qsa(config: ModelConfig, dtype: mx.Dtype, capacity_tokens: int | None) -> QsaState:
    """Return a QSA layer's cache before the first token."""
    ratio, index_dim = config.indexer_compress_ratio, config.indexer_head_dim
    rows = buffer_rows(0, capacity_tokens)
    growth = 0 if capacity_tokens is not None else buffer_rows(1, None)
    kv_shape = (config.num_key_value_heads, rows, config.head_dim)
    return QsaState(
        keys=RowBuffer(kv_shape, 1, dtype, growth),
        values=RowBuffer(kv_shape, 1, dtype, growth),
        pooled=RowBuffer((-(-rows // ratio), index_dim), 0, mx.float32, -(-growth // ratio)),
        open_keys=mx.zeros((0, index_dim), dtype),
    )


def empty_ple(config: ModelConfig, dtype: mx.Dtype) -> PleState:
    """Return the n-gram memory's state before the first token."""
    return PleState(
        history=(config.ngram_separator,) * (config.ngram_size - 1),
        conv_rows=mx.zeros((config.ple_conv_rows, config.stack_size), dtype),
    )


def named_rows(layer: LayerState, num_tokens: int, ratio: int) -> dict[str, mx.array]:
    """Return the meaningful rows of a layer's arrays by name."""
    if isinstance(layer, GdnState):
        return {"recurrent": layer.recurrent, "conv_window": layer.conv_window}
    return {
        "keys": layer.keys.first(num_tokens),
        "values": layer.values.first(num_tokens),
        "pooled": layer.pooled.first(num_tokens // ratio),
        "open_keys": layer.open_keys,
    }
