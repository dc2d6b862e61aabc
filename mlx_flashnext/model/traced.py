"""Pure pieces of a pass, described once and replayed for every token and every layer.

Describing a token in Python names two thousand nodes, which took the inference thread 11 of the 15 to 18 ms
of a token of the demo. `mx.compile` keeps a description and replays it in C++, with chains of elementwise
steps as one kernel each: 0.79 of the time of a token (`bench.studies.replay_gain`). Entry points: `traced`,
`replay_pieces`.

A description is kept for each number of rows, not for each layer: the weights are inputs of it. With weights
in them, descriptions of 48 layers took 28 MB and 0.2 s for each number of rows.

Invariants:
R1. A piece is a function of its arguments and of its owner's weights, which are never replaced: it reads no
    state, no slot and no row buffer.
R2. A replay gives the bits of the description on the CPU backend, whatever the number of rows
    (tests/parity/test_traced.py). On Metal, where fused steps may be contracted, that is to be shown.
R3. What is kept for the life of the process holds no weights.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import mlx.core as mx

from mlx_flashnext.config import Fp8Blocks, ModelConfig, QuantSpec
from mlx_flashnext.geometry import TRACED_ROWS

P = ParamSpec("P")
R = TypeVar("R", bound="mx.array | tuple[mx.array, ...]")

_CONSTANT = int, float, str, type(None), mx.Dtype, ModelConfig, QuantSpec, Fp8Blocks
_is_on = False
_replays: dict[object, Callable[..., Any]] = {}


def may_replay() -> bool:
    """Return whether MLX's own variable leaves it to us."""
    return "MLX_DISABLE_COMPILE" not in os.environ


def replay_pieces(is_on: bool) -> None:
    """Let every piece in this process be replayed, if it may, and MLX's compiled functions; or neither."""
    global _is_on
    _is_on = is_on and may_replay()
    (mx.enable_compile if _is_on else mx.disable_compile)()


def traced(describe: Callable[P, R]) -> Callable[P, R]:
    """Return the function, replayed where the first axis of its first argument is short.

    Long blocks are described anew: prompts come in any length, each would be a description of its own that
    is never forgotten, and next to their work describing them is little.

    Args:
        describe: A function, or a method of an object that holds weights; from arrays, and numbers that are
            the same in most calls, to one array or a tuple of them.

    Raises:
        TypeError: The owner holds something of which it is not known whether it is a weight.
    """
    owner, function = getattr(describe, "__self__", None), getattr(describe, "__func__", describe)
    weights: list[mx.array] = []
    form = () if owner is None else _form(owner, weights)
    key = function, form
    if key not in _replays:
        bare = None if owner is None else _filled(owner, None)
        _replays[key] = mx.compile(lambda arrays, *args: _call(function, bare, arrays, args))
    replay = _replays[key]

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_on and cast("mx.array", args[0]).shape[0] <= TRACED_ROWS:
            return cast("R", replay(weights, *args, **kwargs))
        return describe(*args, **kwargs)

    return call


def _call(function: Callable[..., Any], bare: object, arrays: Sequence[mx.array], args: Sequence[Any]) -> Any:
    """Describe: call a method of an owner that holds these arrays."""
    return function(*args) if bare is None else function(_filled(bare, iter(arrays)), *args)


def _form(owner: object, weights: list[mx.array]) -> tuple[object, ...]:
    """Return what an owner is apart from its weights, which are appended in the order of `_filled`."""
    found: list[object] = [type(owner)]
    for name, value in vars(owner).items():
        if isinstance(value, mx.array):
            weights.append(value)
            found.append(name)
        elif isinstance(value, _CONSTANT):
            found.append((name, value))
        elif hasattr(value, "__dict__") and not isinstance(value, FunctionType):
            found.append((name, _form(value, weights)))
        else:
            raise TypeError(f"{type(owner).__name__}.{name} is neither weight, constant nor owner of weights")
    return tuple(found)


def _filled(owner: object, weights: Any) -> Any:
    """Return a copy of an owner with other weights, taken one after the other; None empties it."""
    filled = copy.copy(owner)
    for name, value in vars(owner).items():
        if isinstance(value, mx.array) or value is _WEIGHT:
            setattr(filled, name, _WEIGHT if weights is None else next(weights))
        elif not isinstance(value, _CONSTANT):
            setattr(filled, name, _filled(value, weights))
    return filled


_WEIGHT = object()
