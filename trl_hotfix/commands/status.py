"""``status`` shows what a run reported: its record, and those of the ranks on which something else happened."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypedDict

import click

from ..catalogue import loading
from ..errors import plain
from ..model import Patch
from ..reporting.effects import Effect
from ..reporting.lines import folded
from .common import Exit, say_json
from .status_records import Record, RecordedHit, RecordedPatch, files, not_repaired, read


class Answer(TypedDict):
    """What ``status --json`` prints. ``fine``: nothing is wrong, and each bug that the run hits is repaired."""

    path: str
    fine: bool
    records: list[Record]


@click.command("status")
@click.argument("path", type=click.Path(path_type=Path), default=".")
@click.option("--json", "as_data", is_flag=True, help="The answer as JSON.")
def command(path: Path, as_data: bool) -> int:
    """What a run reported: the output folder of the run, or its trl_hotfix.json (default: this folder).

    It has each patch with what it was to the run, the bugs that the run hits, and what was warned of. A run that has
    not ended has the record of its newest checkpoint. Ranks on which a patch failed have records of their own.

    Exit codes: 0 fine; 1 a problem, or the run hits a bug that is not repaired; 2 no record, or none that can be read.
    """
    records = [read(file, rank) for file, rank in files(path)]
    fine = not any(one["problems"] or one["unreached"] or not_repaired(one) for one in records)
    if as_data:
        answer: Answer = {"path": str(path), "fine": fine, "records": records}
        say_json(answer)
    else:
        width = min(max(shutil.get_terminal_size((80, 24)).columns, 40), 160)
        known = {patch.id: patch for patch in loading.load()}
        click.echo("\n\n".join("\n".join(_lines(one, known, width)) for one in records))
    return Exit.FINE if fine else Exit.DEGRADED


def _lines(record: Record, known: dict[str, Patch], width: int) -> Iterator[str]:
    name = record["path"] if record["rank"] is None else f"rank {record['rank']}, {record['path']}"
    versions = f"TRL {record['trl'] or 'unknown'}, trl_hotfix {record['trl_hotfix'] or 'unknown'}"
    yield from folded(f"{name}:", width, 0, 2)
    yield from folded(f"{versions}, digest {record['digest'] or 'none'}", width, 0, 2)
    by_id = {hit["id"]: hit for hit in record["hits"]}
    patches = [*record["patches"], *record["reverted"]]

    def section(title: str, entries: Iterable[tuple[str, str, list[str]]]) -> Iterator[str]:
        """Yield a heading, and for each entry its first line, the title of its bug, and more."""
        entries = list(entries)
        if entries:
            yield ""
            yield f"{title}: {len(entries)}"
        for first, patch_id, more in entries:
            yield from folded(first, width, 2, 2)
            for text in [*([f"bug: {known[patch_id].title}"] if patch_id in known else []), *more]:
                yield from folded(text, width, 6, 2)

    def of(word: str) -> list[RecordedPatch]:
        return [patch for patch in patches if patch["word"] == word]

    yield from section(
        "hit by this run, and NOT repaired",
        (
            (
                f"{hit['id']} ({hit['severity']}): {hit['state']} ({hit['reason']})",
                hit["id"],
                [*_cause(hit), *_retrain(known, hit)],
            )
            for hit in not_repaired(record)
        ),
    )
    yield from section("problems", ((problem, "", []) for problem in record["problems"]))
    told = [problem.partition(":")[0] for problem in record["problems"]]
    unreached = [patch for patch in record["unreached"] if patch["id"] not in told]
    yield from section("not reached", ((f"{_name(patch)}: {patch['reason']}", "", []) for patch in unreached))
    yield from section(
        "repaired",
        (
            (
                f"{_name(patch)}: acted in {patch['acted']} of {patch['called']} calls{_steps(patch)}",
                patch["id"],
                [*_run(by_id, patch), *_effect(patch)],
            )
            for patch in of("repaired")
        ),
    )
    yield from section(
        "repaired on some ranks only",
        ((f"{_name(patch)}: {_ranks(patch)}", patch["id"], _run(by_id, patch)) for patch in of("on some ranks")),
    )
    yield from section(
        "called, with nothing to do",
        ((f"{_name(patch)}: called {_times(patch['called'])}", "", _run(by_id, patch)) for patch in of("called")),
    )
    yield from section(
        "called by evaluations, and by no step of the training",
        ((_name(patch), "", _run(by_id, patch)) for patch in of("in evaluation only")),
    )
    yield from section(
        "data that another process prepared, or a cache had",
        ((_name(patch), "", _run(by_id, patch)) for patch in of("not seen")),
    )
    yield from section("on, and not called", ((_name(patch), "", _run(by_id, patch)) for patch in of("standing by")))
    yield from section(
        "cannot tell",
        ((f"{hit['id']}: {'; '.join(hit['unknown'])}", "", []) for hit in record["hits"] if hit["answer"] != "hit"),
    )
    yield from section("on, without a word", ((_name(patch), "", []) for patch in patches if patch["word"] is None))
    if of("selected"):
        yield ""
        yield f"{len(of('selected'))} more on for other trainers."


def _name(patch: RecordedPatch) -> str:
    options = "".join(f", {name}={choice}" for name, choice in sorted(patch["options"].items()))
    return f"{patch['id']} (r{patch['revision']}{options})"


def _steps(patch: RecordedPatch) -> str:
    steps = patch["steps"]
    return f", in {steps['acted']} of {steps['of']} steps" if steps is not None and steps["called"] else ""


def _effect(patch: RecordedPatch) -> list[str]:
    return [f"effect: {plain(Effect(**patch['effect']).line())}"] if patch["effect"] is not None else []


def _ranks(patch: RecordedPatch) -> str:
    words = patch["ranks"] or {}
    return "; ".join(f"{plain(word)}: rank {', '.join(map(str, ranks))}" for word, ranks in words.items())


def _times(number: int | None) -> str:
    return "once" if number == 1 else f"{number} times"


def _run(hits: dict[str, RecordedHit], patch: RecordedPatch) -> list[str]:
    hit = hits.get(patch["id"])
    return _cause(hit) if hit is not None and hit["answer"] == "hit" else []


def _cause(hit: RecordedHit) -> list[str]:
    return [f"your run: {', '.join(hit['because']) or 'as every run of this trainer'}"]


def _retrain(known: dict[str, Patch], hit: RecordedHit) -> list[str]:
    retrain = known[hit["id"]].retrain if hit["id"] in known else None
    return [f"train again? {retrain}"] if retrain is not None else []
