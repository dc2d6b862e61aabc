"""The promotion ladder: what a draft must show before anybody serves with it, rung by rung.

Entry point: `promote`. Every rung that this machine can climb is climbed; what only the target hardware
shows is marked so, with what was measured here beside it and no verdict. A rung that fails ends the climb:
those above it are `not reached`. The evidence is written beside the draft (`flashnext-promotion.json`)
whatever the outcome.

Source: dflash2.md 2.8, 2.9, 3.6, 7.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

from drafter.documents import DocumentRefused, read_document, unusable
from drafter.files import replace_file
from drafter.promotion import FILE, FORMAT, HELD_OUT, SCHEMA, VERSION
from drafter.train.captures import CaptureSet
from drafter.train.trained import FILE as TRAINING
from drafter.train.trained import Training, read_training
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.engine.stats import GenerationStatistics
from mlx_flashnext.training.draft_capture import facts_of, replay
from mlx_flashnext.training.draft_training import LoadedDraft, evaluate_draft, load_draft

GREEDY: Final = SamplingParams(temperature=0.0)
LEAST_TOKENS_PER_CYCLE: Final = 2.0
MOST_CALIBRATION_ERROR: Final = 0.1
# 1 in 1000 that a right sampler is refused, by the normal bound of a chi-square of its degrees.
_SIGMAS: Final = 3.1
_LEAST_COUNT: Final = 5.0
FEW_DEGREES: Final = 5
_FETCH_AGAIN: Final = "fetch the draft again, or export it again: flashnext draft export"

Outcome = Literal["passed", "failed", "not reached", "only target hardware", "not asked"]
OpenEngine = Callable[[Path | None, str], Engine]


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung: what it asks, what came of it, in one line why, and the figures."""

    name: str
    outcome: Outcome
    why: str
    evidence: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ladder:
    """What a promotion is made with.

    Attributes:
        captures: of this target build, with held-out documents.
        prompts: rendered; served with and without the draft.
        max_tokens: of each answer.
        num_samples: answers drawn for the sampling test with the draft, and as many without.
        sample_tokens: length of the drawn answers that are compared.
        least_tokens_per_cycle: held out and served.
    """

    captures: CaptureSet
    prompts: Sequence[list[int]]
    max_tokens: int = 128
    num_samples: int = 400
    sample_tokens: int = 2
    least_tokens_per_cycle: float = LEAST_TOKENS_PER_CYCLE


@dataclass(frozen=True, slots=True)
class _Served:
    answers: list[list[int]]
    statistics: list[GenerationStatistics]
    predicted_bytes: int = 0

    def per_token(self) -> dict[str, float]:
        """Return bytes read, read ahead, and nanoseconds waited for experts, all per committed token."""
        tokens = max(1, sum(one.output_tokens for one in self.statistics))
        return {
            "bytes_per_token": sum(one.read_bytes for one in self.statistics) / tokens,
            "predicted_bytes_per_token": self.predicted_bytes / tokens,
            "exposed_wait_ns_per_token": sum(one.exposed_wait_ns for one in self.statistics) / tokens,
        }

    @property
    def tokens_per_cycle(self) -> float:
        return sum(s.output_tokens for s in self.statistics) / max(1, sum(s.cycles for s in self.statistics))


def promote(
    open_engine: OpenEngine,
    directory: Path,
    ladder: Ladder,
    progress: Callable[[str], None] = lambda _rung: None,
) -> list[Rung]:
    """Climb, write the evidence beside the draft, and return the rungs.

    Args:
        open_engine: opens the target as it will be served, with the draft of a directory, or plain for None,
            and with a kind of hints.
        directory: of the draft.
        ladder: what to climb with.
        progress: called with the name of each rung that is begun.

    Raises:
        StoreError, EngineError, DrafterError: something could not be run at all, or a document beside the
            draft is damaged.
    """
    climb = _Climb(open_engine, directory, ladder)
    rungs: list[Rung] = []
    has_failed = False
    for name, measure in climb.rungs():
        if has_failed:
            rungs.append(Rung(name, "not reached", "a rung below failed", {}))
            continue
        progress(name)
        rung = measure(name)
        rungs.append(rung)
        has_failed = rung.outcome == "failed"
    document = {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **climb.identity,
        "is_promoted": not has_failed,
        "rungs": [asdict(rung) for rung in rungs],
    }
    replace_file(directory / FILE, json.dumps(document, indent=1).encode() + b"\n")
    return rungs


