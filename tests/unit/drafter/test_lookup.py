"""The lookup index against a search of the whole text, on texts that repeat themselves."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter import lookup
from drafter.api import MAX_PROPOSALS, DraftSampling
from drafter.errors import DrafterError
from drafter.lookup import BYTES_PER_TOKEN, LONG_MATCH, MAX_CANDIDATES, LookupDrafter

SAMPLING = DraftSampling(temperature=0.0, seed=0, position=0)
# Two or three letters: everything repeats, and the end of the text occurs in many lengths.
texts = st.lists(st.integers(0, 2), min_size=2, max_size=60)


def fed(text: Sequence[int], *, min_match: int = 3, capacity: int = 256) -> LookupDrafter:
    """Return an index that was given `text` at once, its last token as the anchor."""
    drafter = LookupDrafter(capacity, min_match=min_match)
    drafter.observe(text[:-1], text[-1])
    return drafter


def searched(text: Sequence[int], min_match: int) -> tuple[int, int]:
    """Return the longest match of the text's end and its latest place, by comparing every place."""
    end, best = len(text) - 1, (-1, 0)
    for place in range(end):  # ascending: the latest of equals stays
        length = 0
        while length < min(LONG_MATCH, place + 1) and text[place - length] == text[end - length]:
            length += 1
        if length >= max(best[1], min_match):
            best = (place, length)
    return best


def proposed(drafter: LookupDrafter, k: int = 8) -> tuple[int, ...]:
    return drafter.propose(k, SAMPLING).tokens


@given(texts, st.integers(1, 4))
def test_the_longest_match_is_found_and_the_latest_of_equals(text: list[int], min_match: int) -> None:
    assert fed(text, min_match=min_match).longest_match() == searched(text, min_match)


@given(texts, st.integers(1, 9))
def test_it_proposes_what_followed_and_a_period_goes_on(text: list[int], k: int) -> None:
    place, length = searched(text, 3)
    expected: list[int] = []
    if length:
        whole = list(text)
        for index in range(place + 1, place + 1 + k):
            whole.append(whole[index])
        expected = whole[len(text) :]
    assert proposed(fed(text), k) == tuple(expected)


@given(texts, st.lists(st.integers(1, 7), min_size=60, max_size=60))
def test_however_the_text_arrives_the_index_is_the_same(text: list[int], steps: list[int]) -> None:
    drafter, at = LookupDrafter(256), 0
    for step in steps:
        if at + step >= len(text):
            break
        drafter.observe(text[at : at + step], text[at + step])
        at += step
        assert drafter.longest_match() == searched(text[: at + 1], 3)


@given(st.data())
def test_back_at_any_prefix_the_index_is_the_one_of_that_prefix(data: st.DataObject) -> None:
    text = data.draw(texts)
    cut = data.draw(st.integers(1, len(text) - 1))
    then = data.draw(texts)
    drafter = LookupDrafter(256)
    drafter.observe(text[:cut], text[cut])
    mark = drafter.snapshot()
    drafter.observe(text[cut:], 1)
    drafter.restore(mark)
    fresh = fed(text[: cut + 1])
    assert drafter.longest_match() == fresh.longest_match()
    # Not the anchor of then: another token may follow the rows that were kept.
    for one in (drafter, fresh):
        one.observe(then[:-1], then[-1])
    assert drafter.longest_match() == searched([*text[:cut], *then], 3)
    assert proposed(drafter) == proposed(fresh)
    assert drafter._heads == fresh._heads


def test_generated_text_is_indexed_not_the_prompt_alone() -> None:
    """Defect 32: an index that holds the prompt alone never fires in a chat."""
    drafter = fed([90, 91, 92, 93])
    for token in (1, 2, 3, 4, 5, 1, 2, 3):
        anchor = int(drafter._text[drafter.num_rows])
        drafter.observe([anchor], token)
    assert proposed(drafter, 2) == (4, 5)


def test_hits_and_misses_are_counted() -> None:
    """Defect 32: diagnostics that nobody reads are dead; these are what the statistics show."""
    drafter = fed([1, 2, 3, 4, 1, 2, 3])
    assert proposed(drafter)
    drafter.observe([3], 99)
    assert not proposed(drafter)
    assert not proposed(drafter)
    assert (drafter.describe()["hits"], drafter.describe()["misses"]) == (1, 2)


