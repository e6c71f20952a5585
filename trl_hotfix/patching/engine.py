"""The engine of this process: it does the work of the public functions, and patches modules at their import.

A patch consists of module patches, one for each module that has targets of it, since a module is patched when it is
imported. There are two locks. The engine's lets a single ``apply`` or ``revert`` run at a time. The registry's guards
its records and is held for a few instructions only, never while something is imported, called or tested, since this
runs inside import locks.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from msgspec.structs import replace

from ..catalogue import loading, packs
from ..catalogue.names import by_name, id_of
from ..errors import NotAppliedError, SettingError, UnknownPatchError, plain, quoted
from ..import_hooks import FINDER, is_complete
from ..log import ensure_handler, event, warning
from ..matching import gates, installation, sources
from ..matching.versions import installed
from ..model import Decision, Options, Patch, Reason, State, Strict
from ..reporting.report import PatchStatus, Report
from ..reporting.runs import noted
from ..selection.selection import Selection
from ..settings import (
    OBSERVE,
    STRICT,
    STRICT_ALL,
    callback_is_on,
    effect_is_on,
    main_switch,
    switch,
    tries_unknown_body,
)
from ..witness import totals
from . import collector, phases, previews
from .announcements import Announcements
from .application import try_apply
from .configuration import Configuration, not_applied
from .module_patch import ModulePatch
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
        self._registry = Registry(lambda: self._configuration.strict is Strict.ALL and rank_and_world()[1] == 1)
        self._configuration = Configuration()
        self._announcements = Announcements()
        self._follows = False
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
        strict: bool | Literal["all"] | None,
        dry_run: bool = False,
        unknown_body: str | None = None,
        pack_names: Iterable[str] | str | None = None,
        observe: bool | None = None,
        measure_effect: bool | None = None,
    ) -> Report:
        setting = main_switch()
        variables = os.environ if dry_run else _variables()
        names = packs.named(pack_names, variables)
        patches = loading.known(names)
        selection = Selection.of(only, skip, variables, patches, options, names)
        try_unknown_body = tries_unknown_body(unknown_body or variables.get("TRL_HOTFIX_UNKNOWN_BODY", ""))
        level = strictness(strict)
        if observe and level is not Strict.NOTHING:
            raise SettingError("observe=True repairs nothing, and strict mode needs every repair: leave one out")
        observe = setting == OBSERVE if observe is None else observe
        if dry_run:
            files = sources.installed()
            return previews.preview(patches, selection, observe=observe, files=files, try_unknown_body=try_unknown_body)
        _start_first()
        if setting == "off":
            ensure_handler()
            value = plain(os.environ["TRL_HOTFIX"])
            warning("TRL_HOTFIX=%s turns apply() off: TRL stays unpatched", value, extra=event("switched-off"))
            selection = Selection(only=frozenset(), packs=names)
        level = Strict.NOTHING if observe else level
        measures = setting != "off" and (effect_is_on() if measure_effect is None else measure_effect)
        if measures and observe:
            raise SettingError("observe repairs nothing, so no repair has an effect to measure: leave one out")
        if measures and not callback_is_on():
            raise SettingError("TRL_HOTFIX_CALLBACK=0 leaves out the callback that measures the effect: leave one out")
        if setting != "off" and level is not Strict.NOTHING and not callback_is_on():
            raise SettingError("TRL_HOTFIX_CALLBACK=0 leaves out the callback that decides under strict: leave one out")
        if setting != "off" and selection.only != frozenset():
            _check_installation(patches, level)
        if selection.frozen is not None:
            previews.check_frozen(selection, level)
        decisions = gates.decisions(patches, selection)
        if setting == "off":
            decisions = {patch.id: Decision(State.DISABLED, Reason.SWITCHED_OFF) for patch in patches}
        arguments = {"only": only, "skip": skip, "strict": strict}
        given = frozenset(name for name, argument in arguments.items() if argument is not None)
        report = self._configure(
            Configuration(selection, decisions, level, level, given, try_unknown_body, observe, measures)
        )
        for status in (report[patch_id] for patch_id in selection.options):
            if status.state in (State.DISABLED, State.RETIRED, State.SKIPPED):
                state, reason = status.state.value, status.reason.value
                fields = event("options-unused", patch=status.id, state=state, reason=reason)
                warning("the options of %s do nothing here: %s (%s)", status.id, state, reason, extra=fields)
        return report

    def revert(self, ids: Iterable[str]) -> Report:
        known = by_name(self._patches())
        unknown = [patch_id for patch_id in ids if patch_id not in known]
        if unknown:
            raise UnknownPatchError(unknown, known, "revert()")
        chosen = {id_of(patch_id, known) for patch_id in ids} or {patch.id for patch in known.values()}
        _start_first()
        with self._one_at_a_time:
            for module_patch in self._registry.all():
                if module_patch.patch.id in chosen:
                    self._registry.take_off(module_patch)
            self._follow_trainers()
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
        return self._report(self._objects() if objects is None else objects)

    def _report(self, objects: Sequence[object]) -> Report:
        selection = self._configuration.selection or Selection(packs=self._packs())
        trl, decisions = installed("trl"), self._configuration.decisions
        not_configured = Decision(State.DISABLED, Reason.SWITCHED_OFF)
        counts, module_patches, statuses = totals(), self._registry.by_patch(), []
        for patch in self._patches():
            decision, options = decisions.get(patch.id, not_configured), selection.options_of(patch)
            here, count = module_patches.get(patch.id, ()), counts.get(patch.id)
            statuses.append(status_of(patch, trl, here, decision, options, count, objects))
        return previews.report(trl, statuses, selection, observe=self._configuration.observe, runs=noted())

    @property
    def strict(self) -> Strict:
        """What ends a run, by the last ``apply()``, or else by ``TRL_HOTFIX``."""
        configuration = self._configuration
        return configuration.of_runs if configuration.selection is not None else strictness(None)

    @property
    def configuration(self) -> Configuration:
        """What the last ``apply()`` has asked for."""
        return self._configuration

    @property
    def is_unused(self) -> bool:
        """Whether nobody has called ``apply()``, and nobody has switched it off."""
        return self._configuration.selection is None and not _is_off()

    def broken(self) -> set[str]:
        """Return the ids of the patches whose wrappers have failed in a call."""
        return {module_patch.patch.id for module_patch in self._registry.all() if module_patch.breaker.broken}

    @contextmanager
    def without(self, patch_id: str) -> Iterator[None]:
        """Leave the wrappers of a patch out in this block, on all its targets."""
        with ExitStack() as stack:
            for module_patch in self._registry.of(patch_id):
                stack.enter_context(module_patch.breaker.held_open())
            yield

    def module_patches(self) -> list[ModulePatch]:
        """Return all module patches of this process."""
        return self._registry.all()

    def overlooked(self) -> list[str]:
        """Return the modules that are imported, and whose patches wait for that import still: it was not noticed.

        ``status()`` works on them. It changes nothing.
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
            level: Literal["all", False] = "all" if strict else False
            report = self.apply(only, None, merged, level, unknown_body=unknown_body, pack_names=self._packs())
            self._configuration = replace(self._configuration, of_runs=before.of_runs)
        try:
            yield report
        finally:
            with self._one_at_a_time:
                if before.selection is None:
                    self._registry.drop(self._registry.all())
                    self._configuration = before
                    self._follow_trainers()
                else:
                    self._select(before.selection, before)

    def ensure(self, named: Iterable[Named]) -> None:
        """Put these patches on with these options, besides those that are on. Unknown and refused ones stay off."""
        ensure_handler()
        fields = event("pickle")
        if _is_off():
            value = plain(os.environ["TRL_HOTFIX"])
            warning("TRL_HOTFIX=%s: the patches of a pickled function stay off", value, extra=fields)
            return
        if self._configuration.observe or _observe_is_set():
            warning("this process only observes: the patches of a pickled function stay off", extra=fields)
            return
        pack_names = self._packs()
        known = by_name(loading.known(pack_names))
        requested: dict[str, Options] = {}
        for name, revision, options in named:
            patch = known.get(name)
            if patch is None or patch.revision != revision:
                known_as = f"revision {patch.revision}" if patch is not None else "not known"
                warning("a pickle asks for %s, revision %d; here it is %s", name, revision, known_as, extra=fields)
            if patch is not None:
                requested[id_of(name, known)] = dict(options)
            elif packs.pack_of(name) not in ("", *pack_names):
                pack = plain(packs.pack_of(name))
                warning("name its pack in TRL_HOTFIX_PACKS if you trust it: %s", pack, extra=fields)
        _start_first()
        with self._one_at_a_time:
            refused = self._refused()
            for patch_id in sorted(requested.keys() & refused):
                warning("a pickle asks for %s, which this process leaves out: it stays off", patch_id, extra=fields)
            on = {
                module_patch.patch.id: module_patch.options
                for module_patch in self._registry.all()
                if module_patch.decision.state is not State.REVERTED
            }
            wanted = {patch_id: options for patch_id, options in requested.items() if patch_id not in refused}
            if not on.items() >= wanted.items():
                merged = {**on, **wanted}
                selection = Selection(only=frozenset(merged), skip=refused, options=merged, packs=pack_names)
                self._select(selection, self._configuration)

    def _refused(self) -> frozenset[str]:
        """Return the ids that the user has left out: with ``skip``, or by a freeze file that does not name them."""
        patches = loading.known(self._packs())
        selection = self._configuration.selection or Selection.of(None, None, _variables(), patches)
        if selection.frozen is None:
            return selection.skip
        return frozenset(patch.id for patch in patches) - (selection.only or frozenset())

    def _packs(self) -> tuple[str, ...]:
        """Return the packs that the user has named: in the last call of ``apply()``, or else in the environment."""
        selection = self._configuration.selection
        return selection.packs if selection is not None else packs.named(None, _variables())

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
        """Put patches on and off as the configuration asks. If ``strict-all`` refuses one, everything is as before."""
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
                if configuration.strict is Strict.ALL:
                    self._check_strictly(selected)
            except NotAppliedError:
                self._registry.drop(entering)
                self._configuration = before
                if changed:
                    self._watch_imports(self._entering())
                self._follow_trainers()
                raise
            self._registry.drop(
                [module_patch for module_patch in self._registry.all() if module_patch.patch.id not in selected]
            )
            self._follow_trainers()
            return self.status(() if configuration.strict is Strict.ALL else None)

    def _watch_imports(self, module_patches: Iterable[ModulePatch]) -> None:
        """Have each module patch worked on when its module is imported, or now if it is imported already."""
        for module in dict.fromkeys(module_patch.module for module_patch in module_patches):
            FINDER.when_imported(module, self._imported)

    def _check_strictly(self, selected: Collection[str]) -> None:
        """Raise ``NotAppliedError`` if a selected patch is not on, or does not reach a trainer of this process."""
        found: list[PatchStatus] = []
        for _ in range(2):
            found = [status for status in self.status() if status.degraded and status.id in selected]
            if not found:
                return
            # A trainer that nobody holds any more may wait for the collector.
            gc.collect()
        raise not_applied(f"{status.id}: {status.state.value} ({status.reason.value})" for status in found)

    def _follow_trainers(self) -> None:
        """Have the layers that say what trainers do on, while a patch is on or observed, and no longer."""
        states = {module_patch.decision.state for module_patch in self._registry.all()}
        names = phases.modules_of(self._patches())
        with_patches = {module_patch.module for module_patch in self._registry.all()}
        for name in names - with_patches:
            if states - {State.REVERTED} and name not in sys.modules:
                FINDER.when_imported(name, self._imported)
            elif not states - {State.REVERTED}:
                FINDER.forget(name)
        if states & _STANDS:
            # A module whose patches wait gets them first: their self-tests are to meet TRL's own class.
            waiting = {one.module for one in self._registry.all() if one.decision.state is State.PENDING}
            for name in names - waiting:
                if is_complete(name):
                    phases.put_on(sys.modules[name], site_registry())
        elif site_registry.cache_info().currsize:
            phases.take_off(site_registry().with_layer(phases.LAYER))
        self._follows = bool(states & _STANDS)

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
        """Work on the module patches that wait for this module. ``strict-all``: all go on, or it raises."""
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
        stands = any(module_patch.decision.state in _STANDS for module_patch in self._registry.all())
        if stands is not self._follows:
            self._follow_trainers()
        if stands:
            phases.put_on(module, site_registry())
        if cancelled:
            # The thread that cancelled it may have registered another in its place, which had to wait.
            self._imported(module)
        problems = [module_patch for module_patch in worked_on if module_patch.decision.degraded]
        if problems and configuration.strict is Strict.ALL:
            for module_patch in worked_on:
                if module_patch.decision.state is State.APPLIED:
                    self._registry.take_off(module_patch)
                module_patch.decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
            self._follow_trainers()
            raise not_applied(module_patch.journal[-1] for module_patch in problems)
        self._announcements.add(module)
        # While `apply()` works on modules that were imported before it, the last one has the lines of all.
        if not self.overlooked():
            self._announcements.make(self._registry.all(), lambda: self._report(()))


