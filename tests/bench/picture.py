"""The evidence as a picture: patches down, releases across, the colour is the verdict.

``python tests/bench/picture.py EVIDENCE_JSON OUT_FOLDER`` writes ``matrix.svg``, for the README, and ``matrix.html``,
with all the numbers. Both stand alone, and the same evidence gives the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.reporting import sentences


@dataclass(frozen=True, slots=True)
class Row:
    """One patch of the catalogue. Its name links to the first of ``links``."""

    id: str
    title: str
    severity: str
    trl_range: str
    links: tuple[str, ...]


# Fill and ink on a light page and on a dark one, a glyph in a box of 6 by 6, and the meaning. The hues are Okabe and
# Ito's, which stay distinct under the common colour blindnesses.
LOOKS = {
    "proven": ("#008a64 #fff", "#009e73 #fff", "M.8 3.2 2.4 4.8 5.3 1.2", "bug seen, repaired, and back after revert"),
    "absent": ("#d5e8f5 #57738a", "#1c3a52 #8fb4d0", "M1.4 3H4.6", "this release does not have the bug"),
    "not-reproduced": ("#e69f00 #1f2328", "#e69f00 #0d1117", "M.9 1.4H5.1L3 5z", "in range, but the bug is not seen"),
    "unrepaired": ("#d55e00 #fff", "#d55e00 #fff", "M1 1 5 5M5 1 1 5", "patched, and the bug is still there"),
    "uncovered": ("#cc79a7 #1f2328", "#cc79a7 #0d1117", "M1 3a2 2 0 1 1 0 .01z", "out of range, but the bug is there"),
    "error": ("#1f2328 #fff", "#f0f6fc #0d1117", "M3 .4V3.5M3 5.2V5.6", "no answer from the self-test"),
    "unknown": ("#fff #59636e", "#0d1117 #9da7b1", "M1.6 2A1.4 1.4 0 1 1 3.8 3Q3 3.4 3 4M3 5.4V5.8", "not looked at"),
}
NOT_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
FAILURES = ("not-reproduced", "unrepaired", "uncovered", "error")
WORST_FIRST = (*FAILURES, "unknown", "proven", "absent")
MARKS = {
    "proof": ("M3 .5A2.5 2.5 0 1 1 2.99 .5z", "proven with the real trainer"),
    "broken": ("M0 0H6V6H0z", "failed with the real trainer"),
    "parity": ("M3 0 6 3 3 6 0 3z", "compared with the fixed release"),
}
STALE = "stale: the patch or TRL's code is no longer the one that was tested; test it again"
LIGHT = "--page:#fff;--text:#1f2328;--dim:#59636e;--line:#d1d9e0;--link:#0550ae;--alert:#b84a00"
DARK = "--page:#0d1117;--text:#e6edf3;--dim:#9da7b1;--line:#3d444d;--link:#79b8ff;--alert:#ff9a57"


@dataclass(slots=True)
class Cell:
    """The evidence for one patch on one release: an entry for each stack, and the marks."""

    cells: list[Mapping[str, Any]] = field(default_factory=list)
    proofs: list[Mapping[str, Any]] = field(default_factory=list)
    parity: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def parts(self) -> list[tuple[str, bool]]:
        """Return for each stack the verdict and whether it is stale; they are drawn one above the other."""
        return [(_verdict(entry), bool(entry.get("stale"))) for entry in self.cells] or [("unknown", False)]

    @property
    def worst(self) -> str:
        return min((verdict for verdict, _ in self.parts), key=WORST_FIRST.index)

    @property
    def marks(self) -> list[str]:
        proofs = {_verdict(entry) for entry in self.proofs}
        broken = not proofs <= {"proven", "absent"}
        return ["broken"] * broken + ["proof"] * ("proven" in proofs and not broken) + ["parity"] * bool(self.parity)

    def lines(self, *, full: bool) -> list[str]:
        """Return the cell in words and numbers; ``full`` adds versions and bodies."""
        # The message of an exception may have characters that XML or UTF-8 cannot hold: one of them blanks the picture.
        return [NOT_XML.sub("\ufffd", line) for line in self._lines(full)]

    def _lines(self, full: bool) -> Iterator[str]:
        if not self.cells:
            yield f"unknown: {LOOKS['unknown'][3]}"
        for entry in self.cells:
            verdict = entry["verdict"] if entry["verdict"] in LOOKS else f"error: {entry['verdict']!r} is no verdict"
            yield f"{entry['stack']}: {verdict}" + (f", {STALE}" if entry.get("stale") else "")
            if entry.get("why"):
                yield f"why: {entry['why']}"
            for leaf, runs in entry.get("leaves", {}).items():
                yield from (f"{leaf}, {run}: {_words(outcome)}" for run, outcome in runs.items())
            if full:
                yield f"patch revision {entry['revision']}, with {_words(entry.get('versions', {}))}"
                yield from (f"body {target} = {digest}" for target, digest in entry.get("bodies", {}).items())
        for entry in self.proofs:
            yield f"real trainer, {entry['stack']}: {entry['verdict']}" + (
                f", {entry['why']}" if entry.get("why") else ""
            )
            yield from (f"real trainer, {run}: {_words(outcome)}" for run, outcome in entry.get("runs", {}).items())
        for entry in self.parity:
            yield (
                f"compared with TRL {entry['fixed_release']}: loss differs by {entry['loss_difference']:.3g}, "
                f"{entry['gradients']} gradients by {entry['gradient_difference']:.3g} at most"
            )

    def drawing(self, wide: float, tall: float, x: float = 0) -> str:
        """Return the cell as uses of the ``_symbols`` of the same size."""
        parts, marks = self.parts, self.marks
        uses = [
            f'<use href="#{_name(verdict, stale, len(parts))}" x="{x:g}" y="{tall * place / len(parts):g}"/>'
            for place, (verdict, stale) in enumerate(parts)
        ]
        middle = x + wide / 2 - 3.5 * len(marks) + 0.5
        uses += [f'<use href="#{mark}" x="{middle + 7 * at:.2f}" y="{tall + 2:g}"/>' for at, mark in enumerate(marks)]
        return "".join(uses).replace(' x="0"', "").replace(' y="0"', "")


@dataclass(frozen=True, slots=True)
class Grid:
    """The content of the picture. Evidence for an unlisted patch or release is drawn too: it may be a failure."""

    rows: tuple[Row, ...]
    releases: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    version: str

    @classmethod
    def of(cls, evidence: Mapping[str, Any], catalogue: Sequence[Row]) -> Grid:
        cells: dict[tuple[str, str], Cell] = {}
        for kind in ("cells", "proofs", "parity"):
            for entry in sorted(evidence.get(kind, ()), key=lambda entry: str(entry.get("stack", ""))):
                getattr(cells.setdefault((entry["patch"], entry["release"]), Cell()), kind).append(entry)
        strays = sorted({patch for patch, _ in cells} - {row.id for row in catalogue})
        rows = (*catalogue, *(Row(patch, "Not in the catalogue", "not in the catalogue", "", ()) for patch in strays))
        listed = tuple(evidence["releases"])
        return cls(
            rows, (*listed, *sorted({release for _, release in cells} - {*listed})), cells, evidence["trl_hotfix"]
        )

    def across(self, row: Row) -> list[Cell]:
        return [self.cells.get((row.id, release), Cell()) for release in self.releases]

    def dim(self, column: int) -> bool:
        """Return whether this is a later release of a series, such as 0.11.3. It is dimmed, so the first stands out."""
        return column > 0 and self.releases[column].split(".")[:2] == self.releases[column - 1].split(".")[:2]

    def counts(self) -> Counter[str]:
        """Return the number of cells with each worst verdict and each mark, and of those that failed or are stale."""
        cells = [cell for row in self.rows for cell in self.across(row)]
        counts = Counter(name for cell in cells for name in (cell.worst, *cell.marks))
        counts["failed"] = sum(cell.worst in FAILURES or "broken" in cell.marks for cell in cells)
        counts["stale"] = sum(any(stale for _, stale in cell.parts) for cell in cells)
        return counts

    def legend(self) -> list[tuple[str, str, str]]:
        """Return for each symbol its name, the words with the number of cells, and the meaning."""
        counts = self.counts()
        return [
            *((_name(name, False, 1), f"{counts[name]} {name}", meaning) for name, (*_, meaning) in LOOKS.items()),
            (_name("proven", True, 1), f"{counts['stale']} stale", STALE),
            *((name, f"{counts[name]} {meaning}", meaning) for name, (_, meaning) in MARKS.items()),
        ]

    def headline(self) -> tuple[str, str, str]:
        """Return the size of the matrix, its problems, and the CSS class of the problems."""
        counts = self.counts()
        size = f"{len(self.rows)} patch{'es' * (len(self.rows) != 1)} on {len(self.releases)} releases of TRL"
        span = f", {self.releases[0]} to {self.releases[-1]}" if self.releases else ""
        wrong = ", ".join(f"{counts[name]} {name}" for name in ("failed", "unknown", "stale") if counts[name])
        return f"trl_hotfix {self.version}: {size}{span}", wrong or "nothing failed", "bad" if wrong else "fine"


def svg(evidence: dict[str, Any], catalogue: Sequence[Row]) -> str:
    """Return the picture for a README: no script, and a background of its own."""
    grid = Grid.of(evidence, catalogue)
    names = max([34, *(len(row.id) for row in grid.rows)]) * 6 + 14
    pitch = round(min(24, max(11.2, (992 - names) / max(1, len(grid.releases)))), 2)
    width, tall, high = max(1000, round(names + pitch * len(grid.releases) + 8)), 17, 29
    (head, wrong, tone), x, y = grid.headline(), 12.0, 38
    body = [f'<text class="h" x="12" y="24">{escape(head)}: <tspan class="{tone}">{escape(wrong)}</tspan></text>']
    for name, words, _ in grid.legend():
        if x + 28 + 5.6 * len(words) > width:
            x, y = 12.0, y + 23
        body.append(f'<use href="#{name}" x="{x:.1f}" y="{y + 5 * (name in MARKS)}"/>')
        body.append(f'<text x="{x + (10 if name in MARKS else pitch + 3):.1f}" y="{y + 12}">{escape(words)}</text>')
        x += 5.3 * len(words) + (30 if name in MARKS else pitch + 24)
    labels = 10 + 6 * max([0, *map(len, grid.releases)])
    first = y + 26 + labels

    def releases(at: float, anchor: str) -> Iterator[str]:
        for column, release in enumerate(grid.releases):
            place = f"translate({names + pitch * (column + 0.5) + 3.3:.2f} {at})rotate(-90)"
            dim = ' class="dim"' * grid.dim(column)
            yield f'<text{dim} transform="{place}" text-anchor="{anchor}">{escape(release)}</text>'

    body += releases(first - 6, "start")
    for number, row in enumerate(grid.rows):
        name = f'<text class="id" x="12" y="9">{escape(row.id)}<title>{escape(row.title)}</title></text>'
        if row.links:
            name = f'<a href="{escape(row.links[0])}" target="_blank">{name}</a>'
        note = f"{row.severity}  {row.trl_range}"
        note = note if len(note) * 6 < names else f"{note[: names // 6 - 1]}…"
        body.append(f'<g transform="translate(0 {first + high * number})">{name}')
        body.append(f'<text class="dim" x="12" y="21">{escape(note)}</text>')
        for column, (release, cell) in enumerate(zip(grid.releases, grid.across(row), strict=True)):
            words = "\n".join([f"{row.id} on TRL {release}", *cell.lines(full=False)])
            drawn = cell.drawing(pitch - 1.2, tall, round(names + pitch * column, 2))
            body.append(f"<g><title>{escape(words)}</title>{drawn}</g>")
        body.append("</g>")
    height = first + high * len(grid.rows) + 8
    if len(grid.rows) > 14:
        body += releases(height - 4, "end")
        height += labels
    size, drawn = f'width="{width}" height="{height}"', "\n".join(body)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" role="img"
 aria-label="{escape(head)}: {escape(wrong)}"><style>{_colours()}{SVG_STYLE}</style>
<defs>{_symbols(grid, pitch - 1.2, tall)}</defs><rect class="page" {size}/>
{drawn}
</svg>
"""