class _Climb:
    """What the rungs share: plain and drafted answers are given once."""

    def __init__(self, open_engine: OpenEngine, directory: Path, ladder: Ladder) -> None:
        self._open, self._directory, self._ladder = open_engine, directory, ladder
        self._draft: LoadedDraft | None = None
        self.identity: dict[str, Any] = {}
        self._plain = self._drafted = _Served([], [])

    def rungs(self) -> list[tuple[str, Callable[[str], Rung]]]:
        """Return the rungs from the lowest."""
        return [
            (SCHEMA, self._schema),
            ("golden replay", self._replay),
            ("training", self._training),
            (HELD_OUT, self._held_out),
            ("greedy equality", self._greedy),
            ("sampling distribution", self._sampling),
            ("bytes per accepted token", self._bytes),
            ("exposed SSD wait", self._wait),
            ("route hints", self._hints),
            ("end-to-end latency", self._latency),
        ]

    def _schema(self, name: str) -> Rung:
        """The gate lets it in."""
        with self._open(None, "off") as engine:
            self._draft = load_draft(engine, self._directory)
            facts = facts_of(engine)
            said = [reason.as_row() for reason in self._draft.verdict.reasons]
            self.identity = {
                "draft_digest": self._draft.verdict.digest,
                "target_digest": facts.digest,
                "runtime_version": facts.runtime_version,
            }
        return Rung(name, "passed", "the gate refuses nothing", {"reasons": said})

    def _replay(self, name: str) -> Rung:
        """Read as a prompt, captured documents give the features and routes they were captured with."""
        captures, rows, places = self._ladder.captures, 0, 0
        with self._open(None, "off") as engine:
            for info in captures.documents[:2]:
                document = captures.read(info)
                identity = captures.identity
                features, routes = replay(engine, document.tokens.tolist(), identity)
                if features.dtype != document.features.dtype:
                    features = (features.astype("u4") << 16).view("f4")
                if features.tobytes() != document.features.tobytes():
                    return Rung(name, "failed", f"features of document {info.key} differ", {})
                if routes.size:
                    if (routes != document.routes).any():
                        return Rung(name, "failed", f"routes of document {info.key} differ", {})
                    places += routes.shape[0] * routes.shape[1]
                rows += len(features)
        why = f"{rows} rows, to the bit; experts of {places} places"
        return Rung(name, "passed", why, {"num_rows": rows, "num_routes": places})

    def _training(self, name: str) -> Rung:
        """It says how it was trained, and the losses fell."""
        said = _training_of(self._directory)
        if said is None:
            return Rung(name, "not asked", "trained elsewhere: no record beside the draft", {})
        first, last = said.base_losses
        why = f"{said.steps_done} steps, base loss {first:.3g} to {last:.3g}"
        is_same = said.target_digest == self.identity["target_digest"]
        return Rung(name, "passed" if last < first and is_same else "failed", why, {"log": said.log})

    def _held_out(self, name: str) -> Rung:
        """On documents that training never saw it drafts well enough, and knows how well."""
        with self._open(None, "off") as engine:
            draft = load_draft(engine, self._directory)
            found = evaluate_draft(engine, draft, self._ladder.captures)
        rate, error = found["all"]["tokens_per_cycle"], found["all"]["calibration"]["expected_error"]
        is_good = rate >= self._ladder.least_tokens_per_cycle
        why = f"{rate:.2f} tokens a cycle, confidence off by {error:.3f}"
        if error > MOST_CALIBRATION_ERROR:
            why += ": use its table, not its words"
        return Rung(name, "passed" if is_good else "failed", why, found)

    def _greedy(self, name: str) -> Rung:
        """Greedy answers with it are those without it."""
        self._plain, self._drafted = self._serve(None, GREEDY), self._serve(self._directory, GREEDY)
        pairs = zip(self._plain.answers, self._drafted.answers, strict=True)
        wrong = [number for number, (plain, drafted) in enumerate(pairs) if plain != drafted]
        slots = [s.draft.accepted_by_slot for s in self._drafted.statistics]
        width = max(map(len, slots), default=0)
        rate = self._drafted.tokens_per_cycle
        evidence = {
            "num_prompts": len(self._plain.answers),
            "different": wrong,
            "tokens_per_cycle": rate,
            "num_failures": sum(s.draft.num_failures for s in self._drafted.statistics),
            "accepted_by_slot": [sum(row[i] for row in slots if i < len(row)) for i in range(width)],
        }
        why = f"{len(wrong)} of {len(self._plain.answers)} answers differ; {rate:.2f} tokens a cycle"
        return Rung(name, "failed" if wrong or evidence["num_failures"] else "passed", why, evidence)

    def _sampling(self, name: str) -> Rung:
        """At temperature 1 first tokens are distributed with it as without: chi-square of two samples."""
        count = self._ladder.num_samples
        if not count:
            return Rung(name, "not asked", "no samples were asked for", {})
        samples = [
            self._samples(directory, first) for directory, first in ((None, 0), (self._directory, count))
        ]
        statistic, degrees = chi_square(*samples)
        limit = degrees + _SIGMAS * (2 * degrees) ** 0.5
        why = f"chi-square {statistic:.1f} with {degrees} degrees, limit {limit:.1f}"
        if degrees < FEW_DEGREES:
            why += ": answers begin too much alike for this to say much"
        evidence = {"num_samples": count, "chi_square": statistic, "degrees": degrees, "limit": limit}
        return Rung(name, "passed" if statistic <= limit else "failed", why, evidence)

    def _bytes(self, name: str) -> Rung:
        """What experts cost: records read for a committed token, with it and without."""
        plain, drafted = (
            sum(s.read_bytes for s in served.statistics)
            / max(1, sum(s.output_tokens for s in served.statistics))
            for served in (self._plain, self._drafted)
        )
        evidence = {"plain_bytes_per_token": plain, "drafted_bytes_per_token": drafted}
        if not plain:
            return Rung(
                name, "only target hardware", "every expert was in memory here: nothing was read", evidence
            )
        return Rung(
            name,
            "passed",
            f"{drafted / plain:.2f} times plain decode's, with the slots of this run",
            evidence,
        )

    def _wait(self, name: str) -> Rung:
        """How long compute stood still: a matter of the drive."""
        evidence = self._compared(
            lambda s: s.exposed_wait_ns / max(1, s.output_tokens), "exposed_wait_ns_per_token"
        )
        why = "a matter of the drive: flashnext bench --report ssd-wait, on the machine that serves"
        return Rung(name, "only target hardware", why, evidence)

    def _hints(self, name: str) -> Rung:
        """Answers with trained hints are those without; what they read and spare, side by side."""
        with self._open(self._directory, "both") as engine:
            kind = _kind_of(engine)
            if engine.plan.is_resident:
                return Rung(name, "only target hardware", "every expert was in memory here", {})
            if kind == "off":
                return Rung(name, "not asked", "no trained hints lie beside draft or model", {})
        hinted = self._serve(self._directory, GREEDY, kind)
        pairs = enumerate(zip(self._drafted.answers, hinted.answers, strict=True))
        wrong = [number for number, (without, told) in pairs if without != told]
        without, told = self._drafted.per_token(), hinted.per_token()
        read = [one["bytes_per_token"] / 2**20 for one in (told, without)]
        waited = [one["exposed_wait_ns_per_token"] / 1e6 for one in (told, without)]
        why = (
            f"{kind}: {len(wrong)} of {len(hinted.answers)} answers differ; a token read {read[0]:.2f} MiB "
            f"with them, {read[1]:.2f} without, and waited {waited[0]:.2f} ms, {waited[1]:.2f} without, here"
        )
        evidence = {"hints": kind, "different": wrong, "with": told, "without": without}
        return Rung(name, "failed" if wrong else "passed", why, evidence)

    def _latency(self, name: str) -> Rung:
        """How fast answers are: a matter of the device."""
        evidence = self._compared(lambda s: s.decode_ns / max(1, s.output_tokens), "decode_ns_per_token")
        why = "a matter of the device: flashnext bench --report draft, on the machine that serves"
        return Rung(name, "only target hardware", why, evidence)

    def _compared(self, measure: Callable[[GenerationStatistics], float], what: str) -> dict[str, Any]:
        served = (("plain", self._plain), ("drafted", self._drafted))
        return {f"{who}_{what}": fmean(map(measure, one.statistics)) for who, one in served if one.statistics}

    def _serve(self, directory: Path | None, params: SamplingParams, hints: str = "off") -> _Served:
        answers, figures = list[list[int]](), list[GenerationStatistics]()
        with self._open(directory, hints) as engine:
            for prompt in self._ladder.prompts:
                answer, statistics = _answer(engine, prompt, params, self._ladder.max_tokens)
                answers.append(answer)
                figures.append(statistics)
            predicted = engine.target.store.statistics().predicted_physical_bytes
        return _Served(answers, figures, predicted)

    def _samples(self, directory: Path | None, first_seed: int) -> list[tuple[int, ...]]:
        """Return drawn beginnings of answers to the first prompt, every one with a seed of its own."""
        ladder, found = self._ladder, list[tuple[int, ...]]()
        with self._open(directory, "off") as engine:
            for number in range(ladder.num_samples):
                params = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, seed=first_seed + number)
                # A block longer than what is compared, so that proposals are judged within it.
                answer, _ = _answer(engine, ladder.prompts[0], params, ladder.sample_tokens + 1)
                found.append(tuple(answer[: ladder.sample_tokens]))
        return found


