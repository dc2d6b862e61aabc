"""The ring: what it holds is what was appended last, wherever it lies; what it cannot hold it says."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from drafter.config import RING_SLACK
from drafter.context import ContextRing, DraftContext
from drafter.errors import DrafterError
from tests.tiny.drafts import draft_config, random_parameters

WINDOW = 6


def ring(*, window: int | None = WINDOW, capacity: int | None = 8) -> ContextRing:
    return ContextRing(((2, 3), (2, 3)), mx.float32, window=window, capacity=capacity)


def rows(start: int, stop: int) -> tuple[mx.array, mx.array]:
    """Rows that say their position: keys p, values -p."""
    value = mx.broadcast_to(mx.arange(start, stop, dtype=mx.float32)[None, :, None], (2, stop - start, 3))
    return value, -value


def held(of: ContextRing) -> list[int]:
    """Return the positions held, having checked that every place holds the row that it says."""
    (keys, values), positions = of.view()
    valid = positions >= 0
    for array, sign in ((keys, 1), (values, -1)):
        assert (np.array(array)[:, valid] == sign * positions[valid][None, :, None]).all()
    return sorted(positions[valid].tolist())


@pytest.mark.parametrize("steps", [(30,), (1,) * 30, (5, 3, 1, 1, 9, 2, 9), (8, 8, 8, 6), (7, 23)])
def test_the_newest_rows_are_held_however_they_came(steps: tuple[int, ...]) -> None:
    sliding, whole = ring(), ring(window=None, capacity=None)
    for step in steps:
        for each in (sliding, whole):
            each.append(rows(each.end, each.end + step), each.end)
    assert held(sliding) == list(range(22, 30))
    assert held(whole) == list(range(30))
    for each, first in ((sliding, 22), (whole, 0)):
        (keys, _), start = each.in_order()
        assert start == first
        assert np.array(keys)[0, :, 0].tolist() == list(range(first, 30))


def test_a_gap_and_an_overlap_are_refused_and_nothing_is_stored() -> None:
    for each in (ring(), ring(window=None, capacity=None)):
        each.append(rows(0, 5), 0)
        for start in (4, 6):
            with pytest.raises(DrafterError):
                each.append(rows(start, start + 2), start)
        assert (each.end, held(each)) == (5, list(range(5)))


@pytest.mark.parametrize("seen", range(1, 20))
@pytest.mark.parametrize("back", range(0, 8))
def test_truncation_says_from_where_rows_are_missing(seen: int, back: int) -> None:
    if back > seen:
        return
    each = ring(capacity=WINDOW - 1 + 2)
    each.append(rows(0, seen), 0)
    to = seen - back
    needed = list(range(max(0, to - (WINDOW - 1)), to))
    first = each.truncate(to)
    left = held(each)
    assert each.end == to
    assert all(position < to for position in left)
    assert (first == to) == (set(needed) <= set(left))
    if first != to:
        assert first == needed[0]
        each.reset(first)
        each.append(rows(first, to), first)
        assert held(each) == needed
    each.append(rows(to, to + 3), to)
    assert set(range(max(0, to + 3 - (WINDOW - 1)), to + 3)) <= set(held(each))


def test_a_little_back_is_free_as_long_as_the_slack_reaches() -> None:
    each = ring(capacity=WINDOW - 1 + 2)
    each.append(rows(0, 40), 0)
    assert each.truncate(38) == 38
    assert each.truncate(37) == 32


def test_truncation_of_a_whole_ring_loses_nothing_and_beyond_the_end_is_refused() -> None:
    each = ring(window=None, capacity=None)
    each.append(rows(0, 40), 0)
    assert each.truncate(3) == 3
    assert held(each) == [0, 1, 2]
    each.append(rows(3, 6), 3)
    assert held(each) == list(range(6))
    with pytest.raises(DrafterError):
        each.truncate(7)


def test_bytes_are_those_of_the_arrays_and_do_not_grow() -> None:
    each = ring()
    expected = 2 * (2 * 8 * 3 * 4) + 8 * 4
    for _ in range(5):
        assert each.num_bytes() == expected
        each.append(rows(each.end, each.end + 7), each.end)


def test_a_ring_smaller_than_its_window_cannot_be_made() -> None:
    ring(capacity=WINDOW - 1)
    with pytest.raises(DrafterError):
        ring(capacity=WINDOW - 2)


def test_after_a_reset_the_next_row_may_be_anywhere() -> None:
    for each in (ring(), ring(window=None, capacity=None)):
        each.append(rows(0, 5), 0)
        each.reset(1000)
        assert held(each) == []
        each.append(rows(1000, 1003), 1000)
        assert held(each) == [1000, 1001, 1002]


def test_a_context_taken_back_and_filled_again_equals_one_that_never_went_on() -> None:
    config = draft_config()
    params = random_parameters(config)
    fused = mx.random.normal((80, 32), key=mx.random.key(1))
    straight, returned = (DraftContext(params, config, mx.float32) for _ in range(2))
    straight.append(fused[:40], 0)
    returned.append(fused[:40], 0)
    returned.append(fused[41:80] * 2, 40)  # rows of another text
    assert returned.truncate(40) == 40
    assert RING_SLACK > 39
    assert (returned.end, returned.num_rows) == (straight.end, straight.num_rows)
    for one, other in zip(straight.layers(), returned.layers(), strict=True):
        valid = one.positions >= 0
        assert one.positions.tolist() == other.positions.tolist()
        assert np.array_equal(np.array(one.keys)[:, valid], np.array(other.keys)[:, valid])
        assert np.array_equal(np.array(one.values)[:, valid], np.array(other.values)[:, valid])
