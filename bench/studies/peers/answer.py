"""One engine, one process: load, answer, time, count. Run by `python -m bench.studies.peers`, as a script.

Reads one JSON wish a line from stdin and writes one JSON line for every thing that is done. The first wish
says what to load; `prompt` begins an answer and yields its first token; `more` decodes so many others. An
answer is decoded in pieces so that whoever runs several engines can let them take turns, and can change the
drive under them. Bytes are the kernel's count of what the process had read from the drive.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
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


def begin(engine: Engine, prompt: Sequence[int]) -> tuple[Iterator[int], dict[str, Any]]:
    """Begin an answer; return it, and seconds, bytes and the first token."""
    began, bytes_0 = time.perf_counter(), read_bytes()
    running = engine.answer(prompt)
    tokens = [next(running)]
    took_s = time.perf_counter() - began
    return running, {"prefill_s": took_s, "prefill_bytes": read_bytes() - bytes_0, "tokens": tokens}


def decode(engine: Engine, running: Iterator[int], num_tokens: int) -> dict[str, Any]:
    """Decode some more; return seconds of every step, bytes, processor seconds, tokens and what it counts."""
    steps, tokens, cpu, bytes_0 = [], [], cpu_s(), read_bytes()
    before = engine.counts()
    for _ in range(num_tokens):
        began = time.perf_counter()
        tokens.append(next(running))
        steps.append(time.perf_counter() - began)
    return {
        "steps": steps,
        "decode_bytes": read_bytes() - bytes_0,
        "decode_cpu_s": cpu_s() - cpu,
        "tokens": tokens,
        **{name: count - before[name] for name, count in engine.counts().items()},
    }


def main() -> None:
    """Do what the wishes say, until there are no more."""
    wish = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    engine = ENGINES[wish["engine"]](Path(wish["model"]), wish["budget_bytes"], wish["options"])
    tell(event="loaded", load_s=time.perf_counter() - began, load_bytes=read_bytes())
    running: Iterator[int] = iter(())
    for line in sys.stdin:
        wish = json.loads(line)
        if "prompt" in wish:
            close = getattr(running, "close", None)
            if close is not None:
                close()
            running, said = begin(engine, wish["prompt"])
            tell(event="prompt read", **said)
        else:
            tell(event="decoded", **decode(engine, running, wish["more"]), facts=engine.facts())
    os._exit(0)  # a peer's threads may not end, and its clean-up is nobody's figure


if __name__ == "__main__":
    main()
