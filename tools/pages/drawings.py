"""Drawings on the pages of bugs, as SVG and HTML: bars, curves, and a box for each release."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def bars(part: str, before: Any, after: Any, right: Any) -> str:
    """Draw the values before, after and right as bars from 0.

    If the bars would have nearly the same length, they show the differences from the right value instead.
    """
    shown = {"unpatched": ("before", before), "patched": ("after", after), "right": ("right", right)}
    finite = [value for _, value in shown.values() if _is_number(value)]
    if not finite:
        return ""
    head = part
    if len(finite) == 3 and 0 < max(finite) - min(finite) < 0.15 * max(map(abs, finite)):
        shown = {name: (kind, value - right) for name, (kind, value) in shown.items() if name != "right"}
        finite = [value for _, value in shown.values()]
        head = f"{part}{', ' * bool(part)}measured - right"
    low, high = min(0, *finite), max(0, *finite)
    scale = 240 / (high - low or 1)
    top = 22 if head else 4
    shapes = [f'<text x="0" y="14">{escape(head)}</text>'] if head else []
    for row, (name, (kind, value)) in enumerate(shown.items()):
        y = top + 22 * row
        shapes.append(f'<text x="72" y="{y + 13}" text-anchor="end">{name}</text>')
        if _is_number(value):
            x, width = 80 + (min(0, value) - low) * scale, max(1, abs(value) * scale)
            shapes.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="17" rx="2"/>')
        shapes.append(f'<text x="332" y="{y + 13}">{number(value)}</text>')
    zero, height = 80 - low * scale, top + 22 * len(shown)
    shapes.append(f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="{top - 2}" y2="{height - 3}"/>')
    words = ", ".join(f"{name} {number(value)}" for name, (_, value) in shown.items())
    label = escape(f"{head} {words}".strip())
    return f'<svg class="bars" viewBox="0 0 420 {height}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def curves(runs: Mapping[str, Sequence[float | None]]) -> str:
    """Draw the losses of each run by step. A line has a gap where a loss is no number."""
    kinds = {"fixed": "right", "unpatched": "before", "patched": "after"}
    finite = [loss for losses in runs.values() for loss in losses if loss is not None]
    low, high, last = min(finite), max(finite), max(len(losses) for losses in runs.values()) - 1
    shapes = [f'<text x="40" y="{y}" text-anchor="end">{loss:.4g}</text>' for loss, y in ((high, 30), (low, 174))]
    shapes += [f'<text x="{x}" y="192" text-anchor="middle">{step}</text>' for step, x in ((1, 48), (last + 1, 412))]
    shapes.append('<line x1="46" x2="414" y1="176" y2="176"/><line x1="46" x2="46" y1="24" y2="176"/>')
    # Later lines are drawn on top of earlier ones.
    for column, name in enumerate(name for name in kinds if name in runs):
        kind, x = kinds[name], 48 + 120 * column
        shapes.append(f'<polyline class="{kind}" points="{x},10 {x + 20},10"/><text x="{x + 26}" y="14">{name}</text>')
        points = [
            None if loss is None else f"{48 + 364 * step / last:.1f},{170 - 140 * (loss - low) / (high - low or 1):.1f}"
            for step, loss in enumerate(runs[name])
        ]
        for piece in " ".join("|" if point is None else point for point in points).split("|"):
            if piece.strip():
                shapes.append(f'<polyline class="{kind}" points="{piece.strip()}"/>')
    ends = ", ".join(f"{name} {number(losses[0])} to {number(losses[-1])}" for name, losses in runs.items())
    label = f"loss by step: {ends}"
    return f'<svg class="curves" viewBox="0 0 420 198" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


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
