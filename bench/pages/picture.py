"""The evidence as a page: patches down, releases across, the colour is the verdict, and every number in a panel.

``python -m bench.pages.picture`` writes ``build/evidence/matrix.html``, which is not committed. The page stands alone,
and the same evidence gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench.results.matrix import CHECKOUT, MEANINGS, STALE, Cell, Grid, Row, matrix, rows

PAGE = CHECKOUT / "build" / "evidence" / "matrix.html"

WIDE, TALL = 17, 22
"""The size of a cell without its marks."""

LOOKS = {
    "proven": ("#008a64 #fff", "#009e73 #fff", "M.8 3.2 2.4 4.8 5.3 1.2"),
    "absent": ("#d5e8f5 #57738a", "#1c3a52 #8fb4d0", "M1.4 3H4.6"),
    "not-reproduced": ("#e69f00 #1f2328", "#e69f00 #0d1117", "M.9 1.4H5.1L3 5z"),
    "unrepaired": ("#d55e00 #fff", "#d55e00 #fff", "M1 1 5 5M5 1 1 5"),
    "uncovered": ("#cc79a7 #1f2328", "#cc79a7 #0d1117", "M1 3a2 2 0 1 1 0 .01z"),
    "error": ("#1f2328 #fff", "#f0f6fc #0d1117", "M3 .4V3.5M3 5.2V5.6"),
    "unknown": ("#fff #59636e", "#0d1117 #9da7b1", "M1.6 2A1.4 1.4 0 1 1 3.8 3Q3 3.4 3 4M3 5.4V5.8"),
}
"""Fill and ink on a light page and on a dark one, and a glyph in a box of 6 by 6.

The hues are Okabe and Ito's, which stay distinct under the common colour blindnesses.
"""

MARKS = {
    "proof": ("M3 .5A2.5 2.5 0 1 1 2.99 .5z", "proven with the real trainer"),
    "broken": ("M0 0H6V6H0z", "failed with the real trainer"),
    "parity": ("M3 0 6 3 3 6 0 3z", "compared with the fixed release"),
}
LIGHT = "--page:#fff;--text:#1f2328;--dim:#59636e;--line:#d1d9e0;--link:#0550ae;--alert:#b84a00"
DARK = "--page:#0d1117;--text:#e6edf3;--dim:#9da7b1;--line:#3d444d;--link:#79b8ff;--alert:#ff9a57"


def html(evidence: Mapping[str, Any], catalogue: Sequence[Row]) -> str:
    """Return the page, with a panel for the numbers of the cell under the pointer or with the focus."""
    grid = Grid.of(evidence, catalogue)
    head, problems = f"trl_hotfix {grid.version}: {grid.size()}", grid.problems()
    summary = f'<span class="bad">{problems}</span>' if problems else "nothing failed"
    legend = "".join(
        f'<li title="{escape(meaning)}"><svg class="s-{name}"><use href="#{name}"/></svg>{escape(words)}</li>'
        for name, words, meaning in _legend(grid)
    )
    meanings = escape("\n".join([*(f"{name}: {meaning}" for name, meaning in MEANINGS.items()), STALE]))
    header = "".join(
        f'<th scope="col"{" class=dim" * _is_later_of_its_series(grid, column)}><span>{escape(release)}</span></th>'
        for column, release in enumerate(grid.releases)
    )
    # Many cells share a line. Each line is stored once, or 60 patches on 65 releases would be megabytes.
    lines: dict[str, int] = {}
    numbers: list[list[int]] = []
    body = []
    for row in grid.rows:
        name = f'<a href="{escape(row.links[0])}">{escape(row.id)}</a>' if row.links else escape(row.id)
        note = f"<small>{escape(row.severity)} {escape(row.trl_range)}</small>"
        body.append(f'<tr><th scope="row" title="{escape(row.title)}">{name}{note}</th>')
        for cell in grid.across(row):
            numbers.append([lines.setdefault(line, len(lines)) for line in cell.lines()])
            body.append(f"<td tabindex=-1><svg>{_drawing(cell)}</svg></td>")
        body.append("</tr>\n")
    about = [[row.id, row.title, row.severity, row.trl_range, row.links] for row in grid.rows]
    page = {"rows": about, "releases": grid.releases, "lines": list(lines), "cells": numbers}
    # Entities are not decoded inside <script>, and only "<" could end it.
    data = json.dumps(page, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{escape(head)}</title>
<style>{_colours()}{STYLE}</style></head>
<body><svg style="position:absolute;width:0;height:0" aria-hidden="true"><defs>{_symbols(grid)}</defs></svg>
<h1>{escape(head)}: {summary}</h1><ul>{legend}</ul>
<main><table role="grid"><thead><tr><th></th>{header}</tr></thead><tbody>
{"".join(body)}</tbody></table></main>
<section aria-live="polite"><p>Point at a cell, or walk with Tab and the arrow keys, to see what was measured.</p>
<pre>{meanings}</pre><noscript><p>A script, which is part of this page, shows the numbers.</p></noscript></section>
<script type="application/json">{data}</script><script>{SCRIPT}</script></body></html>
"""


