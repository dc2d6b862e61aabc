"""How much of the held-out answers would a training checkpoint give to the letter? Cheap enough to ask often.

    python -m bench.demo.progress --work SCRATCH [--checkpoint FILE] [--count 48] [--misses 4]

Teacher-forced: an answer counts if every token of reasoning and reply is the most likely one after the right
tokens before it, which is when greedy decoding would give it.  Float32 weights in torch, no quantisation.
"""

from __future__ import annotations

import argparse
import pathlib
import random

import torch
from tokenizers import Tokenizer

from . import chats, net
from .config import text_config
from .corpus import render
from .prompts import held_out_functions, held_out_sums
from .tokenizer import token_ids

Item = tuple[str, str, str]
ROWS, SEED = 12, 7


def items(count: int) -> dict[str, list[Item]]:
    """Return (request, reasoning, reply) of every kind; none is in any training document."""
    rng, out = random.Random(SEED), {}
    for n in (1, 2, 3):
        out[f"sums {n}"] = [(p.question, p.thinking(), p.answer()) for p in held_out_sums(n, count, SEED)]
    out["no thinking"] = [(p.question, "", p.worked_answer()) for p in held_out_sums(1, count, SEED + 1)]
    out["functions"] = [(s.request, s.thinking, s.answer) for s in held_out_functions(count, SEED)]
    repeats = (chats.pick_copying(rng, True) for _ in range(20 * count))
    out["repeating"] = [turns[0] for turns in repeats if turns[0][1].startswith("I repeat")][:count]
    return out


@torch.no_grad()
def misses(model: net.DemoModel, tok: Tokenizer, part: list[Item]) -> list[str]:
    """Return for every answer that is not given to the letter what comes before its first wrong token."""
    stop, out = tok.token_to_id("<|endoftext|>"), []
    for start in range(0, len(part), ROWS):
        rows: list[tuple[int, list[int]]] = []
        for request, reasoning, reply in part[start : start + ROWS]:
            messages = [
                {"role": "user", "content": request},
                {"role": "assistant", "content": reply, "reasoning_content": reasoning},
            ]
            text = render(messages)
            mark = "<think>\n" if reasoning else "</think>\n\n"
            head = text[: text.index(mark) + len(mark)]
            ids = [tok.encode(x, add_special_tokens=False).ids for x in (head, text)]
            rows.append((len(ids[0]), ids[1]))
        length = max(len(row) for _, row in rows)
        batch = torch.tensor([row + [stop] * (length - len(row)) for _, row in rows])
        best = model(batch).argmax(-1)
        for r, (first, row) in enumerate(rows):
            wrong = next((t for t in range(first, len(row) - 1) if best[r, t - 1] != row[t]), None)
            if wrong is not None:
                said, wanted = tok.decode([int(best[r, wrong - 1])]), tok.decode([row[wrong]])
                out.append(f"{tok.decode(row[:wrong])[-60:]!r} wants {wanted!r}, says {said!r}")
    return out


def main() -> None:
    """Print one line a kind, and some first wrong tokens."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--work", type=pathlib.Path, required=True)
    ap.add_argument("--checkpoint", type=pathlib.Path, help="default: WORK/run/checkpoint.pt")
    ap.add_argument("--count", type=int, default=48)
    ap.add_argument("--misses", type=int, default=0, help="how many first wrong tokens to show")
    args = ap.parse_args()
    torch.set_num_threads(1)
    tok = Tokenizer.from_file(str(args.work / "tokenizer" / "tokenizer.json"))
    saved = torch.load(args.checkpoint or args.work / "run" / "checkpoint.pt", weights_only=True)
    model = net.build(text_config(token_ids(tok)))
    model.load_state_dict(saved["model"])
    model.eval()
    print("step", saved["step"])
    for kind, part in items(args.count).items():
        found = misses(model, tok, part)
        print(f"{kind}: {len(part) - len(found)} of {len(part)}", flush=True)
        for line in found[: args.misses]:
            print("   ", line)


if __name__ == "__main__":
    main()
