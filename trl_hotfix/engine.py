"""The state machine: gate -> red -> install -> green, or roll back.

A patch is worked on in parts, one for each leaf module that it has targets in, since a leaf is patched when it is
imported. Two locks: one lets a single ``apply`` or ``revert`` run at a time; the other guards the records and is held
for a few instructions only, never while something is imported, called or tested, since this runs inside import locks.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from . import __version__, catalogue, fingerprint, gates
from . import packs as third_party
from .errors import NotAppliedError, SettingError, UnknownPatchError, plain
from .gates import Selection
from .import_hooks import FINDER
from .isolation import TimeLimitExceeded, time_limit, undisturbed
from .log import ensure_handler, in_one_line, log
from .model import (
    Decision,
    Options,
    Outcome,
    Patch,
    Reason,
    Report,
    State,
    Target,
    Verdict,
)
from .parts import ModulePatch, overtaken, status_of
from .references import Named, Reference
from .startup import STRICT, switch

SELF_TEST_SECONDS = 60.0
"""A self-test takes milliseconds; the first in a process may have to import what it tests from a slow disk."""

if TYPE_CHECKING:
    from .install import Site, Sites


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
    whose body is none that the patch was proved on is left alone; ``unknown_body="try"`` (default:
    ``TRL_HOTFIX_UNKNOWN_BODY``, else ``"skip"``) lets the self-test decide. ``TRL_HOTFIX=0`` turns this call off, with
    a warning.

    Raises ``CatalogueError``, ``PackError``, ``UnknownPatchError``, ``SettingError``, ``NotAppliedError``; after any of
    them nothing has changed.
    """
    return ENGINE.apply(only, skip, options, strict, dry_run, unknown_body, packs)


def revert(*ids: str) -> Report:
    """Take patches off exactly (default: all). One that somebody has wrapped or replaced since stays, as ``displaced``.

    Raises ``UnknownPatchError``.
    """
    return ENGINE.revert(ids)


def status() -> Report:
    """Where every patch stands in this process now; looks again whether each is still on its target."""
    return ENGINE.status()


@contextmanager
def patched(*ids: str, options: Mapping[str, Options] | None = None, strict: bool = True) -> Iterator[Report]:
    """``with patched("some-id"):`` has these patches on besides those that are; afterwards, what was on before.

    Without ids: all that are on by default. Raises what ``apply`` raises.
    """
    with ENGINE.patched(ids, strict, options) as report:
        yield report


def restore(reference: Reference, instance: Any) -> Any:
    """Unpickle a patched function: have its patches on in this process too, then take it from its place."""
    module, attribute, patches = reference
    ENGINE.ensure(patches)
    owner = functools.reduce(getattr, attribute.split(".")[:-1], import_module(module))
    return getattr(owner if instance is None else instance, attribute.split(".")[-1])


