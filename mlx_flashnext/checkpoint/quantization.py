"""The `quantization` section of config.json, and what the shapes of stored tensors say about it.

Entry points: `Quantization.from_config`, `quant_spec`.

Invariants:
1. Shapes are the truth; the config may only agree. Where both speak and differ, the checkpoint is refused.
2. Override keys match in pack and in official spelling.

Source: qwen4exp.md 3.3; MLX 0.32 for the bits and group sizes that its kernels know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from expert_store.safetensors_index import TensorInfo
from mlx_flashnext.checkpoint.expected import Size, describe
from mlx_flashnext.checkpoint.refusals import WRONG_PAIR, mismatch, missing_tensor
from mlx_flashnext.config import QUANT_MODES, Fp8Blocks, QuantSpec
from mlx_flashnext.errors import ModelError, UnsupportedCheckpoint
from mlx_flashnext.names import parse_override

FLOATS = ("F32", "BF16", "F16")
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
MICRO_SCALED: Mapping[str, tuple[int, int]] = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
DEFAULT_GROUPS: Mapping[str, int] = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
DEFAULT_BITS: Mapping[str, int] = {"affine": 4, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4}


class Place(NamedTuple):
    """What an override speaks of: a canonical module, and for the n-gram table one of its parts."""

    module: str
    table_part: int | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """What config.json says about quantisation.

    Attributes:
        default: The spec of modules without an entry of their own, None for an unquantised checkpoint.
        overrides: The spec of single modules; None means not quantised.
        fp8_block: Rows and columns that share a scale in the official FP8 layout, None in all others.
    """

    default: QuantSpec | None
    overrides: Mapping[Place, QuantSpec | None]
    fp8_block: Fp8Blocks | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Quantization:
        """Read the section of a whole config.json.

        Raises:
            UnsupportedCheckpoint: An unknown method or mode, or bits and groups no kernel has.
        """
        section = config.get("quantization", config.get("quantization_config"))
        if section is None:
            return cls(None, {})
        if not isinstance(section, Mapping):
            raise _refuse(f"config.json quantization is not an object: {section!r}", section)
        method = section.get("quant_method")
        if method == "fp8":
            return cls(None, {}, _fp8_block(section))
        if method not in (None, "mlx") or "bits" not in section:
            raise _refuse(f"Unknown quantisation method: {method!r}", method)
        overrides: dict[Place, QuantSpec | None] = {}
        for key, value in section.items():
            if isinstance(value, Mapping) or value is False:
                name = parse_override(str(key))
                spec = None if value is False else _spec(value, str(key))
                overrides[Place(name.module, name.table_part)] = spec
        return cls(_spec(section, "quantization"), overrides)

    def packed_spec(self, weight: TensorInfo, *places: Place) -> QuantSpec | None:
        """Return what the config says of a packed matrix: its own entry, or the default.

        Args:
            weight: The matrix, for messages.
            places: What its entry may be called.

        Raises:
            WeightMismatch: Its entry says that it is not quantised.
        """
        own = next((place for place in places if place in self.overrides), None)
        if own is None:
            return self.default
        spec = self.overrides[own]
        if spec is None:
            raise mismatch(
                f"{weight.name}: stored quantised, config.json quantization says it is not",
                weight.name,
                hint=WRONG_PAIR,
            )
        return spec

    def check_plain(self, weight: TensorInfo, *places: Place) -> None:
        """Refuse a matrix of plain numbers whose own entry says how it is quantised.

        The default says nothing of a single matrix: packs leave plain what its group size does not divide.
        """
        own = next((place for place in places if place in self.overrides), None)
        spec = None if own is None else self.overrides[own]
        if spec is not None:
            raise mismatch(
                f"{weight.name}: stored as {weight.dtype}, config.json quantization says {_words(spec)}",
                weight.name,
                hint=WRONG_PAIR,
            )


def block_sizes(rows: Size, columns: Size, block: Fp8Blocks) -> tuple[Size, Size]:
    """Return the sizes of an FP8 matrix's scales: one for each block, the last ones not full."""
    return (
        Size(-(-rows.value // block.rows), rows.fields),
        Size(-(-columns.value // block.columns), columns.fields),
    )


def quant_spec(
    size: Size,
    weight: TensorInfo,
    scales: TensorInfo,
    biases: TensorInfo | None,
    configured: QuantSpec | None,
    text: Mapping[str, object],
) -> QuantSpec:
    """Return the spec that the shapes of a quantised matrix prove, and check it against the config.

    Args:
        size: The matrix's input width and the fields behind it.
        weight: Packed codes, uint32 [..., out, in * bits / 32].
        scales: [..., out, in / group size]; uint8 in the micro-scaled modes.
        biases: Only in affine mode, shaped like the scales.
        configured: What the config says of this matrix, if it says anything.
        text: The text config, for messages.

    Raises:
        WeightMismatch: Shapes that fit no spec, that contradict the config, or biases missing or left over.
    """
    _check_lead(weight, scales, biases)
    columns, groups = weight.shape[-1], scales.shape[-1]
    spec = _proven(size.value, columns, groups, scales.dtype)
    if configured is not None and spec != configured:
        inputs = columns * 32 // configured.bits
        if inputs != size.value and inputs == groups * configured.group_size:
            raise mismatch(
                f"{weight.name}: {inputs} inputs as stored, config.json asks for {size.value} "
                f"({describe(size, text)})",
                weight.name,
                hint=WRONG_PAIR,
            )
    if spec is None:
        raise mismatch(
            f"{weight.name}: {columns} packed columns and {groups} {scales.dtype} scales a row fit no "
            f"quantisation of {size.value} inputs ({describe(size, text)})",
            weight.name,
            hint="known: affine, mxfp4, mxfp8, nvfp4 as MLX writes them",
        )
    if configured is not None and spec != configured:
        raise mismatch(
            f"{weight.name}: stored as {_words(spec)}, config.json quantization says {_words(configured)}",
            weight.name,
            hint=WRONG_PAIR,
        )
    _check_factors(spec, weight, scales, biases)
    return spec


def _check_lead(weight: TensorInfo, *factors: TensorInfo | None) -> None:
    """Refuse scales and biases that differ from their packed weight in more than the last dimension."""
    for part in factors:
        if part is not None and (not part.shape or part.shape[:-1] != weight.shape[:-1]):
            raise mismatch(
                f"{part.name}: shape {list(part.shape)} does not fit {list(weight.shape)} of {weight.name}",
                part.name,
            )


def _check_factors(
    spec: QuantSpec, weight: TensorInfo, scales: TensorInfo, biases: TensorInfo | None
) -> None:
    """Refuse biases that the mode does not have, lacks, or has otherwise."""
    stem = weight.name.removesuffix(".weight")
    if spec.mode == "affine" and biases is None:
        raise missing_tensor(f"{stem}.biases", "which affine quantisation needs")
    if spec.mode != "affine" and biases is not None:
        raise mismatch(f"{biases.name}: {spec.mode} has no biases", biases.name)
    if biases is not None and (biases.shape != scales.shape or biases.dtype not in FLOATS):
        raise mismatch(
            f"{biases.name}: {biases.dtype} {list(biases.shape)}, its scales are {scales.dtype} "
            f"{list(scales.shape)}",
            biases.name,
        )


def _proven(inputs: int, columns: int, groups: int, scales_dtype: str) -> QuantSpec | None:
    if not columns or not groups or columns * 32 % inputs or inputs % groups:
        return None
    bits, group_size = columns * 32 // inputs, inputs // groups
    if scales_dtype in FLOATS:
        known = bits in AFFINE_BITS and group_size in AFFINE_GROUPS
        return QuantSpec("affine", bits, group_size) if known else None
    if scales_dtype == "U8":
        for mode, pair in MICRO_SCALED.items():
            if pair == (bits, group_size):
                return QuantSpec(mode, bits, group_size)
    return None


def _spec(section: Mapping[str, object], where: str) -> QuantSpec:
    mode = section.get("mode", "affine")
    if not isinstance(mode, str) or mode not in QUANT_MODES:
        raise UnsupportedCheckpoint(
            f"Unknown quantisation mode of {where}: {mode!r}",
            hint=f"known modes: {', '.join(QUANT_MODES)}",
            mode=mode,
        )
    bits = section.get("bits", DEFAULT_BITS[mode])
    group_size = section.get("group_size", DEFAULT_GROUPS[mode])
    if mode == "affine":
        known = bits in AFFINE_BITS and group_size in AFFINE_GROUPS
    else:
        known = (bits, group_size) == MICRO_SCALED[mode]
    if not known or not isinstance(bits, int) or not isinstance(group_size, int):
        raise _refuse(
            f"Unknown quantisation of {where}: {mode}, {bits!r} bits, group size {group_size!r}", bits
        )
    return QuantSpec(mode, bits, group_size)


def _fp8_block(section: Mapping[str, object]) -> Fp8Blocks:
    block = section.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise _refuse(f"Unknown FP8 block size: weight_block_size = {block!r}", block)
    return Fp8Blocks(int(block[0]), int(block[1]))


def _refuse(message: str, value: object) -> ModelError:
    return UnsupportedCheckpoint(
        message, hint="use an official or MLX conversion of Qwen3.8-Flash-Next", value=value
    )


def _words(spec: QuantSpec) -> str:
    return f"{spec.mode} {spec.bits}-bit group {spec.group_size}"
