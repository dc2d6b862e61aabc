"""Does the demo say with a draft what it says without, in law? Two-token continuations at temperature 1.

    python -m bench.demo.draft_sampling --draft mlx_flashnext/demo/draft --samples 2000 [--json FILE]

The same prompt, with each drafter and with none, every answer with a seed of its own; the two-sample
chi-square of pairs, rare ones counted together (dflash2.md 3.6). A right sampler stays under its limit 999
times in 1000; `none` with other seeds shows what the noise is. Proposals are judged inside what is compared.
Needs MLX, no torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.training.draft_promote import chi_square

from .draft_score import arguments, drafters_of, held_out, opened

PAIR, TRIED, SIGMAS = 2, 24, 3.1
Pair = tuple[int, ...]


def pairs(
    kind: str, prompt: Sequence[int], count: int, first: int, args: argparse.Namespace
) -> tuple[list[Pair], int]:
    """Return drawn beginnings of answers and how many proposals were accepted in them."""
    said: list[Pair] = []
    accepted = 0
    with opened(kind, args) as (engine, make):
        session = engine.session(make(), is_guarded=False)
        for seed in range(first, first + count):
            params = SamplingParams(temperature=1.0, seed=seed)
            # One token more than is compared, so that a proposal is judged inside what is.
            events = list(session.generate(prompt, params, max_tokens=PAIR + 1, rule="sampled"))
            said.append(tuple([event.token_id for event in events if isinstance(event, Token)][:PAIR]))
            end = events[-1]
            assert isinstance(end, Finished)
            accepted += end.statistics.draft.num_accepted
            if (seed - first) % 100 == 99:
                print(f"{kind}: {seed - first + 1} of {count}", file=sys.stderr, flush=True)
    return said, accepted


def compare(prompt: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """Return the chi-square of every drafter's sample and one without."""
    plain, _ = pairs("none", prompt, args.samples, 0, args)
    found: dict[str, Any] = {}
    for number, kind in enumerate(("none", *drafters_of(args)), start=1):
        drawn, accepted = pairs(kind, prompt, args.samples, number * args.samples, args)
        statistic, degrees = chi_square(plain, drawn)
        found[kind] = {
            "chi_square": round(statistic, 2),
            "degrees": degrees,
            "limit": round(degrees + SIGMAS * (2 * degrees) ** 0.5, 2),
            "num_accepted": accepted,
        }
    return found


def main() -> None:
    """Draw, compare, print."""
    ap = arguments(__doc__)
    ap.add_argument("--samples", type=int, default=2000)
    ap.add_argument("--json", type=pathlib.Path)
    args = ap.parse_args()
    _, prompts = held_out(2)
    # Where the target is least sure of two tokens a wrong law shows most.
    variety = [len(set(pairs("none", prompt, TRIED, 1 << 20, args)[0])) for prompt in prompts]
    prompt = prompts[variety.index(max(variety))]
    found = compare(prompt, args)
    for kind, one in found.items():
        verdict = "within" if one["chi_square"] <= one["limit"] else "BEYOND"
        print(
            f"{kind}: chi-square {one['chi_square']} with {one['degrees']} degrees, "
            f"{verdict} {one['limit']}; {one['num_accepted']} proposals accepted"
        )
    if args.json:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        head = {"date": date, "num_samples": args.samples, f"different_pairs_of_{TRIED}": max(variety)}
        args.json.write_text(json.dumps({**head, "drafters": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
