"""Everything a sequence carries from token to token, and the transaction that moves it.

What must roll back is here or it does not exist.

Entry points: `SequenceState.begin` -> `Block.commit` or `Block.rollback`; `MtpState` likewise.

Invariants:
S1. All that is carried is one immutable value, replaced in one assignment: committed wholly or not at all,
    whatever is raised and wherever. `commit` and `restore` are the only two that replace it.
S2. Key/value buffers are shared and written only at rows that no committed token owns (L2). So a snapshot is
    a reference, and rolling back changes nothing.
S3. One block is open at a time. A block that nobody holds any more counts as rolled back.
S4. Recurrent layers cannot forget their last tokens: `trim` refuses. Only the rows of an open block can be
    cut; go back further to a snapshot, or start again.
S5. Nothing here waits for the device.

Source: qwen4exp.md 4.1; dflash2.md 2.7.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.errors import StateError
from mlx_flashnext.layer_state import (
    LayerState,
    PleState,
    QsaState,
    S,
    Staged,
    empty_gdn,
    empty_ple,
    empty_qsa,
    named_rows,
)


@dataclass(frozen=True, slots=True)
class Carried:
    """All that `num_tokens` tokens have left; `ple` is None where there is no n-gram memory."""

    num_tokens: int
    layers: tuple[LayerState, ...]
    ple: PleState | None

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        held = [] if self.ple is None else self.ple.arrays()
        for layer in self.layers:
            held.extend(layer.arrays())
        return held


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """A reference to a state as it was; see `restore`."""

    carried: Carried

    @property
    def num_tokens(self) -> int:
        """Return the tokens consumed by then."""
        return self.carried.num_tokens


class Block:
    """The rows of one forward pass, from `begin` to `commit` or `rollback`.

    As a context manager: leaving it uncommitted, with or without an error, rolls back.

    Attributes:
        before: What the sequence carries while the block is open.
        num_rows: Rows of the block.
        is_revocable: Whether fewer rows than all may be committed.
    """

    def __init__(self, state: TransactionalState, num_rows: int, is_revocable: bool) -> None:
        self.before = state.carried
        self.num_rows = num_rows
        # The only row of a block is kept or the whole block is not: there is nothing to return to.
        self.is_revocable = is_revocable and num_rows > 1
        self._state: TransactionalState | None = state
        self._layers: tuple[Staged, ...] | None = None
        self._ple: Staged[PleState] | None = None

    @property
    def position(self) -> int:
        """Return the tokens before the block."""
        return self.before.num_tokens

    def check_rows(self, num_rows: int) -> None:
        """Raise StateError unless the block is open, has not been run, and has `num_rows` rows."""
        if self._state is None:
            raise StateError("The block is closed", hint="begin another")
        if self._layers is not None:
            raise StateError("The block has been run", hint="commit it or roll it back, then begin another")
        if num_rows != self.num_rows:
            raise StateError(
                f"{num_rows} rows for a block of {self.num_rows}",
                hint="begin a block of as many",
            )

    def stage(self, layers: Sequence[Staged], ple: Staged[PleState] | None = None) -> None:
        """Take what the forward pass left; the sequence is unchanged."""
        self._layers, self._ple = tuple(layers), ple

    def commit(self, rows: int | None = None) -> None:
        """Make the first `rows` rows part of the sequence and close the block.

        Fewer rows than all cost a run of the recurrence over those that stay, submitted here and not waited
        for; keys and values cost nothing. If this raises, the sequence is unchanged.

        Args:
            rows: 1 to `num_rows`; None for all.

        Raises:
            StateError: The block is closed or was not run, `rows` is out of range, or fewer rows than all of
                a block that is not revocable.
        """
        kept = self.num_rows if rows is None else rows
        state = self._check_commit(kept)
        assert self._layers is not None
        after = Carried(
            num_tokens=self.position + kept,
            layers=tuple(self._after(layer, kept) for layer in self._layers),
            ple=None if self._ple is None else self._after(self._ple, kept),
        )
        state.check_consistent(after)
        # What is not kept is freed before what replaces it is allocated.
        self._layers = self._ple = None
        if kept < self.num_rows:
            mx.async_eval(after.arrays())
        state.replace(after)
        self.rollback()

    def rollback(self) -> None:
        """Close the block; what is not committed is forgotten. Does nothing to a closed block."""
        self._state = self._layers = self._ple = None

    @property
    def is_open(self) -> bool:
        """Return whether the block can still be committed."""
        return self._state is not None

    def journal_bytes(self) -> int:
        """Return the bytes that the way back to earlier rows holds; 0 before the block has run."""
        parts = (*(self._layers or ()), *(() if self._ple is None else (self._ple,)))
        journals = [part.journal for part in parts if part.journal is not None]
        return sum(array.nbytes for journal in journals for array in journal.arrays())

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.rollback()

    def _after(self, staged: Staged[S], rows: int) -> S:
        if rows == self.num_rows:
            return staged.final
        assert staged.journal is not None
        return staged.journal.state_after(rows)

    def _check_commit(self, rows: int) -> TransactionalState:
        if self._state is None:
            raise StateError("The block is closed", hint="begin another")
        if self._layers is None:
            raise StateError("The block has not been run", hint="pass it to forward first")
        if not 1 <= rows <= self.num_rows:
            raise StateError(
                f"{rows} rows of a block of {self.num_rows} cannot be kept",
                hint="keep at least the first; to keep none, roll back",
            )
        if rows < self.num_rows and not self.is_revocable:
            raise StateError(
                f"A block begun as not revocable cannot be cut to {rows} of its {self.num_rows} rows",
                hint="begin it as revocable",
            )
        return self._state


class TransactionalState:
    """What is common to all that is carried: one value, one open block, snapshots.

    Args:
        config: Model geometry.
        carried: The state before the first token.
        capacity_tokens: Most tokens; None for no limit.
    """

    def __init__(self, config: ModelConfig, carried: Carried, capacity_tokens: int | None) -> None:
        self._config = config
        self._carried = carried
        self.capacity_tokens = capacity_tokens
        self._block: weakref.ref[Block] | None = None
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    @property
    def carried(self) -> Carried:
        """Return all that is carried."""
        return self._carried

    @property
    def layers(self) -> tuple[LayerState, ...]:
        """Return one state per layer."""
        return self._carried.layers

    def begin(self, num_rows: int, *, revocable: bool = True) -> Block:
        """Open a block of rows after the tokens so far.

        Args:
            num_rows: At least 1.
            revocable: Keep what it takes to commit fewer rows than all: see `geometry.journal_bytes`.

        Raises:
            StateError: No rows, more than there is room for, or a block is open.
        """
        self._check_closed("begun")
        if num_rows < 1:
            raise StateError("A block needs at least one token", hint="give a prompt")
        self.check_room(num_rows)
        block = Block(self, num_rows, revocable)
        self._block = weakref.ref(block)
        return block

    def check_room(self, count: int) -> None:
        """Raise StateError if `count` more tokens do not fit."""
        num_tokens = self._carried.num_tokens
        if self.capacity_tokens is not None and num_tokens + count > self.capacity_tokens:
            raise StateError(
                f"{num_tokens} + {count} tokens do not fit a state of {self.capacity_tokens}",
                hint="ask for a longer context, or start a new sequence",
                num_tokens=num_tokens + count,
                capacity_tokens=self.capacity_tokens,
            )

    def check_consistent(self, carried: Carried) -> None:
        """Assert that every part of what is to be carried has forgotten what the others have."""
        ratio = self._config.indexer_compress_ratio
        for layer in carried.layers:
            if isinstance(layer, QsaState):
                assert layer.open_keys.shape[0] == carried.num_tokens % ratio

    def replace(self, carried: Carried) -> None:
        """Carry something else from now on; `Block.commit` and `restore` alone call this."""
        self._carried = carried

    def arrays(self) -> list[mx.array]:
        """Return every array the sequence holds."""
        return self._carried.arrays()

    def named_arrays(self) -> dict[str, mx.array]:
        """Return the meaningful rows of every array by name: two states are equal if all of these are."""
        carried, ratio = self._carried, self._config.indexer_compress_ratio
        named = {"num_tokens": mx.array(carried.num_tokens)}
        if carried.ple is not None:
            named |= {"ple.history": mx.array(carried.ple.history), "ple.conv_rows": carried.ple.conv_rows}
        for index, layer in enumerate(carried.layers):
            for name, array in named_rows(layer, carried.num_tokens, ratio).items():
                named[f"layers.{index}.{name}"] = array
        return named

    def num_bytes(self) -> int:
        """Return the bytes held, without those of an open block."""
        return sum(array.nbytes for array in self.arrays())

    def snapshot(self) -> Snapshot:
        """Return a reference to the state as it is now.

        Raises:
            StateError: A block is open.
        """
        self._check_closed("remembered")
        snapshot = Snapshot(self._carried)
        self._snapshots.add(snapshot)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this sequence.

        Going back to n tokens invalidates snapshots of more than n: their cached rows will be overwritten.

        Raises:
            StateError: The snapshot was invalidated so, or is of another sequence, or a block is open.
        """
        self._check_closed("restored")
        if snapshot not in self._snapshots:
            raise StateError(
                f"A snapshot at {snapshot.num_tokens} tokens no longer fits this sequence",
                hint="run the tokens again from the start",
            )
        for other in list(self._snapshots):
            if other.num_tokens > snapshot.num_tokens:
                self._snapshots.discard(other)
        self.replace(snapshot.carried)

    def trim(self, num_tokens: int) -> None:
        """Refuse to forget tokens: recurrent layers cannot undo them, and trimming only the rest corrupts.

        Raises:
            StateError: Always, unless nothing would be forgotten.
        """
        if num_tokens != self._carried.num_tokens:
            raise StateError(
                f"A sequence of {self._carried.num_tokens} tokens cannot be trimmed to {num_tokens}",
                hint="its recurrent layers cannot be undone: restore a snapshot, or run the tokens again",
                num_tokens=self._carried.num_tokens,
            )

    def _check_closed(self, verb: str) -> None:
        block = None if self._block is None else self._block()
        if block is not None and block.is_open:
            raise StateError(
                f"No state can be {verb} while a block of {block.num_rows} rows is open",
                hint="commit it or roll it back",
            )


