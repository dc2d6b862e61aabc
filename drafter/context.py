"""The context of one sequence: fused rows, and every layer's keys and values of them, with their positions.

Entry points: `DraftContext` (what a drafter keeps), `ContextRing` (one layer's part). A general cache would
not do: one that writes single rows in place keeps them out of temporal order, and a mask computed from
storage order then hides the newest rows - measured in the reference after every cycle without acceptance.

Invariants:
X1. Rows come in order: `append` begins exactly where the last one ended. `end` is the next position.
X2. A place is valid iff its position says so; the mask is computed from positions, so order is irrelevant.
X3. Every ring and the fused rows hold the same positions, as far as their windows reach.
X4. Rings are bounded: a sliding one by its window, another by the tokens it was planned for.

Source: dflash2.md 2.4 to 2.6.
"""

# Shapes: T rows, H hidden, K key heads, d head width, S places.

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.block import LayerContext
from drafter.config import RING_SLACK, SLIDING, DraftConfig
from drafter.errors import DrafterError
from drafter.fuse import context_keys_values
from drafter.layers import Params, rotary_frequencies

_GROWTH = 256
_NONE = -1


class ContextRing:
    """Arrays over positions, the newest `capacity` of them.

    Args:
        shapes: of one row of each array, places left out: [K, d] for keys. Places lie on the axis before
            the last.
        dtype: of the arrays.
        window: rows that a query may look back over, itself included; None: all are kept.
        capacity: most rows held; for `window` None None grows without bound.

    Attributes:
        end: the next position.
    """

    def __init__(
        self,
        shapes: tuple[tuple[int, int], ...],
        dtype: mx.Dtype,
        *,
        window: int | None,
        capacity: int | None,
    ) -> None:
        if window is not None and (capacity is None or capacity < window - 1):
            raise DrafterError(
                f"A ring of {capacity} rows is less than its window", hint="plan window - 1 rows"
            )
        self._shapes, self._dtype = shapes, dtype
        self._window, self._most = window, capacity
        self.end = 0
        self._first = 0  # position of place 0 where all rows are kept
        places = capacity if window is not None and capacity is not None else 0
        self._arrays = [self._zeros(shape, places) for shape in shapes]
        self._positions = np.full(places, _NONE, np.int32)

    def reset(self, end: int = 0) -> None:
        """Forget every row; the next one is at `end`."""
        self.end = end
        self._first = end if self._window is None else 0
        self._positions[:] = _NONE

    def append(self, rows: tuple[mx.array, ...], start: int) -> None:
        """Store rows [K, T, d] of positions `start`, `start + 1`, ...

        Raises:
            DrafterError: a gap, an overlap, or more rows than were planned. Nothing is stored then.
        """
        num_rows = rows[0].shape[-2]
        if start != self.end:
            raise DrafterError(
                f"Context rows begin at {start}, but {self.end} is next", hint="hand over every kept row once"
            )
        self._make_room(num_rows)
        kept = min(num_rows, len(self._positions))
        first = start + num_rows - kept
        done = 0
        while done < kept:
            place = (first + done - self._first) % len(self._positions)
            run = min(kept - done, len(self._positions) - place)
            source = num_rows - kept + done
            for array, row in zip(self._arrays, rows, strict=True):
                array[..., place : place + run, :] = row[..., source : source + run, :]
            self._positions[place : place + run] = np.arange(first + done, first + done + run, dtype=np.int32)
            done += run
        self.end = start + num_rows

    def truncate(self, to: int) -> int:
        """Drop rows from position `to` on.

        Returns:
            `to`, if every row that a query at `to` could see is still here; else the first position from
            which rows must be appended again (after `reset` to it). What is left may be used as it is.

        Raises:
            DrafterError: `to` is beyond the end.
        """
        if not 0 <= to <= self.end:
            raise DrafterError(f"Cannot truncate {self.end} context rows to {to}", hint="keep what there is")
        self._positions[self._positions >= to] = _NONE
        self.end = to
        oldest = 0 if self._window is None else max(0, to - (self._window - 1))
        needed = np.arange(oldest, to, dtype=np.int32)
        return to if np.isin(needed, self._positions).all() else oldest

    def view(self) -> tuple[tuple[mx.array, ...], NDArray[np.int32]]:
        """Return the arrays [..., S, d] and the position of every place, -1 where there is none.

        A ring shows every place, filled or not: what is added up, and in which order, is then the same
        however its rows came, so that proposals are too, to the bit.
        """
        used = len(self._positions) if self._window is not None else self.end - self._first
        return tuple(array[..., :used, :] for array in self._arrays), self._positions[:used].copy()

    def arrays(self) -> list[mx.array]:
        """Return the arrays themselves."""
        return list(self._arrays)

    def newest(self) -> list[mx.array]:
        """Return the row [K, 1, d] of position `end - 1` of every array, [K, 0, d] where it is not held."""
        if not len(self._positions):
            return [array[..., :0, :] for array in self._arrays]
        place = (self.end - 1 - self._first) % len(self._positions)
        is_held = self._positions[place] == self.end - 1
        return [array[..., place : place + int(is_held), :] for array in self._arrays]

    @property
    def num_rows(self) -> int:
        """Return the rows held."""
        return int((self._positions != _NONE).sum())

    def num_bytes(self) -> int:
        """Return the bytes of arrays and positions."""
        return sum(array.nbytes for array in self._arrays) + self._positions.nbytes

    def in_order(self) -> tuple[tuple[mx.array, ...], int]:
        """Return the newest unbroken run of rows in order, and the position of its first."""
        held = np.sort(self._positions[self._positions != _NONE])
        breaks = np.flatnonzero(np.diff(held) != 1)
        if not len(held) or held[-1] != self.end - 1:
            return tuple(array[..., :0, :] for array in self._arrays), self.end
        first = int(held[breaks[-1] + 1] if len(breaks) else held[0])
        places = (np.arange(first, self.end) - self._first) % len(self._positions)
        index = mx.array(places.astype(np.int32))
        return tuple(mx.take(array, index, axis=-2) for array in self._arrays), first

    def _make_room(self, num_rows: int) -> None:
        if self._window is not None:
            return
        wanted = self.end + num_rows - self._first
        if wanted <= len(self._positions):
            return
        if self._most is not None and wanted > self._most:
            raise DrafterError(
                f"A context of {wanted} rows does not fit the {self._most} that were planned",
                hint="plan a longer context",
            )
        places = max(wanted + -wanted % _GROWTH, len(self._positions) * 3 // 2)
        places = places if self._most is None else min(places, self._most)
        more = places - len(self._positions)
        self._arrays = [
            mx.concatenate([array, self._zeros(shape, more)], axis=-2)
            for array, shape in zip(self._arrays, self._shapes, strict=True)
        ]
        self._positions = np.concatenate([self._positions, np.full(more, _NONE, np.int32)])

    def _zeros(self, shape: tuple[int, int], places: int) -> mx.array:
        return mx.zeros((shape[0], places, shape[1]), self._dtype)


@dataclass(frozen=True, slots=True)
class ContextSnapshot:
    """Fused rows [T, H] of the newest unbroken positions, and the position after them.

    Rows are functions of the target alone, so they are exact, the same for every layer, and half as large as
    keys and values.
    """

    fused: mx.array
    end: int

    def num_bytes(self) -> int:
        """Return the bytes held."""
        return self.fused.nbytes


class DraftContext:
    """Everything that one sequence leaves in a drafter.

    Args:
        params: of the draft; borrowed.
        config: of the draft.
        dtype: of what is kept.
        slack: rows kept beyond the window.
        capacity_tokens: tokens planned for; None: as many as come.
    """

    def __init__(
        self,
        params: Params,
        config: DraftConfig,
        dtype: mx.Dtype,
        *,
        slack: int = RING_SLACK,
        capacity_tokens: int | None = None,
    ) -> None:
        self._params, self._config, self._dtype = params, config, dtype
        self._freqs = rotary_frequencies(config.rope_theta, config.head_dim)
        row = (config.num_kv_heads, config.head_dim)
        self._rings = [
            self._ring((row, row), kind == SLIDING, slack, capacity_tokens) for kind in config.layer_types
        ]
        self._fused = self._ring(((1, config.hidden_size),), config.all_slide, slack, capacity_tokens)

    def _ring(
        self, shapes: tuple[tuple[int, int], ...], slides: bool, slack: int, capacity_tokens: int | None
    ) -> ContextRing:
        window = self._config.window if slides else None
        capacity = capacity_tokens if window is None else window - 1 + slack
        return ContextRing(shapes, self._dtype, window=window, capacity=capacity)

    @property
    def end(self) -> int:
        """Return the position of the next row."""
        return self._fused.end

    @property
    def num_rows(self) -> int:
        """Return the rows held: fewer than were seen where the window has passed on or a prefix had none."""
        return self._fused.num_rows

    @property
    def freqs(self) -> mx.array:
        """Return what positions are divided by when rows are turned."""
        return self._freqs

    def reset(self, end: int = 0) -> None:
        """Forget every row; the next one is at `end`."""
        for ring in (*self._rings, self._fused):
            ring.reset(end)

    def append(self, fused_TH: mx.array, start: int) -> None:
        """Store rows from `fuse` for positions from `start` on, in every layer.

        Raises:
            DrafterError: a gap, an overlap, or more rows than planned; nothing is stored then.
        """
        fused_TH = fused_TH.astype(self._dtype)
        self._fused.append((fused_TH[None],), start)
        for layer, ring in enumerate(self._rings):
            ring.append(
                context_keys_values(self._params, self._config, layer, fused_TH, start, self._freqs), start
            )

    def truncate(self, to: int) -> int:
        """Drop rows from position `to` on; see `ContextRing.truncate`."""
        missing = [ring.truncate(to) for ring in (*self._rings, self._fused)]
        return min(missing)

    def layers(self) -> list[LayerContext]:
        """Return what every layer holds."""
        views = [ring.view() for ring in self._rings]
        return [LayerContext(arrays[0], arrays[1], positions) for arrays, positions in views]

    def newest(self) -> mx.array:
        """Return the fused row of the newest position [1, H], or [0, H] where none is held."""
        return self._fused.newest()[0][0]

    def snapshot(self) -> ContextSnapshot:
        """Return what `restore` needs."""
        (fused,), _ = self._fused.in_order()
        return ContextSnapshot(fused[0], self.end)

    def restore(self, snapshot: ContextSnapshot) -> None:
        """Go back to a snapshot, through the projections: all or nothing."""
        start = snapshot.end - snapshot.fused.shape[0]
        self.reset(start)
        if snapshot.fused.shape[0]:
            self.append(snapshot.fused, start)

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        return [array for ring in (*self._rings, self._fused) for array in ring.arrays()]

    def num_bytes(self) -> int:
        """Return the bytes of every ring and of the fused rows."""
        return sum(ring.num_bytes() for ring in (*self._rings, self._fused))
