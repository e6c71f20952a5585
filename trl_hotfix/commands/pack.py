"""``pack fingerprints`` proves the patches of a pack on the installed TRL, and writes the bodies to its file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import click

from .. import __version__
from ..catalogue import loading, packs
from ..errors import UnknownPatchError
from ..matching import gates, sources, versions
from ..matching.fingerprints import Bodies
from ..model import Patch
from ..reporting.lines import say
from .common import Exit, unsupported
from .pack_file import Found, folder_of, merged, read, write
from .verify import verified
from .verify_screen import CellAnswer


class Fingerprint(TypedDict):
    """The body of one target in this release. `new`: the file did not have it."""

    patch: str
    target: str
    body: str
    new: bool


class Refused(TypedDict):
    """A patch whose bodies the command does not write, with the verdict of `verify` and its reason."""

    patch: str
    verdict: str
    why: str


class Answer(TypedDict):
    """What `pack fingerprints` wrote to `path`, and what it refused. `not_here`: the patches of other releases."""

    trl_hotfix: str
    pack: str
    trl: str
    path: str
    fingerprints: list[Fingerprint]
    refused: list[Refused]
    not_here: list[str]


@click.group("pack")
def command() -> None:
    """For authors of packs: patches of your own, in a distribution of yours."""


@command.command("fingerprints")
@click.argument("name", metavar="PACK")
@click.option(
    "--project",
    type=click.Path(path_type=Path),
    default=Path(),
    help="The folder of the pack's project; default: the current one.",
)
@click.option(
    "--unproven",
    multiple=True,
    metavar="ID",
    help="Write the bodies of this patch although its self-test does not prove it here. Several times if needed.",
)
@click.option("--json", "as_data", is_flag=True, help="What was written as JSON.")
def fingerprints(name: str, project: Path, unproven: tuple[str, ...], as_data: bool) -> int:
    """Prove the patches of PACK on the installed TRL, and add the bodies to its fingerprints.json.

    PACK must be installed from the project. A fresh process runs each self-test: it must reproduce the bug, find it
    fixed by the wrapper, and reproduce it again. Bodies of other releases stay in the file. The exit code is 1 if a
    patch is for this release of TRL and is not proven on it; then its bodies are not written.
    """
    pack, patches = packs.find(name), loading.of_pack(name)
    forced = _ids(unproven, patches, name)
    trl = versions.installed("trl")
    if unsupported(trl) or trl is None:
        click.echo(f"TRL is {trl or 'not installed'}; {versions.SUPPORTED} is needed", err=True)
        return Exit.NO_TRL
    path = folder_of(pack, project) / "fingerprints.json"
    before = read(path)
    with tempfile.TemporaryDirectory() as folder:
        cells = verified([patch.id for patch in patches], (name,), Path(folder))
    found: list[Found] = []
    refused: list[Refused] = []
    for patch, cell in zip(patches, cells, strict=True):
        bodies = list(_bodies(patch, cell))
        why = _problem(cell, bodies, before, forced=patch.id in forced)
        if why is not None:
            refused.append({"patch": patch.id, "verdict": cell["verdict"], "why": why})
        else:
            found += bodies
    after = merged(before, trl, found)
    if after != before:
        write(path, after)
    answer: Answer = {
        "trl_hotfix": __version__,
        "pack": pack.release,
        "trl": trl,
        "path": str(path),
        "fingerprints": [_fingerprint(each, name, trl, before) for each in found],
        "refused": refused,
        "not_here": [cell["patch"] for cell in cells if cell["verdict"] == "absent"],
    }
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        _show(answer, changed=after != before)
    return Exit.DEGRADED if refused else Exit.FINE


def _ids(named: Sequence[str], patches: Sequence[Patch], pack: str) -> Collection[str]:
    """Return the whole ids of the patches that ``--unproven`` names, with or without the name of the pack."""
    ids = {patch_id if "/" in patch_id else f"{pack}/{patch_id}" for patch_id in named}
    known = {patch.id for patch in patches}
    if ids - known:
        raise UnknownPatchError(ids - known, known, "--unproven")
    return ids


def _bodies(patch: Patch, cell: CellAnswer) -> Iterator[Found]:
    """Yield the body of each target that the patch wraps in this release."""
    if cell["verdict"] == "absent":
        return
    files = sources.installed()
    for target in gates.targets_for(patch, cell["trl"]):
        body = cell["bodies"].get(target.name)
        if body is not None:
            of = files.inherits(target.module, target.attribute) if files is not None else None
            yield Found(patch.id.rpartition("/")[2], target.name, body, of)


def _problem(cell: CellAnswer, bodies: Sequence[Found], before: Bodies, *, forced: bool) -> str | None:
    """Return why the bodies of a patch are not written, or None."""
    if cell["verdict"] not in ("proven", "absent") and not (forced and bodies):
        return cell["why"] or "the self-test does not prove the patch"
    for each in bodies:
        recorded = before.at(each.target, cell["trl"])
        if each.of is None and recorded not in (None, each.body):
            return (
                f"{each.target} has body {each.body} here, and the file has {recorded} for TRL {cell['trl']}: "
                "one of them is of changed code; take the release from the file if it is that one"
            )
    return None


def _fingerprint(found: Found, pack: str, trl: str, before: Bodies) -> Fingerprint:
    known = before.verdict(found.patch, found.target, found.body) == "buggy"
    new = not (known and trl in before.releases_with(found.target, found.body))
    return {"patch": f"{pack}/{found.patch}", "target": found.target, "body": found.body, "new": new}


def _show(answer: Answer, *, changed: bool) -> None:
    for each in answer["fingerprints"]:
        word = "added" if each["new"] else "there already"
        say(f"{each['patch']}: {each['target']} {each['body']}, TRL {answer['trl']}: {word}")
    for patch_id in answer["not_here"]:
        say(f"{patch_id}: not for TRL {answer['trl']}")
    for refused in answer["refused"]:
        say(f"{refused['patch']}: refused, {refused['verdict']}: {refused['why']}", err=True)
    if changed:
        say(f"wrote {answer['path']}: build and install the pack again, a process reads the installed file")
    else:
        say(f"nothing new for {answer['path']}")
