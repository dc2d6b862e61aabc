"""The curve of a run as an SVG picture: losses left, shares right. Entry: `draw_curve`."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

WIDTH, HEIGHT, MARGIN = 720, 400, 48
LINES = (
    ("base", "#1f5fa8", False),
    ("selector", "#b5651d", False),
    ("accuracy", "#2e8b57", True),
    ("recall", "#8a4f9e", True),
)


def draw_curve(rows: Sequence[dict[str, float]]) -> str:
    """Return a picture of the lines of a log; an empty frame without any."""
    last = max((row["step"] for row in rows), default=1.0)
    top = float(max(1, ceil(max((max(row["base"], row["selector"]) for row in rows), default=1.0))))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{share * top:.2f}</text>')
        parts.append(f'<text x="{WIDTH - MARGIN + 6}" y="{y + 4:.1f}">{100 * share:.0f}%</text>')
        x = MARGIN + share * (WIDTH - 2 * MARGIN)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{share * last:.0f}</text>')
    for place, (name, colour, is_share) in enumerate(LINES):
        scale = 1.0 if is_share else top
        points = " ".join(
            f"{MARGIN + row['step'] / last * (WIDTH - 2 * MARGIN):.1f},{_y(row[name] / scale):.1f}"
            for row in rows
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        label = f"{name} (right)" if is_share else f"{name} loss"
        x = MARGIN + place * (WIDTH - 2 * MARGIN) / len(LINES)
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - 8}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _y(share: float) -> float:
    return HEIGHT - MARGIN - min(1.0, max(0.0, share)) * (HEIGHT - 2 * MARGIN)
