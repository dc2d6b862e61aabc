"""Generate from a checkpoint in torch by plain recomputation (slow, needs no cache code).

python -m bench.demo.sample --official SCRATCH/hf [--pack DIR] [--thinking off] [--prompt "..."]
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from tokenizers import Tokenizer

from . import net
from .checkpoint import read_official
from .corpus import render
from .tokenizer import token_ids
from .unpack import read_pack

PROMPTS = [
    "Hello!",
    "Who are you?",
    "Tom has 17 apples and buys 25 more. How many apples does he have?",
    "Lily has 64 stamps. She gives 29 to Ben and buys 8 more. How many stamps does Lily have now?",
    "What is 58 + 67?",
    "Write a Python function that returns the sum of the squares of the even numbers in a list.",
    "Write a function that counts the vowels in a string.",
    "Tell me a story about a fox who finds a lantern.",
]


@torch.no_grad()
def generate(
    model: net.DemoModel, prompts: list[list[int]], stop: set[int], limit: int, temperature: float, seed: int
) -> list[list[int]]:
    """Continue every prompt to a stop token or `limit` new ones; right padding cannot reach back."""
    rng = torch.Generator().manual_seed(seed)
    rows, done = [list(p) for p in prompts], [False] * len(prompts)
    for _ in range(limit):
        live = [i for i, d in enumerate(done) if not d]
        if not live:
            break
        width = max(len(rows[i]) for i in live)
        batch = torch.tensor([rows[i] + [0] * (width - len(rows[i])) for i in live])
        hidden = model.trunk(batch, sparse=True)[0].view(len(live), width, -1)
        last = hidden[torch.arange(len(live)), torch.tensor([len(rows[i]) - 1 for i in live])]
        logits = last @ model.lm_head.weight.T
        for j, i in enumerate(live):
            if temperature == 0:
                token = int(logits[j].argmax())
            else:
                token = int(torch.multinomial(torch.softmax(logits[j] / temperature, -1), 1, generator=rng))
            done[i] = token in stop
            if not done[i]:
                rows[i].append(token)
    return [r[len(p) :] for r, p in zip(rows, prompts, strict=True)]


def main() -> None:
    """Print samples for the given or the standard prompts."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--official", type=pathlib.Path, required=True, help="also gives the tokenizer")
    ap.add_argument("--pack", type=pathlib.Path, help="take the quantised weights instead")
    ap.add_argument("--prompt", action="append")
    ap.add_argument("--thinking", choices=("on", "off"), default="on")
    ap.add_argument("--temperature", type=float, default=0.0)
    ap.add_argument("--tokens", type=int, default=200)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--threads", type=int, default=1)
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    tok = Tokenizer.from_file(str(args.official / "tokenizer.json"))
    ids = token_ids(tok)
    model = read_pack(args.pack) if args.pack else read_official(args.official)
    tail = "<|im_start|>assistant\n" + ("<think>\n" if args.thinking == "on" else "<think>\n\n</think>\n\n")
    asked = args.prompt or PROMPTS
    prompts = [
        tok.encode(render([{"role": "user", "content": p}]) + tail, add_special_tokens=False).ids
        for p in asked
    ]
    stop = {ids["<|im_end|>"], ids["<|endoftext|>"]}
    for text, row in zip(
        asked, generate(model, prompts, stop, args.tokens, args.temperature, args.seed), strict=True
    ):
        print(f"### {text}\n{tok.decode(row, skip_special_tokens=False)}\n")


if __name__ == "__main__":
    main()
