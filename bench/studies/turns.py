"""Variants of decoding, measured in turns in one process: what the speed studies share. Entry: `in_turns`.

This machine's pace changes by a third within a minute. So every variant, the one with all experts resident
included, answers once in every round, forwards and backwards in turns; a round is compared with itself only,
and ratios are medians over rounds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from drafter.api import Drafter
from expert_store.keys import WaitCause
from expert_store.layout import ReadOp
from expert_store.source import ByteSource
from expert_store.testing import ThrottledSource
from mlx_flashnext.engine.deltas import since
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.predictors import Oracle, Predictor, PredictorSetting, make_predictor
from mlx_flashnext.engine.routes import RecordedRoutes, RouteLog
from mlx_flashnext.reports.measure import GREEDY, answer
from mlx_flashnext.reports.ssd_wait_run import DRAFT_ORACLE


class Dial:
    """A drive whose rate can be changed while an engine is open."""

    def __init__(self) -> None:
        self._drive: ThrottledSource | None = None
        self._plain: ByteSource | None = None

    def wrap(self, source: ByteSource) -> ByteSource:
        """Wrap an engine's files."""
        self._plain = source
        return _Dialled(self, source)

    def turn(self, bytes_per_s: float | None) -> None:
        """Set the rate; None for that of the page cache."""
        assert self._plain is not None
        self._drive = None if bytes_per_s is None else ThrottledSource(self._plain, bytes_per_s=bytes_per_s)

    @property
    def drive(self) -> ByteSource:
        """The drive as it is set."""
        assert self._plain is not None
        return self._drive or self._plain


class _Dialled(ByteSource):
    def __init__(self, dial: Dial, inner: ByteSource) -> None:
        self._dial = dial
        self._inner = inner

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        return self._dial.drive.read_into(file, offset, views)

    def read_runs(self, runs: Sequence[ReadOp], views: Sequence[memoryview]) -> int:
        return self._dial.drive.read_runs(runs, views)

    def name(self, file: int) -> str:
        return self._inner.name(file)

    def close(self) -> None:
        self._inner.close()


class Recorded(NamedTuple):
    """A prompt with what a plain run made of it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    routes: RecordedRoutes


@dataclass(frozen=True, slots=True)
class Contender:
    """A variant.

    Attributes:
        name: what rows call it.
        engine: that it runs in.
        hints: who says what to read ahead; keeps its predictors from answer to answer.
        drafter: makes who proposes for a recorded prompt; None for the engine's own, if it has one.
    """

    name: str
    engine: Engine
    hints: str = "off"
    drafter: Callable[[Recorded], Drafter] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer, or the mean of several; times in nanoseconds, all per committed token."""

    token_ns: float
    waits_ns: Mapping[str, float]
    ngram_ns: float
    required_bytes: float
    physical_bytes: float
    prefetched: float
    accepted: float

    @property
    def wait_ns(self) -> float:
        """Exposed wait for experts."""
        return sum(self.waits_ns.values())


class Turns:
    """Answers of contenders; remembers the predictors that learn."""

    def __init__(self, recorded: Sequence[Recorded], num_tokens: int) -> None:
        self._recorded = recorded
        self._num_tokens = num_tokens
        self._predictors: dict[str, Predictor | None] = {}

    def run(self, one: Contender) -> Turn:
        """Return the mean of a contender's answers to every prompt; a prompt is read before the clock runs.

        Raises:
            SystemExit: it said other tokens than the recorded run: figures would compare different work.
        """
        return _mean([self._answer(one, recorded) for recorded in self._recorded])

    def _answer(self, one: Contender, recorded: Recorded) -> Turn:
        engine, store, rows = one.engine, one.engine.target.store, one.engine.target.rows
        hints = Hints(self._predictor(one, recorded), engine.config.num_hidden_layers)
        drafter = None if one.drafter is None else one.drafter(recorded)
        session = engine.session(drafter, is_guarded=False, hints=hints)
        answer(session, recorded.prompt, 0)
        before, rows_before = store.statistics(), rows.statistics()
        events = list(session.generate(recorded.prompt, GREEDY, max_tokens=self._num_tokens))
        tokens = tuple(event.token_id for event in events if isinstance(event, Token))
        if tokens != recorded.tokens:
            raise SystemExit(f"{one.name} answered other tokens than the plain run")
        store.wait_idle()
        end = events[-1]
        assert isinstance(end, Finished)
        got, got_rows = since(store.statistics(), before), since(rows.statistics(), rows_before)
        count = end.statistics.output_tokens
        record_bytes = got.exact_bytes / got.num_exact if got.num_exact else _record_bytes(engine)
        joined = got.num_joined
        absent = got.num_misses + joined + got.num_prefetched + got.num_stale_used
        return Turn(
            token_ns=end.statistics.decode_ns / count,
            waits_ns={
                cause.name.lower(): (split.queue_ns + split.read_ns) / count
                for cause, split in got.waits.items()
            },
            ngram_ns=got_rows.exposed_wait_ns / count,
            required_bytes=absent * record_bytes / count,
            physical_bytes=got.physical_bytes / count,
            prefetched=(got.num_prefetched + joined) / got.num_demands if got.num_demands else 0.0,
            accepted=count / end.statistics.cycles,
        )

    def _predictor(self, one: Contender, recorded: Recorded) -> Predictor | None:
        if one.hints in ("oracle", DRAFT_ORACLE):
            return Oracle(recorded.routes, looks_beyond=one.hints == "oracle")
        if one.name not in self._predictors:
            layouts = one.engine.checkpoint.experts
            layers = {layer: layout.record.num_experts for layer, layout in layouts.items()}
            routes = one.engine.routes
            setting = PredictorSetting(
                layers,
                one.engine.config.num_experts_per_tok,
                near=routes.near,
                head=None if routes.sidecar is None else routes.sidecar.head,
            )
            self._predictors[one.name] = make_predictor(one.hints, setting)
        return self._predictors[one.name]


