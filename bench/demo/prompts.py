"""The demo's fixed prompts: three to show, sixty held-out ones to measure with, and sixty sealed ones.

    python -m bench.demo.prompts --write

Writes `mlx_flashnext/demo/prompts.json` (`fixed`, one a genre, and `held_out`, twenty a genre) and
`bench/demo/sealed_prompts.json`, the same from another seed.  Every bench may use the former.  Nobody looks
at the latter while training or tuning: it exists so that one day a claim can be checked on prompts that no
decision was made with.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
from collections.abc import Collection
from typing import Any

from . import code, stories, sums
from .code import Spec
from .heldout import equation_is_unseen, function_is_unseen, story_is_unseen

Prompt = dict[str, Any]

PER_GENRE, SEED, SEALED_SEED = 20, 101, 202
FIXED: list[Prompt] = [
    {
        "genre": "sums",
        "prompt": "Tom has 17 apples and buys 25 more. How many apples does he have?",
        "steps": 1,
        "answer": 42,
    },
    {
        "genre": "code",
        "prompt": "Write a Python function that returns the sum of the squares of the even numbers "
        "in a list.",
        "function": dataclasses.asdict(Spec("even", "squares", "sum", 0, 0)),
    },
    {
        "genre": "stories",
        "prompt": "Tell me a story about a fox who finds a lantern.",
        "subject": "a fox who finds a lantern",
    },
]


def sum_prompt(rng: random.Random, num_steps: int) -> Prompt:
    """Return a sum with an equation that no step of training has seen."""
    while True:
        problem = sums.make(rng, num_steps)
        if any(equation_is_unseen(*pair) for pair in problem.pairs):
            return {
                "genre": "sums",
                "prompt": problem.question,
                "steps": num_steps,
                "answer": problem.value,
            }


def code_prompt(rng: random.Random) -> Prompt:
    """Return a request for a list function that no step of training has seen."""
    while True:
        snippet = code.make(rng, True)
        if snippet.spec is not None and function_is_unseen(snippet.spec.key):
            return {
                "genre": "code",
                "prompt": snippet.request,
                "function": dataclasses.asdict(snippet.spec),
            }


def story_prompt(rng: random.Random) -> Prompt:
    """Return a request for a story whose subject no step of training has seen."""
    while True:
        story = stories.make(rng)
        if story_is_unseen(story.subject) and story.subject in story.request:
            return {"genre": "stories", "prompt": story.request, "subject": story.subject}


def prompts(seed: int, taken: Collection[str] = ()) -> list[Prompt]:
    """Return different prompts of every genre, none of them in `taken`; every fifth sum has three steps."""
    rng, asked, out = random.Random(seed), set(taken), []
    makers = {
        "sums": lambda i: sum_prompt(rng, (1, 2, 1, 2, 3)[i % 5]),
        "code": lambda _: code_prompt(rng),
        "stories": lambda _: story_prompt(rng),
    }
    for maker in makers.values():
        part: list[Prompt] = []
        while len(part) < PER_GENRE:
            prompt = maker(len(part))
            if prompt["prompt"] not in asked:
                asked.add(prompt["prompt"])
                part.append(prompt)
        out += part
    return out


def files() -> dict[pathlib.Path, dict[str, Any]]:
    """Return what the two files hold."""
    here = pathlib.Path(__file__).resolve()
    held_out = prompts(SEED)
    return {
        here.parents[2] / "mlx_flashnext" / "demo" / "prompts.json": {
            "fixed": FIXED,
            "held_out": held_out,
        },
        here.parent / "sealed_prompts.json": {
            "sealed": prompts(SEALED_SEED, {p["prompt"] for p in held_out})
        },
    }


def dumps(content: dict[str, list[Prompt]]) -> str:
    """Return JSON text with one prompt a line."""
    parts = [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(p)}" for p in entries) + "\n ]"
        for name, entries in content.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def sealed() -> set[str]:
    """Return the requests that must not be asked here."""
    return {p["prompt"] for content in files().values() for p in content.get("sealed", [])}


def held_out_sums(num_steps: int, count: int, seed: int) -> list[sums.Sum]:
    """Return different sums with an equation that no step of training has seen."""
    rng, out = random.Random(seed * 10 + num_steps), {}
    hidden = sealed()
    while len(out) < count:
        problem = sums.make(rng, num_steps)
        if any(equation_is_unseen(*pair) for pair in problem.pairs) and problem.question not in hidden:
            out[problem.question] = problem
    return list(out.values())


def held_out_functions(count: int, seed: int) -> list[code.Snippet]:
    """Return different functions that no step of training has asked for."""
    rng, out = random.Random(seed), {}
    hidden = sealed()
    while len(out) < count:
        snippet = code.make(rng, True)
        if snippet.spec and function_is_unseen(snippet.spec.key) and snippet.request not in hidden:
            out[snippet.spec.key] = snippet
    return list(out.values())


def main() -> None:
    """Write both files, or print the shipped one."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument(
        "--write", action="store_true", help="write both files; without it, print the shipped one"
    )
    args = ap.parse_args()
    for path, content in files().items():
        if args.write:
            path.write_text(dumps(content))
        elif "sealed" not in content:
            print(dumps(content), end="")


if __name__ == "__main__":
    main()
