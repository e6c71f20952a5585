"""Draw the results: a panel for each benchmark and unit, and a dot with an interval for each figure.

A goal is a line across the row. The same results give the same bytes. ``python -m benchmarks.plot`` draws
``results.json`` as ``build/benchmarks/results.svg``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import measure

NAMES, AXIS, ROW, MARGIN = 470, 400, 20, 14
COLOURS = {"met": "#009e73", "not met": "#d55e00", "undecided": "#e69f00", "": "#57738a"}
STYLE = """
text{font:11px -apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#1f2328}
.h{font-size:14px;font-weight:600}.dim{fill:#59636e}.page{fill:#fff}.axis{stroke:#d1d9e0}
.goal{stroke:#1f2328;stroke-dasharray:3 2}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9da7b1}.page{fill:#0d1117}
.axis{stroke:#3d444d}.goal{stroke:#e6edf3}}
"""


def svg(results: Mapping[str, Any]) -> str:
    """Return the picture of ``results``, the value of ``benchmarks`` in ``results.json``."""
    body: list[str] = []
    y = MARGIN
    for name, result in results.items():
        for unit in dict.fromkeys(finding["unit"] for finding in result["findings"]):
            rows = [finding for finding in result["findings"] if finding["unit"] == unit]
            body += _panel(f"{name}, {unit or 'ratio or count'}", rows, y)
            y += ROW * (len(rows) + 2) + 8
    width, height = NAMES + AXIS + 190, y + MARGIN
    size = f'width="{width}" height="{height}"'
    panels = "\n".join(body)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" role="img"
 aria-label="benchmarks of trl_hotfix"><style>{STYLE}</style><rect class="page" {size}/>
{panels}
</svg>
"""


def draw(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the picture to ``folder``, and return its path."""
    path = folder / "results.svg"
    path.write_text(svg(results), encoding="utf-8", newline="\n")
    return path


def _panel(title: str, rows: list[Mapping[str, Any]], top: float) -> Iterator[str]:
    ends = [value for row in rows for value in (row["low"], row["high"], row["goal"]) if value is not None]
    least, most = min(0.0, *ends), max(0.0, *ends)
    span = (most - least) or 1.0

    def x(value: float) -> str:
        return f"{NAMES + AXIS * (value - least) / span:.1f}"

    yield f'<text class="h" x="{MARGIN}" y="{top + 12}">{escape(title)}</text>'
    for value in (least, most):
        yield f'<text class="dim" x="{x(value)}" y="{top + 12}" text-anchor="middle">{value:.3g}</text>'
    for number, row in enumerate(rows, 1):
        y = top + ROW * number + 8
        colour = COLOURS[row["verdict"]]
        goal = "" if row["goal"] is None else f", goal {row['goal']:g}: {row['verdict']}"
        figures = f"{row['median']:.3g} [{row['low']:.3g}, {row['high']:.3g}]{goal}"
        yield f"<g><title>{escape(row['what'])}: {escape(figures)}</title>"
        yield f'<text x="{MARGIN}" y="{y + 4}">{escape(row["what"])}</text>'
        yield f'<path class="axis" d="M{x(0.0)} {y - 9}V{y + 9}"/>'
        if row["goal"] is not None:
            yield f'<path class="goal" d="M{x(row["goal"])} {y - 9}V{y + 9}"/>'
        yield f'<path stroke="{colour}" stroke-width="3" d="M{x(row["low"])} {y}H{x(row["high"])}"/>'
        yield f'<circle fill="{colour}" cx="{x(row["median"])}" cy="{y}" r="4"/>'
        yield f'<text class="dim" x="{NAMES + AXIS + 12}" y="{y + 4}">{escape(figures)}</text></g>'


if __name__ == "__main__":
    measure.WORK.mkdir(parents=True, exist_ok=True)
    recorded = json.loads(Path(__file__).with_name("results.json").read_text(encoding="utf-8"))
    print(draw(recorded["benchmarks"], measure.WORK))