class _Engine:
    def __init__(self) -> None:
        self._one_at_a_time = threading.RLock()
        self._lock = threading.RLock()
        self._parts: dict[tuple[str, str], ModulePatch] = {}
        self._busy: set[tuple[str, str]] = set()
        self._decisions: Mapping[str, Decision] = {}
        self._selection: Selection | None = None
        self._strict = False
        self._try_unknown = False

    # What the public functions do.

    def apply(
        self,
        only: Iterable[str] | str | None,
        skip: Iterable[str] | None,
        options: Mapping[str, Options] | None,
        strict: bool | None,
        dry_run: bool = False,
        unknown_body: str | None = None,
        packs: Iterable[str] | str | None = None,
    ) -> Report:
        names = third_party.named(packs, os.environ)
        patches = catalogue.known(names)
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
            self._speak_of_frozen(selection, strict)
        before, self._try_unknown = self._try_unknown, unknown_body == "try"
        try:
            report = self._select(selection, strict, off=setting == "off")
        except NotAppliedError:
            self._try_unknown = before
            raise
        for each in (report[patch_id] for patch_id in selection.options):
            if each.state in (State.DISABLED, State.RETIRED, State.SKIPPED):
                state, reason = each.state.value, each.reason.value
                log.warning("the options of %s do nothing here: %s (%s)", each.id, state, reason)
        return report

    def preview(
        self, patches: Iterable[Patch], selection: Selection, version_of: gates.VersionOf = gates.installed
    ) -> Report:
        """Where the gates would leave these patches beside these versions. Nothing is changed."""
        decisions = gates.decisions(patches, selection, version_of)
        return self._report(decisions, selection, live=False, trl=version_of("trl"))

    def _speak_of_frozen(self, selection: Selection, strict: bool) -> None:
        """Say which of the patches in the freeze file cannot be on here; under strict, that is the end."""
        decisions = gates.decisions(catalogue.known(selection.packs), selection)
        off = {each: decisions[each] for each in selection.only or () if decisions[each].state is not State.PENDING}
        said = [f"{each}: {why.state.value} ({why.reason.value})" for each, why in sorted(off.items())]
        if said and strict:
            raise _not_applied(said)
        ensure_handler()
        for each in said:
            log.warning("in the freeze file, and not on here: %s", each)

    def revert(self, ids: Iterable[str]) -> Report:
        known = {patch.id for patch in self._patches()}
        unknown = [each for each in ids if each not in known]
        if unknown:
            raise UnknownPatchError(unknown, known, "revert()")
        chosen = set(ids) or known
        _start_first()
        with self._one_at_a_time:
            for part in self._all_parts():
                if part.patch.id in chosen:
                    self._take_off(part)
            return self.status(())

    def status(self, objects: Sequence[object] | None = None) -> Report:
        """``objects`` are where to look for a trainer with a method of its own: among all, which takes a while."""
        _start_first()
        # The import of a leaf that another thread had begun, but that was not in sys.modules yet, when it was to be
        # waited for; or a reload that was under way when its class was patched: nobody has seen it end.
        waiting = {part.leaf for part in self._all_parts() if part.decision.state is State.PENDING or overtaken(part)}
        for leaf in sorted(waiting & sys.modules.keys()):
            FINDER.when_imported(leaf, self._imported)
        selection = self._selection or Selection(packs=self._packs())
        return self._report(
            self._decisions, selection, live=True, objects=self._objects() if objects is None else objects
        )

    def journal(self, patch_id: str) -> list[str]:
        """How a patch came to stand where it does: one line a step, for each of its leaf modules."""
        return [line for part in self._all_parts() if part.patch.id == patch_id for line in part.journal]

    def _packs(self) -> tuple[str, ...]:
        """The packs that the user has named: in the last call of ``apply()``, or else in the environment."""
        return self._selection.packs if self._selection is not None else third_party.named(None, os.environ)

    def _patches(self) -> tuple[Patch, ...]:
        """The catalogue, and what is still on of a pack that is not named any more: somebody stands on it."""
        patches = {patch.id: patch for patch in catalogue.known(self._packs())}
        left = {part.patch.id: part.patch for part in self._all_parts() if part.patch.id not in patches}
        return (*patches.values(), *left.values())

    def _all_parts(self) -> list[ModulePatch]:
        # A list, taken under the lock: another thread's import may add to them at any time.
        with self._lock:
            return list(self._parts.values())

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
            before, before_strict, before_try = self._selection, self._strict, self._try_unknown
            live = (State.APPLIED, State.PENDING)
            on = frozenset(part.patch.id for part in self._all_parts() if part.decision.state in live)
            merged = {**before.options, **(options or {})} if before is not None else options
            only = [*ids, *on] if ids else None
            report = self.apply(only, None, merged, strict, unknown_body=unknown_body, packs=self._packs())
        try:
            yield report
        finally:
            with self._one_at_a_time:
                self._try_unknown = before_try
                if before is None:
                    self._drop(self._all_parts())
                    self._decisions, self._selection, self._strict = {}, None, before_strict
                else:
                    self._select(before, before_strict)

    def ensure(self, named: Iterable[Named]) -> None:
        """Have these patches on with these options, besides what is. One that no catalogue here has is left out."""
        ensure_handler()
        if switch(os.environ.get("TRL_HOTFIX", "") or "unset") == "off":
            log.warning("TRL_HOTFIX=%s: the patches of a pickled function stay off", os.environ["TRL_HOTFIX"])
            return
        packs = self._packs()
        known = {patch.id: patch.revision for patch in catalogue.known(packs)}
        wanted: dict[str, Options] = {}
        for patch_id, revision, options in named:
            here = known.get(patch_id)
            if here != revision:
                here_it_is = f"revision {here}" if here is not None else "not known"
                log.warning("a pickle asks for %s, revision %d; here it is %s", patch_id, revision, here_it_is)
            if here is not None:
                wanted[patch_id] = dict(options)
            elif third_party.pack_of(patch_id) not in ("", *packs):
                pack = third_party.pack_of(patch_id)
                log.warning("name its pack in TRL_HOTFIX_PACKS if you trust it: %s", plain(pack))
        _start_first()
        with self._one_at_a_time:
            parts = [part for part in self._all_parts() if part.decision.state is not State.REVERTED]
            on = {part.patch.id: part.options for part in parts}
            if not on.items() >= wanted.items():
                both = {**on, **wanted}
                self._select(Selection(only=frozenset(both), options=both, packs=packs), self._strict)

    # From a selection to parts.

    def _select(self, selection: Selection, strict: bool, off: bool = False) -> Report:
        with self._one_at_a_time:
            ensure_handler()
            patches = catalogue.known(selection.packs)
            decisions = gates.decisions(patches, selection)
            if off:
                decisions = {patch.id: Decision(State.DISABLED, Reason.SWITCHED_OFF) for patch in patches}
            undo = (self._decisions, self._selection, self._strict)
            self._decisions, self._selection, self._strict = decisions, selection, strict
            wanted = self._wanted()
            changed = [part for part in self._all_parts() if part.options != selection.options_of(part.patch)]
            changed = [part for part in changed if part.patch.id in wanted]
            self._drop(changed)
            entering = self._entering()
            try:
                self._watch_imports(entering)
                degraded = [each for each in self.status() if each.degraded and each.id in wanted] if strict else []
                if degraded:
                    raise _not_applied(f"{each.id}: {each.state.value} ({each.reason.value})" for each in degraded)
            except NotAppliedError:
                self._drop(entering)
                self._decisions, self._selection, self._strict = undo
                if changed:
                    self._watch_imports(self._entering())
                raise
            self._drop([part for part in self._all_parts() if part.patch.id not in wanted])
            return self.status(() if strict else None)

    def _wanted(self) -> set[str]:
        return {patch_id for patch_id, decision in self._decisions.items() if decision.state is State.PENDING}

    def _drop(self, parts: Iterable[ModulePatch]) -> None:
        """Take parts off and forget them; one that somebody stands on is kept, since it cannot be taken off."""
        for part in parts:
            self._take_off(part)
            if part.decision.state is State.REVERTED:
                self._parts.pop(part.key, None)

    def _watch_imports(self, parts: Iterable[ModulePatch]) -> None:
        """Have every part worked on when its leaf is imported: now, if it is."""
        for leaf in dict.fromkeys(part.leaf for part in parts):
            FINDER.when_imported(leaf, self._imported)

    def _entering(self) -> list[ModulePatch]:
        """The parts that wait for their leaf: new, reverted, or with a leaf that came unseen."""
        trl = gates.installed("trl")
        wanted = self._wanted() if trl is not None else set()
        patches = catalogue.known(self._packs())
        return [part for patch in patches if patch.id in wanted for part in self._waiting(patch, trl or "")]

    def _waiting(self, patch: Patch, trl: str) -> Iterator[ModulePatch]:
        selection = self._selection or Selection()
        by_leaf: dict[str, list[Target]] = {}
        here = gates.targets_for(patch, trl)
        for target in here or patch.targets:
            by_leaf.setdefault(target.module, []).append(target)
        for leaf, targets in by_leaf.items():
            with self._lock:
                part = self._parts.get((patch.id, leaf))
                if part is None or part.decision.state is State.REVERTED:
                    journal = part.journal if part is not None else []
                    options = selection.options_of(patch)
                    part = self._parts[patch.id, leaf] = ModulePatch(
                        patch, leaf, tuple(targets), options, journal=journal
                    )
            if part.decision.state is State.PENDING:
                yield part

    # A leaf module has been imported.

    def _imported(self, module: ModuleType) -> None:
        """Work on every part that waits for this leaf. Under strict, all of them go on, or none and it raises."""
        worked_on, cancel_requested = [], False
        for part in self._all_parts():
            with ExitStack() as undo:
                if part.leaf != module.__name__ or not self._claim(part, undo):
                    continue
                try:
                    decision = self._try_apply(part, module)
                # The first border, the import hook: nothing that goes wrong in here may end the user's import.
                except Exception as error:
                    decision = _failed(Reason.INSTALL_ERROR, error)
                if self._record_decision(part, decision):
                    worked_on.append(part)
                else:
                    cancel_requested = True
                undo.pop_all()
        if cancel_requested:
            self._imported(module)  # whoever took the part off may have put another in its place, which had to wait
        problems = [part for part in worked_on if part.decision.degraded]
        if problems and self._strict:
            for part in worked_on:
                if part.decision.state is State.APPLIED:
                    self._take_off(part)
                part.decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
            raise _not_applied(part.journal[-1] for part in problems)

    def _claim(self, part: ModulePatch, undo: ExitStack) -> bool:
        """Take a part to work on, unless another thread has it. An applied one too: its module may be new."""
        with self._lock:
            if part.key in self._busy or part.decision.state not in (State.PENDING, State.APPLIED):
                return False
            undo.callback(self._interrupted, part)
            self._busy.add(part.key)
            return True

    def _interrupted(self, part: ModulePatch) -> None:
        """Something came between, such as a keyboard interrupt: off, and to be worked on at the next import."""
        self._off_its_sites(part)
        with self._lock:
            if part.decision.state is State.REVERTED and not part.cancel_requested:
                part.decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
            self._busy.discard(part.key)

    def _try_apply(self, part: ModulePatch, module: ModuleType) -> Decision:
        """Red, install, green; or leave everything as it was."""
        from .conflicts import compiled_code, foreign
        from .guard import Guard
        from .install import Layer, MissingTargetError

        patch = part.patch
        sites: list[Site] = []
        for target in part.targets:
            try:
                sites.append(site_registry().at(module, target))
            except MissingTargetError as error:
                seen: dict[str, Any] = {"missing": str(error)}
                if not gates.in_range(gates.installed("trl") or "", patch.trl):
                    return Decision(State.SKIPPED, Reason.TRL_VERSION, seen)
                if self._on_record(target):
                    return Decision(State.CONFLICTED, Reason.DELETED, seen)
                return Decision(State.SKIPPED, Reason.MISSING_TARGET, seen)
        if all(site.has(patch.id) for site in sites):
            if part.decision.state is State.APPLIED:
                return part.decision
            # Reached under a second name: TRL keeps old module names as aliases of moved classes.
            part.sites = sites
            return Decision(State.APPLIED, Reason.PROVEN, {"same_as": "another name of the target"})
        for site, target in zip(sites, part.targets, strict=True):
            by = foreign(site)
            if by is not None:
                held = {"target": f"{target.module}.{target.attribute}", "by": by}
                return Decision(State.CONFLICTED, Reason.FOREIGN_WRAPPER, held)

            not_this_one = self._body(patch, target, site)
            if not_this_one is not None:
                return not_this_one

        red = self_test(patch, module, part.options)
        if isinstance(red, Decision):
            return red
        if red.verdict is not Verdict.REPRODUCED:
            return Decision(State.SKIPPED, Reason.NOT_REPRODUCED, {"red": red.to_dict()})
        guards = []
        with ExitStack() as roll_back:
            for site, target in zip(sites, part.targets, strict=True):
                wrapper = catalogue.function_of(patch, target.wrapper, part.options)
                if not target.traced and not self._strict:
                    guards.append(wrapper := Guard(patch.id, wrapper))
                chosen = tuple(sorted(part.options.items()))
                # First: what fails in the middle of putting on is to be taken off too.
                roll_back.callback(site.take_off, patch.id)
                site.put_on(Layer(patch.id, patch.revision, wrapper, target.traced, chosen))
            green = self_test(patch, module, part.options)
            if isinstance(green, Decision):
                return green
            seen = {"red": red.to_dict(), "green": green.to_dict()}
            if green.verdict is not Verdict.FIXED:
                return Decision(State.FAILED, Reason.SELF_TEST, seen)
            if not getattr(module.__spec__, "_initializing", False):  # else nobody can have called it yet
                part.compiled = compiled_code(any(target.traced for target in part.targets))
            applied = Decision(State.APPLIED, Reason.PROVEN, seen)
            for guard in guards:
                guard.armed = True
            part.guards = guards
            part.sites += [site for site in sites if site not in part.sites]
            roll_back.pop_all()
        return applied

    def _body(self, patch: Patch, target: Target, site: Site) -> Decision | None:
        """Why the body of this target is none to put the wrapper on, or None if it is known to have the bug."""
        from .install import ABSENT

        trl = gates.installed("trl") or ""
        if not callable(getattr(site.original, "__func__", site.original)):
            return None  # nothing that has a body: installing says so
        body = fingerprint.loaded(site.original)
        seen = {"target": target.name, "body": body.digest}
        if not body.from_file:
            seen["by"] = "code that is not what its file says"
            return Decision(State.CONFLICTED, Reason.REPLACED, seen)
        what = fingerprint.bodies_for(patch.id).what(patch.id, target.name, body.digest)
        if what == "buggy":
            return None
        if not gates.in_range(trl, patch.range_of(target)):
            return Decision(State.SKIPPED, Reason.TRL_VERSION, {"installed": trl, "range": patch.trl, **seen})
        if what is not None:
            return Decision(State.SKIPPED, Reason.ALREADY_FIXED, seen)
        if site.raw is ABSENT and self._on_record(target):
            return Decision(State.CONFLICTED, Reason.DELETED, {**seen, "by": "what TRL defines here was deleted"})
        return None if self._try_unknown else Decision(State.SKIPPED, Reason.UNKNOWN_BODY, seen)

    @staticmethod
    def _on_record(target: Target) -> bool:
        """Whether the release that is installed has this target: where it has not, somebody has deleted it."""
        return fingerprint.bodies().at(target.name, gates.installed("trl") or "") is not None

    def _record_decision(self, part: ModulePatch, decision: Decision) -> bool:
        """The work on a part is done; False if another thread has taken it off meanwhile, so that it is undone."""
        with self._lock:
            news = part.decision is not decision
            if not part.cancel_requested:
                part.decision = decision
                self._busy.discard(part.key)
        if part.cancel_requested:
            self._off_its_sites(part)
            with self._lock:
                self._busy.discard(part.key)
            return False
        if news:
            self._log_decision(part, decision)
        return True

    def _log_decision(self, part: ModulePatch, decision: Decision) -> None:
        self._note(part)
        where = f"{part.patch.id} (r{part.patch.revision})"
        if decision.state is State.APPLIED:
            targets = ", ".join(target.attribute for target in part.targets)
            chosen = "".join(f", {option}={choice}" for option, choice in part.options.items())
            seen = in_one_line(decision)
            log.info("applied %s to TRL %s, %s%s%s", where, gates.installed("trl"), targets, chosen, seen)
        elif decision.degraded:
            log.warning(
                "%s is NOT on: %s (%s)%s. `python -m trl_hotfix --list` says more",
                where,
                decision.state.value,
                decision.reason.value,
                in_one_line(decision),
            )

    def _take_off(self, part: ModulePatch) -> None:
        """Take a part off its targets, or off the waiting list; where somebody else stands, leave it and say so."""
        with self._lock:
            # Another thread is putting it on, within an import: to wait for that here could be to wait for ever.
            part.cancel_requested = part.key in self._busy
            if part.cancel_requested:
                part.decision = Decision(State.REVERTED, Reason.BY_REQUEST)
        if part.cancel_requested:
            self._note(part)
        else:
            self._off_its_sites(part)
        if not any(each.leaf == part.leaf and each.decision.state is not State.REVERTED for each in self._all_parts()):
            FINDER.forget(part.leaf)

    def _off_its_sites(self, part: ModulePatch) -> None:
        from .install import OccupiedError

        left = []
        for site in part.sites:
            try:
                site.take_off(part.patch.id)
            except OccupiedError as error:
                left.append((site, error))
        with self._lock:
            part.sites = [site for site, _ in left]
            part.decision = Decision(State.REVERTED, Reason.BY_REQUEST)
            if left:
                part.decision = Decision(State.DISPLACED, left[0][1].reason, {"by": left[0][1].by})
        self._note(part)
        if left:
            log.warning("%s cannot be taken off: %s stands in its place", part.patch.id, left[0][1].by)

    def _note(self, part: ModulePatch) -> None:
        decision = part.decision
        line = f"{part.patch.id}: {part.leaf}: {decision.state.value} ({decision.reason.value}){in_one_line(decision)}"
        part.journal.append(line)

    # Reports.

    def _report(
        self,
        decisions: Mapping[str, Decision],
        selection: Selection,
        *,
        live: bool,
        objects: Sequence[object] = (),
        trl: str | None = None,
    ) -> Report:
        statuses = []
        trl = trl or gates.installed("trl")
        for patch in self._patches() if live else catalogue.known(selection.packs):
            parts = [part for part in self._all_parts() if part.patch.id == patch.id] if live else []
            decision = decisions.get(patch.id, Decision(State.DISABLED, Reason.SWITCHED_OFF))
            statuses.append(status_of(patch, trl, parts, decision, selection.options_of(patch), objects))
        packs = {name: third_party.find(name).release for name in selection.packs}
        return Report(__version__, trl, platform.python_version(), tuple(statuses), packs)

    def _objects(self) -> list[object]:
        """What there is of the classes that patches are on: one of them may have a method of its own."""
        sites = [site for part in self._all_parts() if part.decision.state is State.APPLIED for site in part.sites]
        if not sites:
            return []
        from .conflicts import objects_of

        return objects_of(sites)


