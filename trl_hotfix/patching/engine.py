"""The engine of this process: it does the work of the public functions, and patches modules when they are imported.

A patch consists of module patches, one for each module that has targets of it, since a module is patched when it is
imported. There are two locks. The engine's lets a single ``apply`` or ``revert`` run at a time. The registry's guards
its records and is held for a few instructions only, never while something is imported, called or tested, since this
runs inside import locks.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from ..catalogue import loading, packs
from ..errors import NotAppliedError, SettingError, UnknownPatchError, plain, quoted
from ..import_hooks import FINDER, is_complete
from ..log import ensure_handler, log
from ..matching import gates, installation
from ..matching.versions import installed
from ..model import Decision, Options, Patch, Reason, State
from ..reporting.report import Report
from ..reporting.runs import noted
from ..selection.selection import Selection
from ..settings import OBSERVE, STRICT, switch
from . import collector, previews
from .application import try_apply
from .configuration import Configuration, not_applied
from .module_patch import ModulePatch
from .reach import one_search
from .references import Named, Reference
from .registry import Registry
from .self_test import failed
from .sites import MissingTargetError, OccupiedError, Sites
from .standing import overtaken, status_of


class Engine:
    """The patches of one process, and the work of the public functions. There is one, ``ENGINE``; tests make others.

    ``_one_at_a_time`` is held by a call that changes the configuration, and not by an import that puts patches on.
    """

    def __init__(self) -> None:
        self._one_at_a_time = threading.RLock()
        self._registry = Registry(lambda: self._configuration.strict)
        self._configuration = Configuration()
        _ENGINES.add(self)

    def _after_fork(self) -> None:
        """Free what threads hold that this process, a child, does not have. Their patches wait again, and are off."""
        self._one_at_a_time = threading.RLock()
        abandoned = self._registry.after_fork()
        # Without sites there are no wrappers, and a thread that is gone may have begun to import their module.
        if not abandoned or not site_registry.cache_info().currsize:
            return
        for module_patch in abandoned:
            module = sys.modules.get(module_patch.module)
            if module is None:
                continue
            for target in module_patch.targets:
                # That thread may have put the wrapper on, and has not recorded the site yet.
                with suppress(MissingTargetError, OccupiedError):
                    site_registry().at(module, target).take_off(module_patch.patch.id)

    # The work of the public functions.

    @collector.paused()
    def apply(
        self,
        only: Iterable[str] | str | None,
        skip: Iterable[str] | None,
        options: Mapping[str, Options] | None,
        strict: bool | None,
        dry_run: bool = False,
        unknown_body: str | None = None,
        pack_names: Iterable[str] | str | None = None,
        observe: bool | None = None,
    ) -> Report:
        names = packs.named(pack_names, os.environ)
        patches = loading.known(names)
        selection = Selection.of(only, skip, os.environ, patches, options, names)
        unknown_body = unknown_body or os.environ.get("TRL_HOTFIX_UNKNOWN_BODY") or "skip"
        if unknown_body not in ("skip", "try"):
            raise SettingError(
                f"unknown_body (TRL_HOTFIX_UNKNOWN_BODY) is {quoted(unknown_body)}: expected 'skip' or 'try'"
            )
        setting = switch(os.environ.get("TRL_HOTFIX", "") or "unset")
        if observe and (strict or (strict is None and setting == STRICT)):
            raise SettingError(
                "observe=True repairs nothing, and strict mode asks that everything is repaired: leave one out"
            )
        observe = setting == OBSERVE if observe is None else observe
        if dry_run:
            return previews.preview(patches, selection, observe=observe)
        _start_first()
        if setting == "off":
            ensure_handler()
            log.warning("TRL_HOTFIX=%s turns apply() off: nothing is patched", plain(os.environ["TRL_HOTFIX"]))
            selection = Selection(only=frozenset(), packs=names)
        strict = not observe and (setting == STRICT if strict is None else strict)
        if setting != "off" and selection.only != frozenset():
            _check_installation(patches, strict)
        if selection.frozen is not None:
            previews.check_frozen(selection, strict)
        decisions = gates.decisions(patches, selection)
        if setting == "off":
            decisions = {patch.id: Decision(State.DISABLED, Reason.SWITCHED_OFF) for patch in patches}
        report = self._configure(Configuration(selection, decisions, strict, unknown_body == "try", observe))
        for status in (report[patch_id] for patch_id in selection.options):
            if status.state in (State.DISABLED, State.RETIRED, State.SKIPPED):
                state, reason = status.state.value, status.reason.value
                log.warning("the options of %s do nothing here: %s (%s)", status.id, state, reason)
        return report

    def revert(self, ids: Iterable[str]) -> Report:
        known = {patch.id for patch in self._patches()}
        unknown = [patch_id for patch_id in ids if patch_id not in known]
        if unknown:
            raise UnknownPatchError(unknown, known, "revert()")
        chosen = set(ids) or known
        _start_first()
        with self._one_at_a_time:
            for module_patch in self._registry.all():
                if module_patch.patch.id in chosen:
                    self._registry.take_off(module_patch)
            if not ids:
                # What the record of a run has put on is no patch, and goes too.
                site_registry().clear()
            return self.status(())

    def status(self, objects: Sequence[object] | None = None) -> Report:
        """Return the state of every patch. An instance in ``objects`` may have a method of its own (None: search all).

        A search through all objects of the process takes some time.
        """
        _start_first()
        # The end of an import can be missed: another thread had begun it, but the module was not in sys.modules yet
        # when the wait for it began; or a reload was under way when its class was patched.
        waiting = {
            module_patch.module
            for module_patch in self._registry.all()
            if module_patch.decision.state is State.PENDING or overtaken(module_patch)
        }
        for module in sorted(waiting & sys.modules.keys()):
            FINDER.when_imported(module, self._imported)
        selection = self._configuration.selection or Selection(packs=self._packs())
        objects = self._objects() if objects is None else objects
        trl, decisions = installed("trl"), self._configuration.decisions
        not_configured = Decision(State.DISABLED, Reason.SWITCHED_OFF)
        statuses = []
        for patch in self._patches():
            decision, options = decisions.get(patch.id, not_configured), selection.options_of(patch)
            statuses.append(status_of(patch, trl, self._registry.of(patch.id), decision, options, objects))
        return previews.report(trl, statuses, selection, observe=self._configuration.observe, runs=noted())

    def module_patches(self) -> list[ModulePatch]:
        """Return all module patches of this process."""
        return self._registry.all()

    def overlooked(self) -> list[str]:
        """Return the modules that are imported, and whose patches wait for that import still: it was not noticed.

        ``status()`` works on them. Nothing is changed here.
        """
        pending = {
            module_patch.module
            for module_patch in self._registry.all()
            if module_patch.decision.state is State.PENDING and not self._registry.is_busy(module_patch)
        }
        return [module for module in sorted(pending) if is_complete(module)]

    def journal(self, patch_id: str) -> list[str]:
        """Return the steps that led to the state of a patch, a line for each step in each of its modules."""
        return [line for module_patch in self._registry.of(patch_id) for line in module_patch.journal]

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
            live, observe = (State.APPLIED, State.OBSERVED, State.PENDING), _observe_is_set()
            on = frozenset(
                module_patch.patch.id
                for module_patch in self._registry.all()
                if module_patch.decision.state in live and module_patch.observe == observe
            )
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
                    self._registry.drop(self._registry.all())
                    self._configuration = before
                else:
                    self._select(before.selection, before)

    def ensure(self, named: Iterable[Named]) -> None:
        """Put these patches on with these options, besides those that are on. Unknown patches are left out."""
        ensure_handler()
        if switch(os.environ.get("TRL_HOTFIX", "") or "unset") == "off":
            log.warning("TRL_HOTFIX=%s: the patches of a pickled function stay off", os.environ["TRL_HOTFIX"])
            return
        if self._configuration.observe or _observe_is_set():
            log.warning("this process only observes: the patches of a pickled function stay off")
            return
        pack_names = self._packs()
        known = {patch.id: patch.revision for patch in loading.known(pack_names)}
        requested: dict[str, Options] = {}
        for patch_id, revision, options in named:
            known_revision = known.get(patch_id)
            if known_revision != revision:
                known_as = f"revision {known_revision}" if known_revision is not None else "not known"
                log.warning("a pickle asks for %s, revision %d; here it is %s", patch_id, revision, known_as)
            if known_revision is not None:
                requested[patch_id] = dict(options)
            elif packs.pack_of(patch_id) not in ("", *pack_names):
                pack = packs.pack_of(patch_id)
                log.warning("name its pack in TRL_HOTFIX_PACKS if you trust it: %s", plain(pack))
        _start_first()
        with self._one_at_a_time:
            on = {
                module_patch.patch.id: module_patch.options
                for module_patch in self._registry.all()
                if module_patch.decision.state is not State.REVERTED
            }
            if not on.items() >= requested.items():
                merged = {**on, **requested}
                selection = Selection(only=frozenset(merged), options=merged, packs=pack_names)
                self._select(selection, self._configuration)

    def _packs(self) -> tuple[str, ...]:
        """Return the packs that the user has named: in the last call of ``apply()``, or else in the environment."""
        selection = self._configuration.selection
        return selection.packs if selection is not None else packs.named(None, os.environ)

    def _patches(self) -> tuple[Patch, ...]:
        """Return the catalogue, and patches of earlier packs that are still on, since other code is on top of them."""
        patches = {patch.id: patch for patch in loading.known(self._packs())}
        kept = {
            module_patch.patch.id: module_patch.patch
            for module_patch in self._registry.all()
            if module_patch.patch.id not in patches
        }
        return (*patches.values(), *kept.values())

    def _objects(self) -> list[object]:
        """Return all trainers, and the instances of the patched classes. One may have a method of its own."""
        module_patches = self._registry.all()
        applied = [module_patch for module_patch in module_patches if module_patch.decision.state is State.APPLIED]
        sites = [site for module_patch in applied for site in module_patch.every_site()]
        if not sites:
            return []
        from .conflicts import objects_of

        return objects_of(sites)

    # Configuring.

    def _select(self, selection: Selection, configuration: Configuration) -> Report:
        """Change the selection, with the strictness and the policy of ``configuration``."""
        decisions = gates.decisions(loading.known(selection.packs), selection)
        return self._configure(replace(configuration, selection=selection, decisions=decisions))

    def _configure(self, configuration: Configuration) -> Report:
        """Put patches on and off as the configuration asks. If strict mode refuses one, everything is as before."""
        selection = configuration.selection
        assert selection is not None
        with self._one_at_a_time:
            ensure_handler()
            before, self._configuration = self._configuration, configuration
            selected = configuration.selected
            changed = [
                module_patch
                for module_patch in self._registry.all()
                if module_patch.patch.id in selected
                and (module_patch.options, module_patch.observe)
                != (selection.options_of(module_patch.patch), configuration.observe)
            ]
            self._registry.drop(changed)
            entering = self._entering()
            try:
                self._watch_imports(entering)
                if configuration.strict:
                    degraded = [status for status in self.status() if status.degraded and status.id in selected]
                    if degraded:
                        raise not_applied(
                            f"{status.id}: {status.state.value} ({status.reason.value})" for status in degraded
                        )
            except NotAppliedError:
                self._registry.drop(entering)
                self._configuration = before
                if changed:
                    self._watch_imports(self._entering())
                raise
            self._registry.drop(
                [module_patch for module_patch in self._registry.all() if module_patch.patch.id not in selected]
            )
            return self.status(() if configuration.strict else None)

    def _watch_imports(self, module_patches: Iterable[ModulePatch]) -> None:
        """Have each module patch worked on when its module is imported, or now if it is imported already."""
        with one_search():
            for module in dict.fromkeys(module_patch.module for module_patch in module_patches):
                FINDER.when_imported(module, self._imported)

    def _entering(self) -> list[ModulePatch]:
        """Return those that wait for their module: new, reverted, or with a module whose import was missed."""
        trl = installed("trl")
        selected = self._configuration.selected if trl is not None else set()
        selection = self._configuration.selection or Selection()
        return [
            module_patch
            for patch in loading.known(self._packs())
            if patch.id in selected
            for module_patch in self._registry.waiting(
                patch, trl or "", selection.options_of(patch), observe=self._configuration.observe
            )
        ]

    # After an import.

    @collector.paused()
    def _imported(self, module: ModuleType) -> None:
        """Work on the module patches that wait for this module. Under strict, all go on, or none does and it raises."""
        worked_on, cancelled = [], False
        configuration = self._configuration
        for module_patch in self._registry.all():
            with ExitStack() as undo:
                if module_patch.module != module.__name__ or not self._registry.claim(module_patch, undo):
                    continue
                try:
                    decision = try_apply(
                        module_patch,
                        module,
                        site_registry(),
                        try_unknown_body=configuration.try_unknown_body,
                    )
                # An error in a patch must not end the user's import.
                except Exception as error:
                    decision = failed(Reason.INSTALL_ERROR, error)
                if self._registry.record_decision(module_patch, decision):
                    worked_on.append(module_patch)
                else:
                    cancelled = True
                undo.pop_all()
        if cancelled:
            # The thread that cancelled it may have registered another in its place, which had to wait.
            self._imported(module)
        problems = [module_patch for module_patch in worked_on if module_patch.decision.degraded]
        if problems and configuration.strict:
            for module_patch in worked_on:
                if module_patch.decision.state is State.APPLIED:
                    self._registry.take_off(module_patch)
                module_patch.decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
            raise not_applied(module_patch.journal[-1] for module_patch in problems)


def _check_installation(patches: Iterable[Patch], strict: bool) -> None:
    """Warn if the installed TRL is none that patches can be chosen for. Raises ``NotAppliedError`` under strict."""
    problems = installation.problems(patches)
    if problems and strict:
        raise not_applied(problems)
    ensure_handler()
    for problem in problems:
        log.warning("%s", problem)


def _observe_is_set() -> bool:
    return switch(os.environ.get("TRL_HOTFIX", "")) == OBSERVE


def _start_first() -> None:
    """Do the work of ``TRL_HOTFIX=1`` now, if TRL has not been imported yet.

    Otherwise, in a script that imports TRL later, that work would come after the script's own call and undo it.
    """
    FINDER.run_before_import("trl")


def restore(reference: Reference) -> Any:
    """Unpickle a patched function: put its patches on in this process too, then look the function up."""
    module, attribute, patches = reference
    ENGINE.ensure(patches)
    owner = functools.reduce(getattr, attribute.split(".")[:-1], import_module(module))
    return getattr(owner, attribute.split(".")[-1])


@functools.cache
def site_registry() -> Sites:
    return Sites()


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    FINDER.forget_other_threads()
    collector.after_fork_in_child()
    for engine in list(_ENGINES):
        engine._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

ENGINE = Engine()
