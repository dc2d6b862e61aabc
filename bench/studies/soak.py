"""Does a process that talks for hours, and is disturbed all the time, stay whole? 2,000 turns on the demo.

    python -m bench.studies.soak [--turns 2000] [--seed 1] [--progress FILE]

One process answers turn after turn of scripted conversations. Between and within turns, at random: answers
are cancelled, closed, left to the collector, or lose a read; sessions are reset or changed; the drafter,
the hints, the number of slots, the policy, the chunks, the readers and the budget of guesses change;
targets that cannot fit and files that fail while they are opened are refused. Every turn ends with a whole
answer, which must be that of plain decode with every expert resident, taken once before. After every turn
no lease, pin, ticket or listener may be left and the slot tables must hold; after every block of turns the
engine is closed and `resting.py` looks at memory, threads and descriptors. The last line of stdout is one
JSON document; `--progress` has a line a block.
"""

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

from bench.studies.disturbing import BreakableSource
from bench.studies.resting import MOST_DRIFT, Rest, drift, judge, measure, use_one_arena
from drafter.lookup import LookupDrafter
from expert_store.errors import StoreError
from expert_store.slots import SlotState
from expert_store.source import ByteSource
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine, Session
from mlx_flashnext.engine.errors import EngineError
from mlx_flashnext.engine.events import Event, Finished, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.reports.prompt_sets import demo_tasks
from mlx_flashnext.text.template import ChatTemplate

CONTEXT: Final = 384
DRAFTS: Final = ("none", "lookup", "mtp", "dflash2")
HINTS: Final = ("off", "near-gate", "near-linear", "sidecar", "both", "frequency", "previous", "random")
HABITS: Final = ("whole", "whole", "whole", "cancelled", "closed", "left", "a read fails", "reset", "jump")
SHORTEST: Final = 40
"""Tasks of the demo that are asked: the shorter a turn, the more of them an hour has."""
BLOCK: Final = 25
"""Turns between two looks at the resting process."""
REOPEN: Final = 0.12
"""How often the engine is opened anew, with another plan."""


class WentWrongError(Exception):
    """What a soak is there to find; the message says what and where."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a soak talks to, and between what it switches.

    Attributes:
        model: a checkpoint that has drafts of every kind in `DRAFTS`.
        draft: directory of its block draft; None for the one beside it.
        slots: numbers of slots a layer; the last is all experts.
        hints: that any drafter goes with.
        draft_hints: that its block draft goes with.
    """

    model: Path
    draft: Path | None
    slots: tuple[int, ...]
    hints: tuple[str, ...]
    draft_hints: tuple[str, ...]


DEMO: Final = Setting(
    demo_dir(), None, (8, 12, 16, 24, 40, 63, 64), ("off", "near-gate", "near-linear"), HINTS
)


