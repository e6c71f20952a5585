"""The public functions: ``apply``, ``revert``, ``status``, ``patched``, ``explain``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

from .catalogue.names import by_name, id_of
from .errors import UnknownPatchError
from .import_hooks import FINDER
from .model import Options, Strict
from .patching import engine
from .reporting.explanation import explanation
from .reporting.report import Report

_TRAINER = "transformers.trainer"
"""The module whose trainers get the callback under strict."""


def apply(
    *,
    only: Iterable[str] | str | None = None,
    skip: Iterable[str] | None = None,
    options: Mapping[str, Options] | None = None,
    strict: bool | Literal["all"] | None = None,
    dry_run: bool = False,
    unknown_body: Literal["skip", "try"] | None = None,
    packs: Iterable[str] | str | None = None,
    observe: bool | None = None,
    measure_effect: bool | None = None,
) -> Report:
    """Repair the installed TRL: at once in modules that are imported, and in the others when they are imported.

    ``only`` and ``skip`` are ids of patches (default: ``TRL_HOTFIX_ONLY``, ``TRL_HOTFIX_SKIP``, else all patches that
    are on by default). ``only="@trl_hotfix.json"`` applies exactly the set that a run has recorded. ``options`` are
    choices within patches, ``{id: {option: choice}}`` (default: ``TRL_HOTFIX_OPTIONS``, ``id.option=choice`` separated
    by commas, else the defaults of the catalogue). ``packs`` are names of packs of third parties that add their patches
    (default: ``TRL_HOTFIX_PACKS``, else none); their patches have ids ``pack/id``.

    A call with another selection than the last takes off the patches that are not in it, and puts those with other
    options on again. A reverted patch goes on again; a failed one is tried again only after ``revert()``. ``dry_run``
    changes nothing; ``pending`` then means that the patch would go on. The patch leaves a method alone if it was not
    proven on its body; ``unknown_body="try"`` (default: ``TRL_HOTFIX_UNKNOWN_BODY``, else ``"skip"``)
    lets the self-test decide. ``TRL_HOTFIX=0`` turns this call off, with a warning.

    ``strict=True`` (default: whether ``TRL_HOTFIX=strict``) ends a run on all ranks, with ``NotAppliedError``, if it
    hits a bug, or may hit it, whose patch is not on or does not reach its trainer: before its first step, or after it.
    ``strict="all"`` (``TRL_HOTFIX=strict-all``) does so for each patch that should be on and is not, and raises here
    and at the import of a trainer, too. Both give every trainer a ``HotfixCallback``, which decides.

    With ``observe`` (default: whether ``TRL_HOTFIX=observe``) nothing is repaired and no number changes: the self-tests
    show which bugs are here, and the record of a run which of them it hits. A later call without it repairs. Under
    ``TRL_HOTFIX=observe`` it takes ``observe=False`` to repair, and ``strict`` has no effect while nothing is repaired.

    With ``measure_effect`` (default: whether ``TRL_HOTFIX_EFFECT`` is on) every trainer gets a ``HotfixCallback``. It
    computes the first step again without each repair that acted in it, and records the losses and the gradients.

    Raises ``CatalogueError``, ``PackError``, ``UnknownPatchError``, ``SettingError``, ``NotAppliedError``; after any of
    them nothing has changed. ``observe=True`` with ``strict=True``, or under ``TRL_HOTFIX=strict``, is a
    ``SettingError``.
    """
    report = engine.ENGINE.apply(only, skip, options, strict, dry_run, unknown_body, packs, observe, measure_effect)
    needs_callback = engine.ENGINE.strict is not Strict.NOTHING or engine.ENGINE.configuration.measure_effect
    if not dry_run and needs_callback:
        FINDER.when_imported(_TRAINER, _add_callback)
    return report


def _add_callback(module: ModuleType) -> None:
    from .recording import callback  # It imports transformers.

    callback.add_to_every_trainer(module)
    callback.add_to_those_made_already()


def revert(*ids: str) -> Report:
    """Take patches off exactly (default: all). One that other code has wrapped or replaced stays, as ``displaced``.

    Raises ``UnknownPatchError``.
    """
    report = engine.ENGINE.revert(ids)
    if not ids and _TRAINER in sys.modules:
        # What waits by the environment stays: the trainers of this process have a record, also of no repair.
        FINDER.forget(_TRAINER, _add_callback)
    return report


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
    known = by_name(status.patch for status in report)
    if patch_id not in known:
        raise UnknownPatchError([patch_id], known, "explain()")
    present = id_of(patch_id, known)
    return explanation(report[present], engine.ENGINE.journal(present))
