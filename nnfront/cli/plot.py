# SPDX-License-Identifier: Apache-2.0
"""Lines over numbers, as a picture in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log2

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 360, 240, 56, 56, 40
COLOURS = ("#2563a8", "#c2571a", "#2f7d4f", "#7a4a9e", "#8a6d1f", "#9c2f45")


@dataclass(frozen=True)
class Panel:
    """A title, and lines by their names: points (x, y), x above 0 and y at least."""

    title: str
    lines: dict[str, list[tuple[float, float]]]


def plot(title: str, x_name: str, panels: Sequence[Panel]) -> str:
    """Return a picture with the panels side by side: x in powers of two, y from 0."""
    width = len(panels) * (WIDTH + LEFT) + 16
    parts = [part for i, panel in enumerate(panels) for part in _panel(panel, i * (WIDTH + LEFT), x_name)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + BOTTOM}" width="{width}"'
        ' font-family="sans-serif" font-size="11" fill="#333">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(panel: Panel, left: float, x_name: str) -> Iterator[str]:
    points = [point for line in panel.lines.values() for point in line]
    low, high = log2(min(x for x, _ in points)), log2(max(x for x, _ in points))
    top = 1.1 * max(y for _, y in points) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = (log2(x) - low) / (high - low) if high > low else 0.5
        return left + LEFT + 8 + across * (WIDTH - 24), TOP + HEIGHT * (1 - y / top)

    yield f'<text x="{left + LEFT}" y="{TOP - 12}">{escape(panel.title)}</text>'
    for i in range(5):
        x, y = left + LEFT, TOP + HEIGHT * (1 - i / 4)
        yield f'<path d="M{x} {y:.1f}h{WIDTH - 8}" stroke="#ddd"/><text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{top * i / 4:.4g}</text>'
    for tick in sorted({x for x, _ in points}):
        yield f'<text x="{at(tick, 0)[0]:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="{left + LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 32}" text-anchor="middle">{escape(x_name)}</text>'
    for i, line in enumerate(panel.lines.values()):
        colour = COLOURS[i % len(COLOURS)]
        places = [f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in sorted(line))]
        yield f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{p.partition(",")[0]}" cy="{p.partition(",")[2]}" r="3" fill="{colour}"/>' for p in places)  # fmt: skip
    names = [
        f'<tspan dx="12" fill="{COLOURS[i % len(COLOURS)]}">{escape(name)}</tspan>'
        for i, name in enumerate(panel.lines)
    ]
    yield f'<text x="{left + LEFT + WIDTH - 8}" y="{TOP - 12}" text-anchor="end">{"".join(names)}</text>'
