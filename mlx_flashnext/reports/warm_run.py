"""What a warm start gains: the time of the first answer after opening. Entry: `measure_warm_start`.

The same prompt each time, as who comes back asks more of the same; the popularity is that of one earlier run.
Three ways in turns: cold; warm and asked at once; warm and asked when everything named is in its slot.

Owner of the format of the report.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from expert_store.source import ByteSource
from mlx_flashnext.engine.conditions import Conditions, conditions_of
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.machine import Machine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.reports.measure import answer
from mlx_flashnext.reports.page_cache import CacheState, prepare

FORMAT: Final = "flashnext-warm-start"
VERSION: Final = 1

Way = Literal["cold", "at once", "warmed"]
_WAYS: tuple[Way, ...] = ("cold", "at once", "warmed")


@dataclass(frozen=True, slots=True)
class FirstAnswers:
    """Times of first answers, one a round.

    Attributes:
        way: how the engine had started.
        prefill_ns: reading the prompt.
        decode_ns: saying the answer.
        exposed_wait_ns: of it, standing still for experts while decoding.
        num_hints: records that the start named.
    """

    way: Way
    prefill_ns: tuple[int, ...]
    decode_ns: tuple[int, ...]
    exposed_wait_ns: tuple[int, ...]
    num_hints: int

    @property
    def median_ns(self) -> float:
        """Return the median time of prompt and answer together."""
        return statistics.median(a + b for a, b in zip(self.prefill_ns, self.decode_ns, strict=True))


@dataclass(frozen=True, slots=True)
class WarmAsked:
    """What is measured.

    Attributes:
        directory: of the checkpoint.
        label: what to call the model.
        request: of every plan.
        prompt: token ids.
        prompt_set: what it is, in words.
        num_tokens: of each answer.
        rounds: of all three ways.
        page_cache: state before every opening.
        disk: what the report says of the drive.
        wrap_source: wraps the files.
    """

    directory: Path
    label: str
    request: PlanRequest
    prompt: Sequence[int]
    prompt_set: str
    num_tokens: int
    rounds: int
    page_cache: CacheState
    disk: str = "real"
    wrap_source: Callable[[ByteSource], ByteSource] = lambda source: source


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What was found.

    Attributes:
        conditions: of all of it.
        num_tokens: of each answer.
        answers: `cold` first.
    """

    conditions: Conditions
    num_tokens: int
    answers: tuple[FirstAnswers, ...]

    def ratios(self, one: FirstAnswers) -> list[float]:
        """Return the times of first answers over those of the same round's cold start, in ascending order."""
        cold = self.answers[0]
        times = zip(one.prefill_ns, one.decode_ns, cold.prefill_ns, cold.decode_ns, strict=True)
        return sorted((prefill + decode) / (p + d) for prefill, decode, p, d in times)

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values; times in nanoseconds."""
        answers = [
            {**asdict(one), "median_ns": one.median_ns, "against_cold": self.ratios(one)}
            for one in self.answers
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "conditions": self.conditions.to_dict(),
            "num_tokens": self.num_tokens,
            "answers": answers,
        }


def measure_warm_start(
    asked: WarmAsked, machine: Machine, progress: Callable[[str, int, int], None] = lambda _s, _d, _t: None
) -> WarmStartReport:
    """Measure the first answer of fresh engines.

    Args:
        asked: what.
        machine: this machine.
        progress: told (what runs, openings done, openings in all).
    """
    found: dict[Way, list[tuple[int, int, int]]] = {way: [] for way in _WAYS}
    num_hints = dict.fromkeys(_WAYS, 0)

    def opened(warm: Path | None) -> Engine:
        return Engine.open(asked.directory, asked.request, wrap_source=asked.wrap_source, warm_directory=warm)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with opened(folder) as engine:
            checkpoint, plan = engine.checkpoint, engine.plan
            answer(engine.session(), asked.prompt, asked.num_tokens)
        files = [info.path for info in checkpoint.table.files]
        how = prepare(files, asked.page_cache).how
        for number in range(asked.rounds):
            for way in _WAYS if number % 2 == 0 else reversed(_WAYS):
                prepare(files, asked.page_cache)
                with opened(None if way == "cold" else folder) as engine:
                    if way == "warmed":
                        engine.target.store.wait_idle()
                    got = answer(engine.session(), asked.prompt, asked.num_tokens)
                    num_hints[way] = engine.warm.num_hints
                found[way].append((got.prefill_ns, got.decode_ns, got.exposed_wait_ns))
                progress("first answers", sum(map(len, found.values())), asked.rounds * len(_WAYS))
    conditions = conditions_of(
        checkpoint,
        machine,
        plan,
        model=asked.label,
        hints=plan.hints,
        page_cache=asked.page_cache,
        page_cache_how=how,
        disk=asked.disk,
        prompt_set=asked.prompt_set,
    )
    answers: list[FirstAnswers] = []
    for way in _WAYS:
        prefill, decode, waited = zip(*found[way], strict=True)
        answers.append(FirstAnswers(way, prefill, decode, waited, num_hints[way]))
    return WarmStartReport(conditions, asked.num_tokens, tuple(answers))
