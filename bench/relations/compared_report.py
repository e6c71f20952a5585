"""What the relations say of a new release, in Markdown: a section of its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from trl_hotfix.relations.cells import ERROR, HOLDS, UNASKED, VIOLATED

from bench.relations.compared import Changed, Comparison, New
from bench.releases.layout import Place


def markdown(comparison: Comparison) -> Iterator[str]:
    """Give the lines of the section."""
    before = comparison.before.release
    yield f"All that TRL's trainers answer with the patches, compared with {before}: {comparison}."
    yield from ("", "| place | claims | hold | violated | cannot be asked | error | run now | seconds of all |")
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    yield from (_counts(comparison, place) for place in (comparison.before, comparison.place))
    yield from _new("New violations", comparison.violations, before)
    yield from _new("New errors", comparison.errors, before)
    yield from _changed("Violated before, and holds now", comparison.gone, before)
    yield from _changed("Asked before, and cannot be asked now", comparison.unasked, before)
    if comparison.ended:
        yield from ("", "### Findings of the ledger that are gone", "")
        for finding in comparison.ended:
            trainers = ", ".join(finding.trainers)
            yield f'- {finding.relation} of {trainers}: {finding.cause}, `trl: "{finding.trl}"`: {finding.why}'


def _counts(comparison: Comparison, place: Place) -> str:
    answers = [answer for answer in comparison.answers if answer["place"] == str(place)]
    states = Counter(answer["cell"]["state"] for answer in answers)
    counts = [len(answers), *(states[state] for state in (HOLDS, VIOLATED, UNASKED, ERROR))]
    own = [answer for answer in answers if answer["ran"] == str(place)]
    seconds = sum(answer["seconds"] for answer in answers)
    return f"| {place} | {' | '.join(map(str, counts))} | {len(own)} | {seconds:.0f} |"


def _new(title: str, news: Sequence[New], before: str) -> Iterator[str]:
    """Give a line for all that is new in a claim with the same cause."""
    by_claim: dict[tuple[tuple[str, str, str], str, str], list[New]] = {}
    for one in news:
        by_claim.setdefault((one.name, one.was, one.cause or "no cause"), []).append(one)
    if by_claim:
        yield from ("", f"### {title}", "", f"| trainer | relation | setting | in {before} | what | cause |")
        yield "|---|---|---|---|---|---|"
    for (name, was, cause), same in by_claim.items():
        yield f"| {_claim(*name)} | {was} | {_cell(_described(same))} | {cause} |"


def _described(news: Sequence[New]) -> str:
    """Return the first difference with its numbers, and how many there are besides."""
    first, *others = news
    numbers = ""
    if first.numbers is not None:
        numbers = ": " + " and ".join("none" if number is None else f"{number:.5g}" for number in first.numbers)
    return f"{first.what}{numbers}" + (f"; {len(others)} more" if others else "")


def _changed(title: str, claims: Sequence[Changed], before: str) -> Iterator[str]:
    if claims:
        yield from ("", f"### {title}", "", f"| trainer | relation | setting | in {before} | reason |")
        yield "|---|---|---|---|---|"
    for claim in claims:
        yield f"| {_claim(*claim.name)} | {claim.was} | {_cell(claim.why)} |"


def _claim(trainer: str, relation: str, setting: str) -> str:
    return f"{trainer} | {relation} | `{_cell(setting)}`"


def _cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
