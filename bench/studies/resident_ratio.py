"""What does streaming cost when it never misses? Decode at S = E - 1 against every expert resident.

    python -m bench.studies.resident_ratio [--model DIR] [--tokens 24] [--rounds 5]

Both engines answer the same prompt greedily, so they compute the same tokens with the same kernels; the
streamed one reads ids back in every layer, asks the store, and maps experts to slots. The streamed engine
first repeats the answer until a whole answer has no miss. Rounds are A/B/B/A in one process; the ratio is
the median over rounds. Bar: 0.9. The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
from pathlib import Path

from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams

BAR = 0.9
MAX_WARM_UPS = 20


def answer(engine: Engine, tokens: int) -> tuple[list[int], Finished]:
    """Return a greedy answer and its figures."""
    prompt = [(17 * position + 3) % (engine.config.vocab_size // 2) for position in range(4)]
    events = list(engine.session().generate(prompt, SamplingParams(temperature=0.0), max_tokens=tokens))
    end = events[-1]
    assert isinstance(end, Finished)
    return [event.token_id for event in events if isinstance(event, Token)], end


def warm(engine: Engine, tokens: int) -> None:
    """Repeat the answer until it is read from memory alone."""
    for _ in range(MAX_WARM_UPS):
        if answer(engine, tokens)[1].statistics.hit_rate == 1.0:
            return
    raise SystemExit(
        f"still missing after {MAX_WARM_UPS} answers: fewer tokens, or a model with more experts"
    )


def main() -> None:
    """Print the rounds, the ratio and the bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; the demo if left out")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = options.model or demo_dir()

    with Engine.open(model, PlanRequest(context_tokens=256)) as probe:
        experts = probe.plan.num_experts
    full, one_less = PlanRequest(None, 256, experts), PlanRequest(None, 256, experts - 1)
    with Engine.open(model, full) as resident, Engine.open(model, one_less) as streamed:
        warm(streamed, options.tokens)
        expected, _ = answer(resident, options.tokens)
        ratios = []
        for number in range(options.rounds):
            times: dict[str, int] = {"resident": 0, "streamed": 0}
            for name, engine in (
                ("resident", resident), ("streamed", streamed), ("streamed", streamed), ("resident",
                resident),
            ):  # fmt: skip
                tokens, end = answer(engine, options.tokens)
                assert tokens == expected, "streamed and resident answers differ"
                times[name] += end.statistics.decode_ns
                syncs = end.statistics.num_syncs // options.tokens
                seconds = end.statistics.decode_ns / 1e9
                print(f"round {number + 1} {name:9} {seconds:7.3f} s  {syncs} waits a token")
            ratios.append(times["resident"] / times["streamed"])
    ratio = statistics.median(ratios)
    spread = f"[{min(ratios):.3f} to {max(ratios):.3f}]"
    print(f"decode rate, streamed over resident: {ratio:.3f} {spread}, bar {BAR}")
    found = {"experts": experts, "tokens": options.tokens, "ratio": ratio, "ratios": ratios}
    print(json.dumps({"study": "resident_ratio", **found, "bar": BAR, "met": ratio >= BAR}))


if __name__ == "__main__":
    main()
