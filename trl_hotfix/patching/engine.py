"""What is on in this process, and how it comes there and off again.

A patch is worked on as module patches, one for each module that it has targets in, since a module is patched when it is
imported. Two locks: one lets a single ``apply`` or ``revert`` run at a time; the other guards the records and is held
for a few instructions only, never while something is imported, called or tested, since this runs inside import locks.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from .. import __version__
from ..catalogue import loading, packs
from ..errors import NotAppliedError, SettingError, UnknownPatchError, plain
from ..import_hooks import FINDER
from ..log import ensure_handler, log
from ..matching import gates
from ..matching.versions import VersionOf, installed
from ..model import Decision, Options, Patch, Reason, State, Target
from ..reporting.report import Report
from ..reporting.sentences import in_one_line
from ..selection.selection import Selection
from ..settings import STRICT, switch
from .application import try_apply
from .configuration import Configuration
from .module_patch import ModulePatch, overtaken, status_of
from .references import Named, Reference
from .self_test import failed

if TYPE_CHECKING:
    from .sites import Sites


class Engine:
    """The patches of one process. There is one, ``ENGINE``; tests make others."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.RLock()
        self._lock = threading.RLock()
        self._module_patches: dict[tuple[str, str], ModulePatch] = {}
        self._busy: set[tuple[str, str]] = set()
        self._configuration = Configuration()

    # What the public functions do.

    def apply(
        self,
        only: Iterable[str] | str | None,
        skip: Iterable[str] | None,
        options: Mapping[str, Options] | None,
        strict: bool | None,
        dry_run: bool = False,
        unknown_body: str | None = None,
        pack_names: Iterable[str] | str | None = None,
    ) -> Report:
        names = packs.named(pack_names, os.environ)
        patches = loading.known(names)
        selection = Selection.of(only, skip, os.environ, patches, options, names)
        unknown_body = unknown_body or os.environ.get("TRL_HOTFIX_UNKNOWN_BODY") or "skip"
        if unknown_body not in ("skip", "try"):
            raise SettingError(f"unknown_body (TRL_HOTFIX_UNKNOWN_BODY) is {unknown_body!r}: expected 'skip' or 'try'")
        if dry_run:
            return self.preview(patches, selection)
        _start_first()
        setting = switch(os.environ.get("TRL_HOTFIX", "") or "unset")
        if setting == "off":
            ensure_handler()
            log.warning("TRL_HOTFIX=%s turns apply() off: nothing is patched", plain(os.environ["TRL_HOTFIX"]))
            selection = Selection(only=frozenset(), packs=names)
        strict = setting == STRICT if strict is None else strict
        if selection.frozen is not None:
            _check_frozen(selection, strict)
        decisions = gates.decisions(patches, selection)
        if setting == "off":
            decisions = {patch.id: Decision(State.DISABLED, Reason.SWITCHED_OFF) for patch in patches}
        report = self._configure(Configuration(selection, decisions, strict, unknown_body == "try"))
        for status in (report[patch_id] for patch_id in selection.options):
            if status.state in (State.DISABLED, State.RETIRED, State.SKIPPED):
                state, reason = status.state.value, status.reason.value
                log.warning("the options of %s do nothing here: %s (%s)", status.id, state, reason)
        return report

    def preview(self, patches: Iterable[Patch], selection: Selection, version_of: VersionOf = installed) -> Report:
        """Return where the gates would leave these patches beside these versions. Nothing is changed."""
        decisions = gates.decisions(patches, selection, version_of)
        trl = version_of("trl")
        statuses = [
            status_of(patch, trl, (), decisions[patch.id], selection.options_of(patch))
            for patch in loading.known(selection.packs)
        ]
        return _report(trl, statuses, selection)

    def revert(self, ids: Iterable[str]) -> Report:
        known = {patch.id for patch in self._patches()}
        unknown = [patch_id for patch_id in ids if patch_id not in known]
        if unknown:
            raise UnknownPatchError(unknown, known, "revert()")
        chosen = set(ids) or known
        _start_first()
        with self._one_at_a_time:
            for module_patch in self._all():
                if module_patch.patch.id in chosen:
                    self._take_off(module_patch)
            return self.status(())

    def status(self, objects: Sequence[object] | None = None) -> Report:
        """``objects`` are where to look for a trainer with a method of its own: among all, which takes a while."""
        _start_first()
        # The import of a module that another thread had begun, but that was not in sys.modules yet, when it was to be
        # waited for; or a reload that was under way when its class was patched: nobody has seen it end.
        waiting = {
            module_patch.module
            for module_patch in self._all()
            if module_patch.decision.state is State.PENDING or overtaken(module_patch)
        }
        for module in sorted(waiting & sys.modules.keys()):
            FINDER.when_imported(module, self._imported)
        selection = self._configuration.selection or Selection(packs=self._packs())
        objects = self._objects() if objects is None else objects
        trl, decisions = installed("trl"), self._configuration.decisions
        nothing_asked = Decision(State.DISABLED, Reason.SWITCHED_OFF)
        statuses = []
        for patch in self._patches():
            module_patches = [module_patch for module_patch in self._all() if module_patch.patch.id == patch.id]
            decision = decisions.get(patch.id, nothing_asked)
            statuses.append(status_of(patch, trl, module_patches, decision, selection.options_of(patch), objects))
        return _report(trl, statuses, selection)

    def journal(self, patch_id: str) -> list[str]:
        """Return how a patch came to stand where it does: one line a step, for each of its modules."""
        return [
            line for module_patch in self._all() if module_patch.patch.id == patch_id for line in module_patch.journal
        ]

    @contextmanager
    def patched(
        self,
        ids: tuple[str, ...],
        strict: bool,
        options: Mapping[str, Options] | None = None,
        unknown_body: str | None = None,
    ) -> Iterator[Report]:
        _start_first()
        with self._one_at_a_time:
            before = self._configuration
            live = (State.APPLIED, State.PENDING)
            on = frozenset(module_patch.patch.id for module_patch in self._all() if module_patch.decision.state in live)
            merged = options
            if before.selection is not None:
                merged = {**before.selection.options, **(options or {})}
            only = [*ids, *on] if ids else None
            report = self.apply(only, None, merged, strict, unknown_body=unknown_body, pack_names=self._packs())
        try:
            yield report
        finally:
            with self._one_at_a_time:
                if before.selection is None:
                    self._drop(self._all())
                    self._configuration = before
                else:
                    self._select(before.selection, before)

    def ensure(self, named: Iterable[Named]) -> None:
        """Have these patches on with these options, besides what is. One that no catalogue here has is left out."""
        ensure_handler()
        if switch(os.environ.get("TRL_HOTFIX", "") or "unset") == "off":
            log.warning("TRL_HOTFIX=%s: the patches of a pickled function stay off", os.environ["TRL_HOTFIX"])
            return
        pack_names = self._packs()
        known = {patch.id: patch.revision for patch in loading.known(pack_names)}
        wanted: dict[str, Options] = {}
        for patch_id, revision, options in named:
            known_revision = known.get(patch_id)
            if known_revision != revision:
                here = f"revision {known_revision}" if known_revision is not None else "not known"
                log.warning("a pickle asks for %s, revision %d; here it is %s", patch_id, revision, here)
            if known_revision is not None:
                wanted[patch_id] = dict(options)
            elif packs.pack_of(patch_id) not in ("", *pack_names):
                pack = packs.pack_of(patch_id)
                log.warning("name its pack in TRL_HOTFIX_PACKS if you trust it: %s", plain(pack))
        _start_first()
        with self._one_at_a_time:
            on = {
                module_patch.patch.id: module_patch.options
                for module_patch in self._all()
                if module_patch.decision.state is not State.REVERTED
            }
            if not on.items() >= wanted.items():
                merged = {**on, **wanted}
                selection = Selection(only=frozenset(merged), options=merged, packs=pack_names)
                self._select(selection, self._configuration)

    def _packs(self) -> tuple[str, ...]:
        """Return the packs that the user has named: in the last call of ``apply()``, or else in the environment."""
        selection = self._configuration.selection
        return selection.packs if selection is not None else packs.named(None, os.environ)

    def _patches(self) -> tuple[Patch, ...]:
        """Return the catalogue, and what is still on of a pack that is not named any more: somebody stands on it."""
        patches = {patch.id: patch for patch in loading.known(self._packs())}
        left = {
            module_patch.patch.id: module_patch.patch
            for module_patch in self._all()
            if module_patch.patch.id not in patches
        }
        return (*patches.values(), *left.values())

    def _all(self) -> list[ModulePatch]:
        # A list, taken under the lock: another thread's import may add to them at any time.
        with self._lock:
            return list(self._module_patches.values())

    def _objects(self) -> list[object]:
        """Return what there is of the classes that patches are on: one of them may have a method of its own."""
        sites = [
            site
            for module_patch in self._all()
            if module_patch.decision.state is State.APPLIED
            for site in module_patch.sites
        ]
        if not sites:
            return []
        from .conflicts import objects_of

        return objects_of(sites)

    # From a configuration to module patches.

    def _select(self, selection: Selection, configuration: Configuration) -> Report:
        """Have another selection with the strictness and the policy of ``configuration``."""
        decisions = gates.decisions(loading.known(selection.packs), selection)
        return self._configure(replace(configuration, selection=selection, decisions=decisions))

    def _configure(self, configuration: Configuration) -> Report:
        """Put on and take off what the configuration asks for. Where strict mode refuses, nothing has changed."""
        selection = configuration.selection
        assert selection is not None
        with self._one_at_a_time:
            ensure_handler()
            before, self._configuration = self._configuration, configuration
            wanted = configuration.wanted
            changed = [
                module_patch
                for module_patch in self._all()
                if module_patch.patch.id in wanted and module_patch.options != selection.options_of(module_patch.patch)
            ]
            self._drop(changed)
            entering = self._entering()
            try:
                self._watch_imports(entering)
                if configuration.strict:
                    degraded = [status for status in self.status() if status.degraded and status.id in wanted]
                    if degraded:
                        raise _not_applied(f"{each.id}: {each.state.value} ({each.reason.value})" for each in degraded)
            except NotAppliedError:
                self._drop(entering)
                self._configuration = before
                if changed:
                    self._watch_imports(self._entering())
                raise
            self._drop([module_patch for module_patch in self._all() if module_patch.patch.id not in wanted])
            return self.status(() if configuration.strict else None)

    def _drop(self, module_patches: Iterable[ModulePatch]) -> None:
        """Take them off and forget them; one that somebody stands on is kept, since it cannot be taken off."""
        for module_patch in module_patches:
            self._take_off(module_patch)
            if module_patch.decision.state is State.REVERTED:
                self._module_patches.pop(module_patch.key, None)

    def _watch_imports(self, module_patches: Iterable[ModulePatch]) -> None:
        """Have each worked on when its module is imported: now, if it is."""
        for module in dict.fromkeys(module_patch.module for module_patch in module_patches):
            FINDER.when_imported(module, self._imported)

    def _entering(self) -> list[ModulePatch]:
        """Return those that wait for their module: new, reverted, or with a module that was imported unseen."""
        trl = installed("trl")
        wanted = self._configuration.wanted if trl is not None else set()
        return [
            module_patch
            for patch in loading.known(self._packs())
            if patch.id in wanted
            for module_patch in self._waiting(patch, trl or "")
        ]

    def _waiting(self, patch: Patch, trl: str) -> Iterator[ModulePatch]:
        selection = self._configuration.selection or Selection()
        by_module: dict[str, list[Target]] = {}
        for target in gates.targets_for(patch, trl) or patch.targets:
            by_module.setdefault(target.module, []).append(target)
        for module, targets in by_module.items():
            with self._lock:
                module_patch = self._module_patches.get((patch.id, module))
                if module_patch is None or module_patch.decision.state is State.REVERTED:
                    journal = module_patch.journal if module_patch is not None else []
                    options = selection.options_of(patch)
                    module_patch = ModulePatch(patch, module, tuple(targets), options, journal=journal)
                    self._module_patches[module_patch.key] = module_patch
            if module_patch.decision.state is State.PENDING:
                yield module_patch

    # A module has been imported.

    def _imported(self, module: ModuleType) -> None:
        """Work on all that waits for this module. Under strict, all of them go on, or none and it raises."""
        worked_on, cancelled = [], False
        configuration = self._configuration
        for module_patch in self._all():
            with ExitStack() as undo:
                if module_patch.module != module.__name__ or not self._claim(module_patch, undo):
                    continue
                try:
                    decision = try_apply(
                        module_patch,
                        module,
                        site_registry(),
                        strict=configuration.strict,
                        try_unknown_body=configuration.try_unknown_body,
                    )
                # Nothing that goes wrong in here may end the user's import.
                except Exception as error:
                    decision = failed(Reason.INSTALL_ERROR, error)
                if self._record_decision(module_patch, decision):
                    worked_on.append(module_patch)
                else:
                    cancelled = True
                undo.pop_all()
        if cancelled:
            # Whoever took it off may have put another in its place, which had to wait.
            self._imported(module)
        problems = [module_patch for module_patch in worked_on if module_patch.decision.degraded]
        if problems and configuration.strict:
            for module_patch in worked_on:
                if module_patch.decision.state is State.APPLIED:
                    self._take_off(module_patch)
                module_patch.decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
            raise _not_applied(module_patch.journal[-1] for module_patch in problems)

    def _claim(self, module_patch: ModulePatch, undo: ExitStack) -> bool:
        """Take one to work on, unless another thread has it. An applied one too: its module may be new."""
        with self._lock:
            free = module_patch.key not in self._busy
            if not free or module_patch.decision.state not in (State.PENDING, State.APPLIED):
                return False
            undo.callback(self._interrupted, module_patch)
            self._busy.add(module_patch.key)
            return True

    def _interrupted(self, module_patch: ModulePatch) -> None:
        """Something came between, such as a keyboard interrupt: off, and to be worked on at the next import."""
        self._off_its_sites(module_patch)
        with self._lock:
            if module_patch.decision.state is State.REVERTED and not module_patch.cancel_requested:
                module_patch.decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
            self._busy.discard(module_patch.key)

    def _record_decision(self, module_patch: ModulePatch, decision: Decision) -> bool:
        """Return False if another thread has taken it off meanwhile, so that the work is undone."""
        with self._lock:
            is_news = module_patch.decision is not decision
            if not module_patch.cancel_requested:
                module_patch.decision = decision
                self._busy.discard(module_patch.key)
        if module_patch.cancel_requested:
            self._off_its_sites(module_patch)
            with self._lock:
                self._busy.discard(module_patch.key)
            return False
        if is_news:
            module_patch.note()
            _log_decision(module_patch)
        return True

    def _take_off(self, module_patch: ModulePatch) -> None:
        """Take it off its targets, or off the waiting list; where somebody else stands, leave it and say so."""
        with self._lock:
            # Another thread is putting it on, within an import: to wait for that here could be to wait for ever.
            module_patch.cancel_requested = module_patch.key in self._busy
            if module_patch.cancel_requested:
                module_patch.decision = Decision(State.REVERTED, Reason.BY_REQUEST)
        if module_patch.cancel_requested:
            module_patch.note()
        else:
            self._off_its_sites(module_patch)
        module = module_patch.module
        if not any(other.module == module and other.decision.state is not State.REVERTED for other in self._all()):
            FINDER.forget(module)

    def _off_its_sites(self, module_patch: ModulePatch) -> None:
        from .sites import OccupiedError

        occupied = []
        for site in module_patch.sites:
            try:
                site.take_off(module_patch.patch.id)
            except OccupiedError as error:
                occupied.append((site, error))
        with self._lock:
            module_patch.sites = [site for site, _ in occupied]
            module_patch.decision = Decision(State.REVERTED, Reason.BY_REQUEST)
            if occupied:
                first = occupied[0][1]
                module_patch.decision = Decision(State.DISPLACED, first.reason, {"by": first.by})
        module_patch.note()
        if occupied:
            patch_id, by = module_patch.patch.id, occupied[0][1].by
            log.warning("%s cannot be taken off: %s stands in its place", patch_id, by)


