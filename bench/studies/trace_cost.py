"""What does recording cost? One answer with a recorder and one without, a stretch of tokens each in turn.

Both run in one process on one engine, and change places after every stretch: whatever else the machine
does falls on both. A stretch with the recorder ends only when nothing of its record is left to do.

python -m bench.studies.trace_cost [MODEL] [--hints X] [--draft X] [--rounds N] [--tokens N]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import cast

import mlx.core as mx

from mlx_flashnext.demo import DEMO_SLOTS, demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Event, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.reports.prompt_sets import demo_tasks
from mlx_flashnext.traces.recording import Recorder, TraceSettings

STRETCH = 8


class Side:
    """One of the two answers, and what its stretches took."""

    def __init__(self, engine: Engine, prompt: list[int], tokens: int, recorder: Recorder | None) -> None:
        self._recorder = recorder
        params = SamplingParams(seed=1, top_k=20, top_p=0.95)
        session = engine.session(is_guarded=False, recorder=recorder)
        self._events = cast("Generator[Event]", session.generate(prompt, params, max_tokens=tokens))
        self._tokens = (event for event in self._events if isinstance(event, Token))
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def close(self) -> None:
        """End the answer."""
        self._events.close()

    def stretch(self, count: int) -> None:
        """Say so many tokens."""
        wall, cpu = time.perf_counter(), time.process_time()
        said = sum(1 for _ in islice(self._tokens, count))
        mx.synchronize()
        if self._recorder is not None:
            self._recorder.settle()
        if said == count:
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(time.process_time() - cpu)


def round_of(engine: Engine, prompt: list[int], tokens: int) -> tuple[Side, Side]:
    """Return both sides of one round, done."""
    with tempfile.TemporaryFile() as stream:
        settings = TraceSettings(
            "target", "tokenizer", engine.config.vocab_size, engine.config.num_hidden_layers
        )
        recorder = Recorder(stream, settings)
        plain, recorded = Side(engine, prompt, tokens, None), Side(engine, prompt, tokens, recorder)
        for side in (plain, recorded):
            side.stretch(1)  # the prompt
            side.wall.clear()
            side.cpu.clear()
        for number in range((tokens - 1) // STRETCH):
            for side in (plain, recorded) if number % 2 else (recorded, plain):
                side.stretch(STRETCH)
        assert not recorder.failure, recorder.failure
        assert recorder.num_cycles > len(recorded.wall)
        for side in (plain, recorded):
            side.close()
        return plain, recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a checkpoint; the demo without")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--draft", default="none")
    parser.add_argument("--hints", default="off")
    asked = parser.parse_args()
    directory, slots = (Path(asked.model), asked.slots) if asked.model else (demo_dir(), DEMO_SLOTS)
    request = PlanRequest(slots_per_layer=asked.slots or slots or None, hints=asked.hints, draft=asked.draft)
    walls, cpus, times = [], [], []
    with Engine.open(directory, request) as engine:
        task = demo_tasks()
        for number in range(asked.rounds):
            prompt = engine.tokenizer.encode(task[number % len(task)])
            plain, recorded = round_of(engine, prompt, asked.tokens)
            count = min(len(plain.wall), len(recorded.wall))
            walls += [a / b for a, b in zip(recorded.wall, plain.wall, strict=False)]
            cpus += [a / b for a, b in zip(recorded.cpu, plain.cpu, strict=False)]
            times += [wall / STRETCH for wall in plain.wall]
            whole = sum(recorded.wall[:count]) / sum(plain.wall[:count])
            print(f"round {number + 1}: {count} stretches each, {whole:.3f} with over without", flush=True)
    walls.sort()
    print(
        json.dumps(
            {
                "hints": asked.hints,
                "draft": asked.draft,
                "token_ms": round(1e3 * median(times), 3),
                "stretches": len(walls),
                "wall_ratio": round(median(walls), 4),
                "wall_quartiles": [round(walls[len(walls) * part // 4], 4) for part in (1, 3)],
                "cpu_ratio": round(median(cpus), 4),
                "bound": 1.03,
            }
        )
    )


if __name__ == "__main__":
    main()