def html(evidence: dict[str, Any], catalogue: Sequence[Row]) -> str:
    """Return the same as a page, with a panel for the numbers of the cell under the pointer or with the focus."""
    grid = Grid.of(evidence, catalogue)
    head, wrong, tone = grid.headline()
    wide, tall = 17, 22
    legend = "".join(
        f'<li title="{escape(meaning)}"><svg class="s-{name}"><use href="#{name}"/></svg>{escape(words)}</li>'
        for name, words, meaning in grid.legend()
    )
    meanings = escape("\n".join([*(f"{name}: {meaning}" for name, (*_, meaning) in LOOKS.items()), STALE]))
    header = "".join(
        f'<th scope="col"{" class=dim" * grid.dim(column)}><span>{escape(release)}</span></th>'
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
            numbers.append([lines.setdefault(line, len(lines)) for line in cell.lines(full=True)])
            body.append(f"<td tabindex=-1><svg>{cell.drawing(wide, tall)}</svg></td>")
        body.append("</tr>\n")
    rows = [[row.id, row.title, row.severity, row.trl_range, row.links] for row in grid.rows]
    page = {"rows": rows, "releases": grid.releases, "lines": list(lines), "cells": numbers}
    # Entities are not decoded inside <script>, and only "<" could end it.
    data = json.dumps(page, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{escape(head)}</title>
<style>{_colours()}{SVG_STYLE}{HTML_STYLE}</style></head>
<body><svg style="position:absolute;width:0;height:0" aria-hidden="true"><defs>{_symbols(grid, wide, tall)}</defs></svg>
<h1>{escape(head)}: <span class="{tone}">{escape(wrong)}</span></h1><ul>{legend}</ul>
<main><table role="grid"><thead><tr><th></th>{header}</tr></thead><tbody>
{"".join(body)}</tbody></table></main>
<section aria-live="polite"><p>Point at a cell, or walk with Tab and the arrow keys, to see what was measured.</p>
<pre>{meanings}</pre><noscript><p>A script, which is part of this page, shows the numbers.</p></noscript></section>
<script type="application/json">{data}</script><script>{SCRIPT}</script></body></html>
"""


def _symbols(grid: Grid, wide: float, tall: float) -> str:
    """Return the repeated shapes: a cell part for each verdict and share of the height, and the marks."""
    shares = sorted({1} | {len(cell.parts) for cell in grid.cells.values()})
    drawn = [f'<path id="{name}" class="{name}" d="{path}"/>' for name, (path, _) in MARKS.items()]
    for verdict, stale, share in ((name, old, share) for name in LOOKS for old in (False, True) for share in shares):
        high = tall / share - (share > 1)
        size = min(wide - 2, high - 1.2, 11) / 6
        inset = 0.5 * (verdict == "unknown")
        box = f'x="{inset}" y="{inset}" width="{wide - 2 * inset:.2f}" height="{high - 2 * inset:.2f}" rx="1.5"'
        hatch = f'<rect {box} class="hatch"/>' * stale
        place = f"translate({wide / 2 - 3 * size:.2f} {high / 2 - 3 * size:.2f})scale({size:.3f})"
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
    for name, (on_light, on_dark, *_) in LOOKS.items():
        light += ";--{0}:{1};--{0}-g:{2}".format(name, *on_light.split())
        dark += ";--{0}:{1};--{0}-g:{2}".format(name, *on_dark.split())
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _verdict(entry: Mapping[str, Any]) -> str:
    return entry["verdict"] if entry["verdict"] in LOOKS else "error"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        shown = {key: _words(item) for key, item in value.items() if key != "traceback"}
        return ", ".join(text if key == "verdict" else f"{key} {text}" for key, text in shown.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


SVG_STYLE = """
text,body{font:11px -apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif}
text{fill:var(--text);white-space:pre}
.h{font-size:15px;font-weight:600}.id{font-weight:600}a .id{fill:var(--link)}
text.dim{fill:var(--dim)}.bad{fill:var(--alert)}
.page{fill:var(--page)}.proof,.parity{fill:var(--text)}.broken{fill:var(--alert)}.hatch{fill:url(#hatch)}
.unknown{stroke:var(--dim);stroke-width:.8;stroke-dasharray:2 1.6}
.g{fill:none;stroke-width:1.1;stroke-linecap:round;stroke-linejoin:round}
"""
HTML_STYLE = """
body{margin:0;height:100vh;display:flex;flex-direction:column;font-size:14px;background:var(--page);color:var(--text)}
h1{font-size:18px;margin:14px 16px 8px}h2{font-size:15px;margin:6px 0 2px}.bad{color:var(--alert)}a{color:var(--link)}
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
    if len(sys.argv) != 3:
        sys.exit("usage: picture.py EVIDENCE_JSON OUT_FOLDER")
    evidence, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    rows = [
        Row(patch.id, patch.title, patch.severity.value, patch.trl, tuple(sentences.links(patch.upstream)))
        for patch in loading.load()
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "matrix.svg").write_text(svg(evidence, rows), encoding="utf-8", newline="\n")
    (out / "matrix.html").write_text(html(evidence, rows), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
