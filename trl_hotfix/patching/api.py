"""The public functions: ``apply``, ``revert``, ``status``, ``patched``, ``explain``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from ..errors import UnknownPatchError
from ..model import Options
from ..reporting.explanation import explanation
from ..reporting.report import Report
from . import engine


def apply(
    *,
    only: Iterable[str] | str | None = None,
    skip: Iterable[str] | None = None,
    options: Mapping[str, Options] | None = None,
    strict: bool | None = None,
    dry_run: bool = False,
    unknown_body: Literal["skip", "try"] | None = None,
    packs: Iterable[str] | str | None = None,
    observe: bool | None = None,
) -> Report:
    """Repair the installed TRL: at once in modules that are imported, and in the others when they are imported.

    ``only`` and ``skip`` are ids of patches (default: ``TRL_HOTFIX_ONLY``, ``TRL_HOTFIX_SKIP``, else all patches that
    are on by default). ``only="@trl_hotfix.json"`` applies exactly the set that a run has recorded. ``options`` are
    choices within patches, ``{id: {option: choice}}`` (default: ``TRL_HOTFIX_OPTIONS``, ``id.option=choice`` separated
    by commas, else the defaults of the catalogue). ``packs`` are names of packs of third parties whose patches are
    used too (default: ``TRL_HOTFIX_PACKS``, else none); their patches have ids ``pack/id``.

    A call with another selection than the last takes off the patches that are not in it, and puts on anew those with
    other options. A reverted patch goes on again; a failed one is tried again only after ``revert()``. ``strict``
    (default: whether ``TRL_HOTFIX=strict``) raises ``NotAppliedError``, here or at the import of the trainer, if a
    patch that should be on cannot be. With ``dry_run`` nothing is changed; ``pending`` then means that the patch would
    go on. A method is left alone if the patch was not proven on its body; ``unknown_body="try"`` (default:
    ``TRL_HOTFIX_UNKNOWN_BODY``, else ``"skip"``) lets the self-test decide. ``TRL_HOTFIX=0`` turns this call off, with
    a warning.

    With ``observe`` (default: whether ``TRL_HOTFIX=observe``) nothing is repaired and no number changes: the self-tests
    tell which bugs are here, and the record of a run which of them it hits. A later call without it repairs. Under
    ``TRL_HOTFIX=observe`` it takes ``observe=False`` to repair, and ``strict`` has no effect while nothing is repaired.

    Raises ``CatalogueError``, ``PackError``, ``UnknownPatchError``, ``SettingError``, ``NotAppliedError``; after any of
    them nothing has changed. ``observe=True`` with ``strict=True``, or under ``TRL_HOTFIX=strict``, is a
    ``SettingError``.
    """
    return engine.ENGINE.apply(only, skip, options, strict, dry_run, unknown_body, packs, observe)


def revert(*ids: str) -> Report:
    """Take patches off exactly (default: all). One that other code has wrapped or replaced stays, as ``displaced``.

    Raises ``UnknownPatchError``.
    """
    return engine.ENGINE.revert(ids)


def status() -> Report:
    """Return the current state of every patch in this process, after a check that each is still on its target."""
    return engine.ENGINE.status()


@contextmanager
def patched(*ids: str, options: Mapping[str, Options] | None = None, strict: bool = True) -> Iterator[Report]:
    """Put these patches on, besides those that are on, for a ``with`` block. The earlier state is restored afterwards.

    Without ids, all patches that are on by default are put on. Raises the errors of ``apply``.
    """
    with engine.ENGINE.patched(ids, strict, options) as report:
        yield report


def explain(patch_id: str) -> str:
    """Return one patch in words: the bug, the repair, its state here and the reason. Raises ``UnknownPatchError``."""
    report = engine.ENGINE.status()
    ids = [status.id for status in report]
    if patch_id not in ids:
        raise UnknownPatchError([patch_id], ids, "explain()")
    return explanation(report[patch_id], engine.ENGINE.journal(patch_id))
