"""QSA: grouped-query attention over the blocks of tokens an indexer chooses.

Every query attends to at most `indexer_budget` tokens in complete blocks of `indexer_compress_ratio`, chosen
by score, and always to the incomplete tail. While all blocks fit the budget the layer is plain causal
attention.

Invariants:
Q1. Blocks are aligned to absolute position 0, and every query row follows its own rule with n = its position
    + 1, never the block's or chunk's end. No block is protected: with an empty tail even the query's own may
    lose.
Q2. Above the budget a row gathers its own selected keys, ascending, into one fixed masked width: its cost
    does not grow with the context, and its result does not depend on the rows it was computed with.
Q3. Raw index keys are pooled as stored, then normalised and rotated at their block's first position. They are
    kept while attention is still dense, since later queries choose among all blocks.

Source: qwen4exp.md 2.5, statements 11 to 16.
"""

# Shapes: T positions, D hidden, h query heads, g key/value heads, d head width, i index heads, c index width,
#         R rows of a sparse sub-block, B complete blocks, k chosen blocks, r tokens per block, A attended
# tokens.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.geometry import QSA_DENSE_ROWS, QSA_SPARSE_ROWS
from mlx_flashnext.layer_state import QsaState, Staged
from mlx_flashnext.model.conv import rows_before
from mlx_flashnext.model.norm import ZeroCentredNorm
from mlx_flashnext.model.order import after, joined, row_blocks
from mlx_flashnext.model.rope import Rope
from mlx_flashnext.model.select import select_top
from mlx_flashnext.model.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class QsaJournal:
    """The raw index keys of a block: cutting it re-opens the group it is cut in.

    Keys, values and pooled keys stay where they are: their rows past the cut belong to no token any more.

    Attributes:
        final: The state after the whole block.
        window: [open + T, c] raw index keys since the last group boundary before the block.
        num_rows: T.
        ratio: Tokens of a group.
    """

    final: QsaState
    window: mx.array
    num_rows: int
    ratio: int

    def state_after(self, rows: int) -> QsaState:
        """Return the state after the first rows."""
        end = self.window.shape[0] - self.num_rows + rows
        return replace(self.final, open_keys=rows_before(self.window, end, end % self.ratio))

    def arrays(self) -> list[mx.array]:
        """Return what the block computed of it."""
        return [self.window]


class Projected(NamedTuple):
    """What a block is multiplied to before its place in the sequence matters.

    Attributes:
        queries: q_hTd, normalised.
        gate: [T, h, d], before the sigmoid.
        keys: k_gTd, normalised.
        values: v_gTd.
        index_queries: [T, i * c], raw.
        index_keys: [T, c], raw.
    """

    queries: mx.array
    gate: mx.array
    keys: mx.array
    values: mx.array
    index_queries: mx.array
    index_keys: mx.array


@dataclass(frozen=True, slots=True)
class _Cache:
    """The buffers with a block in them, and the state after it.

    Attributes:
        keys: [g, N, d].
        values: [g, N, d].
        pooled: [B, c] of all complete blocks, or more.
        staged: The state after the block.
    """

    keys: mx.array
    values: mx.array
    pooled: mx.array
    staged: Staged[QsaState]


