"""``list`` shows every patch, and whether it applies here."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, cast

import click
from msgspec.structs import replace
from rich.console import Group, RenderableType

from .. import settings
from ..catalogue import loading
from ..catalogue.packs import named
from ..matching import gates, sources, versions
from ..matching.fingerprints import unproven
from ..model import Called, KnownBug, Reason, Severity, State
from ..patching.previews import preview
from ..reporting.lines import say
from ..reporting.report import PatchStatus, Report
from ..reporting.table import block, show, table
from ..selection.selection import Selection
from .common import Exit, release, trainer, unsupported, warn_of_unproven, with_packs

SEVERITIES = [severity.value for severity in Severity]


class Upstream(TypedDict):
    """TRL's own issues and pull requests, by number, and the first release with the fix."""

    issue: int | list[int] | None
    fix: int | list[int] | None
    fixed_in: str | None


class Target(TypedDict):
    """A method or function that the patch wraps, and the TRL range in which it has the bug.

    `called` is the moment of a run at which TRL calls it, or null if the entry does not declare it.
    """

    module: str
    attribute: str
    trl: str
    called: Called | None
    state: State


class Listed(TypedDict):
    """One patch and its state here. `evidence` depends on the reason; `review_by` is a day, or null.

    `not_repaired` is the part of the bug that the patch leaves as it is, or null. `called` and `acted` are the calls of
    its targets in this process, and those in which its wrappers acted: none, since nothing is trained here.
    """

    id: str
    revision: int
    title: str
    severity: Severity
    trl: str
    upstream: Upstream
    review_by: str | None
    not_repaired: str | None
    state: State
    reason: Reason
    options: dict[str, str]
    evidence: dict[str, Any]
    called: int
    acted: int
    targets: list[Target]


class Known(TypedDict):
    """A known bug that has no repair here, and is never applied. `here`: the release of the report has it.

    `requires` has the versions of other distributions that the bug needs; they are left out of account.
    """

    id: str
    state: Literal["known"]
    title: str
    severity: Severity
    trl: str
    requires: dict[str, str]
    upstream: Upstream
    review_by: str | None
    here: bool


class _Report(TypedDict):
    trl_hotfix: str
    trl: str | None
    python: str
    digest: str
    patches: list[Listed]


class _WithPacks(_Report, total=False):
    packs: dict[str, str]


class Answer(_WithPacks):
    """Every patch, and in `known` every bug without one.

    `packs` has the distribution and version of each pack. It is present if packs were named.
    """

    known: list[Known]


@click.command("list")
@click.option("--trl", metavar="VERSION", help="As if this TRL were installed.")
@click.option("--all", "all_releases", is_flag=True, help="Also the patches that are for other releases.")
@click.option(
    "--severity",
    "severities",
    type=click.Choice(SEVERITIES),
    metavar="LEVEL",
    multiple=True,
    help=f"Only bugs of this level, several times if needed: {', '.join(SEVERITIES)}.",
)
@click.option("--trainer", "trainer_name", metavar="NAME", help="Only bugs of this trainer, such as grpo.")
@click.option("--json", "as_data", is_flag=True, help="The report as JSON; it always has all releases' patches.")
@with_packs
def command(
    trl: str | None,
    all_releases: bool,
    severities: Sequence[str],
    trainer_name: str | None,
    as_data: bool,
    packs: str | None,
) -> int:
    """The patches, those that apply here first, the worst bug first: what each repairs, and whether it applies.

    Known bugs that have no repair here stand apart, below the patches.

    --list is list --all.
    """
    names = named(packs, os.environ)
    patches = loading.known(names)
    trl = release(trl) if trl is not None else None
    # An asterisk stands for any trainer.
    known = loading.without_repair()
    trainers = {trainer(trainer_name, (*patches, *known)), "*"} if trainer_name is not None else None
    selection = Selection.of(None, None, os.environ, patches, None, names)
    version_of = functools.cache(versions.installed_but(trl) if trl else versions.installed)
    tried = settings.tries_unknown_body(os.environ.get("TRL_HOTFIX_UNKNOWN_BODY", ""))
    files = sources.installed() if trl in (None, versions.installed("trl")) else None
    report = _doubted(preview(patches, selection, version_of, files=files, try_unknown_body=tried))
    matching = [
        status
        for status in report
        if (not severities or status.patch.severity.value in severities)
        and (trainers is None or any(trainers.intersection(hit.trainers) for hit in status.patch.hits))
    ]
    applicable = [status for status in matching if gates.applicability(status.patch, version_of).state is State.PENDING]
    known = tuple(
        bug
        for bug in known
        if (not severities or bug.severity.value in severities)
        and (trainers is None or any(trainers.intersection(hit.trainers) for hit in bug.hits))
    )
    shown = matching if all_releases or as_data else applicable
    view = replace(report, patches=tuple(sorted(shown, key=_rank)))
    if as_data:
        click.echo(json.dumps({**view.to_dict(), "known": [_known(bug, report.trl) for bug in known]}, indent=2))
    else:
        if shown:
            show(table(view, not_repaired=all_releases))
        _show_known([bug for bug in known if all_releases or _is_here(bug, report.trl)])
        _foot(report, len(matching) - len(shown))
    if unsupported(report.trl):
        return Exit.NO_TRL
    warn_of_unproven(report.trl)
    return Exit.FINE if report.ok else Exit.DEGRADED


