"""The refusals that several readers of a checkpoint share. Every one names the tensor and the next step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from expert_store.pack import PackComponent
from expert_store.safetensors_header import DTYPE_BITS
from expert_store.safetensors_index import TensorInfo
from mlx_flashnext.checkpoint.expected import Size, describe
from mlx_flashnext.errors import WeightMismatch

AGAIN = "fetch or convert the checkpoint again"
AGAIN_OF_PACK = "make the pack again with flashnext pack"
"""What a pack's owner does instead of `AGAIN`."""
REPACK = "the pack is damaged: make it again with flashnext pack"
WRONG_PAIR = "config.json does not belong to these files: get both from one place"


def mismatch(message: str, tensor: str, *, hint: str = AGAIN) -> WeightMismatch:
    """Return a refusal of one tensor."""
    return WeightMismatch(message, hint=hint, tensor=tensor)


def missing_tensor(name: str, why: str = "") -> WeightMismatch:
    """Return the refusal for a tensor that is not there; `Inspection.missing` lists its name.

    Args:
        name: What is missing.
        why: Why it was expected, if that is not plain.
    """
    return WeightMismatch(
        f"Tensor missing: {name}{f', {why}' if why else ''}", hint=AGAIN, tensor=name, missing=name
    )


def size_mismatch(
    info: TensorInfo, what: str, found: int, size: Size, text: Mapping[str, object]
) -> WeightMismatch:
    """Return the refusal of one size: the tensor's value against the config's, with the fields behind it."""
    behind = f" ({describe(size, text)})" if size.fields else ""
    return WeightMismatch(
        f"{info.name}: {what} is {found}, config.json asks for {size.value}{behind}",
        hint=WRONG_PAIR,
        tensor=info.name,
        found=found,
        expected=size.value,
        fields=size.fields,
    )


def check_packed(name: str, component: PackComponent) -> None:
    """Refuse a component of a pack whose bytes are not those of its dtype and shape.

    Args:
        name: What messages call it.
        component: As the manifest has it.
    """
    bits = DTYPE_BITS.get(component.dtype, 0)
    if 8 * component.length != math.prod(component.shape) * bits:
        raise mismatch(
            f"{name}: {component.length} bytes for {component.dtype} {list(component.shape)}",
            name,
            hint=REPACK,
        )


def check_shape(
    info: TensorInfo, shape: tuple[int, ...], sizes: tuple[Size, ...], text: Mapping[str, object]
) -> None:
    """Refuse a stored shape that is not the expected one, naming the config fields behind the difference."""
    if len(shape) != len(sizes):
        raise mismatch(
            f"{info.name}: shape {list(info.shape)}, expected {[size.value for size in sizes]}",
            info.name,
            hint=WRONG_PAIR,
        )
    for axis, (found, size) in enumerate(zip(shape, sizes, strict=True)):
        if found != size.value:
            raise size_mismatch(info, f"dimension {axis}", found, size, text)
