"""``status`` tells what a run reported: its record, and those of the ranks on which something else happened."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypedDict

import click
import msgspec

from ..catalogue import loading
from ..errors import SettingError, plain, printable, quoted
from ..recording.trackers import FILE
from ..selection.freeze_files import LONGEST_PATH, Frozen, FrozenPatch, load
from .common import Exit

_RANK = re.compile(r"trl_hotfix\.rank-(\d{1,9})\.json\Z")
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})\Z")
_ON = ("repaired", "called", "standing by")


class RecordedPatch(TypedDict):
    """A patch. ``word`` and the counts are null in a file of `freeze`, ``reason`` where it is on."""

    id: str
    revision: int
    options: dict[str, str]
    word: str | None
    called: int | None
    acted: int | None
    reason: str | None


class RecordedHit(TypedDict):
    """A bug that the run hits (``answer``), or of which that cannot be told, with the state of its patch."""

    id: str
    severity: str
    answer: str
    symptom: str
    because: list[str]
    unknown: list[str]
    state: str
    reason: str


class Record(TypedDict):
    """The record of one rank. ``rank`` is null for that of the run, which rank 0 writes."""

    path: str
    rank: int | None
    trl: str | None
    trl_hotfix: str | None
    digest: str | None
    patches: list[RecordedPatch]
    unreached: list[RecordedPatch]
    reverted: list[RecordedPatch]
    hits: list[RecordedHit]
    problems: list[str]


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

    \b
    Exit codes: 0 fine; 1 a problem, or the run hits a bug that is not repaired; 2 no record, or none that can be read.
    """
    records = [_record(file, rank) for file, rank in _files(path)]
    fine = not any(record["problems"] or record["unreached"] or _not_repaired(record) for record in records)
    if as_data:
        answer: Answer = {"path": str(path), "fine": fine, "records": records}
        click.echo(json.dumps(answer, indent=2))
    else:
        width = min(max(shutil.get_terminal_size((80, 24)).columns, 40), 160)
        titles = {patch.id: patch.title for patch in loading.load()}
        click.echo("\n\n".join("\n".join(_lines(record, titles, width)) for record in records))
    return Exit.FINE if fine else Exit.DEGRADED


def _files(path: Path) -> list[tuple[Path, int | None]]:
    """Return the records at ``path``, each with its rank: that of the run first. Raises ``click.ClickException``."""
    shown = quoted(str(path), LONGEST_PATH)
    try:
        if not path.is_dir():
            if not path.exists():
                raise click.UsageError(f"there is no {shown}: expected the output folder of a run, or its {FILE}")
            return [(path, None)]
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise click.UsageError(f"{shown} cannot be read: {plain(error.strerror or '')}") from None
    of_ranks = {int(found[1]): path / found[0] for name in names if (found := _RANK.match(name))}
    ranks: list[tuple[Path, int | None]] = [(of_ranks[rank], rank) for rank in sorted(of_ranks)]
    if FILE in names:
        return [(path / FILE, None), *ranks]
    steps = sorted((int(found[1]), found[0]) for name in names if (found := _CHECKPOINT.match(name)))
    checkpoint = next((path / name / FILE for _, name in reversed(steps) if (path / name / FILE).exists()), None)
    if checkpoint is not None:
        return [(checkpoint, None), *ranks]
    if not ranks:
        raise click.UsageError(
            f"{shown} has no {FILE}, nor has a checkpoint in it: expected the output folder of a run of TRL that had "
            "TRL_HOTFIX=1, or a HotfixCallback, and that has saved or ended"
        )
    return ranks


def _record(file: Path, rank: int | None) -> Record:
    """Return one record, with every field. Raises ``SettingError`` where it cannot be read."""
    frozen = load(str(file), "record")
    return {
        "path": str(file),
        "rank": rank,
        "trl": frozen.trl,
        "trl_hotfix": frozen.trl_hotfix,
        "digest": frozen.digest,
        "patches": [_patch(entry) for entry in frozen.patches],
        "unreached": [_patch(entry) for entry in frozen.unreached],
        "reverted": [_patch(entry) for entry in frozen.reverted],
        "hits": _hits(frozen, file),
        "problems": frozen.problems,
    }


def _patch(entry: FrozenPatch) -> RecordedPatch:
    patch: RecordedPatch = msgspec.to_builtins(entry)
    return patch


