"""Runs what a comparison still lacks, one process at a time; appends a line a run. Entry: `run_missing`.

The order of the contenders rotates over the repetitions, and all legs of a repetition follow each other, so
that ratios can be formed within one. A run that is there is not run again: a comparison may be taken in
pieces.
"""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.studies.peers.capped import Box, drop_caches
from bench.studies.peers.legs import FORMS, LEGS, Contender, wish_of

_SCRIPT: Final = Path(__file__).with_name("answer.py")
_LONGEST_S: Final = 280.0

Run = dict[str, Any]


def read_runs(results: Path) -> list[Run]:
    """Return the runs that a file holds."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def missing(
    names: Sequence[str], repetitions: int, runs: Sequence[Run]
) -> Iterator[tuple[int, str, Contender]]:
    """Yield repetition, leg and contender of what has still to be run, in order."""
    there = {(run["repetition"], run["leg"], run["name"]) for run in runs}
    for repetition in range(repetitions):
        for name in names:
            contenders = LEGS[name].contenders
            turn = repetition % len(contenders)
            for one in (*contenders[turn:], *contenders[:turn]):
                if (repetition, name, one.name) not in there:
                    yield repetition, name, one


def run_missing(
    work: Path,
    size: str,
    names: Sequence[str],
    repetitions: int,
    results: Path,
    pythons: Mapping[str, str],
    seconds: float,
) -> int:
    """Run until all is there or the time is up; return how many runs are still missing.

    Args:
        work: where the forms of the checkpoint lie, `SIZE-mlx`, `SIZE-off` and so on.
        size: of the checkpoint.
        names: of the legs.
        repetitions: of each.
        results: a line of JSON is appended to it for every run.
        pythons: the interpreter of each engine.
        seconds: no run is begun that would probably end later.

    Raises:
        SystemExit: a form is missing, or a process has failed: a comparison with a gap is none.
    """
    began, longest = time.monotonic(), 0.0
    mlx = work / f"{size}-mlx"
    text = json.loads((mlx / "config.json").read_text())["text_config"]
    checkpoint_bytes = sum(file.stat().st_size for file in mlx.glob("*.safetensors"))
    todo = list(missing(names, repetitions, read_runs(results)))
    for done, (repetition, name, one) in enumerate(todo):
        if time.monotonic() - began + longest * 1.15 > seconds:
            return len(todo) - done
        since = time.monotonic()
        leg, model = LEGS[name], work / f"{size}-{FORMS[one.form]}"
        wish = wish_of(leg, one, model, text, checkpoint_bytes, repetition)
        cap = None if leg.share is None else int(leg.share * checkpoint_bytes)
        found = run_one(wish, pythons[one.engine], cap, leg.bytes_per_s)
        run = {
            "repetition": repetition, "leg": name, "name": one.name, "size": size, "cap_bytes": cap,
            "budget_bytes": wish["budget_bytes"], "bytes_per_s": leg.bytes_per_s,
            "checkpoint_bytes": checkpoint_bytes, **found,
        }  # fmt: skip
        with results.open("a") as file:
            file.write(json.dumps(run) + "\n")
        longest = max(longest, time.monotonic() - since)
        print(line_of(run), flush=True)
    return 0


def run_one(wish: Run, python: str, cap: int | None, bytes_per_s: int | None) -> Run:
    """Run one process in a box, the page cache dropped before; return what it told.

    Raises:
        SystemExit: it failed, or was killed for want of memory.
    """
    drop_caches()
    found: Run = {}
    with Box(cap, Path(wish["model"])) as box:
        process = subprocess.Popen(
            [python, str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, preexec_fn=box.enter,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(json.dumps(wish) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if not line.startswith('{"event"'):
                    continue  # a peer's own words
                said = json.loads(line)
                event = said.pop("event")
                if event == "prompt read":
                    box.set_rate(bytes_per_s)
                    process.stdin.write("\n")
                    process.stdin.flush()
                elif event in ("first", "next"):
                    found[event] = said
                else:
                    found |= said
            process.wait(_LONGEST_S)
        finally:
            process.kill()
            process.wait()
            errors = process.stderr.read()
        found |= {"box_peak_bytes": box.peak_bytes()}
        if box.was_killed() or "facts" not in found:
            why = "killed for want of memory" if box.was_killed() else errors[-2000:]
            raise SystemExit(f"{wish['engine']} of {Path(wish['model']).name} did not end: {why}")
    return found


def line_of(run: Run) -> str:
    """Return one run in words."""
    after = run["next"]
    steps = len(after["steps"])
    return (
        f"{run['repetition']} {run['leg']:10} {run['name']:28} load {run['load_s']:5.1f} s  prefill "
        f"{after['prefill_s']:6.2f} s  decode {steps / after['decode_s']:6.3f} tok/s  "
        f"{after['decode_bytes'] / steps / 1e6:6.1f} MB/tok  peak {run['box_peak_bytes'] / 1e9:.2f} GB"
    )
