"""Generate and tokenise the training and held-out sets.

    python -m bench.demo.prepare --tokenizer mlx_flashnext/demo --out SCRATCH/data --documents 150000

Writes `train.npz` and `held.npz`: `tokens` (uint16, every document ends with the separator), `weights`
(uint8, loss weight of each token times 10), `starts` (document offsets) and `genres`.  Also compares
`corpus.render` with the shipped chat template on a few hundred documents.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import time

import numpy as np
from tokenizers import Tokenizer

from .config import ADDED_TOKENS
from .corpus import GENRES, Document, document, render

PROMPT_WEIGHT, ANSWER_WEIGHT = 1, 10


def repository() -> pathlib.Path:
    """Return the root of the work tree."""
    return pathlib.Path(__file__).resolve().parents[2]


def answer_weights(ids: np.ndarray, start: int, end: int, assistant: int, is_raw: bool) -> np.ndarray:
    """Return the loss weight of every token: full inside assistant turns and raw texts, small in prompts."""
    if is_raw:
        return np.full(len(ids), ANSWER_WEIGHT, np.uint8)
    weights, inside = np.full(len(ids), PROMPT_WEIGHT, np.uint8), False
    for i, token in enumerate(ids):
        if inside:
            weights[i] = ANSWER_WEIGHT
        if token == assistant and i and ids[i - 1] == start:
            inside = True
        elif token == end:
            inside = False
    return weights


def encode(docs: list[Document], tok: Tokenizer) -> dict[str, np.ndarray]:
    """Tokenise documents into the flat arrays of one data file."""
    ids = {t: tok.token_to_id(t) for t, _ in ADDED_TOKENS}
    assistant = tok.encode("assistant", add_special_tokens=False).ids
    if len(assistant) != 1:
        raise SystemExit(f"the role name must be one token, got {assistant}")
    tokens, weights, starts = [], [], [0]
    for doc, coded in zip(
        docs, tok.encode_batch([d.text() for d in docs], add_special_tokens=False), strict=True
    ):
        row = np.array([*coded.ids, ids["<|endoftext|>"]], np.uint16)
        tokens.append(row)
        weights.append(
            answer_weights(row, ids["<|im_start|>"], ids["<|im_end|>"], assistant[0], bool(doc.raw))
        )
        starts.append(starts[-1] + len(row))
    return {
        "tokens": np.concatenate(tokens),
        "weights": np.concatenate(weights),
        "starts": np.array(starts, np.int64),
        "genres": np.array([GENRES.index(d.genre) for d in docs], np.uint8),
    }


def check_template(docs: list[Document]) -> int:
    """Compare `corpus.render` with the Jinja template; return how many documents were compared."""
    import jinja2

    source = (repository() / "mlx_flashnext" / "demo" / "chat_template.jinja").read_text()
    template = jinja2.Environment(autoescape=False).from_string(source)
    chats = [d for d in docs if d.messages]
    for doc in chats:
        want = render(doc.messages, keep_old_thinking=doc.keep_old_thinking)
        got = template.render(messages=doc.messages, preserve_thinking=doc.keep_old_thinking)
        if want != got:
            raise SystemExit(f"template and training text differ:\n{want!r}\n{got!r}")
    asks = [{"role": "user", "content": "Hi"}]
    for thinks, tail in ((True, "<think>\n"), (False, "<think>\n\n</think>\n\n")):
        text = template.render(messages=asks, add_generation_prompt=True, enable_thinking=thinks)
        if text != render(asks) + "<|im_start|>assistant\n" + tail:
            raise SystemExit(f"generation prompt differs: {text!r}")
    return len(chats)


def main() -> None:
    """Write both data files."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--tokenizer", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--documents", type=int, default=150000)
    ap.add_argument("--seed", type=int, default=12)
    args = ap.parse_args()
    begin, rng = time.time(), random.Random(args.seed)
    tok = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    held = [document(rng, held_out=True) for _ in range(args.documents // 50)]
    docs = [document(rng) for _ in range(args.documents)]
    print("template agrees on", check_template(docs[:400]), "documents")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("held", held), ("train", docs)):
        data = encode(part, tok)
        np.savez(args.out / f"{name}.npz", **data)
        lengths = np.diff(data["starts"])
        shares = {
            g: round(float(lengths[data["genres"] == i].sum() / lengths.sum()), 3)
            for i, g in enumerate(GENRES)
        }
        print(
            name,
            len(part),
            "documents",
            len(data["tokens"]),
            "tokens, mean",
            round(float(lengths.mean()), 1),
            "longest",
            int(lengths.max()),
            "shares",
            shares,
        )
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
