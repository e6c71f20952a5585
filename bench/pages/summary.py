"""The evidence as a picture for the README: a bar for each release of TRL, as tall as its bugs are many.

``python -m bench.pages.summary`` writes ``docs/matrix.svg``. It is drawn for each release of trl_hotfix and not for
each patch, so that two branches with a patch each do not change the same file. It has a phone's width, whatever the
number of patches. Which trainer has which bug stands in the table of the docs' home page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates

from bench.results.matrix import CHECKOUT, SILENT, Cell, Grid, Row, matrix, rows

PICTURE = CHECKOUT / "docs" / "matrix.svg"
KINDS = {
    "silent": "silent, repaired",
    "loud": "other, repaired",
    "known": "known, no repair",
    "alert": "not proven",
}
"""What a bar is made of, from its foot to its head, and what the legend calls it."""

NO_PROBLEM = "nothing failed"
WIDTH, MARGIN, CHART, SCALE = 390, 10, 170, 20
"""The width, the empty edge, the height of the tallest bar, and the bugs from one line behind the bars to the next."""

STYLE = """
text{font:12px -apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#1f2328}
.head{font-size:17px;font-weight:600}.number{text-anchor:middle;font-weight:600}.last{text-anchor:end}.dim{fill:#59636e}
.page{fill:#fff}.line{fill:#d1d9e0}.silent{fill:#007a58}.loud{fill:#8fd3ba}.known{fill:#e0a100}.alert{fill:#b84a00}
text.bad{fill:#b84a00;font-weight:600}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.dim{fill:#9da7b1}.page{fill:#0d1117}.line{fill:#3d444d}
.silent{fill:#1fb78a}.loud{fill:#17614b}.known{fill:#e3b341}text.bad,.alert{fill:#ff9a57}}
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A release, and how many of its bugs are of each kind."""

    release: str
    tally: Counter[str]

    @property
    def repaired(self) -> int:
        return self.tally["silent"] + self.tally["loud"]

    def words(self) -> str:
        return ", ".join(f"{self.tally[kind]} {words}" for kind, words in KINDS.items() if self.tally[kind]) or "no bug"


def summary_svg(evidence: Mapping[str, Any], catalogue: Sequence[Row], known: Mapping[str, int] | None = None) -> str:
    """Return the picture. It has no script, a background of its own, and the colours of a light and a dark page.

    ``known`` has by release how many bugs are known that have no repair.
    """
    grid = Grid.of(evidence, catalogue)
    bars = [Bar(release, _tally(grid, release, known or {})) for release in grid.releases]
    name, problems = f"trl_hotfix {grid.version}", grid.problems()
    newest = f"TRL {bars[-1].release}: {bars[-1].words()}" if bars else "no release"
    proven = f"{sum(bar.repaired for bar in bars):,} repairs, each on one release, are proven"
    label = f"{name}: {grid.size()}. {newest}. {proven}; {problems or NO_PROBLEM}"
    shown = [kind for kind in KINDS if kind != "alert" or any(bar.tally[kind] for bar in bars)]
    foot = 68 + 19 * ((len(shown) + 2) // 3) + CHART
    height = foot + 68
    drawn = [
        f"<title>How many bugs of each release of TRL {escape(name)} repairs</title><style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        _text(MARGIN, 28, "How much of each TRL release is repaired", "head"),
        *_legend(shown, 42),
        *_chart(bars, foot),
        _text(MARGIN, foot + 44, f"{name}, {grid.size()}", "dim"),
        _text(MARGIN, foot + 60, f"{proven}; {problems or NO_PROBLEM}", "bad" if problems else "dim"),
    ]
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">'
    return "\n".join([opening, *drawn, "</svg>\n"])


def _tally(grid: Grid, release: str, known: Mapping[str, int]) -> Counter[str]:
    column = grid.releases.index(release)
    kinds = (_kind(row, grid.across(row)[column]) for row in grid.rows)
    return Counter(kind for kind in kinds if kind) + Counter(known=known.get(release, 0))


def _kind(row: Row, cell: Cell) -> str:
    """Return what a bug counts as in a release, or nothing if the release does not have it."""
    if cell.problems:
        return "alert"
    if cell.worst != "proven":
        return ""
    return "silent" if row.severity in SILENT and row.default else "loud"


def _legend(kinds: Sequence[str], top: float) -> Iterator[str]:
    for number, kind in enumerate(kinds):
        x, y = MARGIN + 126 * (number % 3), top + 19 * (number // 3)
        yield f'<rect class="{kind}" x="{x}" y="{y}" width="12" height="12" rx="2"/>'
        yield _text(x + 18, y + 11, KINDS[kind])


def _chart(bars: Sequence[Bar], foot: float) -> Iterator[str]:
    """Draw the bars, the oldest release on the left, and the numbers of the first, the tallest and the last."""
    tallest = max((bar.tally.total() for bar in bars), default=0) or 1
    pitch, unit = (WIDTH - 2 * MARGIN) / max(len(bars), 1), CHART / tallest
    for bugs in range(0, tallest + 1, SCALE):
        yield f'<rect class="line" x="{MARGIN}" y="{foot - bugs * unit:.1f}" width="{WIDTH - 2 * MARGIN}" height=".5"/>'
    for number, bar in enumerate(bars):
        yield f"<g><title>TRL {escape(bar.release)}: {escape(bar.words())}</title>"
        y = foot
        for kind in KINDS:
            size = bar.tally[kind] * unit
            y -= size
            if size:
                place = f'x="{MARGIN + pitch * number:.1f}" y="{y:.1f}" width="{pitch * 0.84:.1f}" height="{size:.1f}"'
                yield f'<rect class="{kind}" {place}/>'
        yield "</g>"
    for number in _labelled(bars):
        # Above its neighbours, too: the number is wider than the bar.
        top = foot - unit * max(bar.tally.total() for bar in bars[max(number - 2, 0) : number + 3])
        x = min(max(MARGIN + pitch * (number + 0.42), MARGIN + 7), WIDTH - MARGIN - 7)
        yield _text(x, top - 5, str(bars[number].tally.total()), "number")
    yield from _releases(bars, foot + 18, pitch)


def _labelled(bars: Sequence[Bar]) -> list[int]:
    if not bars:
        return []
    tallest = max(range(len(bars)), key=lambda number: bars[number].tally.total())
    return sorted({0, tallest, len(bars) - 1})


def _releases(bars: Sequence[Bar], y: float, pitch: float) -> Iterator[str]:
    """Name the first release of a minor version, where there is room, and the last release."""
    end = float(WIDTH - MARGIN - 44)
    free = 0.0
    for number, bar in enumerate(bars[:-1]):
        x = MARGIN + pitch * number
        begins = number == 0 or _minor(bars[number - 1].release) != _minor(bar.release)
        if begins and x >= free and x + 36 < end:
            yield _text(x, y, bar.release if number == 0 else _minor(bar.release), "dim")
            free = x + 46
    if bars:
        yield _text(WIDTH - MARGIN, y, bars[-1].release, "last")


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _text(x: float, y: float, words: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:g}" y="{y:g}">{escape(words)}</text>' if words else ""


def known_bugs(releases: Sequence[str]) -> dict[str, int]:
    """Return by release how many bugs are known that have no repair."""
    return {release: sum(gates.has_bug(release, bug) for bug in loading.without_repair()) for release in releases}


def main() -> None:
    text = summary_svg(matrix(), rows(), known_bugs(matrix()["releases"]))
    PICTURE.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
