"""Random numbers are keyed by seed, position and purpose, and by nothing else."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.engine.streams import Purpose, draw, draw_draft, draw_seed, stream_keys, uniform


def test_no_two_places_share_a_key():
    places = list(itertools.product(range(20), range(20), Purpose))
    assert len({draw_seed(*place) for place in places}) == len(places)


def test_the_key_holds_all_64_bits_of_the_seed():
    place = (2**64 - 1, 12345, Purpose.ACCEPT)
    seed = draw_seed(*place)
    assert seed >> 32
    assert mx.array_equal(stream_keys([place])[0], mx.random.key(seed))


@pytest.mark.parametrize("width", [1, 2, 5, 37, 128, 1001])
def test_a_row_is_drawn_as_if_it_came_alone(width):
    scores = mx.random.normal((6, width), key=mx.random.key(width))
    keys = stream_keys((9, position, Purpose.DRAW) for position in range(6))
    alone = [int(mx.random.categorical(scores[row], key=keys[row])) for row in range(6)]
    assert draw(scores, keys).tolist() == alone
    assert uniform(keys).tolist() == [float(mx.random.uniform(key=keys[row])) for row in range(6)]


def test_a_drafters_draw_has_its_own_stream():
    scores = mx.zeros((4096,))
    mine = [int(draw_draft(scores, 3, position)) for position in range(6)]
    keys = stream_keys((3, position, Purpose.DRAW) for position in range(6))
    theirs = draw(mx.zeros((6, 4096)), keys).tolist()
    assert mine == [int(draw_draft(scores, 3, position)) for position in range(6)]
    assert not set(enumerate(mine)) & set(enumerate(theirs))


def test_numbers_of_two_purposes_are_unrelated():
    pairs = [
        np.array(uniform(stream_keys((1, position, purpose) for position in range(4000))))
        for purpose in Purpose
    ]
    for one, other in itertools.combinations(pairs, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.06
    assert all(numbers.min() >= 0 and numbers.max() < 1 for numbers in pairs)
