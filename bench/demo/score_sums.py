"""How many two-digit sums does the shipped demo get right? Greedy, thinking on, in the product's own runtime.

    python -m bench.demo.score_sums [--count 60] [--seed 3]

The pairs are random and not held out from training: a picture of the state, not an accuracy claim.
"""

import argparse
import random
import re

from mlx_flashnext.demo import DEMO_SLOTS, demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams

PROMPT = "<|im_start|>user\nWhat is {} {} {}?<|im_end|>\n<|im_start|>assistant\n<think>\n"
MAX_TOKENS = 90


def answer(engine: Engine, left: int, sign: str, right: int) -> int | None:
    """Return the number the demo ends with, None if it ends otherwise."""
    tokenizer = engine.tokenizer
    events = engine.session().generate(
        tokenizer.encode(PROMPT.format(left, sign, right)),
        SamplingParams(temperature=0.0),
        max_tokens=MAX_TOKENS,
        stop_ids=[token for token in (tokenizer.id_of("<|im_end|>"),) if token is not None],
    )
    text = "".join(event.text for event in events if isinstance(event, Token))
    found = re.search(r"= (-?\d+)\.?\s*$", text)
    return None if found is None else int(found[1])


def main() -> None:
    """Print the count for each sign."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    rng, right, asked = random.Random(options.seed), {"+": 0, "-": 0}, {"+": 0, "-": 0}
    with Engine.open(demo_dir(), PlanRequest(slots_per_layer=DEMO_SLOTS)) as engine:
        for _ in range(options.count):
            pair, sign = (rng.randrange(10, 99), rng.randrange(10, 99)), rng.choice("+-")
            larger, smaller = (max(pair), min(pair)) if sign == "-" else pair
            asked[sign] += 1
            expected = larger + smaller if sign == "+" else larger - smaller
            right[sign] += answer(engine, larger, sign, smaller) == expected
    for sign, count in asked.items():
        print(f"{sign} {right[sign]} of {count}")


if __name__ == "__main__":
    main()
