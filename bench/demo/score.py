"""What the demo gets right, in the product's own engine: held-out sums and functions.

    python -m bench.demo.score                            # every part, the shipped demo
    python -m bench.demo.score --part sums --count 60 [--steps 2]
    python -m bench.demo.score --model DIRECTORY --json FILE

Parts: `sums` (greedy, by number of steps), `sampled` (sums of one step at the model's own sampling defaults)
and `functions` (greedy; the code is run against its description by `bench.demo.judge`).  Every sum works out
an equation, and every function is one, that no step of training has seen (`bench.demo.heldout`).  A sum is
right if the last number of the reply is; `as taught` counts the replies that are right to the letter, with
name and noun.  Needs MLX, no torch.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import time
from collections import Counter
from typing import Any

from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.text.generation_config import read_generation_defaults
from mlx_flashnext.text.template import ChatTemplate

from .judge import judge
from .prompts import held_out_functions, held_out_sums

PARTS = ("sums", "sampled", "functions")
GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS = 500
END_OF_THINKING = "</think>"


class Speaker:
    """Asks one model one question at a time, each in a conversation of its own."""

    def __init__(self, model: pathlib.Path) -> None:
        self._template = ChatTemplate.open(model)
        self._engine = Engine.open(model, PlanRequest(slots_per_layer=None))
        self._stops = self._engine.tokenizer.eos_ids
        self.defaults = read_generation_defaults(model)

    def reply(self, request: str, params: SamplingParams, thinks: bool = True) -> str:
        """Return what the model says after its reasoning; empty if that does not end."""
        text = self._template.render([{"role": "user", "content": request}], enable_thinking=thinks)
        events = self._engine.session().generate(
            self._engine.tokenizer.encode(text), params, max_tokens=MAX_TOKENS, stop_ids=self._stops
        )
        said = "".join(event.text for event in events if isinstance(event, Token))
        return said.partition(END_OF_THINKING)[2].strip() if thinks else said.strip()

    def sampling(self, seed: int) -> SamplingParams:
        """Return what the model's own defaults say, as `flashnext chat` takes them."""
        d = self.defaults
        return SamplingParams(
            temperature=1.0 if d.temperature is None else d.temperature,
            top_k=d.top_k or 0,
            top_p=1.0 if d.top_p is None else d.top_p,
            min_p=d.min_p or 0.0,
            seed=seed,
        )


def last_number(text: str) -> int | None:
    """Return the last number of a text."""
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None


def progress(part: str, done: int, total: int, right: int) -> None:
    """Say on standard error how far a part is."""
    if done % 10 == 0 or done == total:
        print(f"{part}: {right} right of {done}, {total} in all", file=sys.stderr, flush=True)


def score_sums(
    speaker: Speaker, num_steps: int, args: argparse.Namespace, sampled: bool = False
) -> dict[str, Any]:
    """Ask sums of one length."""
    problems = held_out_sums(num_steps, args.count, args.seed)
    right = taught = 0
    wrong: list[dict[str, Any]] = []
    for i, problem in enumerate(problems):
        params = speaker.sampling(args.seed + i) if sampled else GREEDY
        reply = speaker.reply(problem.question, params, thinks=not args.no_thinking)
        is_right = last_number(reply) == problem.value
        right += is_right
        taught += reply == (problem.worked_answer() if args.no_thinking else problem.answer())
        if not is_right:
            wrong.append({"request": problem.question, "expected": problem.answer(), "reply": reply})
        progress(f"{num_steps}-step sums" + (", sampled" if sampled else ""), i + 1, len(problems), right)
    return {"asked": len(problems), "right": right, "as taught": taught, "wrong": wrong}


def score_functions(speaker: Speaker, args: argparse.Namespace) -> dict[str, Any]:
    """Ask for functions, run them and compare."""
    snippets = held_out_functions(args.count, args.seed)
    verdicts: Counter[str] = Counter()
    taught = 0
    wrong: list[dict[str, Any]] = []
    for i, snippet in enumerate(snippets):
        reply = speaker.reply(snippet.request, GREEDY, thinks=not args.no_thinking)
        verdict = judge(reply, snippet.spec) if snippet.spec else "no spec"
        verdicts[verdict] += 1
        parameter = re.search(r"def \w+\((\w+)\)", reply)
        taught += bool(parameter) and reply == re.sub(
            r"\b(numbers|values|items)\b(?! (in|of|greater|less|divisible|plus))",
            parameter[1],
            snippet.answer,
        )
        if verdict != "right":
            wrong.append({"request": snippet.request, "verdict": verdict, "reply": reply})
        progress("functions", i + 1, len(snippets), verdicts["right"])
    return {"asked": len(snippets), "right": verdicts["right"], "as taught": taught, "wrong": wrong}


def main() -> None:
    """Ask, and print one line a part."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", type=pathlib.Path, default=demo_dir(), help="default: the shipped demo")
    ap.add_argument("--part", choices=PARTS, action="append", help="default: all; may be given again")
    ap.add_argument("--steps", type=int, choices=(1, 2, 3), action="append", help="of sums; default: all")
    ap.add_argument("--count", type=int, default=60, help="prompts of each kind (default 60)")
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--no-thinking", action="store_true", help="ask with thinking switched off")
    ap.add_argument("--json", type=pathlib.Path, help="also write the result with every wrong reply here")
    args = ap.parse_args()
    begin, speaker, found = time.time(), Speaker(args.model), {}
    parts = args.part or PARTS
    if "sums" in parts:
        for n in args.steps or (1, 2, 3):
            found[f"sums of {n} step{'s' if n > 1 else ''}, greedy"] = score_sums(speaker, n, args)
    if "sampled" in parts:
        d = speaker.defaults
        name = f"sums of 1 step, sampled (temperature {d.temperature}, top-k {d.top_k}, top-p {d.top_p})"
        found[name] = score_sums(speaker, 1, args, sampled=True)
    if "functions" in parts:
        found["functions, greedy"] = score_functions(speaker, args)
    for name, result in found.items():
        share = result["right"] / result["asked"]
        print(
            f"{name}: {result['right']} of {result['asked']} ({share:.1%}), {result['as taught']} as taught"
        )
    print(f"{time.time() - begin:.0f} s", file=sys.stderr)
    if args.json:
        report = {"thinking": not args.no_thinking, "seed": args.seed, "parts": found}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
