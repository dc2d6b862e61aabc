"""How far one build of a model is from another: error of each layer, and greedy agreement.

Entry point: `compare_builds`. The reference answers prompts greedily; then both builds read the same text. A
layer's error is taken on its output, the streams' mean; a position agrees if the other build would have said
the reference's token there. Up to the first position that does not, its own greedy answer is the same text.

The builds are open one after the other, each within its plan; what is kept of the first is features of a few
hundred rows.
"""

# Shapes: T tokens, A answer positions, L layers, D hidden, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.model.host import fence
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks

ROWS: Final = 16
"""Rows of a block whose logits are all wanted: 16 x 248,320 in float32 are 15 MiB."""

Values = NDArray[np.float32]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Difference:
    """What `compare_builds` found.

    Attributes:
        layers: Relative error of each layer's output: root of the ratio of the sums of squares.
        logits: The same of the logits at answer positions.
        num_prompts: Prompts answered.
        num_positions: Answer positions compared.
        num_agreeing: Of them, where both builds choose one token.
        prefixes: Tokens of each answer before the first that differs.
        divergence: Mean of the Kullback-Leibler divergence of the other build from the reference, in nats.
    """

    layers: tuple[float, ...]
    logits: float
    num_prompts: int
    num_positions: int
    num_agreeing: int
    prefixes: tuple[int, ...]
    divergence: float

    @property
    def agreement(self) -> float:
        """Return the share of positions that agree."""
        return self.num_agreeing / self.num_positions

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {**asdict(self), "agreement": self.agreement}


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt with the reference's answer behind it."""

    tokens: list[int]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class _Read:
    """What a build makes of a text: features [L, T, D], and logits [A, V] that choose the answer's tokens."""

    features: Values
    logits: Values


def compare_builds(
    reference: Path,
    other: Path,
    request: PlanRequest,
    *,
    num_prompts: int,
    num_tokens: int,
    progress: Progress = lambda _stage, _done, _total: None,
) -> Difference:
    """Compare two builds of one model.

    Args:
        reference: The build to be compared with.
        other: The build that is judged.
        request: What memory to plan for, for each of them.
        num_prompts: Tasks of the demo model to answer, through the reference's chat template.
        num_tokens: Most tokens of an answer.
        progress: Called with (stage, prompts done, prompts in all).

    Raises:
        InvalidRequest: The two are not builds of one model, or there is nothing to compare.
        StoreError, ModelError, EngineError: One of them does not open or run.
    """
    if num_prompts < 1 or num_tokens < 1:
        raise InvalidRequest(
            f"Nothing to compare: {num_prompts} prompts of {num_tokens} tokens", hint="ask for at least one"
        )
    with Engine.open(reference, request, progress=progress) as engine:
        tasks = demo_tasks()[:num_prompts]
        prompts = chat_prompts(reference, engine.tokenizer, tasks)
        geometry = _geometry(engine)
        texts: list[_Text] = []
        reads: list[_Read] = []
        for number, prompt in enumerate(prompts):
            texts.append(_answered(engine, prompt, num_tokens))
            reads.append(_read(engine, texts[-1]))
            progress("reference", number + 1, len(prompts))
    sums = _Sums(geometry[0])
    with Engine.open(other, request, progress=progress) as engine:
        if _geometry(engine) != geometry:
            raise InvalidRequest(
                f"Not two builds of one model: sizes {geometry} and {_geometry(engine)}",
                hint="compare a conversion with what it was made from",
            )
        for number, (text, exact) in enumerate(zip(texts, reads, strict=True)):
            sums.add(text, exact, _read(engine, text))
            progress("other", number + 1, len(texts))
    return sums.difference()


def _geometry(engine: Engine) -> tuple[int, int, int]:
    config = engine.config
    return config.num_hidden_layers, config.hidden_size, config.vocab_size


def _answered(engine: Engine, prompt: Sequence[int], num_tokens: int) -> _Text:
    events = engine.session().generate(
        prompt, SamplingParams(temperature=0.0), max_tokens=num_tokens, stop_ids=engine.config.eos_token_ids
    )
    answer = [event.token_id for event in events if isinstance(event, Token)]
    return _Text([*prompt, *answer], len(prompt))


def _read(engine: Engine, text: _Text) -> _Read:
    """Run a text in blocks, with the logits of every position that chooses a token of the answer."""
    target, count = engine.target, engine.config.num_hidden_layers
    state = target.model.new_state()
    features: list[Values] = []
    logits: list[Values] = []
    tokens, first_choice = text.tokens[:-1], text.num_prompt - 1
    step = min(engine.plan.prefill_step, ROWS)
    for first in range(0, len(tokens), step):
        part = tokens[first : first + step]
        with state.begin(len(part), revocable=False) as block:
            output = target.model.forward(part, block, logits="all", taps=range(count), contraction="mean")
            assert output.logits is not None
            tapped = mx.stack([output.taps[layer].astype(mx.float32) for layer in range(count)])
            rows = output.logits.astype(mx.float32)
            fence(target.sync, tapped, rows)
            block.commit()
        target.experts.device_idle()
        features.append(np.asarray(tapped, np.float32))
        logits.append(np.asarray(rows, np.float32)[max(0, first_choice - first) :])
    return _Read(np.concatenate(features, axis=1), np.concatenate(logits))


class _Sums:
    """Sums over texts."""

    def __init__(self, num_layers: int) -> None:
        self._layers = np.zeros((2, num_layers))
        self._logits = np.zeros(2)
        self._divergence = 0.0
        self._agrees: list[NDArray[np.bool_]] = []

    def add(self, text: _Text, exact: _Read, other: _Read) -> None:
        """Take one text as both builds read it."""
        assert (
            exact.logits.shape
            == other.logits.shape
            == (len(text.tokens) - text.num_prompt, exact.logits.shape[1])
        )
        for layer, (a, b) in enumerate(zip(exact.features, other.features, strict=True)):
            self._layers[:, layer] += _squares(a - b), _squares(a)
        self._logits += _squares(exact.logits - other.logits), _squares(exact.logits)
        self._agrees.append(exact.logits.argmax(axis=1) == other.logits.argmax(axis=1))
        p, q = _log_softmax(exact.logits), _log_softmax(other.logits)
        self._divergence += float((np.exp(p) * (p - q)).sum())

    def difference(self) -> Difference:
        """Return what was found."""
        agrees = self._agrees
        positions = sum(map(len, agrees))
        return Difference(
            layers=tuple(float(value) for value in _ratio(self._layers)),
            logits=float(_ratio(self._logits)),
            num_prompts=len(agrees),
            num_positions=positions,
            num_agreeing=int(sum(map(np.count_nonzero, agrees))),
            prefixes=tuple(len(one) if one.all() else int(one.argmin()) for one in agrees),
            divergence=self._divergence / positions,
        )


def _squares(values: Values) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt(sums[0] / np.where(sums[1] > 0, sums[1], 1))


def _log_softmax(logits: Values) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