@dataclass(frozen=True, slots=True)
class Question:
    """One turn of a script and what plain decode answers."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    answer: tuple[int, ...]


def answered(engine: Engine, prompt: Sequence[int], rng: random.Random) -> Question:
    """Return a question with what an engine, which is to be a plain one, says in a session of its own."""
    params = SamplingParams(temperature=0.0)
    if rng.random() < 0.3:
        params = SamplingParams(temperature=0.8, seed=rng.getrandbits(32))
    most = rng.randint(2, 8)
    events = list(engine.session().generate(prompt, params, max_tokens=most))
    return Question(tuple(prompt), params, most, tokens_of(events))


def write_scripts(num_scripts: int, num_turns: int, seed: int) -> list[list[Question]]:
    """Return conversations with the demo, answered plainly by an engine with every expert resident."""
    rng, tasks = random.Random(f"scripts {seed}"), sorted(demo_tasks(), key=len)[:SHORTEST]
    request = PlanRequest(context_tokens=CONTEXT, slots_per_layer=DEMO.slots[-1])
    scripts = []
    with Engine.open(DEMO.model, request) as engine, ChatTemplate.open(DEMO.model) as template:
        assert engine.plan.is_resident
        for _ in range(num_scripts):
            messages: list[dict[str, Any]] = []
            script: list[Question] = []
            for _ in range(num_turns):
                messages.append({"role": "user", "content": rng.choice(tasks)})
                script.append(answered(engine, engine.tokenizer.encode(template.render(messages)), rng))
                tokens = script[-1].answer
                messages.append({"role": "assistant", "content": engine.tokenizer.decode(tokens)})
            scripts.append(script)
    return scripts


def tokens_of(events: Sequence[Event]) -> tuple[int, ...]:
    """Return the tokens among events."""
    return tuple(event.token_id for event in events if isinstance(event, Token))


class Soak:
    """A process under way.

    Args:
        setting: what it talks to.
        scripts: what is said.
        seed: of everything that is random.
        place: for files of warm starts.
        after_turn: called after every turn; the tests plant leaks here.

    Attributes:
        engine: the one that is open.
        done: what has happened how often.
    """

    def __init__(
        self,
        setting: Setting,
        scripts: Sequence[Sequence[Question]],
        seed: int,
        place: Path,
        after_turn: Callable[["Soak"], None] = lambda _soak: None,
    ) -> None:
        self.engine: Engine | None = None
        self.done: Counter[str] = Counter()
        self._setting = setting
        self._scripts = scripts
        self._rng = random.Random(f"soak {seed}")
        self._place = place
        self._after_turn = after_turn
        self._source: BreakableSource | None = None
        self._session: Session | None = None
        self._left: list[Iterator[Event]] = []
        self._script, self._at = 0, 0

    def block(self, num_turns: int) -> None:
        """Run turns, then close everything.

        Raises:
            WentWrongError: says what and where.
        """
        try:
            for _ in range(num_turns):
                if self.engine is None or self._rng.random() < REOPEN:
                    self._reopen()
                self.turn()
                self._after_turn(self)
                self.check_idle()
        finally:
            self._close()

    def turn(self) -> None:
        """Answer the next question, disturbed as chance has it, until the answer is whole."""
        rng = self._rng
        habit = rng.choice(HABITS)
        if habit == "jump" or self._at >= len(self._scripts[self._script]):
            self._script, self._at = rng.randrange(len(self._scripts)), 0
            if rng.random() < 0.5:  # else the session finds a prompt that leaves its own
                self._session = None
        question = self._scripts[self._script][self._at]
        session = self._usable_session()
        self.done[habit] += 1
        self._disturb(session, question, habit)
        if self._left and rng.random() < 0.5:
            del self._left[0]
        if rng.random() < 0.1:
            session = self._change_session()
        tokens = tokens_of(events := list(self._ask(session, question)))
        if tokens != question.answer or not isinstance(events[-1], Finished):
            raise WentWrongError(
                f"answered {tokens}, plain decode says {question.answer}; {self._where(habit)}"
            )
        self._at += 1

    def check_idle(self) -> None:
        """Look for what an answer has left over, in the store and in the experts.

        Raises:
            WentWrongError: names it.
        """
        assert self.engine is not None
        store, experts = self.engine.target.store, self.engine.target.experts
        store.wait_idle(60)
        with store._lock:
            tables = [shelf.table for shelf in store._shelves.values()]
            for table in tables:
                table.check()
            left = {
                "leases": len(experts._held),
                "pins": sum(sum(table._pins) for table in tables),
                "loading": sum(table._states.count(SlotState.LOADING) for table in tables),
                "tickets": store._dispatcher.queue.num_queued,
                "listener": int(experts.listener is not None),
                "unverified": experts.num_unverified,
            }
        if any(left.values()):
            raise WentWrongError(
                f"left over: { ({k: v for k, v in left.items() if v}) }; {self._where('idle')}"
            )

    def _disturb(self, session: Session, question: Question, habit: str) -> None:
        rng, got = self._rng, ()
        if habit == "reset":
            session.reset()
        elif habit == "cancelled":
            asked = iter(range(rng.randrange(12)))
            events = list(self._ask(session, question, cancelled=lambda: next(asked, None) is None))
            got = tokens_of(events)
        elif habit in ("closed", "left"):
            begun = self._ask(session, question)
            got = tokens_of([event for _ in range(rng.randrange(12)) if (event := next(begun, None))])
            if habit == "closed":
                begun.close()
            else:
                self._left.append(begun)
                del self._left[:-3]
        elif habit == "a read fails":
            assert self._source is not None
            self._source.reads_left = rng.randrange(80)
            events = []
            try:
                for event in self._ask(session, question):
                    events.append(event)
            except StoreError:
                self.done["reads that failed"] += 1
            self._source.reads_left = None
            got = tokens_of(events)
        if got != question.answer[: len(got)]:
            raise WentWrongError(f"said {got} of {question.answer}; {self._where(habit)}")

    def _ask(self, session: Session, question: Question, **options: Any) -> Iterator[Event]:
        return session.generate(
            question.prompt, question.params, max_tokens=question.max_tokens, rule="coupled", **options
        )

    def _usable_session(self) -> Session:
        if self._session is None or self._rng.random() < 0.1:
            return self._change_session()
        return self._session

    def _change_session(self) -> Session:
        """Take a new session: another drafter, other hints, another budget of guesses, within one engine."""
        assert self.engine is not None
        rng, engine = self._rng, self.engine
        own = LookupDrafter(CONTEXT) if engine.plan.draft == "lookup" and rng.random() < 0.5 else None
        hints = engine.new_hints(rng.choice(self._setting.draft_hints)) if rng.random() < 0.5 else None
        self._session = engine.session(own, is_guarded=rng.random() < 0.5, hints=hints)
        engine.target.store.set_prefetch_budget(rng.choice((None, None, 0, 1 << 20)))
        self.done["sessions"] += 1
        return self._session

    def _reopen(self) -> None:
        """Open the demo with another plan; now and then be refused first, in two ways."""
        self._close()
        rng = self._rng
        if rng.random() < 0.2:
            with contextlib.suppress(EngineError):
                Engine.open(self._setting.model, PlanRequest(memory_bytes=1 << 20))
                raise WentWrongError("a megabyte was enough")
            self.done["plans refused"] += 1
        if rng.random() < 0.2:
            self._fail_to_open()
        setting, draft = self._setting, rng.choice(DRAFTS)
        request = PlanRequest(
            context_tokens=CONTEXT,
            slots_per_layer=rng.choice(setting.slots),
            prefill_step=rng.choice((None, 5, 16, 64)),
            policy=rng.choice(("lru", "slru")),
            num_readers=rng.choice((1, 2, 4)),
            draft=draft,
            draft_directory=setting.draft if draft == "dflash2" else None,
            num_draft_tokens=None if draft == "none" else rng.choice((None, 1, 3)),
            num_snapshots=rng.choice((0, 1, 4)),
            hints=rng.choice(setting.draft_hints if draft == "dflash2" else setting.hints),
        )
        warm = self._place / "warm" if rng.random() < 0.5 else None
        self.engine = Engine.open(setting.model, request, wrap_source=self._breakable, warm_directory=warm)
        self.done[f"opened with {draft}"] += 1
        self.done[f"hints {request.hints}"] += 1

    def _fail_to_open(self) -> None:
        def broken(inner: ByteSource) -> ByteSource:
            source = BreakableSource(inner)
            source.reads_left = self._rng.randrange(100)
            return source

        request = PlanRequest(context_tokens=CONTEXT, slots_per_layer=self._setting.slots[-1])
        with contextlib.suppress(StoreError):
            Engine.open(self._setting.model, request, wrap_source=broken).close()
            raise WentWrongError("files that fail were opened")
        self.done["opening failed"] += 1

    def _breakable(self, inner: ByteSource) -> ByteSource:
        self._source = BreakableSource(inner)
        return self._source

    def _close(self) -> None:
        self._left.clear()
        self._session = self._source = None
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _where(self, habit: str) -> str:
        plan = "closed" if self.engine is None else self.engine.plan
        return f"{habit}, script {self._script}, question {self._at}, {plan}"


def run(soak: Soak, turns: int, block: int, progress: IO[str] | None = None) -> list[Rest]:
    """Run so many turns in blocks; return every rest, that before the first turn included.

    Raises:
        WentWrongError: an answer was wrong, or something was left over.
    """
    rests, began = [measure(0)], time.monotonic()
    while rests[-1].turns < turns:
        todo = min(block, turns - rests[-1].turns)
        soak.block(todo)
        rests.append(measure(rests[-1].turns + todo))
        if progress is not None:
            rest, seconds = rests[-1], time.monotonic() - began
            print(json.dumps({**asdict(rest), "seconds": round(seconds)}), file=progress, flush=True)
    return rests


def main() -> None:
    """Run, and say what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=200, help="turns before the first rest that counts")
    parser.add_argument("--progress", type=Path, help="a line of JSON is added to it after every block")
    options = parser.parse_args()
    use_one_arena()
    began, wrong, rests = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as open_files:
        told = open_files.enter_context(options.progress.open("a")) if options.progress else sys.stderr
        soak = Soak(DEMO, write_scripts(24, 3, options.seed), options.seed, Path(place))
        try:
            rests = [rest for rest in run(soak, options.turns, BLOCK, told) if rest.turns >= options.warm_up]
            wrong = judge(rests)
        except WentWrongError as error:
            wrong = [str(error)]
    grown = {name: drift(rests, name) for name in ("rss_bytes", "blocks")} if rests else {}
    for name, share in grown.items():
        print(f"{name}: {share:+.2%} from the first fifth of the run to the last, bar {MOST_DRIFT:.0%}")
    print(f"{options.turns} turns in {time.monotonic() - began:.0f} s: {'; '.join(wrong) or 'all whole'}")
    report = {"study": "soak", "seed": options.seed, "turns": options.turns, "done": dict(soak.done)}
    ends = {"first": asdict(rests[0]), "last": asdict(rests[-1])} if rests else {}
    print(json.dumps({**report, **ends, "drift": grown, "wrong": wrong}))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
