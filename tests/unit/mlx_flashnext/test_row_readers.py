"""A token's n-gram rows are read together: one thread each, within a bound."""

import dataclasses

import pytest

from mlx_flashnext.config import read_config
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.rows import MAX_ROW_READERS, row_readers


@pytest.mark.parametrize(
    ("heads", "least", "expected"), [(3, 4, 6), (8, 4, 16), (1, 4, 4), (16, 4, MAX_ROW_READERS), (3, 8, 8)]
)
def test_there_is_a_thread_for_each_row_of_a_token(heads, least, expected):
    config = dataclasses.replace(read_config(demo_dir()), heads_per_ngram=heads)
    assert row_readers(config, least) == expected