class SparseAttention:
    """One QSA mixer.

    Args:
        config: Model geometry.
        weights: Where the weights come from.
        name: Canonical prefix, `layers.N.self_attn`.
        rope: The model's rotary table.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str, rope: Rope) -> None:
        self._config = config
        self._rope = rope
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        index_dim = config.indexer_head_dim
        self._q = weights.linear(f"{name}.q_proj", 2 * heads * dim, hidden)
        self._k = weights.linear(f"{name}.k_proj", kv_heads * dim, hidden)
        self._v = weights.linear(f"{name}.v_proj", kv_heads * dim, hidden)
        self._o = weights.linear(f"{name}.o_proj", hidden, heads * dim)
        self._q_norm = ZeroCentredNorm(weights, f"{name}.q_norm", dim, eps)
        self._k_norm = ZeroCentredNorm(weights, f"{name}.k_norm", dim, eps)
        index = f"{name}.indexer"
        self._index_qk = weights.linear(
            f"{index}.index_qk_proj", (config.indexer_n_heads + 1) * index_dim, hidden
        )
        self._index_q_norm = ZeroCentredNorm(weights, f"{index}.q_layernorm", index_dim, eps)
        self._index_k_norm = ZeroCentredNorm(weights, f"{index}.k_layernorm", index_dim, eps)

    def __call__(
        self, x_TD: mx.array, state: QsaState, position: int, *, is_revocable: bool = False
    ) -> tuple[mx.array, Staged[QsaState]]:
        """Attend for a block of positions.

        Args:
            x_TD: Sublayer input.
            state: Cache of the `position` tokens before the block; its buffers take the new rows.
            position: Tokens before the block.
            is_revocable: Keep what it takes to return to any row.

        Returns:
            y_TD, and the state after the block.
        """
        projected = Projected(*self.project(x_TD))
        o_Thd, staged = self.attend(projected, state, position, is_revocable=is_revocable)
        return self.close(o_Thd, projected.gate), staged

    def project(self, x_TD: mx.array) -> tuple[mx.array, ...]:
        """Return the fields of `Projected`: a pure function of arrays (see `traced.py`)."""
        config, T = self._config, x_TD.shape[0]
        q_gate = self._q(x_TD).reshape(T, config.num_attention_heads, 2, config.head_dim)
        k_Tgd = self._k(x_TD).reshape(T, config.num_key_value_heads, config.head_dim)
        v_Tgd = self._v(x_TD).reshape(T, config.num_key_value_heads, config.head_dim)
        index_qk = self._index_qk(x_TD)
        split = config.indexer_n_heads * config.indexer_head_dim
        return Projected(
            queries=self._q_norm(q_gate[:, :, 0]).swapaxes(0, 1),
            gate=q_gate[:, :, 1],
            keys=self._k_norm(k_Tgd).swapaxes(0, 1),
            values=v_Tgd.swapaxes(0, 1),
            index_queries=index_qk[:, :split],
            index_keys=index_qk[:, split:],
        )

    def close(self, o_Thd: mx.array, gate_Thd: mx.array) -> mx.array:
        """Return y_TD of attention's outputs: a pure function of arrays."""
        return self._o((o_Thd * mx.sigmoid(gate_Thd)).reshape(o_Thd.shape[0], -1))

    def attend(
        self, projected: Projected, state: QsaState, position: int, *, is_revocable: bool
    ) -> tuple[mx.array, Staged[QsaState]]:
        """Return o_Thd, before gate and output projection, and the state after the block; see `__call__`."""
        config, T = self._config, projected.gate.shape[0]
        cache = self._append(projected, state, position, is_revocable)
        q_hTd = self._rope(projected.queries, position)
        outputs: list[mx.array] = []
        num_dense = max(0, min(T, config.max_dense_tokens - position))
        for first, end in row_blocks(0, num_dense, QSA_DENSE_ROWS):
            q_hRd = after(outputs, q_hTd[:, first:end])
            outputs.append(self._attend_all(q_hRd, cache.keys, cache.values, position + end))
        if num_dense < T:
            index_q_Tic = projected.index_queries.reshape(T, config.indexer_n_heads, -1)
            index_q_iTc = self._rope(self._index_q_norm(index_q_Tic).swapaxes(0, 1), position).astype(
                mx.float32
            )
            for first, end in row_blocks(num_dense, T, QSA_SPARSE_ROWS):
                index_q_iRc = after(outputs, index_q_iTc[:, first:end])
                tokens_RA, is_seen_RA = self._choose(index_q_iRc, cache.pooled, position + first)
                outputs.append(
                    self._attend_to(q_hTd[:, first:end], cache.keys, cache.values, tokens_RA, is_seen_RA)
                )
        return joined(outputs), cache.staged

    def extend(self, x_TD: mx.array, state: QsaState, position: int) -> Staged[QsaState]:
        """Cache a block of positions without attending from any; see `__call__`.

        Returns:
            The state after the block, the same as if it had been attended from.
        """
        return self._append(Projected(*self.project(x_TD)), state, position, is_revocable=False).staged

    def _append(self, projected: Projected, state: QsaState, position: int, is_revocable: bool) -> _Cache:
        """Put a block's keys, values and index keys into the buffers."""
        T = projected.gate.shape[0]
        keys_gNd = state.keys.write(self._rope(projected.keys, position), position)
        values_gNd = state.values.write(projected.values, position)
        window = mx.concatenate([state.open_keys, projected.index_keys])
        pooled_Bc, open_keys = self._pool(window, state, position)
        final = replace(state, open_keys=open_keys)
        ratio = self._config.indexer_compress_ratio
        journal = QsaJournal(final, window, T, ratio) if is_revocable else None
        return _Cache(keys_gNd, values_gNd, pooled_Bc, Staged(final, journal))

    def _pool(self, window: mx.array, state: QsaState, position: int) -> tuple[mx.array, mx.array]:
        """Pool the blocks that this call completes.

        Args:
            window: Raw index keys of the block that was open, and of this call.
            state: Cache whose buffer takes the new rows.
            position: Tokens before this call.

        Returns:
            The buffer of pooled keys (float32), and the raw keys of the block still open.
        """
        ratio = self._config.indexer_compress_ratio
        first = position // ratio
        num_done = window.shape[0] // ratio
        num_open = window.shape[0] - num_done * ratio
        if not num_done:
            return state.pooled.array, window
        groups = window[: num_done * ratio].reshape(num_done, ratio, -1).astype(mx.float32)
        mean_Bc = groups.mean(axis=1).astype(window.dtype)
        pooled_Bc = self._rope(self._index_k_norm(mean_Bc)[None], first, stride=ratio).squeeze(0)
        return state.pooled.write(pooled_Bc.astype(mx.float32), first), rows_before(
            window, window.shape[0], num_open
        )

    def _attend_all(
        self, q_hTd: mx.array, keys_gNd: mx.array, values_gNd: mx.array, num_tokens: int
    ) -> mx.array:
        """Attend causally to every cached token; the last query row is token `num_tokens - 1`."""
        o_1hTd = mx.fast.scaled_dot_product_attention(
            q_hTd[None],
            keys_gNd[None, :, :num_tokens],
            values_gNd[None, :, :num_tokens],
            scale=self._config.head_dim**-0.5,
            mask="causal" if q_hTd.shape[1] > 1 else None,
        )
        return o_1hTd.squeeze(0).swapaxes(0, 1)

    def _choose(self, index_q_iRc: mx.array, pooled_Bc: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """Choose the tokens of each row of a sub-block.

        Args:
            index_q_iRc: Index queries in float32.
            pooled_Bc: Pooled keys of all complete blocks, or more.
            position: Position of the first row.

        Returns:
            tokens_RA: Positions, ascending, A = budget + ratio. is_seen_RA: False where a place is padding.
        """
        config, R = self._config, index_q_iRc.shape[1]
        ratio = config.indexer_compress_ratio
        num_blocks = (position + R) // ratio
        scores_iRB = mx.maximum(index_q_iRc @ pooled_Bc[:num_blocks].T, 0.0)
        scores_RB = scores_iRB.sum(axis=0) * config.indexer_head_dim**-0.5
        seen_R1 = mx.arange(position + 1, position + R + 1)[:, None]
        done_R1 = seen_R1 // ratio
        if R > 1:
            scores_RB = mx.where(mx.arange(num_blocks) < done_R1, scores_RB, -mx.inf)
        blocks_Rk = select_top(scores_RB, config.num_select_blocks)
        within_r = mx.arange(ratio)
        chosen_RA = (blocks_Rk[..., None] * ratio + within_r).reshape(R, -1)
        tokens_RA = mx.concatenate([chosen_RA, done_R1 * ratio + within_r], axis=1)
        return mx.minimum(tokens_RA, seen_R1 - 1), tokens_RA < seen_R1

    def _attend_to(
        self,
        q_hRd: mx.array,
        keys_gNd: mx.array,
        values_gNd: mx.array,
        tokens_RA: mx.array,
        is_seen_RA: mx.array,
    ) -> mx.array:
        """Attend of each row to its own tokens."""
        R, A = tokens_RA.shape
        flat = tokens_RA.reshape(-1)
        shape = (keys_gNd.shape[0], R, A, keys_gNd.shape[-1])
        o_Rh1d = mx.fast.scaled_dot_product_attention(
            q_hRd.swapaxes(0, 1)[:, :, None],
            mx.take(keys_gNd, flat, axis=1).reshape(shape).swapaxes(0, 1),
            mx.take(values_gNd, flat, axis=1).reshape(shape).swapaxes(0, 1),
            scale=self._config.head_dim**-0.5,
            mask=is_seen_RA[:, None, None],
        )
        return o_Rh1d[:, :, 0]
