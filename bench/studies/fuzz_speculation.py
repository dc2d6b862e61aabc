"""Does anything that proposes, fails, or is interrupted change an answer? Random conversations say no.

    python -m bench.studies.fuzz_speculation [--minutes 10] [--seed 1] [--case N]

Every case builds a tiny checkpoint of random geometry and layout and holds conversations of a few turns with
one session: continued, edited, repeated, cut. A drafter proposes (the text's own, the module, a draft with
random weights, or one that is told the answer and lies at random, raises, or wants to see every row), while
answers are abandoned, cancelled, interleaved with others, or lose a read. Every turn is compared with plain
decode on the independent reference path (`tests/tiny/weights.py`), one token at a time from an empty state:
tokens, text, reason, and the whole state, bit for bit. No lease, pin or block may be left, and the statistics
must add up. A case depends on its number and the seed alone. The last line of stdout is one JSON document.
"""

import argparse
import gc
import json
import random
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx

from bench.studies.disturbing import BreakableSource, Broken, Told
from bench.studies.fuzz_exact import GEOMETRIES, LAYOUTS, build
from expert_store.errors import StoreError
from expert_store.source import ByteSource
from mlx_flashnext.engine.engine import Engine, Session
from mlx_flashnext.engine.events import Event, Finished, Token
from mlx_flashnext.engine.generate import Limits, _Output
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.predictors import HINTS
from mlx_flashnext.engine.sampler import Sampler, SamplingParams
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.state import SequenceState
from tests.tiny.own_drafts import write_draft
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel

