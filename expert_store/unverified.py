"""Demands of rows that may still be rejected, until `advance` says how many stay. Entry: `UnverifiedDemands`.

A verified block of B rows demands the union of what its rows choose. If the ranking learned of it at once,
rows that are then rejected would have made records recent that no committed token used, and pushed others
out. So such a demand pins and reads as any other, but the ranking hears of it only here, once, when the block
is settled: an expert counts if a row that stays chose it, in the order of its last such row - as if the rows
had been decoded one by one (ranking.py K2). One list per owner with an open block; the store's lock protects
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from expert_store.slots import SlotTable


class UnverifiedDemands:
    """What open blocks have demanded, by owner."""

    __slots__ = ("_demands",)

    def __init__(self) -> None:
        """Start with no block open."""
        self._demands: dict[int, list[tuple[SlotTable, tuple[int, ...], tuple[int, ...]]]] = {}

    def add(self, owner: int, table: SlotTable, experts: tuple[int, ...], row_masks: tuple[int, ...]) -> None:
        """Note a demand; bit r of an expert's mask says that row r of the block chose it."""
        self._demands.setdefault(owner, []).append((table, experts, row_masks))

    def settle(self, owner: int, num_rows: int | None) -> None:
        """Close the owner's block: its first `num_rows` rows stay, None keeps all."""
        for table, experts, row_masks in self._demands.pop(owner, ()):
            masks: Sequence[int] = row_masks
            if num_rows is not None:
                stay = (1 << num_rows) - 1
                masks = [mask & stay for mask in row_masks]
            kept = [place for place, mask in enumerate(masks) if mask]
            kept.sort(key=[mask.bit_length() for mask in masks].__getitem__)  # by the last row, then by place
            table.confirm([experts[place] for place in kept], [masks[place].bit_count() for place in kept])
            if len(kept) < len(experts):
                table.ranking.reject(
                    [expert for expert, mask in zip(experts, masks, strict=True) if not mask]
                )