def record(engine: Engine, prompt: Sequence[int], num_tokens: int) -> Recorded:
    """Answer a prompt plainly in an engine that streams, and write down tokens and routes."""
    log = RouteLog()
    session = engine.session(hints=Hints(None, engine.config.num_hidden_layers, log))
    events = list(session.generate(prompt, GREEDY, max_tokens=num_tokens))
    tokens = tuple(event.token_id for event in events if isinstance(event, Token))
    return Recorded(tuple(prompt), tokens, RecordedRoutes(log.passes))


def in_turns(
    contenders: Sequence[Contender], turns: Turns, rounds: int, *, max_seconds: float = 240.0
) -> dict[str, list[Turn]]:
    """Run every contender once uncounted, then once a round; stop early when the time is up."""
    began = time.monotonic()
    found: dict[str, list[Turn]] = {one.name: [] for one in contenders}
    for number in range(1 + rounds):
        if number > 1 and time.monotonic() - began > max_seconds * number / (number + 1):
            break
        for one in contenders if number % 2 == 0 else list(reversed(contenders)):
            turn = turns.run(one)
            if number:
                found[one.name].append(turn)
    return found


def median_of(turns: Sequence[Turn]) -> Turn:
    """Return the median of every figure."""
    first = turns[0]
    values = {
        name: statistics.median(getattr(turn, name) for turn in turns)
        for name in first.__slots__
        if name != "waits_ns"
    }
    waits = {cause: statistics.median(turn.waits_ns[cause] for turn in turns) for cause in first.waits_ns}
    return replace(first, waits_ns=waits, **values)


def ratios(over: Sequence[Turn], under: Sequence[Turn]) -> tuple[float, float, float]:
    """Return median, least and greatest of the ratio of token times, round by round."""
    each = [a.token_ns / b.token_ns for a, b in zip(over, under, strict=True)]
    return statistics.median(each), min(each), max(each)


def attained(
    turns: Sequence[Turn], resident: Sequence[Turn], bytes_per_s: float
) -> tuple[float, float, float]:
    """Return median, least and greatest of the greater bound over the time measured, round by round."""
    each = [
        max(base.token_ns, turn.required_bytes / bytes_per_s * 1e9) / turn.token_ns
        for turn, base in zip(turns, resident, strict=True)
    ]
    return statistics.median(each), min(each), max(each)


def causes(turn: Turn) -> str:
    """Return the exposed wait by cause, in words."""
    named = [cause.name.lower() for cause in WaitCause]
    parts = [f"{name} {turn.waits_ns[name] / 1e6:.1f}" for name in named if turn.waits_ns[name] >= 5e4]
    return ", ".join(parts) or "none"


def _mean(turns: Sequence[Turn]) -> Turn:
    first = turns[0]
    values = {
        name: statistics.fmean(getattr(turn, name) for turn in turns)
        for name in first.__slots__
        if name != "waits_ns"
    }
    waits = {cause: statistics.fmean(turn.waits_ns[cause] for turn in turns) for cause in first.waits_ns}
    return replace(first, waits_ns=waits, **values)


def _record_bytes(engine: Engine) -> float:
    return statistics.fmean(one.record.record_bytes for one in engine.checkpoint.experts.values())
