"""Engines on tiny checkpoints: how tests open what the product opens."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from expert_store.source import ByteSource
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams


def open_tiny(
    directory: Path,
    *,
    slots: int | None = None,
    context: int = 512,
    step: int | None = None,
    draft: str | None = None,
    draft_tokens: int | None = None,
    snapshots: int = 4,
    wrap_source: Callable[[ByteSource], ByteSource] = lambda source: source,
) -> Engine:
    """Open a tiny checkpoint with a fixed number of slots; draft tokens alone mean the test's own drafter."""
    request = PlanRequest(
        context_tokens=context,
        slots_per_layer=slots,
        prefill_step=step,
        draft=draft or ("none" if draft_tokens is None else "oracle"),
        num_draft_tokens=draft_tokens,
        num_snapshots=snapshots,
    )
    return Engine.open(directory, request, wrap_source=wrap_source)


def prompt_of(length: int, seed: int = 7) -> list[int]:
    """Return a deterministic prompt of ordinary tiny tokens, with two separators inside if there is room."""
    tokens = [int(token) for token in np.random.default_rng(seed).integers(0, 118, length)]
    for place in (length // 3, 2 * length // 3):
        if length >= 6:
            tokens[place] = 120
    return tokens


def greedy(engine: Engine, prompt: Sequence[int], max_tokens: int, **limits: object) -> list[int]:
    """Return the greedy answer's token ids."""
    session = engine.session()
    events = list(session.generate(prompt, SamplingParams(temperature=0.0), max_tokens=max_tokens, **limits))  # type: ignore[arg-type]
    assert isinstance(events[-1], Finished)
    return [event.token_id for event in events if isinstance(event, Token)]
