"""Asks all contenders in turns, a round at a time, and appends a line an answer. Entry point: `run_rounds`.

Every contender is a process of its own in a box of its own, and all of them stay: one computes, the others
wait. A round asks each the same prompt, which no round had before, in an order that rotates; then they
decode a few tokens each, forwards and backwards in turns, until all answers are whole. So ratios are formed
within a round and between seconds that lie beside each other, and what is measured is a conversation that
goes on, not a start. The start is told apart. Rounds go on where the last call has stopped: a comparison may
be taken in pieces.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from bench.studies.peers.capped import Box, drop_caches
from bench.studies.peers.legs import (
    FIRST_PROMPT,
    FIRST_TOKENS,
    FORMS,
    LEGS,
    NEXT_PROMPT,
    NEXT_TOKENS,
    TURN_TOKENS,
    Contender,
    Leg,
    budget_of,
    prompt_ids,
)

_SCRIPT: Final = Path(__file__).with_name("answer.py")

Run = dict[str, Any]
Key = tuple[str, str]
"""Of a contender's process, see `Leg.process_of`."""
COUNTED: Final = ("decode_bytes", "decode_cpu_s", "passes", "pass_tokens", "fetched_bytes")
"""What the pieces of an answer add up to."""


def read_runs(results: Path) -> list[Run]:
    """Return the answers that a file holds."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


class Talker:
    """A contender's process.

    Args:
        python: interpreter.
        wish: what to load.
        cap: bytes of its box; None for no cap.

    Attributes:
        start: what it told of loading.
    """

    def __init__(self, python: str, wish: Run, cap: int | None) -> None:
        self._name = f"{wish['engine']} of {Path(wish['model']).name}"
        self._resources = contextlib.ExitStack()
        self._box = self._resources.enter_context(Box(cap, Path(wish["model"])))
        self._process = subprocess.Popen(
            [python, str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, preexec_fn=self._box.enter,
        )  # fmt: skip
        self.start = self._say(wish, "loaded")

    def begin(self, prompt: Sequence[int]) -> Run:
        """Return what it told of a prompt; its answer has begun."""
        return self._say({"prompt": prompt}, "prompt read")

    def decode(self, num_tokens: int, bytes_per_s: int | None) -> Run:
        """Return what it told of some more tokens, decoded with the drive at a rate."""
        self._box.set_rate(bytes_per_s)
        try:
            return self._say({"more": num_tokens}, "decoded")
        finally:
            self._box.set_rate(None)

    def peak_bytes(self) -> int:
        """Return the most that was charged to its box."""
        return self._box.peak_bytes()

    def _say(self, wish: Run, event: str) -> Run:
        """Send a line and return what comes back.

        Raises:
            SystemExit: the process has ended: a comparison with a gap is none.
        """
        talk_in, talk_out = self._process.stdin, self._process.stdout
        assert talk_in is not None
        assert talk_out is not None
        talk_in.write(json.dumps(wish) + "\n")
        talk_in.flush()
        for line in talk_out:
            if line.startswith('{"event"'):  # the rest are a peer's own words
                said = json.loads(line)
                assert said.pop("event") == event, line
                return said
        why = (
            "killed for want of memory" if self._box.was_killed() else f"it ended with {self._process.wait()}"
        )
        self.close()
        raise SystemExit(f"{self._name}: {why}")

    def close(self) -> None:
        """End the process and remove its box."""
        self._process.kill()
        self._process.wait()
        self._resources.close()


def run_rounds(
    work: Path,
    size: str,
    names: Sequence[str],
    rounds: int,
    results: Path,
    pythons: Mapping[str, str],
    seconds: float,
    overhead_bytes: int,
    only: str | None = None,
) -> int:
    """Run rounds until there are enough or the time is up; return how many are still missing.

    Args:
        work: where the forms of the checkpoint lie, `SIZE-mlx`, `SIZE-off` and so on.
        size: of the checkpoint.
        names: of the legs, which are asked together.
        rounds: wanted in all.
        results: a line of JSON is appended to it for every answer, a round at a time.
        pythons: the interpreter of each engine.
        seconds: no round is begun that would probably end later.
        overhead_bytes: what a peer's process takes besides its expert cache.
        only: the name of the contender to run; None for all.

    Raises:
        SystemExit: a form is missing, or a process has failed.
    """
    began, longest = time.monotonic(), 0.0
    mlx = work / f"{size}-mlx"
    text = json.loads((mlx / "config.json").read_text())["text_config"]
    total = sum(file.stat().st_size for file in mlx.glob("*.safetensors"))
    expert_bytes = bytes_of_experts(mlx)
    done = {run["round"] for run in read_runs(results) if run["leg"] in names}
    number = max(done, default=-1) + 1
    asked = [(name, one) for name in names for one in LEGS[name].contenders if only in (None, one.name)]
    drop_caches()
    with contextlib.ExitStack() as open_talkers:
        talkers: dict[Key, Talker] = {}
        for name, one in asked:
            leg = LEGS[name]
            key = leg.process_of(one.name)
            if key not in talkers:
                budget = budget_of(leg, one, total, overhead_bytes, expert_bytes)
                talkers[key] = open_talker(leg, one, work / size, text, total, budget, pythons[one.engine])
                open_talkers.callback(talkers[key].close)
                warm = prompt_ids(text["vocab_size"], FIRST_PROMPT, "first")
                talkers[key].start |= {"first": answers({key: talkers[key]}, warm, FIRST_TOKENS, {})[key]}
        # What one without a cap has left in the kernel's cache would be there for the capped for free.
        drop_caches()
        while number < rounds and time.monotonic() - began + longest * 1.1 < seconds:
            since, lines = time.monotonic(), []
            for place, group in enumerate(apart(asked)):
                # Another prompt for each group: what a process has just answered it need not read again.
                prompt = prompt_ids(text["vocab_size"], NEXT_PROMPT, f"next {number}.{place}")
                turn = number % len(group)
                order = [*group[turn:], *group[:turn]]
                in_turns = {LEGS[name].process_of(one.name): name for name, one in order}
                rates = {key: LEGS[name].bytes_per_s for key, name in in_turns.items()}
                said = answers({key: talkers[key] for key in in_turns}, prompt, NEXT_TOKENS, rates)
                for name, one in order:
                    leg, key = LEGS[name], LEGS[name].process_of(one.name)
                    run = {
                        "round": number, "leg": name, "name": one.name, "size": size,
                        "cap_bytes": leg.cap_bytes(total), "bytes_per_s": leg.bytes_per_s,
                        "budget_bytes": budget_of(leg, one, total, overhead_bytes, expert_bytes),
                        "checkpoint_bytes": total, **talkers[key].start, "next": said[key],
                    }  # fmt: skip
                    lines.append(run)
                    print(line_of(run), flush=True)
            _append(results, lines)
            longest = max(longest, time.monotonic() - since)
            number += 1
    return max(0, rounds - number)


def apart(asked: Sequence[tuple[str, Contender]]) -> list[list[tuple[str, Contender]]]:
    """Return groups that take turns: legs that differ by the drive alone share a process, so they part."""
    groups: list[list[tuple[str, Contender]]] = []
    for name, one in asked:
        key = LEGS[name].process_of(one.name)
        free = (g for g in groups if all(LEGS[leg].process_of(other.name) != key for leg, other in g))
        group = next(free, None)
        if group is None:
            groups.append(group := [])
        group.append((name, one))
    return groups


def answers(
    talkers: Mapping[Key, Talker], prompt: Sequence[int], num_tokens: int, rates: Mapping[Key, int | None]
) -> dict[Key, Run]:
    """Return everybody's answer to a prompt: read one after the other, decoded in turns there and back."""
    said = {key: talker.begin(prompt) for key, talker in talkers.items()}
    for one in said.values():
        one |= {"steps": [], **dict.fromkeys(COUNTED, 0)}
    order = list(talkers)
    for first in range(1, num_tokens, TURN_TOKENS):
        for key in order:
            more = talkers[key].decode(min(TURN_TOKENS, num_tokens - first), rates.get(key))
            for name in ("steps", "tokens", *COUNTED):
                said[key][name] += more[name]
            said[key]["facts"] = more["facts"]
        order.reverse()
    for key, one in said.items():
        one |= {"decode_s": sum(one["steps"]), "box_peak_bytes": talkers[key].peak_bytes()}
    return said


