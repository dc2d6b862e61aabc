"""The training loop: sample, differentiate, step, log, save. Resumable at any moment.

Entry point: `train`. After a kill it goes on from the last checkpoint and ends with the parameters, to the
bit, that an undisturbed run would have: steps follow from seed and number, and nothing else is remembered.

Source: dflash2.md 5.3 and 5.4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx

from drafter.config import DraftConfig
from drafter.documents import unusable
from drafter.errors import DamagedDocument, DrafterError
from drafter.files import replace_file, replacing
from drafter.train.adam import AdamState, adam_step, clipped, fresh_state
from drafter.train.batches import Blocks, StepSampler
from drafter.train.captures import CapturedDocument
from drafter.train.curve import draw_curve
from drafter.train.initial import initial_parameters
from drafter.train.losses import FrozenTarget, Losses, losses
from drafter.train.runs import CURVE, FIRST, PARAMETERS, SECOND, Run, TrainSettings
from drafter.train.schedule import rate_at, selector_share

Params = dict[str, mx.array]
ToHost = Callable[[mx.array], Any]
_TRAIN_AGAIN: Final = "delete the run and train again"


@dataclass(slots=True)
class Position:
    """Where a run is: parameters and moments after `step` steps."""

    step: int
    params: Params
    moments: AdamState


def train(
    run: Run,
    documents: Sequence[CapturedDocument],
    target: FrozenTarget,
    to_host: ToHost,
    *,
    progress: Callable[[int, int, float], None] = lambda _done, _total, _loss: None,
    stop: Callable[[], bool] = lambda: False,
) -> Position:
    """Train until the run's last step, from where it is.

    Args:
        run: with its description.
        documents: of the training split, always the same and in the same order.
        target: embedding and head, frozen.
        to_host: waits for an array and returns its values.
        progress: called with (steps done, steps in all, loss) for every line of the log.
        stop: asked after every step; True saves and returns early.

    Raises:
        DrafterError: the state of the run is damaged, or a loss is not finite.
    """
    description, settings = run.description, run.description.settings
    config = description.draft_config()
    sampler = StepSampler(
        documents,
        config.block_size,
        num_documents=settings.num_documents,
        num_anchors=settings.num_anchors,
        max_rows=settings.max_rows,
        seed=settings.seed,
    )
    here = load_position(run, config)
    run.cut_log(here.step)
    rows: list[list[float]] = []
    began = time.monotonic()
    while here.step < settings.num_steps:
        rate = rate_at(here.step, settings.num_steps, settings.rate)
        batch = sampler.step(here.step)
        found, norm = one_step(here, config, target, batch, settings, description.num_ids, rate)
        figures = to_host(mx.stack([*found, norm]))
        if not all(abs(value) < float("inf") for value in figures):
            raise DrafterError(
                f"Step {here.step} has a loss that is not finite", hint="train with a smaller --rate"
            )
        rows.append(figures)
        if here.step % settings.log_every == 0 or here.step == settings.num_steps:
            means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            names = ("base", "selector", "accuracy", "recall", "norm")
            seconds = time.monotonic() - began
            run.log(
                {"step": here.step, "seconds": seconds, "rate": rate, **dict(zip(names, means, strict=True))}
            )
            progress(here.step, settings.num_steps, means[0] + means[1])
            rows = []
        is_over = stop()
        if here.step % settings.save_every == 0 or here.step == settings.num_steps or is_over:
            save_position(run, here)
            replace_file(run.directory / CURVE, draw_curve(run.rows()).encode())
        if is_over:
            break
    return here


def one_step(
    here: Position,
    config: DraftConfig,
    target: FrozenTarget,
    batch: Sequence[Blocks],
    settings: TrainSettings,
    num_ids: int,
    rate: float,
) -> tuple[Losses, mx.array]:
    """Move a position on by one step and return losses and gradient norm of before; lazy."""
    share = selector_share(here.step, settings)
    parts, gradients = gradients_of(
        here.params, config, target, batch, gamma=settings.gamma, selector_weight=share, num_ids=num_ids
    )
    gradients, norm = clipped(gradients, settings.clip)
    here.params, here.moments = adam_step(here.params, gradients, here.moments, step=here.step, rate=rate)
    here.step += 1
    mx.eval(here.params, here.moments.first, here.moments.second, *parts, norm)
    return parts, norm


def gradients_of(
    params: Params,
    config: DraftConfig,
    target: FrozenTarget,
    batch: Sequence[Blocks],
    *,
    gamma: float,
    selector_weight: float,
    num_ids: int | None,
) -> tuple[Losses, Params]:
    """Return the losses of a batch, and the gradients of what is minimised."""

    def whole(tree: Params) -> tuple[mx.array, Losses]:
        parts = losses(tree, config, target, batch, gamma=gamma, num_ids=num_ids)
        return parts.base + selector_weight * parts.selector, parts

    (_, parts), gradients = mx.value_and_grad(whole)(params)
    return parts, gradients


def load_position(run: Run, config: DraftConfig) -> Position:
    """Return where a run is: its checkpoint, or the beginning.

    Raises:
        DamagedDocument: the checkpoint is none, or not of this draft.
    """
    params = {
        name: mx.array(value)
        for name, value in initial_parameters(config, run.description.settings.seed).items()
    }
    if not run.state.exists():
        return Position(0, params, fresh_state(params))
    try:
        loaded = mx.load(str(run.state), return_metadata=True)
        arrays, metadata = cast("tuple[Params, dict[str, str]]", loaded)
        mx.eval(arrays)  # a file that is cut short is found out here
    except (RuntimeError, ValueError) as error:
        raise unusable(f"{run.state} is no state of this draft", error, hint=_TRAIN_AGAIN) from None
    wanted = {prefix + name for prefix in (PARAMETERS, FIRST, SECOND) for name in params}
    shapes_fit = arrays.keys() == wanted and all(
        arrays[prefix + name].shape == params[name].shape
        for prefix in (PARAMETERS, FIRST, SECOND)
        for name in params
    )
    if not shapes_fit or not str(metadata.get("step", "")).isdigit():
        raise DamagedDocument(f"{run.state} is no state of this draft", hint=_TRAIN_AGAIN)

    def part(prefix: str) -> Params:
        return {name: arrays[prefix + name].astype(mx.float32) for name in params}

    return Position(int(metadata["step"]), part(PARAMETERS), AdamState(part(FIRST), part(SECOND)))


def save_position(run: Run, here: Position) -> None:
    """Write a checkpoint, all or nothing.

    Raises:
        OSError: it cannot be written; the one before it is still there.
    """
    arrays = {PARAMETERS + name: value for name, value in here.params.items()}
    arrays |= {FIRST + name: value for name, value in here.moments.first.items()}
    arrays |= {SECOND + name: value for name, value in here.moments.second.items()}
    with replacing(run.state) as stream:  # MLX tells what the system says of a stream, not of a path
        mx.save_safetensors(cast("Any", stream), arrays, {"step": str(here.step)})
