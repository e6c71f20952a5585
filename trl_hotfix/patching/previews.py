"""Reports that need the gates alone: a preview of a selection, and the check of a freeze file."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence

from .. import __version__
from ..catalogue import loading, packs
from ..log import ensure_handler, log
from ..matching import gates
from ..matching.versions import VersionOf, installed
from ..model import Patch, State
from ..reporting.report import PatchStatus, Report
from ..reporting.runs import Run
from ..selection.selection import Selection
from .configuration import not_applied
from .standing import status_of


def preview(
    patches: Sequence[Patch], selection: Selection, version_of: VersionOf = installed, *, observe: bool = False
) -> Report:
    """Return the report that the gates alone give for these patches with these versions. Nothing is changed."""
    decisions = gates.decisions(patches, selection, version_of)
    trl = version_of("trl")
    statuses = [status_of(patch, trl, (), decisions[patch.id], selection.options_of(patch)) for patch in patches]
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


def check_frozen(selection: Selection, strict: bool) -> None:
    """Warn about the patches of the freeze file that cannot be on here. Raises ``NotAppliedError`` under strict."""
    decisions = gates.decisions(loading.known(selection.packs), selection)
    lines = [
        f"{patch_id}: {decisions[patch_id].state.value} ({decisions[patch_id].reason.value})"
        for patch_id in sorted(selection.only or ())
        if decisions[patch_id].state is not State.PENDING
    ]
    if lines and strict:
        raise not_applied(lines)
    ensure_handler()
    for line in lines:
        log.warning("in the freeze file, and not on here: %s", line)
