"""Reports without an import of TRL: a preview of a selection, and the check of a freeze file."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress

from .. import __version__
from ..catalogue import loading, packs
from ..errors import NotATrlError
from ..log import ensure_handler, event, warning
from ..matching import foreseen, gates
from ..matching.sources import Release
from ..matching.versions import VersionOf, installed
from ..model import Patch, State, Strict
from ..reporting.report import PatchStatus, Report
from ..reporting.runs import Run
from ..selection.selection import Selection
from ..witness import totals
from .configuration import not_applied
from .standing import status_of


def preview(
    patches: Sequence[Patch],
    selection: Selection,
    version_of: VersionOf = installed,
    *,
    observe: bool = False,
    files: Release | None = None,
    try_unknown_body: bool = False,
) -> Report:
    """Return the report that a process with these versions would give. It changes nothing.

    The gates decide, and the bodies in ``files`` of this TRL; without files, those on record for the release.
    """
    decisions = gates.decisions(patches, selection, version_of)
    for patch in patches:
        if decisions[patch.id].state is State.PENDING:
            # A module that cannot be read cannot be imported either: its patches wait.
            with suppress(NotATrlError):
                refused = foreseen.refused(patch, version_of, files, try_unknown_body=try_unknown_body)
                decisions[patch.id] = refused or decisions[patch.id]
    trl = version_of("trl")
    counts = totals()
    statuses = [
        status_of(patch, trl, (), decisions[patch.id], selection.options_of(patch), counts.get(patch.id))
        for patch in patches
    ]
    return report(trl, statuses, selection, observe=observe)


def report(
    trl: str | None,
    statuses: Iterable[PatchStatus],
    selection: Selection,
    *,
    observe: bool = False,
    runs: tuple[Run, ...] = (),
) -> Report:
    releases = {name: packs.find(name).release for name in selection.packs}
    return Report(__version__, trl, platform.python_version(), tuple(statuses), releases, observe, runs)


def check_frozen(selection: Selection, strict: Strict) -> None:
    """Warn about the patches of the freeze file that cannot be on here. ``strict-all`` raises ``NotAppliedError``."""
    decisions = gates.decisions(loading.known(selection.packs), selection)
    lines = [
        f"{patch_id}: {decisions[patch_id].state.value} ({decisions[patch_id].reason.value})"
        for patch_id in sorted(selection.only or ())
        if decisions[patch_id].state is not State.PENDING
    ]
    if lines and strict is Strict.ALL:
        raise not_applied(lines)
    ensure_handler()
    for line in lines:
        fields = event("not-on", patch=line.partition(":")[0])
        warning("in the freeze file, and not on here: %s", line, extra=fields)
