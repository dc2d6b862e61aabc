"""The oracle: right at rate 0, wrong at rate 1, as often wrong as asked in between, and always the same."""

import pytest

from drafter.api import MAX_PROPOSALS, DraftSampling
from drafter.errors import DrafterError
from drafter.oracle import OracleDrafter

SAMPLING = DraftSampling(temperature=0.0, seed=0, position=0)
VOCAB = 11
RECORDED = tuple((7 * i * i + i // 3) % VOCAB for i in range(4000))


def oracle(rate: float, *, rows: int, seed: int = 0) -> OracleDrafter:
    drafter = OracleDrafter(RECORDED, VOCAB, error_rate=rate, seed=seed)
    if rows:
        drafter.observe(RECORDED[:rows], RECORDED[rows])
    return drafter


def slots(rate: float, seed: int = 0) -> list[bool]:
    """Return for every position whether the proposal there is right."""
    return [
        oracle(rate, rows=row, seed=seed).propose(1, SAMPLING).tokens == (RECORDED[row + 1],)
        for row in range(0, 3000)
    ]


def test_at_rate_nought_the_recorded_tokens_come_and_end_with_the_record() -> None:
    assert oracle(0, rows=10).propose(4, SAMPLING).tokens == RECORDED[11:15]
    assert oracle(0, rows=10).propose(100, SAMPLING).tokens == RECORDED[11 : 11 + MAX_PROPOSALS]
    assert oracle(0, rows=len(RECORDED) - 3).propose(8, SAMPLING).tokens == RECORDED[-2:]
    assert oracle(0, rows=10).propose(0, SAMPLING).tokens == ()


def test_at_rate_one_no_token_is_right_and_every_one_is_a_token() -> None:
    assert not any(slots(1))
    proposed = [oracle(1, rows=row).propose(1, SAMPLING).tokens[0] for row in range(500)]
    assert set(proposed) == set(range(VOCAB))


def test_between_them_a_share_is_wrong_and_seed_and_position_decide_which() -> None:
    right = slots(0.3)
    assert 0.66 < sum(right) / len(right) < 0.74
    assert right == slots(0.3)
    assert right != slots(0.3, seed=1)
    one_by_one = [oracle(0.3, rows=row).propose(1, SAMPLING).tokens[0] for row in range(20, 28)]
    assert list(oracle(0.3, rows=20).propose(8, SAMPLING).tokens) == one_by_one


def test_it_follows_its_rows_back_and_forth() -> None:
    drafter = oracle(0, rows=5)
    mark = drafter.snapshot()
    drafter.observe(RECORDED[5:9], RECORDED[9])
    assert drafter.propose(1, SAMPLING).tokens == (RECORDED[10],)
    drafter.restore(mark)
    assert drafter.propose(1, SAMPLING).tokens == (RECORDED[6],)
    with pytest.raises(DrafterError):
        drafter.restore(6)
    drafter.reset()
    assert drafter.propose(2, SAMPLING).tokens == RECORDED[1:3]


@pytest.mark.parametrize(("rate", "vocab"), [(-0.1, 5), (1.1, 5), (0.5, 1)])
def test_a_rate_that_cannot_be_is_refused(rate: float, vocab: int) -> None:
    with pytest.raises(DrafterError):
        OracleDrafter([1], vocab, error_rate=rate)
