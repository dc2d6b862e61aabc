"""Rows of the n-gram table, read when token ids are known and waited for only where the model needs them.

`StreamedRows` implements `model.ple.RowSource` over the store's `RowTable`.
"""

# Shapes: T positions, N n-gram heads.

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from expert_store.rows import RowBatch, RowTable
from expert_store.stats import RowStatistics
from expert_store.watch import RowWatch
from mlx_flashnext.banks import RowBanks
from mlx_flashnext.checkpoint import NgramLayout
from mlx_flashnext.config import ModelConfig
from mlx_flashnext.model.quant import dequantize_rows

MAX_ROW_READERS: Final = 16


def row_readers(config: ModelConfig, least: int) -> int:
    """Return the threads that read rows: one for each row of a token, so that all latencies overlap.

    With four for the demo's six rows, two waves of reads stood in line behind guesses on a busy drive, and
    the second was not there when its layer asked for it.

    Args:
        config: model geometry.
        least: readers of experts; rows have no fewer.
    """
    num_rows = (config.ngram_size - 1) * config.heads_per_ngram
    return max(least, min(num_rows, MAX_ROW_READERS))


class StreamedRows:
    """Rows of the n-gram table, read when token ids are known and waited for only where the model needs them.

    Args:
        table: gathers rows into `banks`.
        banks: where they land.
        layout: stored form of the table.
        dtype: type the rows are computed in.
        scale: the one scale of an FP8 table; None for all others.
    """

    def __init__(
        self,
        table: RowTable,
        banks: RowBanks,
        layout: NgramLayout,
        dtype: mx.Dtype,
        scale: float | None = None,
    ) -> None:
        self._table = table
        self._banks = banks
        self._layout = layout
        self._dtype = dtype
        self._scale = scale

    def issue(self, rows_TN: Sequence[Sequence[int]]) -> "PendingNgramRows":
        """Start reading the rows of a block and return at once.

        Args:
            rows_TN: table rows of each position and head.
        """
        batch = self._table.gather([row for rows in rows_TN for row in rows])
        return PendingNgramRows(self, batch, len(rows_TN), len(rows_TN[0]))

    def statistics(self) -> RowStatistics:
        """Return what was read so far."""
        return self._table.statistics()

    def watch(self, watch: RowWatch | None) -> None:
        """Have somebody told of every wait and read from now on, or nobody any more."""
        self._table.watch = watch

    def assemble(self, batch: RowBatch, num_positions: int, num_heads: int) -> mx.array:
        """Return the landed rows as [T, N, width] in the compute type."""
        index = mx.array(list(batch.index), mx.int32)
        parts = [array[index] for array in self._banks.arrays(batch.buffer)]
        rows = dequantize_rows(parts, self._layout.spec, self._dtype, self._scale)
        return rows.reshape(num_positions, num_heads, -1)


class PendingNgramRows:
    """Rows of one block on their way."""

    def __init__(self, rows: StreamedRows, batch: RowBatch, num_positions: int, num_heads: int) -> None:
        self._rows = rows
        self._batch = batch
        self._shape = (num_positions, num_heads)

    def wait(self) -> mx.array:
        """Wait for the reads and return rows [T, N, width].

        Raises:
            StoreError: a row could not be read.
        """
        self._batch.wait()
        return self._rows.assemble(self._batch, *self._shape)