def test_fewer_tokens_than_the_minimum_propose_nothing() -> None:
    assert proposed(fed([1, 2, 9, 8, 1, 2], min_match=3)) == ()
    assert proposed(fed([1, 2, 9, 8, 1, 2], min_match=2), 2) == (9, 8)
    assert proposed(fed([5, 5], min_match=3)) == ()
    assert proposed(LookupDrafter(16)) == ()


def test_a_proposal_has_at_most_k_tokens_and_asking_twice_gives_the_same() -> None:
    drafter = fed([1, 2, 3] * 20)
    for k in (0, 1, 5, 1000):
        assert len(proposed(drafter, k)) == min(k, MAX_PROPOSALS) == len(proposed(drafter, k))
    assert proposed(drafter, 5) == proposed(drafter, 5) == (1, 2, 3, 1, 2)


def test_the_index_takes_what_it_says_and_never_more() -> None:
    """Bounded memory: allocated once, whatever the text."""
    for capacity in (15, 100, 4095, 32_768):
        drafter = LookupDrafter(capacity)
        before = drafter.num_bytes()
        assert before <= BYTES_PER_TOKEN * (capacity + 1)
        drafter.observe([7] * (capacity - 1), 7)
        assert drafter.num_bytes() == before


def test_a_text_beyond_the_capacity_is_refused_and_leaves_the_index_as_it_was() -> None:
    drafter = fed([1, 2, 3, 1, 2, 3], capacity=8)
    before = drafter.longest_match()
    with pytest.raises(DrafterError, match="10"):
        drafter.observe([3, 4, 5, 6], 7)
    assert drafter.longest_match() == before
    drafter.observe([3, 4, 5], 7)
    assert drafter.num_rows == 8


def test_a_snapshot_whose_rows_were_replaced_is_refused() -> None:
    drafter = fed([1, 2, 3, 4])
    late = drafter.snapshot()
    early = LookupDrafter(256).snapshot()
    drafter.restore(early)
    assert drafter.longest_match() == (-1, 0)
    drafter.observe([9, 9, 9, 9, 9], 9)
    with pytest.raises(DrafterError):
        drafter.restore(late)  # as many rows, other ones
    with pytest.raises(DrafterError):
        drafter.restore("not a snapshot")
    drafter.reset()
    assert drafter.num_rows == 0


def test_the_work_of_one_proposal_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of one token: every place is a candidate, and every one agrees at length."""
    looked: list[int] = []
    agreement = LookupDrafter._agreement

    def counted(self: LookupDrafter, place: int, end: int) -> int:
        looked.append(place)
        return agreement(self, place, end)

    monkeypatch.setattr(LookupDrafter, "_agreement", counted)
    rng = random.Random(5)
    chopped = [token for _ in range(3000) for token in (1, 2, 3, rng.randrange(4, 1000))]
    drafter = fed([*chopped, 1, 2, 3], capacity=20_000)
    assert drafter.longest_match()[1] >= 3
    assert len(looked) <= MAX_CANDIDATES
    looked.clear()
    assert fed([7] * 10_000, capacity=20_000).longest_match()[1] == LONG_MATCH
    assert len(looked) == 1


@pytest.mark.parametrize(
    "fault",
    ["looks at no candidate", "prompt alone", "no repair of heads", "stops at the minimum"],
)
def test_the_checks_above_see_a_broken_index(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "looks at no candidate":
        monkeypatch.setattr(lookup, "MAX_CANDIDATES", 0)
        assert fed([1, 2, 3, 4, 1, 2, 3]).longest_match() != searched([1, 2, 3, 4, 1, 2, 3], 3)
    elif fault == "prompt alone":
        drafter = fed([90, 91, 92, 93])
        monkeypatch.setattr(LookupDrafter, "_append", lambda self, token: None)
        drafter.observe([93, 1, 2, 3, 4, 1, 2], 3)
        assert proposed(drafter) == ()
    elif fault == "no repair of heads":
        monkeypatch.setattr(LookupDrafter, "_cut", lambda self, n: setattr(self, "_length", n))
        drafter = fed([1, 2, 3, 4, 1, 2, 3, 9])
        drafter.restore(fed([1, 2, 3, 4]).snapshot())
        assert drafter._heads != fed([1, 2, 3, 4])._heads
    else:
        monkeypatch.setattr(lookup, "LONG_MATCH", 3)
        text = [1, 2, 3, 4, 8, 2, 3, 4, 1, 2, 3, 4]
        assert fed(text).longest_match() != searched(text, 3)
