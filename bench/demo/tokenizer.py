"""Train the byte-level BPE tokenizer of the demo model on its own corpus.

    python -m bench.demo.tokenizer --out SCRATCH/tokenizer

Digits are always single tokens; added tokens follow the byte-pair entries so that their ids are the highest
used.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .config import ADDED_TOKENS, VOCAB_SIZE
from .corpus import document

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def sample_texts(num_documents: int, seed: int) -> Iterator[str]:
    """Yield document texts without the control tokens."""
    rng = random.Random(seed)
    for _ in range(num_documents):
        doc = document(rng)
        if doc.raw:
            yield doc.raw
        for message in doc.messages:
            yield message["role"]
            yield message["content"]
            yield message.get("reasoning_content", "")


def train(num_documents: int, seed: int) -> Tokenizer:
    """Return a tokenizer of at most `VOCAB_SIZE` entries."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(sample_texts(num_documents, seed), trainer)
    tok.add_tokens([AddedToken(t, special=special, normalized=False) for t, special in ADDED_TOKENS])
    return tok


def tokenizer_config() -> dict[str, object]:
    """Return `tokenizer_config.json`."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 8192,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def token_ids(tok: Tokenizer) -> dict[str, int]:
    """Return the ids of the added tokens."""
    return {t: tok.token_to_id(t) for t, _ in ADDED_TOKENS}


def main() -> None:
    """Train and write `tokenizer.json` and `tokenizer_config.json`."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--documents", type=int, default=40000)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tok = train(args.documents, args.seed)
    tok.save(str(args.out / "tokenizer.json"))
    (args.out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    print("entries", tok.get_vocab_size(), token_ids(tok))


if __name__ == "__main__":
    main()