def _start_first() -> None:
    """Do what ``TRL_HOTFIX=1`` does when TRL is imported, if that is still to come.

    Else it would come after, and undo, what the script asks for here, but only in a script that imports TRL later.
    """
    FINDER.do_now("trl")


def _not_applied(reasons: Iterable[str]) -> NotAppliedError:
    return NotAppliedError("strict mode: a patch that should be on cannot be:" + "".join(f"\n  {x}" for x in reasons))


def self_test(patch: Patch, leaf: ModuleType, options: Options) -> Outcome | Decision:
    """What the self-test of ``patch`` says of ``leaf``, or ``failed`` with the traceback if it says nothing."""
    try:
        with time_limit(SELF_TEST_SECONDS), undisturbed():
            outcome = catalogue.function_of(patch, patch.self_test, options)(leaf)
    # The second border, the self-test: one that raises says nothing about the bug, and must not end the user's import.
    except (Exception, SystemExit, TimeLimitExceeded) as error:
        return _failed(Reason.SELF_TEST_ERROR, error)
    if not isinstance(outcome, Outcome):
        return Decision(State.FAILED, Reason.SELF_TEST_ERROR, {"error": f"the self-test returned {outcome!r}"})
    return outcome


def _failed(reason: Reason, error: BaseException) -> Decision:
    said = str(error) or f"no answer within {SELF_TEST_SECONDS:g} s"
    seen = {"error": f"{type(error).__name__}: {said}", "traceback": traceback.format_exc()}
    return Decision(State.FAILED, reason, seen)


@functools.cache
def site_registry() -> Sites:
    # Here and not above: wrapt takes 50 ms to import, and `--list` has no use for it.
    from .install import Sites

    return Sites(restore)


ENGINE = _Engine()
