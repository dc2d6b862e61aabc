"""What every matrix of a conversion becomes. Entry points: `Recipe`, `parse_spec`.

Invariant: router, hyper-connections, indexer and the embedding stay plain numbers unless `Recipe.also` names
them; norms, convolutions and other vectors always do, since no reader of the MLX layout takes them otherwise.
The embedding is among them because one of its rows is the mask token's, which drafters are calibrated on.

No MLX here. Source: qwen4exp.md 3.3 (MLX packs: router 8 bits, group 64; table in groups of 32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from mlx_flashnext.checkpoint.quantization import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    DEFAULT_GROUPS,
    MICRO_SCALED,
)
from mlx_flashnext.config import QuantSpec
from mlx_flashnext.errors import UnsupportedCheckpoint

Kept = Literal["router", "hyper", "indexer", "embedding"]

FOUR_BITS: Final = QuantSpec("affine", 4, 64)
EIGHT_BITS: Final = QuantSpec("affine", 8, 64)
TABLE_BITS: Final = QuantSpec("affine", 4, 32)
"""A row of the table has 160 values, which 64 does not divide."""

KEPT: Final[tuple[Kept, ...]] = ("router", "hyper", "indexer", "embedding")
"""Groups of matrices that are quantised only if they are asked for."""

NONE: Final = "none"
_SPELLINGS: Final = "write bits, or bits:group, such as 4:64; mxfp4, mxfp8 or nvfp4; or none"


def parse_spec(text: str, group: int = DEFAULT_GROUPS["affine"]) -> QuantSpec | None:
    """Return a quantisation from text: `4`, `4:64`, `affine:4:64`, `mxfp4`, `none`.

    Args:
        text: What was typed.
        group: Group size of an affine quantisation that names none.

    Raises:
        UnsupportedCheckpoint: MLX has no such quantisation.
    """
    if text == NONE:
        return None
    mode, *numbers = text.split(":")
    if mode not in ("affine", *MICRO_SCALED):
        mode, numbers = "affine", [mode, *numbers]
    try:
        sizes = [int(number) for number in numbers]
    except ValueError:
        raise _unknown(text) from None
    if mode != "affine":
        known = MICRO_SCALED[mode]
        if sizes not in ([], [known[0]], list(known)):
            raise _unknown(text)
        return QuantSpec(mode, *known)
    bits, group = [*sizes, group][:2] if 1 <= len(sizes) <= 2 else (0, 0)
    if bits not in AFFINE_BITS or group not in AFFINE_GROUPS:
        raise _unknown(text)
    return QuantSpec(mode, bits, group)


def spell(spec: QuantSpec | None) -> str:
    """Return the text that `parse_spec` reads as this."""
    if spec is None:
        return NONE
    return f"{spec.bits}:{spec.group_size}" if spec.mode == "affine" else spec.mode


@dataclass(frozen=True, slots=True)
class Recipe:
    """What becomes of the parts of a checkpoint; None is plain numbers.

    Attributes:
        experts: Routed experts.
        trunk: Matrices of the layers, and the head.
        table: The n-gram table.
        mtp_experts: Routed experts of the MTP module.
        mtp_trunk: Its other matrices.
        keep_mtp: Whether the output has the module at all.
        keep_vision: Whether vision tensors are copied.
        also: Groups of `KEPT` that are quantised too.
    """

    experts: QuantSpec | None = FOUR_BITS
    trunk: QuantSpec | None = EIGHT_BITS
    table: QuantSpec | None = TABLE_BITS
    mtp_experts: QuantSpec | None = FOUR_BITS
    mtp_trunk: QuantSpec | None = EIGHT_BITS
    keep_mtp: bool = True
    keep_vision: bool = True
    also: Mapping[str, QuantSpec] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Refuse a group of matrices that there is not."""
        for name in self.also:
            if name not in KEPT:
                raise UnsupportedCheckpoint(
                    f"No such group of matrices: {name!r}", hint=f"there are {', '.join(KEPT)}", value=name
                )

    def matrix(self, name: str, columns: int) -> QuantSpec | None:
        """Return what a matrix of trunk or MTP module becomes.

        Args:
            name: Its canonical name.
            columns: Its input width; one that the group size does not divide stays plain.
        """
        kept = _kept_group(name)
        spec = self.mtp_trunk if name.startswith("mtp.") else self.trunk
        if kept is not None:
            spec = self.also.get(kept)
        return None if spec is None or columns % spec.group_size else spec

    def routed(self, *, mtp: bool) -> QuantSpec | None:
        """Return what routed experts become."""
        return self.mtp_experts if mtp else self.experts

    def to_dict(self) -> dict[str, object]:
        """Return the recipe as plain values, in the spelling of `parse_spec`."""
        return {
            "experts": spell(self.experts),
            "trunk": spell(self.trunk),
            "table": spell(self.table),
            "mtp_experts": spell(self.mtp_experts) if self.keep_mtp else "dropped",
            "mtp_trunk": spell(self.mtp_trunk) if self.keep_mtp else "dropped",
            "vision": "copied" if self.keep_vision else "dropped",
            "also": {name: spell(spec) for name, spec in sorted(self.also.items())},
        }


def _kept_group(name: str) -> Kept | None:
    if name.endswith((".mlp.gate", ".mlp.shared_expert_gate")):
        return "router"
    if "hyper_connection" in name:
        return "hyper"
    if ".indexer." in name:
        return "indexer"
    return "embedding" if name == "embed_tokens" else None


def _unknown(text: str) -> UnsupportedCheckpoint:
    bits, groups = ", ".join(map(str, AFFINE_BITS)), ", ".join(map(str, AFFINE_GROUPS))
    return UnsupportedCheckpoint(
        f"Not a quantisation: {text!r}",
        hint=f"{_SPELLINGS}; bits are {bits}, groups {groups}",
        value=text,
    )
