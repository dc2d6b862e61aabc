"""What the demo's draft is worth, served on the sixty held-out prompts: tokens a cycle, and whom it beats.

    python -m bench.demo.draft_score --draft mlx_flashnext/demo/draft --v1 SCRATCH/draft-v1
    python -m bench.demo.draft_score --only dflash2,lookup --per-genre 3 --answers FILE --json FILE

Greedy answers with the governor off, every drafter proposing all it may; each answer must be that of plain
decode, token by token. `tok/cyc` pools committed tokens over cycles. Answers that say some 8 tokens in a row
three times or more draft themselves: they are counted apart. What is compared is what was served (FIELD P43).
`--v1` is a draft without convolutions and selector, trained for as many steps; `off` are the weights of
`--draft` without its selector. A ratio's interval holds 95 of 100 draws of prompts with replacement.

Needs MLX, no torch. Sampled answers: `bench.demo.draft_sampling`.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import pathlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from drafter.api import Drafter
from drafter.dflash2 import Dflash2Drafter, Dflash2Options
from drafter.train.evaluate import calibration
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.cycle import CycleFacts
from mlx_flashnext.engine.draft_target import DraftTarget
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.engine.streams import draw_draft
from mlx_flashnext.reports.prompt_sets import chat_prompts
from mlx_flashnext.tokenizer import Tokenizer
from mlx_flashnext.training.draft_training import load_draft

GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS, CONTEXT = 400, 1024
GRAM, TIMES = 8, 3
LEAST_ALL, LEAST_GENRE = 3.0, 2.0
DRAWS = 2000
DRAFTERS = ("dflash2", "off", "v1", "mtp", "lookup")
PAIRS = (("dflash2", "off"), ("off", "v1"), ("dflash2", "v1"), ("dflash2", "mtp"), ("dflash2", "lookup"))
RESULT = pathlib.Path(__file__).parent / "results" / "draft.json"


@dataclass
class Answer:
    """One answer: its tokens, cycles, and of every proposed token confidence and whether it was kept."""

    tokens: list[int]
    cycles: int
    failures: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    confidence: list[tuple[float, ...]] = field(default_factory=list)


class Kept:
    """Answers that were given already, a line of JSON each; a run that was cut short goes on behind them.

    Args:
        path: of the file; made if it is not there. It belongs to these drafts and this demo.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self.answers: dict[str, Answer] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            name, fields = json.loads(line)
            self.answers[name] = Answer(**fields)

    def name(self, kind: str, prompt: Sequence[int]) -> str:
        return f"{kind} {hashlib.sha256(json.dumps(list(prompt)).encode()).hexdigest()[:16]}"

    def add(self, kind: str, prompt: Sequence[int], answer: Answer) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps([self.name(kind, prompt), asdict(answer)]) + "\n")


class Watcher:
    """Keeps what every cycle of an answer proposed and accepted."""

    def __init__(self) -> None:
        self.answer = Answer([], 0)

    def listen(self, hints: Hints | None) -> Hints | None:
        return hints

    def begin_answer(self, *_: object) -> None:
        self.answer = Answer([], 0)

    def cycle_ended(self, facts: CycleFacts, *_: object) -> None:
        self.answer.proposed.append(len(facts.proposal.tokens))
        self.answer.accepted.append(facts.verdict.accepted)
        self.answer.confidence.append(facts.proposal.confidence)

    def end_answer(self, *_: object) -> None:
        pass


@contextmanager
def opened(kind: str, args: argparse.Namespace) -> Iterator[tuple[Engine, Callable[[], Drafter | None]]]:
    """Open the target with a drafter as it is served, every expert in memory."""
    directory = args.v1 if kind == "v1" else args.draft
    planned = {"dflash2": "dflash2", "v1": "dflash2", "off": "oracle"}.get(kind, kind)
    request = PlanRequest(
        context_tokens=CONTEXT,
        draft=planned,
        draft_directory=directory if planned == "dflash2" else None,
        num_draft_tokens={"mtp": args.mtp, "lookup": args.lookup, "off": proposals_of(args.draft)}.get(kind),
    )
    with Engine.open(demo_dir(), request) as engine:
        yield engine, lambda: without_selector(engine, args.draft) if kind == "off" else None


def proposals_of(directory: pathlib.Path) -> int:
    """Return the proposals of a draft's block."""
    config = json.loads((directory / "config.json").read_text())
    return int(config["dflash_config"]["block_size"]) - 1


def without_selector(engine: Engine, directory: pathlib.Path) -> Drafter:
    """Return a drafter with the weights of a draft that takes every slot's best logit."""
    draft = load_draft(engine, directory)
    return Dflash2Drafter(
        draft.params,
        draft.config,
        DraftTarget(engine.target.model, engine.target.sync),
        draw_draft,
        dtype=engine.target.model.compute_dtype,
        contraction=draft.contraction,
        options=Dflash2Options(
            num_ids=engine.tokenizer.num_ids, stop_ids=engine.tokenizer.eos_ids, use_selector=False
        ),
    )


