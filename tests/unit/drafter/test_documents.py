"""JSON from strangers: what is refused, and that each refusal is one line."""

import pytest

from drafter.documents import DocumentRefused, parse_object


@pytest.mark.parametrize(
    "data",
    [
        b"[1]",
        b"{",
        b"\xff{}",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ' + b"1" * 5_000 + b"}",
        b'{"a": "\\ud800"}',
        b'{"a": ["\\udc00\\ud800"]}',
        b'{"\\ud800": 1}',
    ],
    ids=lambda data: ascii(data[:24]),
)
def test_what_is_no_plain_object_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(DocumentRefused, match=r"x\.json") as caught:
        parse_object(data, "x.json")
    assert "\n" not in str(caught.value)
    str(caught.value).encode()


def test_a_whole_pair_and_plain_escapes_are_text() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00 \\u00e9"}', "x.json") == {"a": "\U0001f600 \u00e9"}
