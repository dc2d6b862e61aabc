"""Everything a sequence carries from token to token. What must roll back is here or it does not exist.

Entry points: `SequenceState`, `MtpState`.

Invariants:
S1. Layer states are immutable values; only `commit` puts new ones in place, all at once.
S2. Key/value buffers are shared between states and written only at rows that no committed token owns: rows
    below `num_tokens` never change, so a snapshot is a handful of references.
S3. Recurrent layers cannot forget their last tokens: `trim` refuses. Go back to a snapshot, or start again.

Source: qwen4exp.md 4.1.
"""

# Shapes: g key/value heads, N buffer rows, d head width, c index width, j value heads, v value width, k key
# width.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class QsaState:
    """A QSA layer's cache.

    Keys (normalised and rotated) and values [g, N, d], pooled index keys [N / r, c] in float32, and the raw
    index keys of the block still open.
    """

    keys: RowBuffer
    values: RowBuffer
    pooled: RowBuffer
    open_keys: mx.array


@dataclass(frozen=True, slots=True)
class PleState:
    """The last `ngram_size - 1` token ids, oldest first, and the rows that entered the PLE convolution."""

    history: tuple[int, ...]
    conv_rows: mx.array


LayerState = GdnState | QsaState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """References to a state as it was; see `SequenceState.restore`."""

    num_tokens: int
    layers: tuple[LayerState, ...]
    ple: PleState
    num_restores: int


class SequenceState:
    """What the trunk carries for one sequence.

    Args:
        config: Model geometry.
        compute_dtype: Type of activations.
        capacity_tokens: Allocate key/value buffers for this many tokens and refuse more; None grows as
            needed.

    Attributes:
        num_tokens: Tokens consumed.
        layers: One state per layer.
        ple: The n-gram memory's state.
    """

    def __init__(
        self, config: ModelConfig, *, compute_dtype: mx.Dtype, capacity_tokens: int | None = None
    ) -> None:
        self._config = config
        self.capacity_tokens = capacity_tokens
        self._restored_to: list[int] = []
        self.num_tokens = 0
        self.layers: tuple[LayerState, ...] = tuple(
            empty_gdn(config, compute_dtype)
            if kind == "gdn"
            else empty_qsa(config, compute_dtype, capacity_tokens)
            for kind in config.layer_kinds
        )
        self.ple = PleState(
            history=(config.ngram_separator,) * (config.ngram_size - 1),
            conv_rows=mx.zeros((config.ple_conv_rows, config.stack_size), compute_dtype),
        )

    def check_room(self, count: int) -> None:
        """Raise StateError if `count` more tokens do not fit."""
        if self.capacity_tokens is not None and self.num_tokens + count > self.capacity_tokens:
            raise StateError(
                f"{self.num_tokens} + {count} tokens do not fit a state of {self.capacity_tokens}",
                hint="ask for a longer context, or start a new sequence",
                num_tokens=self.num_tokens + count,
                capacity_tokens=self.capacity_tokens,
            )

    def commit(self, count: int, layers: Sequence[LayerState], ple: PleState) -> None:
        """Advance by `count` tokens to the given states."""
        self.layers = tuple(layers)
        self.ple = ple
        self.num_tokens += count

    def arrays(self) -> list[mx.array]:
        """Return every array the sequence holds."""
        held = [self.ple.conv_rows]
        for layer in self.layers:
            held.extend(layer_arrays(layer))
        return held

    def named_arrays(self) -> dict[str, mx.array]:
        """Return the meaningful rows of every array by name: two states are equal if all of these are."""
        ratio = self._config.indexer_compress_ratio
        named = {"ple.history": mx.array(self.ple.history), "ple.conv_rows": self.ple.conv_rows}
        for index, layer in enumerate(self.layers):
            for name, array in _layer_rows(layer, self.num_tokens, ratio).items():
                named[f"layers.{index}.{name}"] = array
        return named

    def num_bytes(self) -> int:
        """Return the bytes held."""
        return sum(array.nbytes for array in self.arrays())

    def snapshot(self) -> Snapshot:
        """Return references to the state as it is now."""
        return Snapshot(self.num_tokens, self.layers, self.ple, len(self._restored_to))

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this sequence.

        Going back to n tokens invalidates snapshots of more than n: their cached rows will be overwritten.

        Raises:
            StateError: The snapshot was invalidated so, or is of another sequence.
        """
        is_ours = len(snapshot.layers) == len(self.layers) and all(
            not isinstance(old, QsaState) or (isinstance(new, QsaState) and old.keys is new.keys)
            for old, new in zip(snapshot.layers, self.layers, strict=True)
        )
        if not is_ours or snapshot.num_tokens > min(
            self._restored_to[snapshot.num_restores :], default=1 << 62
        ):
            raise StateError(
                f"A snapshot at {snapshot.num_tokens} tokens no longer fits this sequence",
                hint="run the tokens again from the start",
            )
        self._restored_to.append(snapshot.num_tokens)
        self.num_tokens, self.layers, self.ple = snapshot.num_tokens, snapshot.layers, snapshot.ple

    def trim(self, num_tokens: int) -> None:
        """Refuse to forget tokens: recurrent layers cannot undo them, and trimming only the rest corrupts.

        Raises:
            StateError: Always, unless nothing would be forgotten.
        """
        if num_tokens != self.num_tokens:
            raise StateError(
                f"A sequence of {self.num_tokens} tokens cannot be trimmed to {num_tokens}",
                hint="its recurrent layers cannot be undone: restore a snapshot, or run the tokens again",
                num_tokens=self.num_tokens,
            )


class MtpState:
    """What the MTP module carries for one sequence.

    Args:
        config: Model geometry.
        compute_dtype: Type of activations.
        capacity_tokens: As for `SequenceState`.

    Attributes:
        num_cells: Cells computed: one per committed position but the last.
        layer: Cache of its one layer.
    """

    def __init__(
        self, config: ModelConfig, *, compute_dtype: mx.Dtype, capacity_tokens: int | None = None
    ) -> None:
        self._config = config
        self.num_cells = 0
        self.layer = empty_qsa(config, compute_dtype, capacity_tokens)

    def commit(self, count: int, layer: QsaState) -> None:
        """Advance by `count` cells."""
        self.layer = layer
        self.num_cells += count

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        return layer_arrays(self.layer)

    def named_arrays(self) -> dict[str, mx.array]:
        """Return the meaningful rows of every array by name."""
        return _layer_rows(self.layer, self.num_cells, self._config.indexer_compress_ratio)


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


def layer_arrays(layer: LayerState) -> list[mx.array]:
    """Return every array of a layer's state."""
    if isinstance(layer, GdnState):
        return [layer.recurrent, layer.conv_window]
    return [layer.keys.array, layer.values.array, layer.pooled.array, layer.open_keys]


def _layer_rows(layer: LayerState, num_tokens: int, ratio: int) -> dict[str, mx.array]:
    if isinstance(layer, GdnState):
        return {"recurrent": layer.recurrent, "conv_window": layer.conv_window}
    return {
        "keys": layer.keys.first(num_tokens),
        "values": layer.values.first(num_tokens),
        "pooled": layer.pooled.first(num_tokens // ratio),
        "open_keys": layer.open_keys,
    }
