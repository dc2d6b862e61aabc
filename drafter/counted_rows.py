"""What drafters share that replay a record: all they keep of a sequence is how many rows it has.

Entry point: `CountedRows`, the base of `oracle` and `replay`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from drafter.errors import DrafterError


class CountedRows:
    """The part of `drafter.api.Drafter` that follows the sequence."""

    def __init__(self) -> None:
        self._num_rows = 0

    def reset(self) -> None:
        """Forget the sequence."""
        self._num_rows = 0

    def observe(
        self,
        tokens: Sequence[int],
        next_token: int,
        stack_TGD: mx.array | None = None,
        *,
        features_RF: mx.array | None = None,
    ) -> None:
        """Count rows; what they say is not looked at. See `Drafter`."""
        del next_token, stack_TGD, features_RF
        self._num_rows += len(tokens)

    def snapshot(self) -> int:
        """Return the number of rows."""
        return self._num_rows

    def restore(self, snapshot: object) -> None:
        """Go back to a number of rows.

        Raises:
            DrafterError: that many rows were never there.
        """
        if not isinstance(snapshot, int) or not 0 <= snapshot <= self._num_rows:
            raise DrafterError("These rows were never observed", hint="observe the text from the start")
        self._num_rows = snapshot

    def num_bytes(self) -> int:
        """Return 0: the record is the caller's."""
        return 0
