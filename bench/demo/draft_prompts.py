"""Prompts for a draft of the demo: what people may ask it, with the corpus' own answer as a guess.

    python -m bench.demo.draft_prompts --out SCRATCH/prompts.jsonl --documents 4000 --per-genre 520

made the shipped draft's. Requests of training documents only: nothing that `bench.demo.heldout` holds
out, so that the 60 held-out prompts measure the draft as well as the target. The guess makes `flashnext
draft capture` faster and changes no token.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from .corpus import Document, document


def prompts(num_documents: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return a conversation up to an answer of the assistant, from each of so many documents."""
    rng = random.Random(seed)
    while num_documents:
        found = prompt_of(document(rng), rng)
        if found is not None:
            num_documents -= 1
            yield found


def prompt_of(doc: Document, rng: random.Random) -> dict[str, Any] | None:
    """Return the conversation before one of the document's answers, and that answer."""
    answers = [place for place, message in enumerate(doc.messages) if message["role"] == "assistant"]
    if not answers:
        return None
    place = rng.choice(answers)
    answer = doc.messages[place]
    reasoning = answer.get("reasoning_content", "")
    thinks = bool(reasoning)
    # As the chat template ends a prompt: inside the think block, or behind an empty one.
    guess = f"{reasoning}\n</think>\n\n{answer['content']}" if thinks else answer["content"]
    return {
        "messages": doc.messages[:place],
        "thinking": thinks,
        "label": doc.genre,
        "guess": f"{guess}<|im_end|>",
    }


def balanced(rows: Iterable[dict[str, Any]], per_genre: int, seed: int) -> list[dict[str, Any]]:
    """Return the first so many rows of each genre, mixed: a set that is cut short is still balanced."""
    genres: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        genres[row["label"]].append(row)
    kept = [row for each in genres.values() for row in each[:per_genre]]
    random.Random(seed).shuffle(kept)
    return kept


def main() -> None:
    """Write the file."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--documents", type=int, default=2000)
    ap.add_argument("--per-genre", type=int, help="keep so many of each genre; left out: all")
    ap.add_argument("--seed", type=int, default=7000)
    ap.add_argument("--mix-seed", type=int, default=5)
    args = ap.parse_args()
    rows: Iterable[dict[str, Any]] = prompts(args.documents, args.seed)
    if args.per_genre is not None:
        rows = balanced(rows, args.per_genre, args.mix_seed)
    with args.out.open("w") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
