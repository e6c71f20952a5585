"""Find patches by the ids that a user names: the present ones, and those that they had before.

An id is in policies, records and scripts of years ago. So a patch that gets another id keeps the earlier one, in
``formerly``, as a name that means the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ..log import ensure_handler, event, level_of_repairs, log
from ..model import Patch


def by_name(patches: Iterable[Patch]) -> dict[str, Patch]:
    """Return each patch by its id, and after these by the ids that it had before."""
    patches = tuple(patches)
    present = {patch.id: patch for patch in patches}
    return present | {name: patch for patch in patches for name in patch.formerly}


def id_of(name: str, known: dict[str, Patch]) -> str:
    """Return the present id of the patch that ``known`` has under ``name``. A former one is mentioned once."""
    patch = known[name]
    if patch.id != name:
        _mention(name, patch.id)
    return patch.id


@functools.cache
def _mention(former: str, present: str) -> None:
    ensure_handler()
    log.log(
        level_of_repairs(), "%s is now called %s", former, present, extra=event("renamed", former=former, patch=present)
    )
