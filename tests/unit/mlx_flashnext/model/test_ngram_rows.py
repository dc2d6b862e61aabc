"""P63: the n-gram hash, against the reference's rows for the real constants, and its rules of context."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.model.ple import ngram_rows
from mlx_flashnext.ngram import ngram_constants

REAL = Path(__file__).parents[4] / "mlx_flashnext/checkpoint/qwen3.8-flash-next.config.json"
TEXT = (248045, 846, 198, 248044, 9707, 11)
# Rows of positions 0, 1 and 4, computed with the reference implementation (qwen4exp.md 2.3.2).
GOLDEN = {
    0: "13981229 30076798 49239434 61315716 98540601 111186732 120378863 146384625 "
    "173637879 184336749 217808755 222173721 249579227 277180543 299757935 312970430",
    1: "4908448 36872991 46611251 64451521 83649409 110850044 122402102 159207155 "
    "170314019 195445770 214314282 239389039 254862662 271565595 284073139 308659387",
    4: "16410909 39682429 55103279 60931720 87006904 116506179 131512017 152932897 "
    "169641436 182022480 209277433 237891023 256841529 277007269 290665954 300984276",
}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_dict(json.loads(REAL.read_text()))


def start(config: ModelConfig) -> tuple[int, ...]:
    return (config.ngram_separator,) * 2


def test_rows_of_a_fixed_text_equal_the_reference(config: ModelConfig) -> None:
    rows = ngram_rows(TEXT, start(config), config)
    for position, wanted in GOLDEN.items():
        assert rows[position] == [int(row) for row in wanted.split()], position


def test_seed_zero_reads_other_rows(config: ModelConfig) -> None:
    """The fault of P63: the field is absent from the file, and its default is 1234, not 0."""
    wrong = ngram_constants(
        vocab_size=config.vocab_size,
        ngram_size=config.ngram_size,
        heads_per_ngram=config.heads_per_ngram,
        vocab_size_base=20_000_000,
        divisor=128,
        embed_dim=config.ple_embed_dim,
        seed=0,
    )
    rows = ngram_rows(TEXT, start(config), dataclasses.replace(config, ngram=wrong))
    assert rows[0] != [int(row) for row in GOLDEN[0].split()]


def test_a_separator_cuts_everything_older_but_not_its_own_context(config: ModelConfig) -> None:
    eos = config.ngram_separator
    rows = ngram_rows([5, 6, eos, 7, 8], start(config), config)
    assert rows[2] == ngram_rows([eos], (5, 6), config)[0]
    assert rows[2] != ngram_rows([eos], (eos, eos), config)[0]
    assert rows[3] == ngram_rows([7], (eos, eos), config)[0]
    assert rows[4] == ngram_rows([8], (eos, 7), config)[0]
    # One step back is the separator: what lies before it must not matter.
    assert ngram_rows([9], (3, eos), config) == ngram_rows([9], (4, eos), config)


def test_the_turn_end_does_not_cut(config: ModelConfig) -> None:
    turn_end = 248046
    assert ngram_rows([9], (3, turn_end), config) != ngram_rows([9], (4, turn_end), config)


def test_any_chunking_gives_the_same_rows(config: ModelConfig) -> None:
    tokens = [
        1,
        2,
        config.ngram_separator,
        3,
        248046,
        4,
        config.ngram_separator,
        config.ngram_separator,
        5,
        6,
    ]
    whole = ngram_rows(tokens, start(config), config)
    for size in range(1, len(tokens)):
        history, rows = start(config), []
        for at in range(0, len(tokens), size):
            block = tokens[at : at + size]
            rows += ngram_rows(block, history, config)
            history = (*history, *block)[-2:]
        assert rows == whole, size


def test_every_row_lies_in_its_head(config: ModelConfig) -> None:
    bounds = [*config.ngram.offsets, config.ngram.num_rows]
    for row in ngram_rows(range(0, config.vocab_size, 4999), start(config), config):
        assert all(bounds[head] <= value < bounds[head + 1] for head, value in enumerate(row))
