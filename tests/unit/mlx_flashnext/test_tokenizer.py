"""Tokenizer and stream decoder: pieces equal the whole, code points stay whole, mismatches are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_flashnext.errors import DocumentCorrupt, TokenizerMismatch
from mlx_flashnext.text.generation_config import read_generation_defaults
from mlx_flashnext.tokenizer import Tokenizer
from tests.tiny.tokenizer import IM_END, SPECIALS, THINK, write_tokenizer

VOCAB = 400


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.open(directory)


def streamed(tokenizer: Tokenizer, ids: list[int], *, special: bool) -> list[str]:
    decoder = tokenizer.stream_decoder(special=special)
    return [*(decoder.feed(token) for token in ids), decoder.flush()]


@given(ids=st.lists(st.integers(0, VOCAB + 5), max_size=40), special=st.booleans())
def test_streamed_pieces_concatenate_to_the_decoding_of_any_ids(tokenizer, ids, special):
    assert "".join(streamed(tokenizer, ids, special=special)) == tokenizer.decode(ids, special=special)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_streamed_text_survives_and_no_piece_holds_half_a_code_point(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer.encode(text, special=False), special=True)
    assert "".join(pieces) == text
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


def test_a_code_point_split_over_tokens_appears_with_its_last_byte(tokenizer):
    ids = tokenizer.encode("\U0001f600")
    assert len(ids) == 4
    assert streamed(tokenizer, ids, special=False) == ["", "", "", "\U0001f600", ""]


def test_an_unfinished_code_point_becomes_one_replacement_at_the_end(tokenizer):
    ids = tokenizer.encode("\u20ac")[:2]
    assert streamed(tokenizer, ids, special=False) == ["", "", "\ufffd"]


def test_special_tokens_in_text_are_read_as_tokens_or_as_characters(tokenizer):
    assert tokenizer.encode("<|im_end|>") == [IM_END]
    plain = tokenizer.encode("<|im_end|>", special=False)
    assert IM_END not in plain
    assert tokenizer.decode(plain) == "<|im_end|>"


def test_special_tokens_are_hidden_and_thinking_tags_are_not(tokenizer):
    assert streamed(tokenizer, [THINK, IM_END], special=False) == ["<think>", "", ""]


def test_ids_of_tokens(tokenizer):
    assert {token: tokenizer.id_of(token) for token in SPECIALS} == SPECIALS
    assert tokenizer.id_of("<|nothing|>") is None


def test_ids_without_a_token_have_no_text(tokenizer):
    assert tokenizer.decode([VOCAB - 1, VOCAB + 5]) == ""


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tokenizer):
    tokenizer.check_vocabulary(SimpleNamespace(vocab_size=VOCAB))
    with pytest.raises(TokenizerMismatch, match="beyond the model's 128 rows: "):
        tokenizer.check_vocabulary(SimpleNamespace(vocab_size=128))


def test_an_end_id_beyond_the_rows_is_refused(tmp_path):
    write_tokenizer(tmp_path, vocab_size=VOCAB)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 248046}')
    with pytest.raises(TokenizerMismatch, match="248046"):
        Tokenizer.open(tmp_path).check_vocabulary(SimpleNamespace(vocab_size=VOCAB))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no tokenizer"),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_missing_or_broken_tokenizer_is_refused_by_name(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    kind = TokenizerMismatch if content is None else DocumentCorrupt
    with pytest.raises(kind, match=message) as caught:
        Tokenizer.open(tmp_path)
    assert caught.value.hint


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
    write_tokenizer(tmp_path, vocab_size=VOCAB)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["decoder"] = {"type": "Fuse"}
    path.write_text(json.dumps(raw))
    with pytest.raises(TokenizerMismatch, match="byte-level"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 5]}, {"eos_token_id": 1}, (7, 5)),
        ({"eos_token_id": 7}, {"eos_token_id": 1}, (7,)),
        ({}, {"eos_token_id": [3], "text_config": {"eos_token_id": 2}}, (3,)),
        ({}, {"text_config": {"eos_token_id": 2}}, (2,)),
        ({}, {}, ()),
    ],
)
def test_end_ids_come_from_the_generation_config_then_the_config(tmp_path, generation, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_generation_defaults(tmp_path).eos_ids == expected


def test_generation_defaults_of_the_official_file(tmp_path):
    official = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95, "pad_token_id": 248044}
    (tmp_path / "generation_config.json").write_text(json.dumps(official))
    defaults = read_generation_defaults(tmp_path)
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (1.0, 20, 0.95, None)


def test_sampling_switched_off_in_the_file_means_greedy(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7}')
    assert read_generation_defaults(tmp_path).temperature == 0.0


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"top_k": "many"}', b'{"temperature": \xff}'])
def test_a_damaged_generation_config_is_refused_by_name(tmp_path, content):
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(DocumentCorrupt, match=r"generation_config\.json"):
        read_generation_defaults(tmp_path)


@pytest.mark.parametrize(
    "rest",
    [
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 64},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "!",
            }
        },
    ],
    ids=["truncation", "padding"],
)
def test_prompts_are_neither_cut_nor_filled_up_as_in_training(tmp_path, tokenizer, rest):
    path = write_tokenizer(tmp_path, vocab_size=VOCAB) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **rest}))
    text = "a prompt of many tokens"
    assert Tokenizer.open(tmp_path).encode(text) == tokenizer.encode(text)
