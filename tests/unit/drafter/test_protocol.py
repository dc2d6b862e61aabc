"""What every drafter promises, held to all of them; the MTP one over a module that is a list of cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from drafter.api import MAX_PROPOSALS, Drafter, DraftSampling
from drafter.errors import DrafterError
from drafter.lookup import LookupDrafter
from drafter.mtp import MtpDrafter
from drafter.oracle import OracleDrafter
from tests.tiny.drafts import self_feeding

VOCAB = 13
TEXT = [(3 * i + i // 4) % VOCAB for i in range(80)]
SAMPLING = DraftSampling(temperature=0.7, seed=9, position=0)
STACKS = mx.arange(len(TEXT), dtype=mx.float32).reshape(-1, 1, 1)


@dataclass
class ListCache:
    """Cells as (stack, token) pairs."""

    cells: list[tuple[float, int]] = field(default_factory=list)

    def arrays(self) -> list[mx.array]:
        return []


class ListView:
    """A module that proposes from everything it has seen: one cell too many or too few shows."""

    def new_cache(self) -> ListCache:
        return ListCache()

    def extend(self, stack_TGD: mx.array, next_tokens: Sequence[int], cache: ListCache) -> None:
        assert stack_TGD.shape == (len(next_tokens), 1, 1)
        cache.cells += zip(stack_TGD.reshape(-1).tolist(), next_tokens, strict=True)

    def run_cell(
        self, stack_1GD: mx.array, next_token: Sequence[int] | mx.array, cache: ListCache
    ) -> tuple[mx.array, mx.array]:
        token = int(next_token.item()) if isinstance(next_token, mx.array) else next_token[0]
        cache.cells.append((stack_1GD.item(), token))
        answer = hash(tuple(cache.cells)) % VOCAB
        logits = mx.zeros((1, VOCAB))
        logits[0, answer] = 9
        return logits, stack_1GD + 0.5

    def mark(self, cache: ListCache) -> object:
        return tuple(cache.cells)

    def rewind(self, cache: ListCache, mark: Any) -> None:
        if tuple(cache.cells[: len(mark)]) != mark:
            raise DrafterError("replaced", hint="")
        del cache.cells[len(mark) :]

    def to_host(self, array: mx.array) -> Any:
        return array.tolist()


MAKERS: dict[str, Callable[[], Drafter]] = {
    "lookup": lambda: LookupDrafter(len(TEXT)),
    "oracle": lambda: OracleDrafter(TEXT, VOCAB, error_rate=0.3),
    "mtp": lambda: MtpDrafter(ListView()),  # type: ignore[arg-type]
    "mtp that draws": lambda: MtpDrafter(
        ListView(),  # type: ignore[arg-type]
        lambda scores, seed, position: mx.random.categorical(
            scores, key=mx.random.key(1000 * seed + position)
        ),
    ),
    "dflash2": lambda: self_feeding(VOCAB, "sliding"),
    "dflash2 that looks at everything": lambda: self_feeding(VOCAB, "full"),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[], Drafter]:
    return MAKERS[request.param]


def feed(drafter: Drafter, first: int, end: int) -> None:
    drafter.observe(TEXT[first:end], TEXT[end], STACKS[first:end] if drafter.needs_stack else None)


def tokens(drafter: Drafter, k: int = 4) -> tuple[int, ...]:
    return drafter.propose(k, SAMPLING).tokens


def test_however_the_rows_come_the_proposals_are_the_same(make: Callable[[], Drafter]) -> None:
    whole, pieces = make(), make()
    feed(whole, 0, 60)
    for first, end in ((0, 33), (33, 34), (34, 39), (39, 40), (40, 60)):
        feed(pieces, first, end)
        tokens(pieces)
    assert tokens(pieces) == tokens(whole)
    assert len(tokens(whole)) == 4


def test_asking_leaves_no_trace(make: Callable[[], Drafter]) -> None:
    asked, quiet = make(), make()
    for drafter in (asked, quiet):
        feed(drafter, 0, 41)
    assert tokens(asked) == tokens(asked) == tokens(quiet)
    for drafter in (asked, quiet):
        feed(drafter, 41, 45)
    assert tokens(asked) == tokens(quiet)


@pytest.mark.parametrize("k", [0, 1, 3, 1000])
def test_at_most_k_tokens_of_the_vocabulary(make: Callable[[], Drafter], k: int) -> None:
    drafter = make()
    feed(drafter, 0, 50)
    proposal = drafter.propose(k, SAMPLING)
    assert len(proposal.tokens) <= min(k, drafter.max_proposals(), MAX_PROPOSALS)
    assert all(0 <= token < VOCAB for token in proposal.tokens)
    if proposal.law == "rows":
        assert proposal.row_ids is not None
        assert proposal.row_probs is not None
        assert proposal.row_ids.shape == proposal.row_probs.shape
        for token, ids in zip(proposal.tokens, proposal.row_ids.tolist(), strict=True):
            assert token in ids


def test_back_at_a_snapshot_it_goes_on_as_if_nothing_had_come_after(make: Callable[[], Drafter]) -> None:
    drafter, fresh = make(), make()
    feed(drafter, 0, 30)
    mark = drafter.snapshot()
    feed(drafter, 30, 47)
    tokens(drafter)
    drafter.restore(mark)
    feed(fresh, 0, 30)
    assert tokens(drafter) == tokens(fresh)
    for one in (drafter, fresh):
        feed(one, 30, 61)
    assert tokens(drafter) == tokens(fresh)
    drafter.restore(mark)  # more than once
    assert tokens(drafter) == tokens(_fed(make, 30))


def _fed(make: Callable[[], Drafter], rows: int) -> Drafter:
    drafter = make()
    feed(drafter, 0, rows)
    return drafter


def test_a_second_shorter_request_is_drafted_like_a_first(make: Callable[[], Drafter]) -> None:
    """Defect 12: what is left of the request before crashes the next one, or drafts garbage."""
    drafter = make()
    feed(drafter, 0, 70)
    tokens(drafter)
    drafter.reset()
    assert tokens(drafter) == tokens(make())
    feed(drafter, 0, 20)
    assert tokens(drafter) == tokens(_fed(make, 20))


def test_a_foreign_snapshot_is_refused_and_changes_nothing(make: Callable[[], Drafter]) -> None:
    drafter = _fed(make, 30)
    before = tokens(drafter)
    with pytest.raises(DrafterError):
        drafter.restore(object())
    assert tokens(drafter) == before


def test_what_it_is_and_did_are_plain_values(make: Callable[[], Drafter]) -> None:
    drafter = _fed(make, 30)
    description = drafter.describe()
    assert description["kind"] == drafter.kind
    assert all(isinstance(value, str | int | float) for value in description.values())
    assert drafter.num_bytes() >= 0


class SilentView(ListView):
    """Takes stacks of any size and keeps nothing of them."""

    def extend(self, stack_TGD: mx.array, next_tokens: Sequence[int], cache: ListCache) -> None:
        pass


def test_the_row_that_mtp_holds_back_keeps_no_chunk_in_memory() -> None:
    drafter, snapshots = MtpDrafter(SilentView()), []  # type: ignore[arg-type]
    before = mx.get_active_memory()
    for _ in range(3):
        stacks = mx.zeros((64, 4, 4096)) + 1
        mx.eval(stacks)
        drafter.observe([1] * 64, 1, stacks)
        snapshots.append(drafter.snapshot())
        del stacks
    mx.synchronize()
    one_row = 4 * 4096 * 4
    assert mx.get_active_memory() - before < 8 * one_row
