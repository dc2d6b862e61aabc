"""A tiny byte-level tokenizer with ChatML specials, for checkpoints whose vocabulary has 128 rows.

Entry point: `write_tokenizer`. Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

Invariants:
1. Special ids are those of the tiny config: end of text 120, vision 121 to 124; ChatML and thinking below.
2. With 128 rows only printable ASCII, newline, tab and the bytes of three characters (one each of 2, 3 and 4
   UTF-8 bytes, so that split code points occur) have tokens; other bytes are dropped by the encoder. With at
   least 300 rows every byte has a token. The last row never has one: real vocabularies are padded too.

Source: qwen4exp.md 5.1 (special tokens), 5.3 (template behaviour).
"""

from __future__ import annotations

import json
from pathlib import Path

THINK, THINK_END, END_OF_TEXT, IM_START, IM_END = 118, 119, 120, 125, 126
SPECIALS = {
    "<think>": THINK,
    "</think>": THINK_END,
    "<|endoftext|>": END_OF_TEXT,
    "<|image_pad|>": 121,
    "<|video_pad|>": 122,
    "<|vision_start|>": 123,
    "<|vision_end|>": 124,
    "<|im_start|>": IM_START,
    "<|im_end|>": IM_END,
}
# U+00E9, U+20AC and U+1F600: two, three and four bytes.
MULTIBYTE = "\u00e9\u20ac\U0001f600"
MERGES = ("t h", "th e", "i n", "e r", "\u0120 t", "\u0120t h", "a n", "o u", "\u0120 a", "r e", "o r")

# Shaped like the real template (5.3): effort sentence, think blocks, a generation prompt that opens or closes
# them.
CHAT_TEMPLATE = """\
{%- set thinking = enable_thinking is not defined or enable_thinking %}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'xhigh' %}
{%- if thinking and effort not in ['xhigh', 'medium', 'low'] %}
{{- raise_exception('Unexpected reasoning effort ' + effort) }}
{%- endif %}
{%- set notes = {'xhigh': 'Think hard.', 'medium': '', 'low': 'Think briefly.'} %}
{%- set note = notes[effort] if thinking else '' %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- if note or system %}
{{- '<|im_start|>system\\n' + note + ('\\n' if note and system else '') + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}
{{- raise_exception('System message must be at the beginning') }}
{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if preserve_thinking is not defined or preserve_thinking is true or loop.last %}
{{- '<think>\\n' + (message.reasoning_content | default('') | trim) + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content | trim + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if thinking else '<think>\\n\\n</think>\\n\\n') }}
{%- endif %}
"""


def byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level BPE (the GPT-2 table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    table.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def vocabulary(vocab_size: int = 128) -> dict[str, int]:
    """Return ordinary tokens and ids: every id but the specials and the last row, as far as tokens go."""
    characters = byte_characters()
    bytes_first = [10, 9, *range(32, 127), *dict.fromkeys(MULTIBYTE.encode())]
    merged = [merge.replace(" ", "") for merge in MERGES]
    rest = [byte for byte in range(256) if byte not in bytes_first]
    tokens = [characters[byte] for byte in bytes_first] + merged
    if vocab_size >= 300:
        tokens += [characters[byte] for byte in rest]
    taken = set(SPECIALS.values())
    free = [i for i in range(vocab_size - 1) if i not in taken]
    return dict(zip(tokens, free, strict=False))


def write_tokenizer(directory: Path, *, vocab_size: int = 128, chat_template: str = CHAT_TEMPLATE) -> Path:
    """Write the tokenizer files into a checkpoint directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = vocabulary(vocab_size)
    merges = [merge.split() for merge in MERGES if merge.replace(" ", "") in vocab]
    pretokenizer = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                # The real file marks the think tags as ordinary added tokens.
                "special": i not in (THINK, THINK_END),
            }
            for token, i in SPECIALS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": pretokenizer,
        "post_processor": None,
        "decoder": pretokenizer,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            # The library numbers added tokens after the vocabulary unless it finds them in it.
            "vocab": {**vocab, **SPECIALS},
            "merges": merges,
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    config = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (directory / "chat_template.jinja").write_text(chat_template)
    return directory
