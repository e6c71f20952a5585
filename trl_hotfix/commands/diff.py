"""``diff`` shows what two runs, or two machines, do not have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import click

from ..catalogue import loading
from ..catalogue.names import by_name
from ..reporting.lines import say
from ..selection.freeze_files import Frozen, FrozenPatch, load
from .common import Exit
from .status_records import files as files_of


class Difference(TypedDict):
    """One difference. ``patch`` is None for the versions. None in the place of a text: it is not there at all."""

    patch: str | None
    what: str
    first: str | None
    second: str | None


class Answer(TypedDict):
    """What ``diff --json`` prints."""

    first: str
    second: str
    same_repairs: bool
    differences: list[Difference]


@click.command("diff")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--json", "as_data", is_flag=True, help="The answer as JSON.")
def command(first: Path, second: Path, as_data: bool) -> int:
    """What two runs, or two files of `freeze`, do not have in common.

    A run is its output folder, as for `status`, or its trl_hotfix.json. Two runs have the same repairs if they have
    the same TRL, the same patches with their revisions and options, and the same ranks with a record of their own. It
    does not compare the counts of calls, since two runs of unequal length have other ones.

    Exit codes: 0 the same repairs; 1 other ones; 2 a file cannot be read, or usage.
    """
    files, ranks = zip(*(_record(path) for path in (first, second)), strict=True)
    found = list(differences(*(load(str(file)) for file in files)))
    if ranks[0] != ranks[1]:
        found.append({"patch": None, "what": "ranks with a record of their own", "first": ranks[0], "second": ranks[1]})
    same = not any(difference["what"] not in ("word", "trl_hotfix") for difference in found)
    if as_data:
        answer: Answer = {
            "first": str(files[0]),
            "second": str(files[1]),
            "same_repairs": same,
            "differences": found,
        }
        click.echo(json.dumps(answer, indent=2))
    else:
        say("\n".join([_head(same, found), *map(_line, found)]))
    return Exit.FINE if same else Exit.DEGRADED


def _record(path: Path) -> tuple[Path, str | None]:
    """Return the record of the run, or the file, and the ranks with a record of their own."""
    records = files_of(path)
    ranks = [str(rank) for _, rank in records if rank is not None]
    return records[0][0], ", ".join(ranks) or None


def _head(same: bool, found: Sequence[Difference]) -> str:
    """Return the verdict. Nothing that differs stands below "the same"."""
    if not found:
        return "The repairs are the same."
    if same:
        return "The patches that are on do not differ, with their revisions and options. This does:"
    return "The repairs are not the same:"


def _line(difference: Difference) -> str:
    subject = f"{difference['patch']}: {difference['what']}" if difference["patch"] else difference["what"]
    return f"  {subject}: {difference['first'] or 'none'} -> {difference['second'] or 'none'}"


def differences(first: Frozen, second: Frozen) -> Iterator[Difference]:
    """Yield the differences: of the versions, then patch by patch."""
    for name in ("trl", "trl_hotfix"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            yield {"patch": None, "what": name, "first": one, "second": other}
    for name in sorted(first.packs.keys() | second.packs.keys()):
        if first.packs.get(name) != second.packs.get(name):
            yield {
                "patch": None,
                "what": f"pack {name}",
                "first": first.packs.get(name),
                "second": second.packs.get(name),
            }
    # An older file may have a patch by an earlier id.
    present = {name: patch.id for name, patch in by_name(loading.load()).items()}
    patches = [{present.get(entry.id, entry.id): entry for entry in frozen.patches} for frozen in (first, second)]
    unreached = [{present.get(entry.id, entry.id) for entry in frozen.unreached} for frozen in (first, second)]
    for patch_id in sorted(patches[0].keys() | patches[1].keys()):
        entries = [by_id.get(patch_id) for by_id in patches]
        if entries[0] is None or entries[1] is None:
            states = [_state(entry, patch_id in ids) for entry, ids in zip(entries, unreached, strict=True)]
            yield {"patch": patch_id, "what": "patch", "first": states[0], "second": states[1]}
        else:
            yield from _differences_of_patch(patch_id, entries[0], entries[1])


def _state(entry: FrozenPatch | None, is_unreached: bool) -> str | None:
    if entry is None:
        return "unreached" if is_unreached else None
    return f"r{entry.revision}"


def _differences_of_patch(patch_id: str, first: FrozenPatch, second: FrozenPatch) -> Iterator[Difference]:
    pairs = {
        "revision": (str(first.revision), str(second.revision)),
        "options": (_listed(first.options), _listed(second.options)),
        "word": (first.word, second.word),
    }
    for what, (one, other) in pairs.items():
        # A file of `freeze` has no words.
        if one != other and not (what == "word" and None in (one, other)):
            yield {"patch": patch_id, "what": what, "first": one, "second": other}


def _listed(options: dict[str, str]) -> str | None:
    return ", ".join(f"{name}={choice}" for name, choice in sorted(options.items())) or None
