"""Small inline SVG pictures: lines with bands, and bars against a ceiling. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 40
THINNEST, WIDEST, FEW = 2.2, 5.0, 4  #: of curves, in pixels; more than FEW are all thin
COLOURS = 8  #: classes c0 ... c7 of the style sheet


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve through `points` (x, y), drawn as steps; `band` holds (x, low, high)."""

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a bar chart: our value, what marks stand beside it, and its own ceiling."""

    name: str
    value: float
    low: float
    high: float
    ceiling: float
    marks: tuple[tuple[str, float], ...] = ()


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`, about so many."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(n * step, 10) for n in range(first, last + 1)]


def line_chart(lines: Sequence[Line], x_title: str, y_title: str, from_zero: bool = True) -> str:
    """Draw step curves over a common pair of axes; a legend stands below."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, low, high in line.band for y in (low, high)]
    if not xs:
        return '<p class="quiet">Nothing to draw yet.</p>'
    x_low, x_high = min(*xs, 0), max(*xs, 1e-9)
    y_high = max(ys)
    y_low = 0.0 if from_zero else min(ys)
    if y_high <= y_low:
        half = abs(y_low) * 0.05 or 0.5
        y_low, y_high = (y_low if from_zero else y_low - half), y_high + half
    room = (y_high - y_low) * 0.06
    y_high += room
    y_low -= 0.0 if from_zero else room

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [_open(WIDTH, HEIGHT, f"{y_title} by {x_title}")]
    for y in ticks(y_low, y_high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" {_at_y(py(y))}/>')
        parts.append(_text(LEFT - 6, py(y) + 4, _number(y), "end"))
    for x in ticks(x_low, x_high):
        parts.append(_text(px(x), HEIGHT - BOTTOM + 17, _number(x), "middle"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" {_at_y(py(y_low))}/>')
    for n, line in enumerate(lines):
        colour = f"c{n % COLOURS}"
        if line.band:
            parts.append(_band(line, colour, px, py))
        parts.append(_steps(line, colour, px, py, x_high, _width(n, len(lines))))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 6, x_title, "end"))
    parts.append("</svg>")
    return "".join(parts) + legend([line.name for line in lines])


def bar_chart(bars: Sequence[Bar], unit: str, ceiling: str) -> str:
    """Draw horizontal bars with their intervals, the peers as marks, each row's ceiling a line."""
    row, left = 30, 104
    height = row * len(bars) + 34
    most = max([b.ceiling for b in bars] + [v for b in bars for _, v in b.marks]) * 1.02

    def px(x: float) -> float:
        return left + x / most * (WIDTH - left - RIGHT)

    parts = [_open(WIDTH, height, f"{unit} of each shape against {ceiling}")]
    for x in ticks(0, most):
        parts.append(
            f'<line class="grid" x1="{px(x):.1f}" x2="{px(x):.1f}" y1="4" y2="{height - 30}"/>'
        )
        parts.append(_text(px(x), height - 16, _number(x), "middle"))
    names = sorted({name for b in bars for name, _ in b.marks})
    for n, bar in enumerate(bars):
        y = 6 + n * row
        parts.append(_text(left - 8, y + 15, bar.name, "end"))
        parts.append(
            f'<rect class="bar" x="{left}" y="{y + 3}" height="15" '
            f'width="{max(px(bar.value) - left, 0):.1f}"/>'
        )
        parts.append(f'<path class="whisker" d="{_whisker(px(bar.low), px(bar.high), y + 10)}"/>')
        parts.append(f'<path class="roof" d="M{px(bar.ceiling):.1f} {y - 1}v23"/>')
        for name, value in bar.marks:
            colour = f"c{(names.index(name) + 2) % COLOURS}"
            parts.append(f'<path class="mark {colour}" d="M{px(value):.1f} {y}v21"/>')
    parts.append(_text(WIDTH - RIGHT, height - 2, unit, "end"))
    parts.append("</svg>")
    keys = '<span class="key"><i class="swatch bar"></i>best kernel</span>'
    keys += f'<span class="key"><i class="swatch roof"></i>{escape(ceiling)}</span>'
    return "".join(parts) + legend(names, first=2, before=keys)


def legend(names: Sequence[str], first: int = 0, before: str = "") -> str:
    """Return the names with their colours."""
    keys = [
        f'<span class="key"><i class="swatch c{(n + first) % COLOURS}"></i>{escape(name)}</span>'
        for n, name in enumerate(names)
    ]
    return f'<div class="legend">{before}{"".join(keys)}</div>'


def _open(width: int, height: int, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label, quote=True)}">'
    )


def _at_y(y: float) -> str:
    return f'y1="{y:.1f}" y2="{y:.1f}"'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 100 or x == int(x) else f"{x:g}"


def _whisker(low: float, high: float, y: float) -> str:
    return f"M{low:.1f} {y - 4:.1f}v8M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 4:.1f}v8"


def _width(place: int, count: int) -> float:
    """Width of a curve: of a few, those that lie below others are wider and stay visible."""
    if not 1 < count <= FEW:
        return THINNEST
    return WIDEST - (WIDEST - THINNEST) * place / (count - 1)


def _steps(line: Line, colour: str, px: object, py: object, x_high: float, width: float) -> str:
    assert callable(px) and callable(py)
    if not line.points:
        return ""
    (x, y), *rest = line.points
    path = f"M{px(x):.1f} {py(y):.1f}"
    for x, y in rest:
        path += f"H{px(x):.1f}V{py(y):.1f}"
    last = line.points[-1][0]
    tail = f'<path class="line {colour} after" d="M{px(last):.1f} {py(y):.1f}H{px(x_high):.1f}"/>'
    dot = f'<circle class="dot {colour}" cx="{px(last):.1f}" cy="{py(y):.1f}" r="3"/>'
    drawn = f'<path class="line {colour}" style="stroke-width:{width:.1f}px" d="{path}"/>'
    return drawn + (tail if last < x_high else "") + dot


def _band(line: Line, colour: str, px: object, py: object) -> str:
    assert callable(px) and callable(py)
    upper = lower = ""
    for n, (x, low, high) in enumerate(line.band):
        upper += f"M{px(x):.1f} {py(high):.1f}" if not n else f"H{px(x):.1f}V{py(high):.1f}"
        after = line.band[n + 1][0] if n + 1 < len(line.band) else x
        lower = f"L{px(after):.1f} {py(low):.1f}L{px(x):.1f} {py(low):.1f}" + lower
    return f'<path class="band {colour}" d="{upper}{lower}Z"/>'