def arguments(page: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows which drafters to serve."""
    ap = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--draft", type=pathlib.Path, default=demo_dir() / "draft")
    ap.add_argument("--v1", type=pathlib.Path, help="a draft of the same geometry without selector")
    ap.add_argument("--only", help=f"of {','.join(DRAFTERS)}; default: all that there are")
    ap.add_argument("--mtp", type=int, default=2, help="proposals of mtp")
    ap.add_argument("--lookup", type=int, default=4, help="proposals of lookup")
    return ap


def drafters_of(args: argparse.Namespace) -> list[str]:
    """Return the drafters that were asked for."""
    return (args.only or ",".join(kind for kind in DRAFTERS if kind != "v1" or args.v1)).split(",")


def held_out(per_genre: int) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the first held-out prompts of each genre, and as the model's template renders them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for task in json.loads((demo_dir() / "prompts.json").read_text())["held_out"]:
        found.setdefault(task["genre"], []).append(task)
    chosen = [task for tasks in found.values() for task in tasks[:per_genre]]
    texts = [task["prompt"] for task in chosen]
    return chosen, chat_prompts(demo_dir(), Tokenizer.open(demo_dir()), texts)


def serve(
    kind: str, prompts: Sequence[Sequence[int]], args: argparse.Namespace, kept: Kept | None = None
) -> list[Answer]:
    """Return the greedy answer to every prompt, each in a conversation of its own, or as it was kept."""
    found = [None if kept is None else kept.answers.get(kept.name(kind, prompt)) for prompt in prompts]
    if None not in found:
        return [answer for answer in found if answer is not None]
    with opened(kind, args) as (engine, make):
        drafter = make()
        for number, prompt in enumerate(prompts):
            if found[number] is not None:
                continue
            watcher = Watcher()
            session = engine.session(drafter, is_guarded=False, recorder=watcher)
            events = list(
                session.generate(prompt, GREEDY, max_tokens=MAX_TOKENS, stop_ids=engine.tokenizer.eos_ids)
            )
            answer, end = watcher.answer, events[-1]
            assert isinstance(end, Finished)
            answer.tokens = [event.token_id for event in events if isinstance(event, Token)]
            answer.cycles, answer.failures = end.statistics.cycles, end.statistics.draft.num_failures
            found[number] = answer
            if kept is not None:
                kept.add(kind, prompt, answer)
            print(f"{kind}: {number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return [answer for answer in found if answer is not None]


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether some 8 tokens in a row come three times or more."""
    grams = Counter(tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1))
    return max(grams.values(), default=0) >= TIMES


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return pooled figures of some answers."""
    tokens, cycles = sum(len(a.tokens) for a in answers), sum(a.cycles for a in answers)
    proposed = [n for a in answers for n in a.proposed]
    accepted = [n for a in answers for n in a.accepted]
    width = max(proposed, default=0)
    by_slot, conditional = [], []
    for slot in range(width):
        asked = [kept for tried, kept in zip(proposed, accepted, strict=True) if tried > slot]
        reached = [kept for kept in asked if kept >= slot]
        by_slot.append(round(sum(kept > slot for kept in asked) / max(1, len(asked)), 4))
        conditional.append(round(sum(kept > slot for kept in reached) / max(1, len(reached)), 4))
    return {
        "num_answers": len(answers),
        "num_tokens": tokens,
        "num_cycles": cycles,
        "tokens_per_cycle": round(tokens / cycles, 4) if cycles else None,
        "proposing_share": round(sum(n > 0 for n in proposed) / max(1, cycles), 4),
        "accepted_share": round(sum(accepted) / max(1, sum(proposed)), 4),
        "acceptance_by_slot": by_slot,
        "conditional_by_slot": conditional,
        "calibration": calibrated(answers),
    }


def calibrated(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Return how often tokens of each confidence are kept, given that all before them were."""
    said: list[float] = []
    right: list[bool] = []
    for answer in answers:
        for confidence, kept in zip(answer.confidence, answer.accepted, strict=True):
            said += confidence[: kept + 1]
            right += [slot < kept for slot in range(len(confidence[: kept + 1]))]
    return calibration(np.array(said, np.float32), np.array(right, bool)) if said else None


