"""One engine, one process: load, answer, time, count. Run by `python -m bench.studies.peers`, as a script.

Reads one JSON wish a line from stdin and writes one JSON line for every thing that is done. The first wish
says what to load, each later one what to answer. Between prompt and decode of an answer it says "prompt
read" and waits for a line, so that whoever runs it can change the drive under it. Bytes are the kernel's
count of what the process had read from the drive.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from bench.studies.peers.engines import ENGINES, Engine


def read_bytes() -> int:
    """Return what this process has had read from a drive."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def cpu_s() -> float:
    """Return the seconds of processor that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def tell(**said: Any) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def one_answer(engine: Engine, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Answer once; return times in seconds, bytes and tokens."""
    began, bytes_0, steps = time.perf_counter(), read_bytes(), []
    running = engine.answer(prompt)
    tokens = [next(running)]
    prefill_s, bytes_1 = time.perf_counter() - began, read_bytes()
    tell(event="prompt read")
    sys.stdin.readline()
    cpu = cpu_s()
    while len(tokens) < num_tokens:
        began = time.perf_counter()
        tokens.append(next(running))
        steps.append(time.perf_counter() - began)
    running.close()
    return {
        "prefill_s": prefill_s,
        "prefill_bytes": bytes_1 - bytes_0,
        "decode_s": sum(steps),
        "decode_bytes": read_bytes() - bytes_1,
        "decode_cpu_s": cpu_s() - cpu,
        "steps": steps,
        "tokens": tokens,
    }


def main() -> None:
    """Do what the wishes say, until there are no more."""
    wish = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    engine = ENGINES[wish["engine"]](Path(wish["model"]), wish["budget_bytes"], wish["options"])
    tell(event="loaded", load_s=time.perf_counter() - began, load_bytes=read_bytes())
    for line in sys.stdin:
        wish = json.loads(line)
        tell(event="answered", **one_answer(engine, wish["prompt"], wish["num_tokens"]), facts=engine.facts())
    os._exit(0)  # a peer's threads may not end, and its clean-up is nobody's figure


if __name__ == "__main__":
    main()