def open_talker(
    leg: Leg, one: Contender, stem: Path, text: Run, total: int, budget_bytes: int | None, python: str
) -> Talker:
    """Load a contender in its box; `stem` is the path that its forms begin with."""
    experts = text["num_experts"] if leg.expert_share is None else int(leg.expert_share * text["num_experts"])
    beside = {} if one.drafter is None else {"drafter": f"{stem}-{FORMS[one.drafter]}"}
    wish = {
        "engine": one.engine,
        "model": f"{stem}-{FORMS[one.form]}",
        "budget_bytes": budget_bytes,
        "options": {**one.options, **beside, "experts": experts},
    }
    return Talker(python, wish, leg.cap_bytes(total))


def bytes_of_experts(mlx: Path) -> int:
    """Return what all experts of a checkpoint in the MLX layout take."""
    found = 0
    for file in mlx.glob("*.safetensors"):
        with file.open("rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        spans = (one["data_offsets"] for name, one in header.items() if ".switch_mlp." in name)
        found += sum(end - start for start, end in spans)
    return found


def line_of(run: Run) -> str:
    """Return one answer in words."""
    after = run["next"]
    steps = len(after["steps"])
    return (
        f"{run['round']} {run['leg']:10} {run['name']:28} load {run['load_s']:5.1f} s  prefill "
        f"{after['prefill_s']:6.2f} s  decode {steps / after['decode_s']:6.3f} tok/s  "
        f"{after['decode_bytes'] / steps / 1e6:6.1f} MB/tok  peak {after['box_peak_bytes'] / 1e9:.2f} GB"
    )


def _append(results: Path, lines: Sequence[Run]) -> None:
    file: IO[str]
    with results.open("a") as file:
        file.writelines(json.dumps(run) + "\n" for run in lines)
