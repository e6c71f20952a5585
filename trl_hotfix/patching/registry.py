"""The module patches of this process, and the steps by which one of them goes on its targets and off again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from ..import_hooks import FINDER
from ..log import event, log, warning
from ..matching import gates
from ..matching.versions import installed
from ..model import Decision, Options, Patch, Reason, State, Target
from ..reporting.sentences import in_one_line
from .breaker import Breaker
from .module_patch import ModulePatch

LONGEST_JOURNAL = 100
"""So many steps of a module patch are kept."""


class Registry:
    """The module patches of an engine. Several threads may import modules, and so work on them, at once.

    ``_lock`` guards the records and is held for a few instructions only, never while something is imported, called or
    tested, since this runs inside import locks. ``_busy`` has the keys of the module patches that are worked on, and
    the thread that does it.
    """

    def __init__(self, strict: Callable[[], bool] = bool) -> None:
        self._strict = strict
        self._lock = threading.RLock()
        self._module_patches: dict[tuple[str, str], ModulePatch] = {}
        self._busy: dict[tuple[str, str], int] = {}

    def all(self) -> list[ModulePatch]:
        # This makes a list under the lock: another thread's import may add to the records at any time.
        with self._lock:
            return list(self._module_patches.values())

    def by_patch(self) -> dict[str, list[ModulePatch]]:
        """Return the module patches by the id of their patch."""
        found: dict[str, list[ModulePatch]] = {}
        for module_patch in self.all():
            found.setdefault(module_patch.patch.id, []).append(module_patch)
        return found

    def of(self, patch_id: str) -> list[ModulePatch]:
        return self.by_patch().get(patch_id, [])

    def is_busy(self, module_patch: ModulePatch) -> bool:
        """Return whether a thread works on it now."""
        return module_patch.key in self._busy

    def after_fork(self) -> list[ModulePatch]:
        """Free the lock, and what other threads worked on, in a child process, which does not have these threads.

        Return the module patches that wait again. Their layers, if any, are still on.
        """
        self._lock = threading.RLock()
        abandoned = [key for key, thread in self._busy.items() if thread != threading.get_ident()]
        waiting = []
        for key in abandoned:
            del self._busy[key]
            module_patch = self._module_patches.get(key)
            if module_patch is not None:
                module_patch.sites = []
                if not module_patch.cancel_requested:
                    module_patch.decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
                module_patch.cancel_requested = False
                waiting.append(module_patch)
        return waiting

    def waiting(self, patch: Patch, trl: str, options: Options, *, observe: bool = False) -> Iterator[ModulePatch]:
        """Yield the module patches of ``patch`` that wait for their module. New and reverted ones begin to wait."""
        by_module: dict[str, list[Target]] = {}
        for target in gates.targets_for(patch, trl) or patch.targets:
            by_module.setdefault(target.module, []).append(target)
        for module, targets in by_module.items():
            with self._lock:
                module_patch = self._module_patches.get((patch.id, module))
                if module_patch is None or module_patch.decision.state is State.REVERTED:
                    journal = module_patch.journal if module_patch is not None else []
                    breaker = self._breaker_of(patch)
                    module_patch = ModulePatch(
                        patch, module, tuple(targets), breaker, options, observe=observe, journal=journal
                    )
                    self._module_patches[module_patch.key] = module_patch
            if module_patch.decision.state is State.PENDING:
                yield module_patch

    def _breaker_of(self, patch: Patch) -> Breaker:
        """Return the breaker that the modules of a patch share. After a revert, a patch gets a new one."""
        others = self._module_patches.values()
        shared = (
            other.breaker
            for other in others
            if other.patch.id == patch.id and other.decision.state is not State.REVERTED
        )
        return next(shared, None) or Breaker(patch.id, self._strict)

    def claim(self, module_patch: ModulePatch, undo: ExitStack) -> bool:
        """Take a module patch to work on, unless another thread has it, and return whether this thread has it now.

        One that is on is taken too, since its module may be a new one. ``undo`` gets the undoing of an interruption.
        """
        with self._lock:
            free = module_patch.key not in self._busy
            if not free or module_patch.decision.state not in (State.PENDING, State.APPLIED, State.OBSERVED):
                return False
            undo.callback(self._interrupted, module_patch)
            self._busy[module_patch.key] = threading.get_ident()
            return True

    def _interrupted(self, module_patch: ModulePatch) -> None:
        """Take it off after an interruption, such as a keyboard interrupt. It waits for the next import again."""
        self._off_its_sites(module_patch)
        with self._lock:
            if module_patch.decision.state is State.REVERTED and not module_patch.cancel_requested:
                module_patch.decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
            self._busy.pop(module_patch.key, None)

    def record_decision(self, module_patch: ModulePatch, decision: Decision) -> bool:
        """Record the result of the work. Return False if another thread has cancelled it, so that it is undone."""
        with self._lock:
            is_news = module_patch.decision is not decision
            if not module_patch.cancel_requested:
                module_patch.decision = decision
                self._busy.pop(module_patch.key, None)
        if module_patch.cancel_requested:
            self._off_its_sites(module_patch)
            with self._lock:
                self._busy.pop(module_patch.key, None)
            return False
        if is_news:
            _note(module_patch)
            _log_decision(module_patch)
        return True

    def take_off(self, module_patch: ModulePatch) -> None:
        """Take it off its targets, or stop waiting. If other code is on top of a wrapper, leave it and log that."""
        with self._lock:
            # Another thread is putting it on, within an import. To wait for that thread here could be to wait for ever.
            module_patch.cancel_requested = module_patch.key in self._busy
            if module_patch.cancel_requested:
                module_patch.decision = Decision(State.REVERTED, Reason.BY_REQUEST)
        if module_patch.cancel_requested:
            _note(module_patch)
        else:
            self._off_its_sites(module_patch)
        module = module_patch.module
        if not any(other.module == module and other.decision.state is not State.REVERTED for other in self.all()):
            FINDER.forget(module)

    def drop(self, module_patches: Iterable[ModulePatch]) -> None:
        """Take module patches off and forget them. One that cannot be taken off, since other code is on it, is kept."""
        for module_patch in module_patches:
            self.take_off(module_patch)
            if module_patch.decision.state is State.REVERTED:
                self._module_patches.pop(module_patch.key, None)

    def _off_its_sites(self, module_patch: ModulePatch) -> None:
        from .sites import OccupiedError

        occupied = []
        for site in module_patch.every_site():
            try:
                site.take_off(module_patch.patch.id)
            except OccupiedError as error:
                occupied.append((site, error))
        with self._lock:
            module_patch.sites = [site for site, _ in occupied]
            module_patch.before_reload = []
            module_patch.decision = Decision(State.REVERTED, Reason.BY_REQUEST)
            if occupied:
                first = occupied[0][1]
                module_patch.decision = Decision(State.DISPLACED, first.reason, {"by": first.by})
        _note(module_patch)
        if occupied:
            patch_id, by = module_patch.patch.id, occupied[0][1].by
            fields = event("not-off", patch=patch_id)
            warning("%s cannot be taken off: %s stands in its place", patch_id, by, extra=fields)


def _note(module_patch: ModulePatch) -> None:
    """Add the decision to the journal, which keeps the newest steps: a program may apply and revert in a loop."""
    module_patch.note()
    del module_patch.journal[:-LONGEST_JOURNAL]


def _log_decision(module_patch: ModulePatch) -> None:
    """Log a WARNING if the patch should be on and is not. Under ``TRL_HOTFIX_LOG=full`` log each patch that went on.

    There a second line has its targets and the numbers of the self-test.
    """
    patch, decision = module_patch.patch, module_patch.decision
    known = {"patch": patch.id, "revision": patch.revision, "module": module_patch.module}
    if decision.degraded:
        name, what = f"{patch.id} (r{patch.revision})", "observed" if module_patch.observe else "on"
        reason = f"{decision.state.value} ({decision.reason.value})"
        fields = event("not-on", **known, state=decision.state.value, reason=decision.reason.value)
        more = "`python -m trl_hotfix --list` says more"
        warning("%s is NOT %s: %s%s. %s", name, what, reason, in_one_line(decision), more, extra=fields)
    elif decision.state in (State.APPLIED, State.OBSERVED) and log.isEnabledFor(logging.DEBUG):
        _log_in_full(module_patch, known)


def _log_in_full(module_patch: ModulePatch, known: dict[str, Any]) -> None:
    patch, state, trl = module_patch.patch, module_patch.decision.state, installed("trl")
    choices = "".join(f" {option}={choice}" for option, choice in module_patch.options.items())
    line = f"repair of {patch.id}{choices} is on (bug: {patch.title})"
    if state is State.OBSERVED:
        line = f"TRL {trl} has {patch.id}, not repaired (bug: {patch.title})"
    log.debug("%s", line, extra=event(state.value, **known, title=patch.title))
    name = f"{patch.id} (r{patch.revision}): {state.value}"
    where = f"TRL {trl}, {', '.join(target.attribute for target in module_patch.targets)}"
    evidence = in_one_line(module_patch.decision)
    log.debug("%s in %s%s", name, where, evidence, extra=event("evidence", **known))
