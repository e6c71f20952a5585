"""The evidence as a picture for the README: releases down, the newest first, and trainers across.

``python tests/bench/summary.py`` writes ``docs/matrix.svg``. It is drawn for each release of trl_hotfix and not for
each patch, so that two branches with a patch each do not change the same file. It has a phone's width, whatever the
number of patches: a cell is a count.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import ANY_TRAINER, CHECKOUT, Grid, Row, matrix, rows

PICTURE = CHECKOUT / "docs" / "matrix.svg"
NAMED_TRAINERS = 6
"""The trainers with a column of their own: those with the most bugs. The others share the last one."""

ALL, OTHERS = "all", "others"
REPAIRED, NO_PROBLEM = "repaired", "nothing failed"
WIDTH, MARGIN, LABELS, ROW = 390, 10, 70, 19
SHADES = 4
STYLE = """
text{font:12px -apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#1f2328}
.head{font-size:17px;font-weight:600}.number{text-anchor:middle}.all{font-weight:600}.dim,.none{fill:#59636e}
.page{fill:#fff}.line{fill:#d1d9e0}.empty{fill:#f0f3f6}
.s1{fill:#d8f1e7}.s2{fill:#a5dfc8}.s3{fill:#5cc39c}.s4{fill:#007a58}text.on4{fill:#fff}
.alert{fill:#b84a00}text.bad{fill:#b84a00;font-weight:600}text.onalert{fill:#fff;font-weight:600}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.dim,.none{fill:#9da7b1}.page{fill:#0d1117}.line{fill:#3d444d}.empty{fill:#161b22}
.s1{fill:#10352a}.s2{fill:#12503d}.s3{fill:#107355}.s4{fill:#1fb78a}text.on4{fill:#04140e}
text.bad,.alert{fill:#ff9a57}text.onalert{fill:#0d1117}}
"""

Tally = Counter[str]
"""The number of bugs that are repaired, failed, unknown or stale."""


@dataclass(frozen=True, slots=True)
class Line:
    """Releases of one minor version that follow each other and have equal numbers, and these numbers by column."""

    releases: tuple[str, ...]
    tallies: Mapping[str, Tally]

    @property
    def label(self) -> str:
        """Return the releases in short: ``1.14.0-2`` is 1.14.0 to 1.14.2."""
        first, last = self.releases[0], self.releases[-1]
        return first if first == last else f"{first}-{last.removeprefix(_minor(last)).removeprefix('.')}"


def summary_svg(evidence: Mapping[str, Any], catalogue: Sequence[Row]) -> str:
    """Return the picture. It has no script, a background of its own, and the colours of a light and a dark page."""
    grid = Grid.of(evidence, catalogue)
    columns = _columns(grid)
    lines = _lines(grid, columns)
    notes = textwrap.wrap(_note(grid, columns), 58)
    below = 200 + ROW * len(lines)
    height = below + 16 * len(notes)
    name = f"trl_hotfix {grid.version}"
    repairs = sum(len(line.releases) * line.tallies[ALL][REPAIRED] for line in lines)
    proven, problems = f"{repairs:,} repairs, each on one release, are proven", grid.problems()
    label = f"{name}: {grid.size()}. {proven}; {problems or NO_PROBLEM}"
    drawn = [
        f"<title>The bugs of each release of TRL that {escape(name)} repairs, by trainer</title><style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        _text(MARGIN, 28, name, "head"),
        _text(MARGIN, 48, grid.size()),
        _text(MARGIN, 65, proven),
        _text(MARGIN, 82, problems or NO_PROBLEM, "bad" if problems else ""),
        *_legend(106),
        *_header(columns, 174),
        *_table(lines, columns, 182),
        *(_text(MARGIN, below + 16 * number, note, "dim") for number, note in enumerate(notes)),
    ]
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">'
    return "\n".join([opening, *drawn, "</svg>\n"])


def _columns(grid: Grid) -> tuple[str, ...]:
    bugs = Counter(trainer for row in grid.rows for trainer in row.trainers - {ANY_TRAINER})
    trainers = sorted(bugs, key=lambda trainer: (-bugs[trainer], trainer))
    return (ALL, *trainers[:NAMED_TRAINERS], OTHERS)


def _columns_of(row: Row, release: str, columns: Sequence[str]) -> set[str]:
    """Return the columns in which a bug counts in ``release``: that of each trainer that has it."""
    trainers = row.trainers_in(release)
    if ANY_TRAINER in trainers:
        return {*columns}
    return {ALL, *(trainer if trainer in columns else OTHERS for trainer in trainers or {OTHERS})}


def _lines(grid: Grid, columns: Sequence[str]) -> list[Line]:
    """Return the lines, newest release first."""
    tallies = {release: {column: Tally() for column in columns} for release in grid.releases}
    for row in grid.rows:
        for release, cell in zip(grid.releases, grid.across(row), strict=True):
            # A bug counts once, also if its cell is stale and has failed.
            words = (cell.problems or [REPAIRED] * (cell.worst == "proven"))[:1]
            for column in _columns_of(row, release, columns):
                tallies[release][column].update(words)
    lines: list[Line] = []
    for release in reversed(grid.releases):
        newer = lines[-1] if lines else None
        if newer and _minor(newer.releases[0]) == _minor(release) and newer.tallies == tallies[release]:
            lines[-1] = Line((release, *newer.releases), newer.tallies)
        else:
            lines.append(Line((release,), tallies[release]))
    return lines


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _places(columns: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield each column with its left edge."""
    yield from ((column, MARGIN + LABELS + _pitch(columns) * number) for number, column in enumerate(columns))


def _pitch(columns: Sized) -> float:
    return (WIDTH - 2 * MARGIN - LABELS) / len(columns)


def _header(columns: Sequence[str], y: float) -> Iterator[str]:
    yield _text(MARGIN, y, "TRL", "dim")
    pitch = _pitch(columns)
    for column, x in _places(columns):
        words = re.sub("(?<=[a-z])(?=[A-Z])", " ", column).split()
        for number, word in enumerate(reversed(words)):
            # A longer word would run into the next column.
            fit = f' textLength="{pitch - 4:.1f}" lengthAdjust="spacingAndGlyphs"' * (len(word) > 6)
            style = "number dim" if column == OTHERS else "number all"
            yield f'<text class="{style}" x="{x + pitch / 2:.1f}" y="{y - 13 * number}"{fit}>{escape(word)}</text>'


def _table(lines: Sequence[Line], columns: Sequence[str], top: float) -> Iterator[str]:
    most = max((line.tallies[column][REPAIRED] for line in lines for column in columns if column != ALL), default=0)
    for number, line in enumerate(lines):
        y = top + ROW * number
        if number and _minor(line.releases[0]) != _minor(lines[number - 1].releases[0]):
            yield f'<rect class="line" x="{MARGIN}" y="{y - 0.75}" width="{WIDTH - 2 * MARGIN}" height=".5"/>'
        yield _text(MARGIN, y + 13.5, line.label)
        yield from (_cell(line, column, x, y, most) for column, x in _places(columns))


def _cell(line: Line, column: str, x: float, y: float, most: int) -> str:
    tally = line.tallies[column]
    repaired, wrong = tally[REPAIRED], tally.total() - tally[REPAIRED]
    words = ", ".join(f"{count} {name}" for name, count in tally.items()) or "no bug"
    shade = math.ceil(SHADES * repaired / most) if column != ALL and repaired else 0
    box, ink = (f"s{shade}", f"on{shade}") if shade else ("page", "all") if column == ALL else ("empty", "none")
    shown = str(repaired or "")
    if wrong:
        box, ink, shown = "alert", "onalert", f"!{wrong}"
    place = f'x="{x + 1:.1f}" y="{y + 0.5}" width="{_pitch(line.tallies) - 2:.1f}" height="{ROW - 2}"'
    number = _text(x + _pitch(line.tallies) / 2, y + 13.5, shown, f"number {ink}")
    title = f"<title>TRL {escape(line.label)}, {escape(column)}: {words}</title>"
    return f'<g>{title}<rect class="{box}" {place} rx="2.5"/>{number}</g>'


def _legend(y: float) -> Iterator[str]:
    yield _text(MARGIN, y, "Bugs of each TRL release, by trainer:")
    x = float(MARGIN)
    for box, ink, shown, words in (
        ("s2", "on2", "3", "repaired, proven"),
        ("empty", "none", "", "none known"),
        ("alert", "onalert", "!1", "not proven"),
    ):
        yield f'<rect class="{box}" x="{x}" y="{y + 9}" width="24" height="17" rx="2.5"/>'
        yield _text(x + 12, y + 22, shown, f"number {ink}")
        yield _text(x + 29, y + 22, words)
        x += 41 + 7 * len(words)


def _note(grid: Grid, columns: Sequence[str]) -> str:
    others = sorted(set().union(*(row.trainers for row in grid.rows)) - {ANY_TRAINER, *columns})
    listed = f" Others: {', '.join(others)}." if others else ""
    return (
        "A bug of several trainers counts under each. Not proven: failed, not looked at, or tested with other code."
        f"{listed}"
    )


def _text(x: float, y: float, words: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:g}" y="{y:g}">{escape(words)}</text>' if words else ""


def main() -> None:
    PICTURE.write_text(summary_svg(matrix(), rows()), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
