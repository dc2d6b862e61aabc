"""The thinking splitter: tags never leak, and cutting the text differently changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_flashnext.text.thinking import Piece, ThinkingSplitter, prompt_ends_inside


def split(pieces: list[str], *, starts_inside: bool) -> tuple[str, str]:
    splitter = ThinkingSplitter(starts_inside=starts_inside)
    found = [*(splitter.feed(piece) for piece in pieces), splitter.flush()]
    return "".join(piece.reasoning for piece in found), "".join(piece.answer for piece in found)


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "answer"),
    [
        ("hm\n</think>\n\nYes", True, "hm\n", "Yes"),
        ("</think>\n\nYes", True, "", "Yes"),
        ("endless", True, "endless", ""),
        ("almost </thin", True, "almost </thin", ""),
        ("Yes", False, "", "Yes"),
        ("<think>hm</think>Yes", False, "hm", "Yes"),
        ("\n<think>\nhm\n</think>\n\nYes", False, "\nhm\n", "Yes"),
        ("<thin ice", False, "", "<thin ice"),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("a</think>\n b</think>c", True, "a", " b</think>c"),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_answer(text, starts_inside, reasoning, answer):
    assert split([text], starts_inside=starts_inside) == (reasoning, answer)


@given(
    pieces=st.lists(
        st.sampled_from(["<", "/", "think", ">", "</think>", "<think>", "\n", "a", " ", ""]), max_size=20
    ),
    starts_inside=st.booleans(),
)
def test_the_split_does_not_depend_on_where_the_text_is_cut(pieces, starts_inside):
    text = "".join(pieces)
    whole = split([text], starts_inside=starts_inside)
    assert split(pieces, starts_inside=starts_inside) == whole
    assert split(list(text), starts_inside=starts_inside) == whole


def test_text_that_cannot_be_a_tag_is_not_held_back():
    splitter = ThinkingSplitter(starts_inside=True)
    assert splitter.feed("a <b> ") == Piece(reasoning="a <b> ")
    assert splitter.feed("x</thi") == Piece(reasoning="x")
    assert splitter.is_inside
    assert splitter.feed("nk>y") == Piece(answer="y")


def test_a_prompt_that_opens_a_think_block_is_recognised():
    assert prompt_ends_inside("<|im_start|>assistant\n<think>\n")
    assert not prompt_ends_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")
