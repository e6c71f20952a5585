"""Drawings on the pages of bugs, as SVG and HTML: bars, dots, curves, and a box for each release.

Each is as wide as a phone. The colours are those of the style sheet, and each colour has its name beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

WIDTH = 350
LEFT, RIGHT = 62, 262
"""The borders of the bars. The names are on the left of them, and the numbers on the right."""


def bars(what: str, wrong: Any, repaired: Any, right: Any) -> str:
    """Draw three numbers as bars from 0 over an axis with ticks.

    If the bars would have nearly the same length, dots on an axis that does not begin at 0 take their place.
    """
    values = {"wrong": wrong, "repaired": repaired, "right": right}
    finite = [value for value in values.values() if _is_number(value)]
    if not finite:
        return ""
    spread = max(finite) - min(finite)
    is_dots = 0 < spread < 0.15 * max(map(abs, finite))
    low, high = (min(finite), max(finite)) if is_dots else (min(0, *finite), max(0, *finite))
    if is_dots:
        low, high = low - 0.2 * spread, high + 0.2 * spread

    def at(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (value - low) / (high - low or 1)

    base = 68
    shapes = [f'<line x1="{LEFT}" x2="{RIGHT}" y1="{base}" y2="{base}"/>']
    for tick in _ticks(low, high):
        shapes.append(f'<line x1="{at(tick):.1f}" x2="{at(tick):.1f}" y1="{base}" y2="{base + 4}"/>')
        shapes.append(f'<text x="{at(tick):.1f}" y="{base + 17}" text-anchor="middle">{_short(tick)}</text>')
    if not is_dots:
        shapes.append(f'<line x1="{at(0):.1f}" x2="{at(0):.1f}" y1="2" y2="{base}"/>')
    for row, (name, value) in enumerate(values.items()):
        y = 3 + 22 * row
        shapes.append(f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{name}</text>')
        if _is_number(value):
            x, zero = at(value), at(0)
            if is_dots:
                shapes.append(f'<circle class="{name}" cx="{x:.1f}" cy="{y + 9}" r="6"/>')
            else:
                size = f'x="{min(x, zero):.1f}" y="{y}" width="{max(1, abs(x - zero)):.1f}" height="17" rx="2"'
                shapes.append(f'<rect class="{name}" {size}/>')
        shapes.append(f'<text x="{RIGHT + 10}" y="{y + 13}">{number(value)}</text>')
    shapes.append(
        f'<text class="axis" x="{(LEFT + RIGHT) / 2}" y="{base + 34}" text-anchor="middle">{escape(what)}</text>'
    )
    numbers = ", ".join(f"{name} {number(value)}" for name, value in values.items())
    return _svg("bars", base + 40, f"{escape(what)}: {numbers}", shapes)


def curves(runs: Mapping[str, Sequence[float | None]]) -> str:
    """Draw the losses of each run by step. A line has a gap where a loss is no number."""
    names = {"fixed": "right", "unpatched": "wrong", "patched": "repaired"}
    losses_of = {names[run]: runs[run] for run in names if run in runs}
    finite = [loss for losses in losses_of.values() for loss in losses if loss is not None]
    low, high, last = min(finite), max(finite), max(len(losses) for losses in losses_of.values()) - 1
    left, right, top, base = 44, 340, 44, 164

    def x_of(step: int) -> float:
        return left + (right - left) * step / last

    def y_of(loss: float) -> float:
        return base - (base - top) * (loss - low) / (high - low or 1)

    shapes = [
        f'<line x1="{left}" x2="{right}" y1="{base + 6}" y2="{base + 6}"/>',
        f'<line x1="{left}" x2="{left}" y1="{top - 6}" y2="{base + 6}"/>',
        f'<text class="axis" x="{left}" y="32">loss in the log</text>',
        f'<text class="axis" x="{(left + right) / 2}" y="{base + 36}" text-anchor="middle">optimizer step</text>',
    ]
    for tick in _ticks(low, high):
        shapes.append(f'<text x="{left - 6}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
        shapes.append(f'<line x1="{left - 4}" x2="{left}" y1="{y_of(tick):.1f}" y2="{y_of(tick):.1f}"/>')
    for step in sorted({0, last // 2, last}):
        shapes.append(f'<text x="{x_of(step):.1f}" y="{base + 20}" text-anchor="middle">{step + 1}</text>')
    # Later lines are drawn on top of earlier ones.
    for column, (name, losses) in enumerate(losses_of.items()):
        x = left + 100 * column
        shapes.append(f'<polyline class="{name}" points="{x},10 {x + 20},10"/><text x="{x + 26}" y="14">{name}</text>')
        points = [None if loss is None else f"{x_of(step):.1f},{y_of(loss):.1f}" for step, loss in enumerate(losses)]
        for piece in " ".join("|" if point is None else point for point in points).split("|"):
            if piece.strip():
                shapes.append(f'<polyline class="{name}" points="{piece.strip()}"/>')
    ends = ", ".join(f"{name} {number(losses[0])} to {number(losses[-1])}" for name, losses in losses_of.items())
    return _svg("curves", base + 42, f"loss in the log by optimizer step: {ends}", shapes)


def _svg(kind: str, height: float, label: str, shapes: Sequence[str]) -> str:
    head = f'<svg class="{kind}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    return f"{head}{''.join(shapes)}</svg>"


def _ticks(low: float, high: float) -> Iterator[float]:
    """Yield two to five round numbers between the ends of an axis."""
    if high <= low:
        yield low
        return
    exact = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(exact))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= exact * 0.999)
    for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield index * step


def _short(value: float) -> str:
    return f"{value:.6g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any) -> str:
    """Return a number with six digits, or text as HTML."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))


def strip(releases: Sequence[str], cells: Sequence[Mapping[str, Any]]) -> str:
    """Return a box for each release, in the colours of the matrix. The text above it has the same in words."""
    verdicts_of: dict[str, set[str]] = {}
    for cell in cells:
        verdicts_of.setdefault(cell["release"], set()).add(cell["verdict"])
    boxes = []
    for release in releases:
        verdicts = verdicts_of.get(release, {"not looked at"})
        # With another version of transformers the same release may be without the bug.
        worst = next((verdict for verdict in sorted(verdicts) if verdict not in ("absent", "proven")), "")
        word = worst or ("proven" if "proven" in verdicts else "absent")
        boxes.append(f'<i class="{word}" title="{release}: {" or ".join(sorted(verdicts))}"></i>')
    counts = Counter(word.partition('"')[0] for word in (box.removeprefix('<i class="') for box in boxes))
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    row = f'<div class="strip" role="img" aria-label="{words}">{"".join(boxes)}</div>'
    return f"{row}\n<small>{releases[0]} to {releases[-1]}: {words}</small>"