def _legend(grid: Grid) -> list[tuple[str, str, str]]:
    """Return for each symbol its name, the words with the number of cells, and the meaning."""
    counts = grid.counts()
    return [
        *((_name(name, False, 1), f"{counts[name]} {name}", meaning) for name, meaning in MEANINGS.items()),
        (_name("proven", True, 1), f"{counts['stale']} stale", STALE),
        *((name, f"{counts[name]} {meaning}", meaning) for name, (_, meaning) in MARKS.items()),
    ]


def _is_later_of_its_series(grid: Grid, column: int) -> bool:
    """Return whether this is a release such as 0.11.3. It is dimmed, so that the first of the series stands out."""
    return column > 0 and grid.releases[column].split(".")[:2] == grid.releases[column - 1].split(".")[:2]


def _drawing(cell: Cell) -> str:
    """Return the cell as uses of the symbols: a part for each stack, one above the other, and the marks below."""
    parts, marks = cell.parts, cell.marks
    uses = [
        f'<use href="#{_name(verdict, stale, len(parts))}" x="0" y="{TALL * place / len(parts):g}"/>'
        for place, (verdict, stale) in enumerate(parts)
    ]
    first = WIDE / 2 - 3.5 * len(marks) + 0.5
    uses += [f'<use href="#{mark}" x="{first + 7 * place:.2f}" y="{TALL + 2}"/>' for place, mark in enumerate(marks)]
    return "".join(uses).replace(' x="0"', "").replace(' y="0"', "")


def _symbols(grid: Grid) -> str:
    """Return the repeated shapes: a cell part for each verdict and share of the height, and the marks."""
    shares = sorted({1} | {len(cell.parts) for cell in grid.cells.values()})
    drawn = [f'<path id="{name}" class="{name}" d="{path}"/>' for name, (path, _) in MARKS.items()]
    for verdict, stale, share in ((name, old, share) for name in LOOKS for old in (False, True) for share in shares):
        high = TALL / share - (share > 1)
        size = min(WIDE - 2, high - 1.2, 11) / 6
        inset = 0.5 * (verdict == "unknown")
        box = f'x="{inset}" y="{inset}" width="{WIDE - 2 * inset:.2f}" height="{high - 2 * inset:.2f}" rx="1.5"'
        hatch = f'<rect {box} class="hatch"/>' * stale
        place = f"translate({WIDE / 2 - 3 * size:.2f} {high / 2 - 3 * size:.2f})scale({size:.3f})"
        glyph = f'<path class="g" stroke="var(--{verdict}-g)" transform="{place}" d="{LOOKS[verdict][2]}"/>'
        fade = ' opacity=".5"' * stale
        rect = f'<rect class="{verdict}" fill="var(--{verdict})"{fade} {box}/>'
        drawn.append(f'<g id="{_name(verdict, stale, share)}">{rect}{hatch}{glyph}</g>')
    hatch = '<pattern id="hatch" width="3.5" height="3.5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    return f'{hatch}<path d="M1 0V4" stroke="var(--dim)"/></pattern>{"".join(drawn)}'


def _name(verdict: str, stale: bool, share: int) -> str:
    return f"{verdict}{'-stale' * stale}-{share}"


def _colours() -> str:
    light, dark = LIGHT, DARK
    for name, (on_light, on_dark, _) in LOOKS.items():
        light += ";--{0}:{1};--{0}-g:{2}".format(name, *on_light.split())
        dark += ";--{0}:{1};--{0}-g:{2}".format(name, *on_dark.split())
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


