"""A byte-level tokenizer for synthetic vocabularies: a token per byte, a made-up word for every other id.

Entry point: `write_tokenizer`. Text of any kind can be encoded (a token per byte) and whatever the random
model emits can be shown. Id 1 is the end of text, ids below 8 are special and never preferred by the
synthetic head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIALS = ("<pad>", "<eos>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<unk>")
FIRST_BYTE = 8
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level BPE (the GPT-2 table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and a template that joins the messages' contents."""
    characters = byte_characters()
    vocab = {character: FIRST_BYTE + byte for byte, character in enumerate(characters)}
    space = characters[ord(" ")]
    vocab.update({f"{space}w{i}": i for i in range(FIRST_BYTE + 256, vocab_size)})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
        "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocab, "merges": [],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {
                "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for i, token in enumerate(SPECIALS)
        ],
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
