"""A word-level tokenizer for synthetic vocabularies: `t17 t9` stands for ids 17 and 9.

Entry point: `write_tokenizer`.
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIALS = ("<pad>", "<eos>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<unk>")


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and a template that joins the messages' contents."""
    added = [
        {
            "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for i, token in enumerate(SPECIALS)
    ]  # fmt: skip
    vocab = {token: i for i, token in enumerate(SPECIALS)}
    vocab.update((f"t{i}", i) for i in range(len(SPECIALS), vocab_size))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