STYLE = """
.bad{color:var(--alert)}.proof,.parity{fill:var(--text)}.broken{fill:var(--alert)}.hatch{fill:url(#hatch)}
.unknown{stroke:var(--dim);stroke-width:.8;stroke-dasharray:2 1.6}
.g{fill:none;stroke-width:1.1;stroke-linecap:round;stroke-linejoin:round}
body{font-family:-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif}
body{margin:0;height:100vh;display:flex;flex-direction:column;font-size:14px;background:var(--page);color:var(--text)}
h1{font-size:18px;margin:14px 16px 8px}h2{font-size:15px;margin:6px 0 2px}a{color:var(--link)}
ul{list-style:none;display:flex;flex-wrap:wrap;gap:5px 18px;margin:0 16px 10px;padding:0;font-size:13px}
li{display:flex;align-items:center;gap:5px}svg{display:block;width:17px;height:31px}li svg{height:22px}
svg.s-proof,svg.s-broken,svg.s-parity{width:6px;height:6px}
main{flex:0 1 auto;min-height:96px;overflow:auto;border:solid var(--line);border-width:1px 0}
table{border-spacing:0}th,td{padding:0;background:var(--page)}td{padding:3px 1px 1px;vertical-align:top}
thead th{position:sticky;top:0;z-index:1;vertical-align:bottom;height:54px;font-size:12px}
th span{writing-mode:vertical-rl;transform:rotate(180deg);padding-top:4px}thead .dim{color:var(--dim);font-weight:400}
th:first-child{position:sticky;left:0;z-index:2;text-align:left;padding:2px 12px 2px 16px;min-width:150px;
border-right:1px solid var(--line);overflow-wrap:anywhere}thead th:first-child{z-index:3}
small{display:block;font-weight:400;font-size:11px;color:var(--dim)}@media(min-width:700px){th{white-space:nowrap}}
td:hover,td.on{background:var(--line)}td:focus{outline:2px solid var(--link);outline-offset:-1px}
td{cursor:pointer;scroll-margin:60px 20px 20px min(46vw,400px)}
section{flex:1 0 30vh;overflow:auto;padding:4px 16px 10px}p{margin:3px 0;color:var(--dim)}
pre{margin:6px 0 0;font-size:12.5px;line-height:1.5;white-space:pre-wrap;overflow-wrap:anywhere}
"""
SCRIPT = """
const data = JSON.parse(document.querySelector("script").textContent), panel = document.querySelector("section");
const cells = [...document.querySelectorAll("td")], across = data.releases.length;
const row = index => data.rows[Math.floor(index / across)];
const head = index => `${row(index)[0]} on TRL ${data.releases[index % across]}`;
const add = (name, text, into) => Object.assign(into.appendChild(document.createElement(name)), {textContent: text});
let kept = 0;
const show = index => {
  const [, title, severity, range, links] = row(index);
  panel.replaceChildren();
  add("h2", head(index), panel);
  const about = add("p", `${title}. ${severity} ${range} `, panel);
  for (const link of links) { add("a", link, about).href = link; about.append(" "); }
  add("pre", data.cells[index].map(line => data.lines[line]).join("\\n"), panel);
};
cells.forEach((cell, index) => {
  cell.ariaLabel = `${head(index)}: ${data.lines[data.cells[index][0]]}`;
  cell.tabIndex = index ? -1 : 0;
  cell.onmouseenter = () => show(index);
  cell.onclick = () => cell.focus();
  cell.onfocus = () => {
    cells[kept].tabIndex = -1; cells[kept].classList.remove("on");
    kept = index; cell.tabIndex = 0; cell.classList.add("on"); show(index);
  };
});
document.querySelector("tbody").onmouseleave = () => { if (cells[kept]?.className) show(kept); };
document.querySelector("table").onkeydown = event => {
  const index = cells.indexOf(event.target), at = index % across;
  const step = {ArrowUp: -across, ArrowDown: across, ArrowLeft: -(at > 0), ArrowRight: +(at < across - 1)}[event.key];
  if (index >= 0 && step !== undefined) { event.preventDefault(); cells[index + step]?.focus(); }
};
"""


def main() -> None:
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(html(matrix(), rows()), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