def _hits(frozen: Frozen, file: Path) -> list[RecordedHit]:
    """Return the bugs that the run hits, or of which that cannot be told: also those that were only observed."""
    observed = [
        {
            **{name: value for name, value in entry.items() if name != "called"},
            "state": "observed",
            "reason": "reproduced",
        }
        for entry in frozen.observed
        if entry.get("answer") != "not hit"
    ]
    try:
        return msgspec.convert([*frozen.hits, *observed], list[RecordedHit])
    except msgspec.ValidationError as error:
        shown = quoted(str(file), LONGEST_PATH)
        raise SettingError(f"the record {shown} cannot be used: in its hits: {plain(str(error))}") from None


def _not_repaired(record: Record) -> list[RecordedHit]:
    """Return the bugs that the run hits, and whose patch is not on this trainer."""
    on = {patch["id"] for patch in record["patches"] if patch["word"] in _ON}
    on |= {patch["id"] for patch in record["reverted"] if patch["word"] in _ON}
    return [hit for hit in record["hits"] if hit["answer"] == "hit" and hit["id"] not in on]


# As text.


def _lines(record: Record, titles: dict[str, str], width: int) -> Iterator[str]:
    name = record["path"] if record["rank"] is None else f"rank {record['rank']}, {record['path']}"
    versions = f"TRL {record['trl'] or 'unknown'}, trl_hotfix {record['trl_hotfix'] or 'unknown'}"
    yield from _folded(f"{name}:", width)
    yield from _folded(f"{versions}, digest {record['digest'] or 'none'}", width)
    by_id = {hit["id"]: hit for hit in record["hits"]}
    patches = [*record["patches"], *record["reverted"]]

    def section(title: str, entries: Iterable[tuple[str, str, list[str]]]) -> Iterator[str]:
        """Yield a heading, and for each entry its first line, the title of its bug, and more."""
        entries = list(entries)
        if entries:
            yield ""
            yield f"{title}: {len(entries)}"
        for first, patch_id, more in entries:
            yield from _folded(first, width, 2)
            for text in [*([titles[patch_id]] if patch_id in titles else []), *more]:
                yield from _folded(text, width, 6)

    def of(word: str) -> list[RecordedPatch]:
        return [patch for patch in patches if patch["word"] == word]

    yield from section(
        "hit by this run, and NOT repaired",
        (
            (f"{hit['id']} ({hit['severity']}): {hit['state']} ({hit['reason']})", hit["id"], _cause(hit))
            for hit in _not_repaired(record)
        ),
    )
    yield from section("problems", ((problem, "", []) for problem in record["problems"]))
    told = [problem.partition(":")[0] for problem in record["problems"]]
    unreached = [patch for patch in record["unreached"] if patch["id"] not in told]
    yield from section("not reached", ((f"{_name(patch)}: {patch['reason']}", "", []) for patch in unreached))
    yield from section(
        "repaired",
        (
            (f"{_name(patch)}: acted in {patch['acted']} of {patch['called']} calls", patch["id"], _run(by_id, patch))
            for patch in of("repaired")
        ),
    )
    yield from section(
        "called, with nothing to do",
        ((f"{_name(patch)}: called {_times(patch['called'])}", "", _run(by_id, patch)) for patch in of("called")),
    )
    yield from section("on, and not called", ((_name(patch), "", _run(by_id, patch)) for patch in of("standing by")))
    yield from section(
        "cannot be told",
        ((f"{hit['id']}: {'; '.join(hit['unknown'])}", "", []) for hit in record["hits"] if hit["answer"] != "hit"),
    )
    yield from section("on, without a word", ((_name(patch), "", []) for patch in patches if patch["word"] is None))
    if of("selected"):
        yield ""
        yield f"{len(of('selected'))} more on for other trainers."


def _name(patch: RecordedPatch) -> str:
    options = "".join(f", {name}={choice}" for name, choice in sorted(patch["options"].items()))
    return f"{patch['id']} (r{patch['revision']}{options})"


def _times(number: int | None) -> str:
    return "once" if number == 1 else f"{number} times"


def _run(hits: dict[str, RecordedHit], patch: RecordedPatch) -> list[str]:
    hit = hits.get(patch["id"])
    return _cause(hit) if hit is not None and hit["answer"] == "hit" else []


def _cause(hit: RecordedHit) -> list[str]:
    return [f"your run: {', '.join(hit['because']) or 'as every run of this trainer'}"]


def _folded(text: str, width: int, indent: int = 0) -> list[str]:
    """Fold a text into lines. An id, a path or a value is never cut: it must be easy to copy."""
    space = " " * indent
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=space,
        subsequent_indent=f"{space}  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [space.rstrip()]