SHARED = 6
"""Cases that share a checkpoint."""
KINDS = ("none", "lookup", "mtp", "dflash2", "told", "told rows")
HABITS = (
    "quiet", "quiet", "closed before", "left before", "left and resumed", "cancelled before", "two sessions",
    "a read fails", "thrown into",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """One turn's request."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain decode says."""

    tokens: list[int]
    text: str
    reason: str
    state: SequenceState


def refer(model: FlashNext, engine: Engine, question: Question) -> Reference:
    """Answer token by token on the reference path."""
    state, sampler = model.new_state(), Sampler(question.params, question.prompt)
    limits = Limits(0, 0, frozenset(question.stop_ids), question.stop_strings, 1, lambda: False)
    output, tokens = _Output(engine.tokenizer.stream_decoder(), limits), []
    for token in question.prompt[:-1]:
        mx.eval(advance(model, [token], state, logits="none").stack)
    token, reason = question.prompt[-1], None
    context = engine.plan.context_tokens
    while reason is None:
        if len(tokens) >= question.max_tokens:
            reason = "length"
        elif state.num_tokens >= context:
            reason = "context"
        else:
            logits = advance(model, [token], state).logits
            assert logits is not None
            token = int(sampler.sample(logits[-1]).item())
            sampler.observe(token)
            tokens.append(token)
            output.take([token])
            reason = output.reason
    text = "".join(piece.text for piece in output.shown()) + output.tail()
    return Reference(tokens, text, reason, state)


def any_params(rng: random.Random) -> SamplingParams:
    """Return greedy or seeded sampling with random options."""
    changes: dict[str, Any] = {}
    if rng.random() < 0.4:
        changes = {
            "repetition_penalty": rng.choice((1.0, 0.8, 1.3)),
            "presence_penalty": rng.choice((0.0, 0.5)),
            "frequency_penalty": rng.choice((0.0, 0.3)),
            "penalty_context": rng.choice((1, 3, 20)),
        }
    if rng.random() < 0.2:
        changes["logit_bias"] = {rng.randrange(128): rng.uniform(-5, 5) for _ in range(rng.randrange(1, 5))}
    if rng.random() < 0.5:
        return SamplingParams(temperature=0.0, **changes)
    filters = {
        "top_k": rng.choice((0, 1, 5, 40, 1000)),
        "top_p": rng.choice((1.0, 0.95, 0.3, 0.0)),
        "min_p": rng.choice((0.0, 0.05)),
    }
    seed = rng.choice((0, 1, rng.getrandbits(63)))
    return SamplingParams(temperature=rng.choice((0.2, 0.9, 2.0)), seed=seed, **filters, **changes)


def any_text(rng: random.Random, length: int) -> list[int]:
    """Return tokens, sometimes repetitive, so that a lookup finds something."""
    alphabet = rng.choice((2, 5, 118, 121))
    tokens = [rng.randrange(alphabet) for _ in range(length)]
    if length > 8 and rng.random() < 0.5:
        period = rng.randrange(1, 7)
        tokens = [tokens[at % period] if at >= length // 3 else token for at, token in enumerate(tokens)]
    return tokens


def next_prompt(rng: random.Random, before: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the next turn's prompt: continued, edited, repeated, cut, or something else."""
    whole = [*before, *answer]
    more = any_text(rng, rng.choice((1, 2, rng.randrange(1, 25))))
    choice = rng.randrange(7)
    if choice == 0:
        return list(before)
    if choice == 1:
        return whole[: rng.randrange(1, len(whole) + 1)]
    if choice == 2:
        return [*whole[: rng.randrange(len(whole) + 1)], *more]
    if choice == 3:
        return [*whole[: max(0, len(whole) - rng.randrange(20))], *more]
    if choice == 4:
        return any_text(rng, rng.randrange(1, 40))
    return [*whole, *more]


class Case:
    """One checkpoint, one engine, one conversation."""

    def __init__(self, rng: random.Random, directory: Path, model: FlashNext, draft: Path | None) -> None:
        self.rng, self.directory, self.model, self.draft = rng, directory, model, draft
        self.kind = rng.choice(KINDS if draft is not None else tuple(k for k in KINDS if k != "dflash2"))
        config, width = model.config, rng.choice((1, 2, 3, 5, 8, 16))
        fewest, most = max(2, config.num_experts_per_tok), config.num_experts
        self.request = PlanRequest(
            context_tokens=rng.choice((60, 300)),
            slots_per_layer=rng.choice((fewest, most, rng.randint(fewest, most))),
            prefill_step=rng.choice((1, 3, 7, 16, 64, rng.randrange(1, 130))),
            policy=rng.choice(("lru", "slru")),
            num_readers=rng.choice((1, 4)),
            draft="oracle" if self.kind.startswith("told") else self.kind,
            draft_directory=draft if self.kind == "dflash2" else None,
            num_draft_tokens=None if self.kind == "none" else width,
            num_snapshots=rng.choice((0, 1, 4)),
            hints=rng.choice(("off", "off", "off", *(kind for kind in HINTS if kind != "oracle"))),
        )
        self.is_guarded = rng.random() < 0.3
        self.error_rate = rng.choice((0.0, 0.2, 0.5, 1.0))
        self.fault_rate = rng.choice((0.0, 0.0, 0.1, 0.5))
        self.told: Told | None = None
        self.left: list[Iterator[Event]] = []
        self.log: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any] | None:
        """Hold the conversation; return what was wrong, or None."""
        source: list[BreakableSource] = []

        def wrapped(inner: ByteSource) -> ByteSource:
            source.append(BreakableSource(inner))
            return source[0]

        with Engine.open(self.directory, self.request, wrap_source=wrapped) as engine:
            session, prompt = (
                self._session(engine),
                any_text(self.rng, self.rng.choice((1, 2, 15, 16, 17, 30, 50))),
            )
            for turn in range(self.rng.randrange(1, 5)):
                prompt = prompt[: self.request.context_tokens]
                question = self._question(prompt)
                expected = refer(self.model, engine, question)
                habit = self.rng.choice(HABITS)
                self.log.append({"turn": turn, "habit": habit, "question": str(question)})
                try:
                    wrong = self._turn(engine, session, source[0], question, expected, habit)
                except Exception:  # noqa: BLE001  anything that is raised is a finding
                    wrong = {"raised": traceback.format_exc()}
                if wrong:
                    return {"kind": self.kind, "request": str(self.request), "log": self.log,
                            "guarded": self.is_guarded, **wrong}  # fmt: skip
                prompt = next_prompt(self.rng, prompt, expected.tokens)
            self.left.clear()
        return None

    def _session(self, engine: Engine) -> Session:
        if not self.kind.startswith("told"):
            return engine.session(is_guarded=self.is_guarded)
        rng = random.Random(self.rng.getrandbits(32))
        self.told = Told(rng, self.error_rate, self.fault_rate, needs_stack=self.kind == "told rows")
        return engine.session(self.told, is_guarded=self.is_guarded)

    def _question(self, prompt: list[int]) -> Question:
        rng = self.rng
        stop_ids = tuple(rng.sample(range(128), rng.choice((0, 0, 2, 10))))
        strings = ("".join(rng.sample("abcdefg ", rng.randrange(1, 3))),) if rng.random() < 0.2 else ()
        most = rng.choice((0, 1, 2, 7, 20, 40))
        return Question(prompt, any_params(rng), most, stop_ids, strings)

    def _ask(self, session: Session, question: Question, **options: Any) -> Iterator[Event]:
        rule = self.rng.choice(("auto", "coupled"))
        return session.generate(
            question.prompt,
            question.params,
            max_tokens=question.max_tokens,
            stop_ids=question.stop_ids,
            stop_strings=question.stop_strings,
            rule=rule,
            **options,
        )

    def _turn(
        self,
        engine: Engine,
        session: Session,
        source: BreakableSource,
        question: Question,
        expected: Reference,
        habit: str,
    ) -> dict[str, Any] | None:
        if self.told is not None:
            self.told.truth = [*question.prompt, *expected.tokens]
        rng = self.rng
        if habit == "closed before":
            begun = self._ask(session, question)
            for _ in range(rng.randrange(12)):
                next(begun, None)
            begun.close()
        elif habit in ("left before", "left and resumed"):
            begun = self._ask(session, question)
            for _ in range(rng.randrange(12)):
                next(begun, None)
            self.left.append(begun)
            del begun
        elif habit == "cancelled before":
            asked = iter(range(rng.randrange(10)))
            list(self._ask(session, question, cancelled=lambda: next(asked, None) is None))
        elif habit == "a read fails":
            source.reads_left = rng.randrange(60)
            with suppress(StoreError):
                list(self._ask(session, question))
            source.reads_left = None
        elif habit == "thrown into":
            begun = self._ask(session, question)
            for _ in range(rng.randrange(1, 12)):
                next(begun, None)
            with suppress(Broken):
                begun.throw(Broken("from outside"))
        wrong = self._idle(engine)
        if wrong:
            return {"after": habit, **wrong}
        events: list[Event] = []
        other = self._other(engine, question) if habit == "two sessions" else None
        asked_again = self._ask(session, question)
        for event in asked_again:
            events.append(event)
            if other is not None:
                next(other, None)
            if self.left and rng.random() < 0.1:
                if habit == "left and resumed" and rng.random() < 0.7:
                    next(self.left[-1], None)
                else:
                    self.left.pop()
                    gc.collect()
        if other is not None:
            list(other)
        return self._compare(session, events, question, expected) or self._idle(engine)

    def _other(self, engine: Engine, question: Question) -> Iterator[Event]:
        """Answer the same question in another session, and check it."""
        expected = refer(self.model, engine, question)
        drafter = None
        if self.told is not None:
            drafter = Told(
                random.Random(1), self.error_rate, self.fault_rate, needs_stack=self.told.needs_stack
            )
            drafter.truth = [*question.prompt, *expected.tokens]
        session = engine.session(drafter, is_guarded=self.is_guarded)
        events: list[Event] = []
        for event in self._ask(session, question):
            events.append(event)
            yield event
        wrong = self._compare(session, events, question, expected)
        if wrong:
            raise AssertionError(f"the other session: {wrong}")

    def _compare(
        self, session: Session, events: list[Event], question: Question, expected: Reference
    ) -> dict[str, Any] | None:
        tokens = [event.token_id for event in events if isinstance(event, Token)]
        end = events[-1]
        if not isinstance(end, Finished):
            return {"no end": str(end)}
        text = "".join(event.text for event in events if isinstance(event, Token)) + end.text
        got, wanted = (tokens, text, end.reason), (expected.tokens, expected.text, expected.reason)
        if got != wanted or any(type(token) is not int for token in tokens):
            return {"expected": wanted, "got": got}
        consumed = [*question.prompt, *tokens][:-1]
        if list(session.tokens) != consumed:
            return {"session tokens": session.tokens, "wanted": consumed}
        timeline = session._timeline
        assert timeline is not None
        state, wanted_state = timeline.state.named_arrays(), expected.state.named_arrays()
        unequal = [name for name in wanted_state if not mx.array_equal(state[name], wanted_state[name])]
        if unequal:
            return {"state": unequal}
        if self.told is not None and self.told.complaints:
            return {"the drafter says": self.told.complaints}
        statistics, draft = end.statistics, end.statistics.draft
        sums = {
            "output": statistics.output_tokens == len(tokens),
            "prompt": statistics.prompt_tokens == len(question.prompt),
            "reused": 0 <= statistics.reused_tokens < max(1, len(question.prompt)),
            "cycles": len(tokens) - draft.num_accepted in (statistics.cycles, statistics.cycles - 1),
            "slots": sum(draft.accepted_by_slot) == draft.num_accepted <= draft.num_proposed,
            "tried": sum(draft.proposed_by_slot) == draft.num_proposed,
            "used": (draft.used == "none") == (draft.num_cycles == 0),
            "failures": draft.num_failures <= 1 and (draft.num_failures == 0 or draft.reason is not None),
            "rates": draft.num_failures == 0 or self.fault_rate > 0,
        }
        failed = [name for name, holds in sums.items() if not holds]
        return {"statistics": failed, "are": str(statistics)} if failed else None

    def _idle(self, engine: Engine) -> dict[str, Any] | None:
        """Return what is left over between two answers."""
        store, experts = engine.target.store, engine.target.experts
        store.wait_idle(10)
        pins = [sum(shelf.table._pins) for shelf in store._shelves.values()]
        left = {
            "leases": len(experts._held),
            "pins": sum(pins),
            "listener": experts.listener is not None,
            "unverified": experts.num_unverified,
        }
        return {"left over": left} if any(left.values()) else None


def main() -> None:
    """Run until the time is up or something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="run this one alone")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    numbers = count() if options.case is None else iter((options.case,))
    cases = turns = 0
    kinds: dict[str, int] = {}
    found: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for number in numbers:
            if time.monotonic() > end or found is not None:
                break
            if not cases or number % SHARED == 0:
                rng = random.Random(f"{options.seed} {number // SHARED}")
                layout, geometry, seed = rng.choice(LAYOUTS), rng.choice(GEOMETRIES), rng.randrange(50)
                directory = build(place / f"tiny {number}", layout, geometry, seed)
                draft = write_draft(place / f"draft {number}", directory) if fits(geometry) else None
                model = TinyModel.open(directory).model
            case = Case(random.Random(f"{options.seed} case {number}"), directory, model, draft)
            found = case.run()
            cases, turns = cases + 1, turns + len(case.log)
            kinds[case.kind] = kinds.get(case.kind, 0) + 1
            if found is not None:
                found |= {"case": number, "layout": layout, "geometry": geometry, "checkpoint": seed}
    said = "all as plain decode" if found is None else f"WRONG: {json.dumps(found, indent=1, default=str)}"
    print(f"{cases} conversations of {turns} turns: {said}")
    report = {
        "study": "fuzz_speculation",
        "seed": options.seed,
        "cases": cases,
        "turns": turns,
        "kinds": kinds,
    }
    print(json.dumps({**report, "wrong": found}, default=str))
    raise SystemExit(found is not None)


def fits(geometry: dict[str, Any]) -> bool:
    """Return whether the tests' own draft, which taps three layers, fits."""
    return geometry.get("num_hidden_layers", 8) >= 3


if __name__ == "__main__":
    main()
