"""PLE: the n-gram memory. Token ids hash to table rows, which enter the residual stack in one layer.

Entry points: `ngram_rows` (the hash), `NgramMemory` (the float part), `RowSource` (where rows come from).

Invariants:
P1. Hashing is done on the host in Python integers: products reach 2^63, and rows must be on their way before
    the first layer runs, since they depend on token ids alone.
P2. Going back from a position, the first separator and everything older read as the separator; the position's
    own token never cuts its context. Before the sequence every token is the separator.
P3. The convolution's history holds zeros before the start, not the norm of anything.

Source: qwen4exp.md 2.3, statements 5 to 9.
"""

# Shapes: T positions, G streams, D hidden, W = G * D, N n-gram heads, F all row values (N * width).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.layer_state import PleState, Staged
from mlx_flashnext.model.conv import CausalConv, rows_before
from mlx_flashnext.model.norm import StreamNorm
from mlx_flashnext.model.weight_source import WeightSource


class PendingRows(Protocol):
    """Table rows on their way."""

    def wait(self) -> mx.array:
        """Wait for the reads and return the rows [T, N, width] in the compute type."""
        ...


class RowSource(Protocol):
    """Reads rows of the n-gram table."""

    def issue(self, rows_TN: Sequence[Sequence[int]]) -> PendingRows:
        """Start reading the rows of a block and return at once."""
        ...


def ngram_rows(tokens: Sequence[int], history: Sequence[int], config: ModelConfig) -> list[list[int]]:
    """Return the table rows of each token of a block.

    Args:
        tokens: Token ids of the block.
        history: The `ngram_size - 1` ids before it, oldest first; the separator before the sequence.
        config: Hash constants and separator.

    Returns:
        rows_TN: heads of order 2 first, then of order 3, and so on.
    """
    constants, separator = config.ngram, config.ngram_separator
    reach = config.ngram_size - 1
    line = [*history, *tokens]
    rows: list[list[int]] = []
    for at in range(reach, len(line)):
        mixed = line[at] * constants.multipliers[0]
        is_cut = False
        row: list[int] = []
        for back in range(1, reach + 1):
            is_cut = is_cut or line[at - back] == separator
            mixed ^= (separator if is_cut else line[at - back]) * constants.multipliers[back]
            first = (back - 1) * config.heads_per_ngram
            row.extend(
                mixed % constants.sizes[head] + constants.offsets[head]
                for head in range(first, first + config.heads_per_ngram)
            )
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class PleJournal:
    """The token ids and convolution rows of a block, those before it first."""

    line: tuple[int, ...]
    window: mx.array
    num_rows: int

    def state_after(self, rows: int) -> PleState:
        """Return the state after the first rows."""
        reach, history = (len(each) - self.num_rows for each in (self.line, self.window))
        return PleState(self.line[rows : rows + reach], rows_before(self.window, history + rows, history))

    def arrays(self) -> list[mx.array]:
        """Return what the block computed of it."""
        return [self.window]


class NgramMemory:
    """The float part of PLE.

    Args:
        config: Model geometry.
        weights: Where the weights come from.
        name: Canonical prefix, `layers.N.ple`.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str) -> None:
        streams, hidden, wide, eps = (
            config.hc_count,
            config.hidden_size,
            config.stack_size,
            config.rms_norm_eps,
        )
        self._hidden = hidden
        self._key = weights.linear(f"{name}.key_proj", wide, config.ple_embed_dim)
        self._value = weights.linear(f"{name}.value_proj", hidden, config.ple_embed_dim)
        self._key_norm = StreamNorm(weights, f"{name}.norm_key", streams, hidden, eps)
        self._query_norm = StreamNorm(weights, f"{name}.norm_query", streams, hidden, eps)
        self._conv_norm = StreamNorm(weights, f"{name}.norm_conv", streams, hidden, eps)
        self._conv = CausalConv(
            weights.array(f"{name}.conv1d", (wide, config.ple_conv_kernel_size)), dilation=config.ngram_size
        )

    def __call__(
        self,
        stack_TGD: mx.array,
        tokens: Sequence[int],
        rows_TNw: mx.array,
        state: PleState,
        *,
        is_revocable: bool = False,
    ) -> tuple[mx.array, Staged[PleState]]:
        """Return what the memory adds to the stack, and the state after the block.

        Args:
            stack_TGD: The stack entering the layer.
            tokens: Token id of each position.
            rows_TNw: Table rows of each position.
            state: What the earlier positions left.
            is_revocable: Keep what it takes to return to any row.
        """
        T, dtype = stack_TGD.shape[0], stack_TGD.dtype
        rows_TF = rows_TNw.reshape(T, -1)
        key_TGD = self._key_norm(self._key(rows_TF).reshape(stack_TGD.shape))
        value_TD = self._value(rows_TF)
        match_TGD = (key_TGD * self._query_norm(stack_TGD)).astype(mx.float32)
        match_TG = match_TGD.sum(axis=-1) * self._hidden**-0.5
        match_TG = mx.sign(match_TG) * mx.sqrt(mx.maximum(mx.abs(match_TG), 1e-6))
        gated_TGD = mx.sigmoid(match_TG).astype(dtype)[..., None] * value_TD[:, None]
        unit_TW = self._conv_norm(gated_TGD).reshape(T, -1)
        conv_TW, window = self._conv(unit_TW, state.conv_rows)
        conv_TW = conv_TW.astype(dtype)
        conv_TGD = (conv_TW * mx.sigmoid(conv_TW)).reshape(stack_TGD.shape)
        journal = PleJournal((*state.history, *tokens), window, T)
        return gated_TGD + conv_TGD, Staged(journal.state_after(T), journal if is_revocable else None)
