"""Which experts the native routers chose, written down pass by pass, and read again by position.

Entry points: `RouteLog` (while a model runs), `RecordedRoutes` (what a run left, for replay and simulation).
Only streamed layers are seen: where every expert is resident, ids never come to the host.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Rows = list[list[int]]
"""Expert ids of every row of a pass, K each."""
Guesses = Sequence[tuple[int, int, float, int]]


@dataclass(slots=True)
class Pass:
    """One forward pass.

    Attributes:
        position: tokens before it.
        num_rows: tokens in it.
        num_kept: rows that were committed; 0 while it runs, and for good if it failed.
        routes: the rows' experts by layer, in the order in which layers ran.
        guesses: what was guessed while it ran: (layer, expert, confidence, passes ahead).
        committed_ns: when it was committed, on the clock of `time.perf_counter_ns`.
    """

    position: int
    num_rows: int
    num_kept: int = 0
    routes: dict[int, Rows] = field(default_factory=dict[int, Rows])
    guesses: list[Guesses] = field(default_factory=list[Guesses])
    committed_ns: int = 0


class RouteLog:
    """Writes passes down.

    Attributes:
        passes: all of them, the open one included.
    """

    def __init__(self) -> None:
        self.passes: list[Pass] = []

    def begin(self, position: int, num_rows: int) -> None:
        """Open a pass."""
        self.passes.append(Pass(position, num_rows))

    def routed(self, layer: int, ids_TK: Sequence[Sequence[int]]) -> None:
        """Note what a layer chose."""
        self.passes[-1].routes[layer] = [list(row) for row in ids_TK]

    def guessed(self, guesses: Guesses) -> None:
        """Note what was guessed, handed over or not; not to be changed any more."""
        self.passes[-1].guesses.append(guesses)

    def commit(self, num_rows: int) -> None:
        """Close the pass; its first `num_rows` rows stay."""
        self.passes[-1].num_kept = num_rows
        self.passes[-1].committed_ns = time.perf_counter_ns()


class RecordedRoutes:
    """The committed routes of one sequence, by position.

    Args:
        passes: in the order in which they ran. A position that ran twice has the route of the last time.

    Attributes:
        by_position: for every committed position, the experts of each streamed layer.
    """

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.by_position: dict[int, dict[int, tuple[int, ...]]] = {}
        for one in passes:
            for row in range(one.num_kept):
                self.by_position[one.position + row] = {
                    layer: tuple(rows[row]) for layer, rows in one.routes.items()
                }

    def at(self, position: int) -> Mapping[int, tuple[int, ...]]:
        """Return the experts of each layer at a position; empty where nothing was recorded."""
        return self.by_position.get(position, {})


def demands(passes: Sequence[Pass]) -> dict[int, list[list[int]]]:
    """Return, for every layer, what each pass demanded of the store: distinct experts in ascending order."""
    found: dict[int, list[list[int]]] = {}
    for one in passes:
        for layer, rows in one.routes.items():
            found.setdefault(layer, []).append(sorted({expert for row in rows for expert in row}))
    return found
