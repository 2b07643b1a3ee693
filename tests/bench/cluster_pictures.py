"""A picture of an experiment: bars of measured and predicted times, grouped by table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ["Bars", "draw_bars"]

#: A group of bars: its title, and (label, measured [s], predicted [s] or None) of each bar.
Bars = tuple[str, Sequence[tuple[str, float, "float | None"]]]

WIDTH, LABEL, ROW, MARGIN, FONT = 860, 250, 22, 16, 12


def draw_bars(path: Path, groups: Sequence[Bars]) -> None:
    """Write an SVG: a row for each bar, as long as its measured time, with a line at the predicted one; a scale for each group."""
    parts, y = [], MARGIN
    for title, bars in groups:
        y += ROW
        parts.append(f'<text x="{MARGIN}" y="{y - 6}" font-weight="bold">{escape(title)}</text>')
        longest = max(max(measured, predicted or 0.0) for _, measured, predicted in bars)
        scale = (WIDTH - LABEL - 5 * MARGIN) / longest
        for label, measured, predicted in bars:
            colour = "#2a78b5" if label.startswith("AutoDDL") else "#b9c6d1"
            parts.append(f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
            parts.append(
                f'<rect x="{LABEL}" y="{y + 3}" width="{measured * scale:.1f}" height="{ROW - 6}" fill="{colour}"/>'
            )
            parts.append(f'<text x="{LABEL + measured * scale + 4:.1f}" y="{y + 15}">{measured:.2f} s</text>')
            if predicted is not None:
                x = LABEL + predicted * scale
                parts.append(
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 1}" y2="{y + ROW - 1}" stroke="#c0392b" stroke-width="2"/>'
                )
            y += ROW
        y += MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="{FONT}">'
    background = f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
    path.write_text("\n".join([head, background, *parts, "</svg>", ""]))