def _start_first() -> None:
    """Do what ``TRL_HOTFIX=1`` does when TRL is imported, if that is still to come.

    Else it would come after, and undo, what the script asks for here, but only in a script that imports TRL later.
    """
    FINDER.run_before_import("trl")


def _check_frozen(selection: Selection, strict: bool) -> None:
    """Say which of the patches in the freeze file cannot be on here. Raises ``NotAppliedError`` under strict."""
    decisions = gates.decisions(loading.known(selection.packs), selection)
    lines = [
        f"{patch_id}: {decisions[patch_id].state.value} ({decisions[patch_id].reason.value})"
        for patch_id in sorted(selection.only or ())
        if decisions[patch_id].state is not State.PENDING
    ]
    if lines and strict:
        raise _not_applied(lines)
    ensure_handler()
    for line in lines:
        log.warning("in the freeze file, and not on here: %s", line)


def _report(trl: str | None, statuses: Iterable[Any], selection: Selection) -> Report:
    releases = {name: packs.find(name).release for name in selection.packs}
    return Report(__version__, trl, platform.python_version(), tuple(statuses), releases)


def _log_decision(module_patch: ModulePatch) -> None:
    """One line where the patch went on, and a WARNING where it should be on and is not."""
    decision, evidence = module_patch.decision, in_one_line(module_patch.decision)
    name = f"{module_patch.patch.id} (r{module_patch.patch.revision})"
    if decision.state is State.APPLIED:
        targets = ", ".join(target.attribute for target in module_patch.targets)
        choices = "".join(f", {option}={choice}" for option, choice in module_patch.options.items())
        log.info("applied %s to TRL %s, %s%s%s", name, installed("trl"), targets, choices, evidence)
    elif decision.degraded:
        log.warning(
            "%s is NOT on: %s (%s)%s. `python -m trl_hotfix --list` says more",
            name,
            decision.state.value,
            decision.reason.value,
            evidence,
        )


def _not_applied(reasons: Iterable[str]) -> NotAppliedError:
    lines = "".join(f"\n  {reason}" for reason in reasons)
    return NotAppliedError(f"strict mode: a patch that should be on cannot be:{lines}")


def restore(reference: Reference, instance: Any) -> Any:
    """Unpickle a patched function: have its patches on in this process too, then take it from its place."""
    module, attribute, patches = reference
    ENGINE.ensure(patches)
    owner = functools.reduce(getattr, attribute.split(".")[:-1], import_module(module))
    return getattr(owner if instance is None else instance, attribute.split(".")[-1])


@functools.cache
def site_registry() -> Sites:
    # Here and not above: wrapt takes 50 ms to import, and `--list` has no use for it.
    from .sites import Sites

    return Sites(restore)


ENGINE = Engine()