def _training_of(directory: Path) -> Training | None:
    """Return how a draft was trained, None if nothing beside it says so.

    Raises:
        DamagedDocument, ForeignDocument: what is there is none, or of another version.
    """
    try:
        return read_training(read_document(directory / TRAINING))
    except FileNotFoundError:
        return None
    except DocumentRefused as error:
        raise unusable(f"No record of a training in {directory}", error, hint=_FETCH_AGAIN) from None


def _kind_of(engine: Engine) -> str:
    """Return the best kind of hints whose files were let in."""
    has_near, has_sidecar = engine.routes.near is not None, engine.routes.sidecar is not None
    if has_near and has_sidecar:
        return "both"
    return "sidecar" if has_sidecar else "near-linear" if has_near else "off"


def chi_square(one: Sequence[tuple[int, ...]], other: Sequence[tuple[int, ...]]) -> tuple[float, int]:
    """Return the two-sample statistic and its degrees; rare outcomes are counted together."""
    counts = Counter(one), Counter(other)
    together = counts[0] + counts[1]
    share = len(one) / (len(one) + len(other))
    cells: dict[object, list[int]] = {}
    for outcome, count in together.items():
        is_rare = min(share, 1 - share) * count < _LEAST_COUNT
        cell = cells.setdefault("rare" if is_rare else outcome, [0, 0])
        cell[0] += counts[0][outcome]
        cell[1] += counts[1][outcome]
    statistic = 0.0
    for left, right in cells.values():
        for found, wanted in ((left, share * (left + right)), (right, (1 - share) * (left + right))):
            statistic += (found - wanted) ** 2 / wanted
    return statistic, max(1, len(cells) - 1)


def _answer(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, max_tokens: int
) -> tuple[list[int], GenerationStatistics]:
    """Return an answer's tokens, with the governor off, and its figures."""
    session = engine.session(is_guarded=False)
    events = list(session.generate(prompt, params, max_tokens=max_tokens, stop_ids=engine.tokenizer.eos_ids))
    last = events[-1]
    assert isinstance(last, Finished)
    return [event.token_id for event in events if isinstance(event, Token)], last.statistics