def interval(one: Sequence[Answer], other: Sequence[Answer], seed: int = 1) -> dict[str, float]:
    """Return the ratio of two drafters' tokens a cycle over the same answers, with its interval."""
    rng = random.Random(seed)
    cycles = [(a.cycles, b.cycles) for a, b in zip(one, other, strict=True)]

    def ratio(drawn: Sequence[tuple[int, int]]) -> float:
        return sum(b for _, b in drawn) / max(1, sum(a for a, _ in drawn))

    ratios = sorted(ratio(rng.choices(cycles, k=len(cycles))) for _ in range(DRAWS))
    return {
        "ratio": round(ratio(cycles), 4),
        "from": round(ratios[DRAWS // 40], 4),
        "to": round(ratios[-DRAWS // 40], 4),
    }


def report(served: dict[str, list[Answer]], plain: list[Answer], genres: Sequence[str]) -> dict[str, Any]:
    """Return all figures; see the page's head."""
    apart = [repeats(answer.tokens) for answer in plain]

    def of(answers: Sequence[Answer], genre: str | None, is_apart: bool = False) -> list[Answer]:
        rows = zip(answers, genres, apart, strict=True)
        return [a for a, own, bad in rows if bad == is_apart and genre in (None, own)]

    drafters: dict[str, Any] = {}
    for kind, answers in served.items():
        drafters[kind] = {
            "all": figures(of(answers, None)),
            "by_genre": {genre: figures(of(answers, genre)) for genre in sorted(set(genres))},
            "repeating": figures(of(answers, None, True)) if any(apart) else None,
            "num_different": sum(a.tokens != b.tokens for a, b in zip(answers, plain, strict=True)),
            "failures": sum(answer.failures for answer in answers),
        }
    pairs = {
        f"{one} over {other}": interval(of(served[one], None), of(served[other], None))
        for one, other in PAIRS
        if one in served and other in served
    }
    return {"num_repeating": sum(apart), "drafters": drafters, "ratios": pairs}


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    genres = list(next(iter(found["drafters"].values()))["by_genre"])
    print(f"{'tok/cyc':8} {'all':>6} " + " ".join(f"{genre:>8}" for genre in genres) + "  different")
    for kind, one in found["drafters"].items():
        cells = " ".join(f"{one['by_genre'][genre]['tokens_per_cycle'] or 0:8.2f}" for genre in genres)
        print(f"{kind:8} {one['all']['tokens_per_cycle']:6.2f} {cells}  {one['num_different']}")
    print(f"answers that repeat themselves, counted apart: {found['num_repeating']}")
    for kind, one in found["drafters"].items():
        if one["repeating"] is not None:
            print(f"  {kind:8} {one['repeating']['tokens_per_cycle']:.2f}")
    for name, one in found["ratios"].items():
        print(f"{name}: {one['ratio']:.3f} [{one['from']:.3f} to {one['to']:.3f}]")
    print("kept of each slot's proposals (of those reached)")
    for kind, one in found["drafters"].items():
        pairs = zip(one["all"]["acceptance_by_slot"], one["all"]["conditional_by_slot"], strict=True)
        print(f"  {kind:8} " + " ".join(f"{kept:.2f} ({given:.2f})" for kept, given in pairs))
    for kind, one in found["drafters"].items():
        table = one["all"]["calibration"]
        if table is not None:
            print(f"{kind}: confidence off by {table['expected_error']:.3f}; said, kept, tokens:")
            rows = table["table"]
            print(
                "  " + "; ".join(f"{r['confidence']:.2f} {r['accepted']:.2f} {r['num_tokens']}" for r in rows)
            )


def bars(found: dict[str, Any]) -> dict[str, bool]:
    """Return what the draft must reach, and whether it does."""
    own = found["drafters"].get("dflash2")
    if own is None:
        return {}
    return {
        f"at least {LEAST_ALL} tokens a cycle": own["all"]["tokens_per_cycle"] >= LEAST_ALL,
        f"at least {LEAST_GENRE} in each genre": all(
            (one["tokens_per_cycle"] or 0) >= LEAST_GENRE for one in own["by_genre"].values()
        ),
        "every answer that of plain decode": not any(d["num_different"] for d in found["drafters"].values()),
    }


def main() -> None:
    """Serve, print, and write the JSON."""
    ap = arguments(__doc__)
    ap.add_argument("--per-genre", type=int, default=20, help="held-out prompts of each genre")
    ap.add_argument("--json", type=pathlib.Path, help=f"default: {RESULT.name} in results/ of a whole run")
    ap.add_argument("--answers", type=pathlib.Path, help="keep answers here; go on from those that are there")
    args = ap.parse_args()
    chosen, prompts = held_out(args.per_genre)
    kinds = drafters_of(args)
    kept = Kept(args.answers) if args.answers else None
    plain = serve("none", prompts, args, kept)
    served = {kind: serve(kind, prompts, args, kept) for kind in kinds}
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "num_prompts": len(prompts),
        "max_tokens": MAX_TOKENS,
        "proposals": {"mtp": args.mtp, "lookup": args.lookup},
        **report(served, plain, [task["genre"] for task in chosen]),
    }
    found["bars"] = bars(found)
    show(found)
    for bar, is_met in found["bars"].items():
        print(f"{'met' if is_met else 'NOT MET'}: {bar}")
    place = args.json or (RESULT if args.per_genre >= 20 else None)
    if place is not None:
        place.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
