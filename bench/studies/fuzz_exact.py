"""Is a streamed answer always the resident one? Random models, slots, chunks, policies, interruptions.

    python -m bench.studies.fuzz_exact [--minutes 10] [--seed 1]

Every case builds a tiny checkpoint of random geometry in a random layout, computes an answer token by token
on the independent reference path (`tests/tiny/weights.py`: `mx.load`, no store, no plan), and compares tokens
and the whole state, bit for bit, with an engine of random slots, prefill step, policy and readers. Some
sessions see part of the prompt first, some answers are abandoned half-way and asked again. The last line of
stdout is one JSON document.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_flashnext.engine.engine import Engine, Session
from mlx_flashnext.engine.events import Event, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.state import SequenceState
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel

GREEDY = SamplingParams(temperature=0.0)
GEOMETRIES: tuple[dict[str, Any], ...] = (
    {},
    {"norm_topk_prob": False, "num_experts_per_tok": 3, "num_experts": 7},
    {"num_experts_per_tok": 1},
    {"num_experts": 16, "num_experts_per_tok": 16},
    {"indexer_budget": 8, "indexer_compress_ratio": 8, "ngram_size": 2},
    {"num_attention_heads": 6, "num_key_value_heads": 3, "hc_count": 3},
    {"ple_layer_ids": [1]},
    {"ple_layer_ids": [4], "ngram_size": 4, "ple_embed_dim": 384},
    {"num_hidden_layers": 2, "full_attention_interval": 1, "linear_conv_kernel_dim": 2},
    {"num_hidden_layers": 3, "full_attention_interval": 8, "linear_conv_kernel_dim": 5},
)
LAYOUTS = ("hf float32", "mlx float32", "mlx 4 bits", "mlx 8 bits")


@dataclass(frozen=True, slots=True)
class Reference:
    """What the reference path says: the answer, and the state after consuming all but its last token."""

    answer: list[int]
    state: SequenceState


def build(directory: Path, layout: str, geometry: dict[str, Any], seed: int) -> Path:
    """Write one random tiny checkpoint."""
    if layout == "hf float32":
        return build_hf(directory, seed=seed, overrides=geometry, shards=1 + seed % 3)
    bits = {"mlx float32": None, "mlx 4 bits": 4, "mlx 8 bits": 8}[layout]
    return build_mlx(directory, seed=seed, overrides=geometry, bits=bits)


def refer(model: FlashNext, prompt: list[int], count: int) -> Reference:
    """Answer token by token."""
    state, answer = model.new_state(), []
    for token in prompt[:-1]:
        mx.eval(advance(model, [token], state, logits="none").stack)
    token = prompt[-1]
    for _ in range(count):
        logits = advance(model, [token], state).logits
        assert logits is not None
        token = int(mx.argmax(logits[-1]).item())
        answer.append(token)
    return Reference(answer, state)


def disturbed(session: Session, prompt: list[int], count: int, rng: random.Random) -> Iterator[Event]:
    """Ask for the answer, sometimes after something else was begun."""
    habit = rng.choice(("plain", "part of the prompt first", "abandoned first"))
    if habit == "part of the prompt first" and len(prompt) > 2:
        list(session.generate(prompt[: rng.randrange(1, len(prompt))], GREEDY, max_tokens=0))
    elif habit == "abandoned first":
        begun = session.generate(prompt, GREEDY, max_tokens=count)
        for _ in range(rng.randrange(4)):
            next(begun, None)
        begun.close()
    return session.generate(prompt, GREEDY, max_tokens=count)


def compare(directory: Path, model: FlashNext, rng: random.Random) -> dict[str, Any] | None:
    """Run one random engine; return what differs, or None."""
    config = model.config
    length = rng.choice((1, 2, 3, rng.randrange(1, 30), rng.randrange(1, 120)))
    prompt = [rng.randrange(121) for _ in range(length)]
    count, fewest = rng.randrange(1, 16), max(2, config.num_experts_per_tok)
    request = PlanRequest(
        context_tokens=rng.choice((len(prompt) + count, 512)),
        slots_per_layer=rng.choice((fewest, config.num_experts, rng.randint(fewest, config.num_experts))),
        prefill_step=rng.choice((1, 2, 3, 7, 16, 64, rng.randrange(1, 130))),
        policy=rng.choice(("lru", "slru")),
        num_readers=rng.choice((1, 2, 4, 8)),
    )
    expected = refer(model, prompt, count)
    with Engine.open(directory, request) as engine:
        session = engine.session()
        events = list(disturbed(session, prompt, count, rng))
        tokens = [event.token_id for event in events if isinstance(event, Token)]
        timeline = session._timeline
        state = {} if timeline is None else timeline.state.named_arrays()
    wanted = expected.state.named_arrays()
    unequal = [name for name in wanted if name not in state or not mx.array_equal(state[name], wanted[name])]
    if tokens == expected.answer and not unequal:
        return None
    found = {"request": str(request), "prompt": prompt, "state": unequal}
    return {**found, "expected": expected.answer, "got": tokens}


def main() -> None:
    """Run until the time is up or something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, end = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    cases = checkpoints = 0
    found: dict[str, Any] | None = None
    while time.monotonic() < end and found is None:
        with tempfile.TemporaryDirectory() as scratch:
            layout, geometry, seed = rng.choice(LAYOUTS), rng.choice(GEOMETRIES), rng.randrange(50)
            directory = build(Path(scratch) / "tiny", layout, geometry, seed)
            model = TinyModel.open(directory).model
            checkpoints += 1
            for _ in range(4):
                cases += 1
                found = compare(directory, model, rng)
                if found is not None:
                    found |= {"layout": layout, "geometry": geometry, "checkpoint seed": seed}
                    break
    print(f"{cases} answers over {checkpoints} checkpoints: {'all equal' if found is None else 'DIFFERENT'}")
    print(json.dumps({"study": "fuzz_exact", "seed": options.seed, "cases": cases, "difference": found}))
    raise SystemExit(found is not None)


if __name__ == "__main__":
    main()
