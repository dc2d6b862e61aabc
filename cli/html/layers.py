"""Which layers compute waits for: exposed wait of a token, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from cli.html.figures import Cell, ms
from cli.html.section import Section
from cli.html.tables import Value, table
from cli.html.variants import Variant, names_among


def wait_by_layer(variants: Sequence[Variant]) -> Section | None:
    """Return the section; None without layers."""
    known = [one for one in variants if one.node["layers"].members]
    if not known:
        return None
    layers = names_among(known, "layers")
    rows: list[list[Value]] = [
        [one.name, *(ms(one.node["layers"][layer]["exposed_wait_ns"].number) for layer in layers)]
        for one in known
    ]
    cells = [cell for row in rows for cell in row if isinstance(cell, Cell) and cell.value is not None]
    most = max((cell.value or 0.0 for cell in cells), default=0.0)
    if most <= 0:
        return None
    worst = max(
        ((one, layer) for one in known for layer in layers),
        key=lambda pair: pair[0].node["layers"][pair[1]]["exposed_wait_ns"].number or 0.0,
    )
    return Section(
        "layers",
        "Which layers are waited for",
        [
            "Exposed wait of a token by layer; the bar under a number is its share of the largest. Layers "
            "whose choice is hard to foresee, or that come before any guess can be made, stand out.",
            f"The longest: {ms(most)} ms a token for layer {worst[1]}, with {worst[0].name}.",
        ],
        [
            table(
                "t-layers",
                "Exposed wait of a token by layer, ms",
                ("row", *(f"layer {layer}" for layer in layers)),
                rows,
                bars=most,
            )
        ],
    )
