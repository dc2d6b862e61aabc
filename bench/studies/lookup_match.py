"""How many tokens must agree before a lookup proposes, and how many should it propose?

    python -m bench.studies.lookup_match [--tokens 160] [--conversations 2] [--width 4]

Answers of the demo model over conversations of three turns in four genres, drawn with its own defaults and a
fixed seed. Every answer is then replayed token by token: a cycle proposes up to `width` tokens from the text
so far, keeps those that the answer says too, and adds one, as the coupled rule does. No figure is a time.

    fires      share of cycles with a proposal
    right      share of proposed tokens that were kept
    tok/cyc    tokens of a cycle; the bound is width + 1
    gain(c)    tokens of a cycle over its cost in plain steps, if every further row costs c of a step

The last line of stdout is one JSON document.
"""

import argparse
import json
from collections.abc import Sequence

from drafter.api import DraftSampling
from drafter.lookup import LookupDrafter
from mlx_flashnext.demo import DEMO_SLOTS, demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams

GENRES = {
    "sums": ["What is 58 + 67?", "And what is 58 + 76?", "Ben has 14 boxes with 6 stamps. How many stamps?"],
    "code": [
        "Write a Python function that returns the sum of the squares of the even numbers in a list.",
        "Now write one that returns the sum of the squares of the odd numbers in a list.",
        "Write a function that counts the vowels in a string.",
    ],
    "stories": [
        "Tell me a story about a fox who finds a lantern.",
        "Tell me the story again, with a bear.",
        "Tell me a short story about a girl and a boat.",
    ],
    "chat": ["Hello!", "Who are you?", "What can you do?"],
}
MATCHES = (1, 2, 3, 4, 5, 6)
ROW_COSTS = (0.25, 0.5, 0.75)
Answer = tuple[list[int], int]  # the whole text, and where the answer begins


def answers(engine: Engine, questions: Sequence[str], max_tokens: int, seed: int) -> list[Answer]:
    """Return the turns of one conversation."""
    tokenizer = engine.tokenizer
    text, found = "", []
    stops = [token for token in (tokenizer.id_of("<|im_end|>"),) if token is not None]
    for question in questions:
        text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n"
        prompt = tokenizer.encode(text)
        events = engine.session().generate(
            prompt,
            SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=seed),
            max_tokens=max_tokens,
            stop_ids=stops,
        )
        said = [event for event in events if isinstance(event, Token)]
        found.append(([*prompt, *(event.token_id for event in said)], len(prompt)))
        text += "".join(event.text for event in said) + "<|im_end|>\n"
    return found


def replay(answer: Answer, min_match: int, width: int) -> tuple[int, int, int, int]:
    """Return cycles, cycles that proposed, tokens proposed, and tokens kept of one answer."""
    text, start = answer
    drafter = LookupDrafter(len(text), min_match=min_match)
    drafter.observe(text[: start - 1], text[start - 1])
    cycles = fired = proposed = kept = 0
    at = start - 1  # the anchor's place
    while at < len(text) - 1:
        room = len(text) - 2 - at
        tokens = drafter.propose(min(width, room), DraftSampling(0.6, 0, at + 1)).tokens
        accepted = 0
        while accepted < len(tokens) and tokens[accepted] == text[at + 1 + accepted]:
            accepted += 1
        cycles, fired = cycles + 1, fired + bool(tokens)
        proposed, kept = proposed + len(tokens), kept + accepted
        drafter.observe(text[at : at + accepted + 1], text[at + accepted + 1])
        at += accepted + 1
    return cycles, fired, proposed, kept


def row(found: Sequence[Answer], min_match: int, width: int) -> dict[str, float]:
    """Return the figures of one table row."""
    sums = [sum(column) for column in zip(*(replay(one, min_match, width) for one in found), strict=True)]
    cycles, fired, proposed, kept = sums
    per_cycle = (cycles + kept) / cycles
    figures = {
        "fires": fired / cycles,
        "right": kept / proposed if proposed else 0.0,
        "tok/cyc": per_cycle,
    }
    for cost in ROW_COSTS:
        figures[f"gain({cost})"] = per_cycle / (1 + cost * proposed / cycles)
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Print one table for each genre and one for all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--width", type=int, default=4)
    options = parser.parse_args()
    found: dict[str, list[Answer]] = {}
    with Engine.open(demo_dir(), PlanRequest(slots_per_layer=DEMO_SLOTS, context_tokens=2048)) as engine:
        for genre, questions in GENRES.items():
            found[genre] = [
                answer
                for seed in range(options.conversations)
                for answer in answers(engine, questions, options.tokens, seed)
            ]
    found["all"] = [answer for of_genre in found.values() for answer in of_genre]
    report: dict[str, dict[int, dict[str, float]]] = {}
    for genre, of_genre in found.items():
        print(f"{genre}: {sum(len(text) - start for text, start in of_genre)} tokens; width {options.width}")
        report[genre] = {match: row(of_genre, match, options.width) for match in MATCHES}
        for match, figures in report[genre].items():
            print(f"  match {match}  " + "  ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    print(json.dumps({"width": options.width, "tables": report}))


if __name__ == "__main__":
    main()
