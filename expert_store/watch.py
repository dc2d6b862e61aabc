"""Who wants to know when things happen, not only how often: `StoreWatch`, `RowWatch`.

The books (`books.py`) keep sums. A watch gets each event with its times, to draw one cycle; nobody watches
an answer that is measured. Times are those of the store's clock. What is called must be quick and must not
raise: it runs under a lock that readers and inference share.
"""

from __future__ import annotations

from typing import Protocol

from expert_store.keys import WaitCause
from expert_store.ticket import Ticket


class StoreWatch(Protocol):
    """Told of the store's waits and reads, in the order in which they end."""

    def stood_still(self, layer: int, cause: WaitCause, began_ns: int, queue_ns: int, read_ns: int) -> None:
        """Hear of an exposed wait.

        Args:
            layer: Layer index.
            cause: Of the record that ended it.
            began_ns: When it began.
            queue_ns: Of it, before the read of that record began.
            read_ns: The rest.
        """
        ...

    def read_ready(self, ticket: Ticket) -> None:
        """Hear of a record that has come. Its fate may be settled later: `Ticket.fate` is None until then."""
        ...


class RowWatch(Protocol):
    """Told of the waits and reads of a row table."""

    def rows_stood_still(self, began_ns: int, waited_ns: int) -> None:
        """Hear of an exposed wait for rows."""
        ...

    def rows_ready(self, began_ns: int, ended_ns: int, num_rows: int, num_bytes: int) -> None:
        """Hear of rows that have come; on a reader thread, without any lock."""
        ...
