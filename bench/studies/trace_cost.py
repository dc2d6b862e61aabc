"""What does recording cost? Decode of the demo with and without, A/B/B/A, one process.

python -m bench.studies.trace_cost [--rounds N] [--tokens N]
"""

import argparse
import json
import tempfile
import time
from statistics import median

from mlx_flashnext.demo import DEMO_SLOTS, demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.prompt_sets import demo_tasks
from mlx_flashnext.engine.recording import Recorder, TraceSettings
from mlx_flashnext.engine.sampler import SamplingParams


def decode_cpu_s(engine: Engine, prompt: list[int], tokens: int, *, is_recording: bool) -> float:
    """Return CPU seconds a token of this process: the machine is shared, wall time says little."""
    with tempfile.TemporaryFile() as stream:
        settings = TraceSettings(
            "target", "tokenizer", engine.config.vocab_size, engine.config.num_hidden_layers
        )
        session = engine.session(recorder=Recorder(stream, settings) if is_recording else None)
        began, count = 0.0, 0
        for event in session.generate(
            prompt, SamplingParams(seed=1, top_k=20, top_p=0.95), max_tokens=tokens
        ):
            if isinstance(event, Token):
                began = began or time.process_time()
                count += 1
        return (time.process_time() - began) / max(1, count - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft", default="none", help="widths are chosen by time: the two runs then differ")
    parser.add_argument("--hints", default="off")
    asked = parser.parse_args()
    request = PlanRequest(slots_per_layer=DEMO_SLOTS, hints=asked.hints, draft=asked.draft)
    with Engine.open(demo_dir(), request) as engine:
        prompt = engine.tokenizer.encode(demo_tasks()[0])
        decode_cpu_s(engine, prompt, 16, is_recording=True)
        ratios = []
        for _ in range(asked.rounds):
            plain, on, on_again, plain_again = (
                decode_cpu_s(engine, prompt, asked.tokens, is_recording=flag)
                for flag in (False, True, True, False)
            )
            ratios.append((on + on_again) / (plain + plain_again))
            print(
                f"with over without: {ratios[-1]:.3f} ({1e3 * plain:.2f} ms of CPU a token without)",
                flush=True,
            )
    print(json.dumps({"median_ratio": median(ratios), "ratios": ratios, "bound": 1.03}))


if __name__ == "__main__":
    main()