_STANDS = {State.APPLIED, State.OBSERVED}


def _check_installation(patches: Iterable[Patch], strict: Strict) -> None:
    """Warn if no patch can be chosen for the installed TRL. Raises ``NotAppliedError`` under strict."""
    problems = installation.problems(patches)
    if problems and strict:
        raise not_applied(problems)
    ensure_handler()
    for problem in problems:
        warning("%s", problem, extra=event("installation"))


def _is_off() -> bool:
    """Return whether ``TRL_HOTFIX`` is off, and not only empty."""
    value = os.environ.get("TRL_HOTFIX", "")
    return bool(value.strip()) and switch(value) == "off"


def _variables() -> Mapping[str, str]:
    """Return the variables that choose patches: if it is off none, so that a mistake in them does not matter then."""
    return {} if _is_off() else os.environ


def strictness(given: bool | str | None) -> Strict:
    """Return the level that the argument ``strict=`` asks for, or ``TRL_HOTFIX`` if it is None.

    Raises ``SettingError`` for any other argument than True, False and ``"all"``.
    """
    if given is None:
        setting = switch(os.environ.get("TRL_HOTFIX", ""))
        return {STRICT: Strict.RUN, STRICT_ALL: Strict.ALL}.get(setting or "", Strict.NOTHING)
    if given == "all":
        return Strict.ALL
    if isinstance(given, bool):
        return Strict.RUN if given else Strict.NOTHING
    raise SettingError(f"strict={quoted(given)}: expected True, False or 'all'")


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process, and the number of processes that train together: they end together, too."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


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
