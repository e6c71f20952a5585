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
) -> Report:
    """Repair the TRL that is installed: now where its trainers are imported, else as soon as they are.

    ``only`` and ``skip`` are ids of patches (default: ``TRL_HOTFIX_ONLY``, ``TRL_HOTFIX_SKIP``, else all that are on
    by default). ``only="@trl_hotfix.json"`` applies exactly the set that a run has recorded. ``options`` are choices
    within patches, ``{id: {option: choice}}`` (default: ``TRL_HOTFIX_OPTIONS``, ``id.option=choice`` separated by
    commas, else those of the catalogue). ``packs`` are names of packs of third parties whose patches are looked at too
    (default: ``TRL_HOTFIX_PACKS``, else none); theirs have ids ``pack/id``.

    A call with another selection than the last takes off what leaves it, and puts on anew what has other options. What
    was reverted goes on again; what failed is tried again only after ``revert()``. ``strict`` (default: whether
    ``TRL_HOTFIX=strict``) raises ``NotAppliedError``, here or at the import of the trainer, where a patch that should
    be on cannot be. With ``dry_run`` nothing is changed; ``pending`` then means that the patch would go on. A method
    whose body is not one that the patch was proved on is left alone; ``unknown_body="try"`` (default:
    ``TRL_HOTFIX_UNKNOWN_BODY``, else ``"skip"``) lets the self-test decide. ``TRL_HOTFIX=0`` turns this call off, with
    a warning.

    Raises ``CatalogueError``, ``PackError``, ``UnknownPatchError``, ``SettingError``, ``NotAppliedError``; after any of
    them nothing has changed.
    """
    return engine.ENGINE.apply(only, skip, options, strict, dry_run, unknown_body, packs)


def revert(*ids: str) -> Report:
    """Take patches off exactly (default: all). One that somebody has wrapped or replaced since stays, as ``displaced``.

    Raises ``UnknownPatchError``.
    """
    return engine.ENGINE.revert(ids)


def status() -> Report:
    """Return where every patch stands in this process now, after a look whether each is still on its target."""
    return engine.ENGINE.status()


@contextmanager
def patched(*ids: str, options: Mapping[str, Options] | None = None, strict: bool = True) -> Iterator[Report]:
    """``with patched("some-id"):`` has these patches on besides those that are; afterwards, what was on before.

    Without ids: all that are on by default. Raises what ``apply`` raises.
    """
    with engine.ENGINE.patched(ids, strict, options) as report:
        yield report


def explain(patch_id: str) -> str:
    """Return one patch in words: the bug, the repair, where it stands here and why. Raises ``UnknownPatchError``."""
    report = engine.ENGINE.status()
    ids = [status.id for status in report]
    if patch_id not in ids:
        raise UnknownPatchError([patch_id], ids, "explain()")
    return explanation(report[patch_id], engine.ENGINE.journal(patch_id))
