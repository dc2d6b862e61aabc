"""Loads the tensors of a draft that the gate has let in: every one that it must have, and no other.

Entry point: `load_parameters`. Where the bytes come from is the caller's: files were opened and their headers
checked before the gate was asked. A draft that fails half way leaves nothing behind.

Source: dflash2.md 1.3, 4.5; defects 28 and 30.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from drafter.config import DraftConfig, expected_tensors
from drafter.errors import DrafterError

CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
FLOATING = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


def canonical_name(name: str) -> str:
    """Return the name of 1.3 for a stored one: codebooks may carry `.weight`."""
    plain = name.removesuffix(".weight")
    return plain if plain in CODEBOOKS else name


def load_parameters(
    config: DraftConfig,
    read: Callable[[str], mx.array],
    to_host: Callable[[mx.array], Any],
    *,
    dtype: mx.Dtype,
) -> dict[str, mx.array]:
    """Return the parameters by their canonical names, computed and of one type.

    Args:
        config: that the gate let in.
        read: returns a tensor by its canonical name; may be lazy.
        to_host: waits for an array and returns its values.
        dtype: of computation: float32, or bfloat16.

    Raises:
        DrafterError: a tensor has another shape than the gate saw, or a value that is not finite.
    """
    staged: dict[str, mx.array] = {}
    for name, shape in expected_tensors(config).items():
        tensor = read(name)
        if tuple(tensor.shape) != shape:
            raise DrafterError(
                f"Draft tensor {name} has shape {tuple(tensor.shape)}, expected {shape}",
                hint="the files changed after they were checked; fetch the draft again",
            )
        tensor = tensor.astype(dtype)
        if not to_host(mx.isfinite(tensor).all()):
            raise DrafterError(
                f"Draft tensor {name} holds values that are not finite", hint="fetch the draft again"
            )
        staged[name] = tensor
    return staged