class SequenceState(TransactionalState):
    """What the trunk carries for one sequence.

    Args:
        config: Model geometry.
        compute_dtype: Type of activations.
        capacity_tokens: Allocate key/value buffers for this many tokens and refuse more; None grows as
            needed.
    """

    def __init__(
        self, config: ModelConfig, *, compute_dtype: mx.Dtype, capacity_tokens: int | None = None
    ) -> None:
        layers = tuple(
            empty_gdn(config, compute_dtype)
            if kind == "gdn"
            else empty_qsa(config, compute_dtype, capacity_tokens)
            for kind in config.layer_kinds
        )
        super().__init__(config, Carried(0, layers, empty_ple(config, compute_dtype)), capacity_tokens)

    @property
    def num_tokens(self) -> int:
        """Return the tokens consumed."""
        return self._carried.num_tokens

    @property
    def ple(self) -> PleState:
        """Return the n-gram memory's state."""
        assert self._carried.ple is not None
        return self._carried.ple


class MtpState(TransactionalState):
    """What the MTP module carries for one sequence: the cache of its one layer.

    Args:
        config: Model geometry.
        compute_dtype: Type of activations.
        capacity_tokens: As for `SequenceState`.
    """

    def __init__(
        self, config: ModelConfig, *, compute_dtype: mx.Dtype, capacity_tokens: int | None = None
    ) -> None:
        layers = (empty_qsa(config, compute_dtype, capacity_tokens),)
        super().__init__(config, Carried(0, layers, None), capacity_tokens)

    @property
    def num_cells(self) -> int:
        """Return the cells computed: one per committed position but the last."""
        return self._carried.num_tokens
