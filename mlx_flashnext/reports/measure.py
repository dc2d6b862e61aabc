"""What `flashnext bench` and the studies measure with: prefill and decode apart. Entry: `run_case`.

A case is prefill of n tokens or decode of n tokens, at a depth of d tokens that the state has consumed before
the clock starts. Prompts are salted: no repetition sees a prompt that an earlier one has left in a cache
(FIELD P56). One repetition before the first is not counted. Decode is greedy and goes on after stop tokens,
so that every repetition has the same length.

Owner of the bench result format.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from mlx_flashnext.engine.conditions import Conditions
from mlx_flashnext.engine.engine import Session
from mlx_flashnext.engine.events import Finished
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.engine.stats import GenerationStatistics
from mlx_flashnext.reports.prompt_sets import salted_prompt
from mlx_flashnext.tokenizer import Tokenizer

FORMAT = "flashnext-bench"
VERSION = 1
GREEDY: Final = SamplingParams(temperature=0.0)

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Case:
    """What one row measures.

    Attributes:
        kind: reading a prompt, or saying tokens.
        num_tokens: how many.
        depth: tokens consumed before the clock starts.
    """

    kind: Kind
    num_tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        """Return the usual short name: `pp512`, `tg128 @ d4096`."""
        short = "pp" if self.kind == "prefill" else "tg"
        return f"{short}{self.num_tokens}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def context_tokens(self) -> int:
        """Return the context it needs."""
        return self.depth + self.num_tokens + 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition.

    Attributes:
        num_tokens: tokens the clock ran for.
        wall_ns: how long it ran.
        read_bytes: physical bytes of experts meanwhile.
        exposed_wait_ns: decode stood still for experts; None for prefill, where nobody counts it apart.
        hit_rate: of expert demands while decoding.
        salt: of the prompt.
    """

    num_tokens: int
    wall_ns: int
    read_bytes: int
    exposed_wait_ns: int | None
    hit_rate: float | None
    salt: int

    @property
    def tokens_per_s(self) -> float:
        """Rate; zero where no time passed, which no machine can do (FIELD P21)."""
        return self.num_tokens / self.wall_ns * 1e9 if self.wall_ns > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A case's repetitions and their conditions."""

    case: Case
    samples: tuple[Sample, ...]
    conditions: Conditions

    @property
    def tokens_per_s(self) -> float:
        """Return the median rate."""
        return statistics.median(sample.tokens_per_s for sample in self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """Return the least and the greatest rate."""
        rates = [sample.tokens_per_s for sample in self.samples]
        return min(rates), max(rates)

    @property
    def read_bytes_per_token(self) -> float:
        """Return the physical bytes of experts for a token, the median."""
        return statistics.median(sample.read_bytes / sample.num_tokens for sample in self.samples)

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values: sizes in bytes, times in nanoseconds, rates per second."""
        low, high = self.spread
        return {
            "format": FORMAT,
            "version": VERSION,
            "test": self.case.name,
            "kind": self.case.kind,
            "n_prompt": self.case.num_tokens if self.case.kind == "prefill" else 0,
            "n_gen": self.case.num_tokens if self.case.kind == "decode" else 0,
            "n_depth": self.case.depth,
            "repetitions": len(self.samples),
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_min": low,
            "tokens_per_s_max": high,
            "read_bytes_per_token": self.read_bytes_per_token,
            **self.conditions.to_dict(),
            "samples": [{**asdict(sample), "tokens_per_s": sample.tokens_per_s} for sample in self.samples],
        }


def cases_of(prompts: Sequence[int], answers: Sequence[int], depths: Sequence[int]) -> list[Case]:
    """Return a case of each length at each depth; a length of 0 means none."""
    cases = [Case("prefill", length, depth) for depth in depths for length in prompts if length]
    return cases + [Case("decode", length, depth) for depth in depths for length in answers if length]


def run_case(
    session: Callable[[], Session],
    tokenizer: Tokenizer,
    case: Case,
    conditions: Conditions,
    *,
    texts: Sequence[str],
    salts: Sequence[int],
    before_each: Callable[[], None] = lambda: None,
    after_each: Callable[[int], None] = lambda _done: None,
) -> Row:
    """Run a case once uncounted, then once for every salt.

    Args:
        session: makes an empty timeline.
        tokenizer: of the model.
        case: what to measure.
        conditions: what the row will state.
        texts: what prompts are made of.
        salts: one a repetition.
        before_each: brings the page cache into its state.
        after_each: told the repetitions done, the uncounted one included.
    """
    samples: list[Sample] = []
    for number, salt in enumerate((~salts[0], *salts)):
        before_each()
        prompt = salted_prompt(tokenizer, texts, case.context_tokens, salt)
        measure = _prefill if case.kind == "prefill" else _decode
        sample = measure(session(), case, prompt, salt)
        samples += [sample] if number else []
        after_each(number + 1)
    return Row(case, tuple(samples), conditions)


def answer(session: Session, prompt: Sequence[int], max_tokens: int) -> GenerationStatistics:
    """Return what a greedy answer cost that no stop token ends."""
    last = None
    for event in session.generate(prompt, GREEDY, max_tokens=max_tokens):
        last = event
    assert isinstance(last, Finished)
    return last.statistics


def _prefill(session: Session, case: Case, prompt: Sequence[int], salt: int) -> Sample:
    if case.depth:
        answer(session, prompt[: case.depth + 1], 0)
    got = answer(session, prompt, 0)
    num_tokens = got.prompt_tokens - got.reused_tokens - 1  # the last one is the first anchor of an answer
    return Sample(num_tokens, got.prefill_ns, got.prefill_read_bytes, None, None, salt)


def _decode(session: Session, case: Case, prompt: Sequence[int], salt: int) -> Sample:
    start = prompt[: case.depth + 1]
    answer(session, start, 0)
    got = answer(session, start, case.num_tokens)
    return Sample(got.output_tokens, got.decode_ns, got.read_bytes, got.exposed_wait_ns, got.hit_rate, salt)
