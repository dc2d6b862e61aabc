"""Text to tokens and back, for the byte-level BPE of the checkpoint.

Entry points: `Tokenizer.open` and `Tokenizer.stream_decoder`.

Invariants:
1. `StreamDecoder` pieces, concatenated with the flush, equal `Tokenizer.decode` of the same ids, byte for
   byte.
2. A piece never ends inside a code point: bytes wait until they are complete or certainly broken.

Source: `tokenizer.json` through the tokenizers library; ByteLevel decoding is its table and its lossy
UTF-8 rule. Imports neither transformers nor MLX (1.6 s of start-up); a parity test compares with
transformers.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders

from mlx_flashnext.errors import DocumentCorrupt, TokenizerMismatch
from mlx_flashnext.text.generation_config import read_generation_defaults


def _character_bytes() -> dict[str, int]:
    """Return the GPT-2 table: which byte each character of a byte-level token stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTES = _character_bytes()


class HasVocabulary(Protocol):
    """What a model config tells about its vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding."""
        ...


class Tokenizer:
    """The checkpoint's tokenizer. Not thread-safe.

    Attributes:
        eos_ids: ids that end an answer: `generation_config.json`, else the config.
    """

    def __init__(self, raw: tokenizers.Tokenizer, eos_ids: tuple[int, ...]) -> None:
        self._raw = raw
        self.eos_ids = eos_ids
        self._special_ids = frozenset(
            i for i, token in raw.get_added_tokens_decoder().items() if getattr(token, "special", False)
        )

    @classmethod
    def open(cls, directory: Path) -> Tokenizer:
        """Open the tokenizer of a checkpoint directory.

        Raises:
            TokenizerMismatch: the file is missing or not byte-level.
            DocumentCorrupt: it, `config.json` or `generation_config.json` is not what its name says.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            if os.path.lexists(path):
                raise DocumentCorrupt(
                    "tokenizer.json cannot be read: Not a regular file",
                    hint="download the file again",
                    path=str(path),
                )
            raise TokenizerMismatch(
                f"The checkpoint has no tokenizer: {path}",
                hint="download tokenizer.json into it",
                path=str(path),
            )
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DocumentCorrupt(
                f"tokenizer.json cannot be read: {error}", hint="download the file again", path=str(path)
            ) from error
        # What training cut or filled up must not happen to prompts, as in transformers.
        raw.no_truncation()
        raw.no_padding()
        if not isinstance(raw.decoder, decoders.ByteLevel):
            raise TokenizerMismatch(
                f"tokenizer.json must decode byte-level tokens: {type(raw.decoder).__name__}",
                hint="this runtime serves the byte-level BPE of Qwen models only",
            )
        return cls(raw, read_generation_defaults(directory).eos_ids)

    @property
    def num_ids(self) -> int:
        """Return one more than the largest id that has a token."""
        return max(self._raw.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens, which are never text."""
        return self._special_ids

    def check_vocabulary(self, config: HasVocabulary) -> None:
        """Check that the model has a row for every id that can be read or ends an answer.

        Raises:
            TokenizerMismatch: an id lies beyond the model's rows.
        """
        rows, vocab = config.vocab_size, self._raw.get_vocab(with_added_tokens=True)
        token, largest = max(vocab.items(), key=lambda item: item[1], default=("", -1))
        if largest >= rows:
            raise TokenizerMismatch(
                f"The tokenizer has ids beyond the model's {rows} rows: {largest} ({token!r})",
                hint="tokenizer.json belongs to another model; download it again",
                largest_id=largest,
                vocab_size=rows,
            )
        for eos in self.eos_ids:
            if not 0 <= eos < rows:
                raise TokenizerMismatch(
                    f"An end-of-text id lies beyond the model's {rows} rows: {eos}",
                    hint="generation_config.json belongs to another model; download it again",
                    eos_id=eos,
                    vocab_size=rows,
                )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of `text`, with no token added.

        Args:
            text: without lone surrogates.
            special: read special tokens in the text as such (a rendered prompt), or as plain characters.
        """
        self._raw.encode_special_tokens = not special
        return self._raw.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids`.

        Args:
            ids: ids without a token have no text.
            special: include special tokens.
        """
        return self._raw.decode(list(ids), skip_special_tokens=not special)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token's exact content, None if there is none."""
        return self._raw.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; empty for an id without a token."""
        token = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([_BYTES[character] for character in token])
        except KeyError:
            return token.encode()

    def stream_decoder(self, *, special: bool = False) -> StreamDecoder:
        """Return a fresh decoder for one answer."""
        return StreamDecoder(self, special=special)


class StreamDecoder:
    """Decodes one answer token by token."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        """Begin an answer.

        Args:
            tokenizer: of the checkpoint.
            special: show special tokens as text.
        """
        self._tokenizer = tokenizer
        self._hidden: Collection[int] = () if special else tokenizer.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Return the text that became final with this token, "" while a code point is incomplete."""
        if token_id in self._hidden:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return what remains at the end: a replacement character if the last code point is incomplete."""
        return self._utf8.decode(b"", final=True)