def _doubted(report: Report) -> Report:
    """Return the report without a word that a TRL that nobody has proved the patches on has their bugs."""
    if report.trl is None or unsupported(report.trl) or unproven(report.trl) is None:
        return report
    patches = [
        replace(status, reason=Reason.BODY_DECIDES) if status.reason is Reason.APPLIES else status for status in report
    ]
    return replace(report, patches=tuple(patches))


def _is_here(bug: KnownBug, trl: str | None) -> bool:
    return trl is not None and gates.has_bug(trl, bug)


def _known(bug: KnownBug, trl: str | None) -> Known:
    return {
        "id": bug.id,
        "state": "known",
        "title": bug.title,
        "severity": bug.severity,
        "trl": bug.trl,
        "requires": dict(bug.requires),
        "upstream": cast(Upstream, bug.upstream.to_dict()),
        "review_by": bug.review_by.isoformat() if bug.review_by is not None else None,
        "here": _is_here(bug, trl),
    }


def _show_known(bugs: Sequence[KnownBug]) -> None:
    """Print a block for each bug without a repair. A table of these would look like one of patches."""
    if not bugs:
        return
    blocks: list[RenderableType] = [
        block("Known, no repair here (trl-hotfix scan shows whether they hit a script):", 0)
    ]
    for bug in bugs:
        others = "".join(f", {name} {specifiers}" for name, specifiers in bug.requires.items())
        blocks.append(block(bug.id, 2, style="bold"))
        blocks += [block(text, 4) for text in (f"{bug.severity.value}: {bug.title}", f"TRL {bug.trl}{others}")]
    show(Group(*blocks))
    click.echo()


def _rank(status: PatchStatus) -> tuple[bool, int]:
    """Sort patches that apply here before those that do not, and the worst bug first."""
    inapplicable = status.state in (State.SKIPPED, State.RETIRED, State.DISABLED)
    return inapplicable, SEVERITIES.index(status.patch.severity.value)


def _foot(report: Report, hidden: int) -> None:
    if hidden:
        are = "patch is" if hidden == 1 else "patches are"
        say(f"{hidden} {are} for other releases than TRL {report.trl or '(none is installed)'}: --all")
    say(f"trl_hotfix {report.trl_hotfix}, Python {report.python}, digest {report.digest}")
    say(_start_hook())


def _start_hook() -> str:
    problem = settings.hook_problem()
    if problem is not None:
        return f"TRL_HOTFIX=1 does nothing here: {problem}. trl_hotfix.apply() in the script works."
    setting = settings.switch(os.environ.get("TRL_HOTFIX", ""))
    if setting is None:
        return "TRL_HOTFIX has a value in this shell that is not understood: it stops `import trl`."
    name = f"on, {setting}" if setting in settings.STRICT_LEVELS else setting
    return f"TRL_HOTFIX=1 works here; it is {name} in this shell."
