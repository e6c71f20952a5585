"""Call back when a module is about to be imported, or has finished importing.

This is a finder of its own, since a module such as ``trl.trainer.dpo_trainer`` must be patched after its last line ran
and before other code takes a name from it. wrapt's importer is lost on reload, ends the user's import when a hook
raises, fires on half-initialised modules and passes on the discarded module of a lazy package.

A finder of somebody else that stands in front of this one, as jaxtyping, typeguard and pytest put theirs, would hide
every module that it finds itself. So the finder also looks at each spec that the import system has found, by any
finder. ``sys.addaudithook`` cannot do that: it does not see ``importlib.import_module``, by which TRL imports its
trainers, and nobody can remove an audit hook.

We hold no lock during an import or a callback. It uses the standard library only: this runs at interpreter start.
"""

import _frozen_importlib
import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any
else:
    # This is the same class. Importing it from `importlib`, which imports `warnings`, takes a third of a start.
    ModuleSpec = type(sys.__spec__)


class Finder:
    """A ``sys.meta_path`` finder that asks the other finders for the spec, and watches the module that they find."""

    def __init__(self) -> None:
        self._before: dict[str, Callable[[], None]] = {}
        self._imports: dict[str, Callable[[ModuleType], None]] = {}
        self._busy: set[tuple[int, str]] = set()
        self._unwatchable: set[str] = set()
        self._observing = False
        self._find_in_meta_path: Callable[..., ModuleSpec | None]

    def before_import(self, name: str, callback: "Callable[[], None]") -> None:
        """Call ``callback()`` before the first line of the module ``name`` runs, or in ``run_before_import(name)``."""
        self._before[name] = callback
        self._be_first()

    def run_before_import(self, name: str) -> None:
        """Call the callback of ``before_import(name)`` now, if it has not been called yet."""
        callback, busy = self._before.get(name), (get_ident(), name)
        if callback is None or busy in self._busy:
            return
        self._busy.add(busy)
        try:
            callback()
            # A callback that raises, as in strict mode, stays: it must raise again at the next import.
            self._before.pop(name, None)
        finally:
            self._busy.discard(busy)
        self._leave_if_idle()

    def when_imported(self, name: str, callback: "Callable[[ModuleType], None]") -> None:
        """Call ``callback(module)`` after every import of ``name``, reloads included.

        It is called at once if the module is imported already. If its import is under way, in this thread or another,
        it is called when that ends.
        """
        self._imports[name] = callback
        self._be_first()
        module = sys.modules.get(name)
        if module is None:
            return
        spec = getattr(module, "__spec__", None)
        if not (getattr(spec, "_initializing", False) and _watch_to_the_end(spec, self._notify)):
            callback(module)

    def forget(self, name: str, callback: "Callable[[ModuleType], None] | None" = None) -> None:
        """Undo ``when_imported``, or only that of ``callback``.

        The finder leaves ``sys.meta_path`` when it waits for no module any more.
        """
        if callback is None or self._imports.get(name) == callback:
            self._imports.pop(name, None)
        self._leave_if_idle()

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname not in self._before and fullname not in self._imports:
            return None
        # Other hooks look for a spec by asking all of sys.meta_path again, this finder included.
        busy = (get_ident(), fullname)
        if busy in self._busy:
            return None
        self._busy.add(busy)
        try:
            spec = _find_elsewhere(self, fullname, path, target)
        finally:
            self._busy.discard(busy)
        # No callback is called here: the import system holds its global lock while it asks the finders, so a callback
        # that waited for another thread, which is importing itself, would wait for ever.
        self._watch(fullname, spec)
        return spec

    def waits_for(self, name: str) -> bool:
        """Return whether the next import of ``name`` will be noticed, for one of the two kinds of callbacks."""
        waiting = name in self._before or name in self._imports
        return waiting and (self._observing or self in sys.meta_path)

    def forget_other_threads(self) -> None:
        """Forget what other threads were busy with. After a fork they do not exist, and their ids are used again."""
        self._busy = {busy for busy in self._busy if busy[0] == get_ident()}
        _EXECUTIONS.difference_update([execution for execution in _EXECUTIONS if execution[0] != get_ident()])

    def _watch(self, name: str, spec: "ModuleSpec | None") -> None:
        if spec is None or spec.loader is None:
            return
        try:
            _around_execution(spec, self)
        # A loader of an unexpected kind must not end the user's import.
        except Exception as error:
            if name in self._unwatchable:
                return
            self._unwatchable.add(name)
            from .settings import warn

            warn(f"the import of {name} cannot be watched ({type(error).__name__}: {error})", "not-watched")

    def _observe(self) -> None:
        """See every spec that the import system finds, also if it does not ask this finder.

        ``_find_spec`` is what an import statement, ``import_module`` and a reload call to ask ``sys.meta_path``. It is
        not public. Where Python lacks it, only a finder in front of this one goes unseen.
        """
        importlib: Any = _frozen_importlib
        if not self._observing and hasattr(importlib, "_find_spec"):
            self._find_in_meta_path, self._observing = importlib._find_spec, True
            importlib._find_spec = self._find_spec

    def _find_spec(self, name: str, *arguments: "Any") -> "ModuleSpec | None":
        """Ask ``sys.meta_path`` as before, and watch the module if a callback waits for it."""
        spec = self._find_in_meta_path(name, *arguments)
        if name in self._imports or any(map(self._before.__contains__, _and_packages(name))):
            self._watch(name, spec)
        return spec

    def _run_all_before(self, name: str) -> None:
        """Make the calls that are due before ``name`` is executed: first those of its packages, if they are overdue.

        They are if somebody called the package's loader by hand, so that we saw no import of it.
        """
        for module in _and_packages(name)[::-1]:
            self.run_before_import(module)

    def _notify(self, name: str, module: "ModuleType") -> None:
        callback = self._imports.get(name)
        if callback is not None:
            callback(module)

    def _be_first(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._observe()

    def _leave_if_idle(self) -> None:
        if self._before or self._imports:
            return
        if self in sys.meta_path:
            # This makes a new list: the import system may be iterating over the old one, and would skip a finder.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        importlib: Any = _frozen_importlib
        # Other code may have put a function of its own on top, which calls this one. Then it stays, and does nothing.
        if self._observing and importlib._find_spec == self._find_spec:
            importlib._find_spec, self._observing = self._find_in_meta_path, False


FINDER = Finder()


def _find_elsewhere(
    finder: Finder, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> "ModuleSpec | None":
    for candidate in list(sys.meta_path):
        find_spec = getattr(candidate, "find_spec", None)
        if candidate is finder or find_spec is None:
            continue
        spec: ModuleSpec | None = find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None


def _and_packages(name: str) -> list[str]:
    """Return ``a.b.c``, ``a.b`` and ``a`` for ``a.b.c``."""
    names = [name]
    while "." in names[-1]:
        names.append(names[-1].rpartition(".")[0])
    return names


def is_complete(name: str) -> bool:
    """Return whether the module is imported, and its import is not under way."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


_EXECUTIONS: "set[tuple[int, str]]" = set()
"""The thread and the name of each watched module that is being executed."""


class _WatchedExecution:
    """Shadows ``exec_module`` on one loader, so that the class of the loader is not changed.

    There is one for a loader, also if several modules of it are watched: zipimport has one loader for many modules.
    """

    def __init__(self, loader: "Any") -> None:
        self._loader, self._execute = loader, loader.exec_module
        self._shadowed = vars(loader).get("exec_module")
        self.finders: dict[str, list[Finder]] = {}

    def __call__(self, module: "ModuleType") -> None:
        name = getattr(module.__spec__, "name", "")
        finders = self.finders.pop(name, ())
        if not self.finders and vars(self._loader).get("exec_module") is self:
            del self._loader.exec_module
            if self._shadowed is not None:
                self._loader.exec_module = self._shadowed
        execution = get_ident(), name
        if execution in _EXECUTIONS:
            # A loader that calls another one, as wrapt's do. The outer one calls back when both have ended.
            self._execute(module)
            return
        for finder in finders:
            finder._run_all_before(name)
        _EXECUTIONS.add(execution)
        try:
            self._execute(module)
        finally:
            _EXECUTIONS.discard(execution)
        if type(module.__spec__) is not _WatchedSpec:
            for finder in finders:
                finder._notify(name, module)


def _around_execution(spec: "ModuleSpec", finder: Finder) -> None:
    """Have the callbacks of ``finder`` called before and after this spec's module is executed."""
    loader: Any = spec.loader
    if getattr(loader, "exec_module", None) is None:
        return
    execution = getattr(loader, "__dict__", {}).get("exec_module")
    try:
        if type(execution) is not _WatchedExecution:
            execution = _WatchedExecution(loader)
            loader.exec_module = execution
    except (AttributeError, TypeError):
        # This loader takes no attributes. Both callbacks are called after the import, which is better than not at all.
        def before_and_notify(name: str, module: "ModuleType") -> None:
            finder._run_all_before(name)
            finder._notify(name, module)

        _watch(spec, before_and_notify)
        return
    finders = execution.finders.setdefault(spec.name, [])
    if finder not in finders:
        finders.append(finder)


class _WatchedSpec(ModuleSpec):
    """The spec of a module whose import is under way.

    The import system sets ``_initializing`` to False, in the importing thread, when the module is complete and before
    the import statement returns. There is no public hook for an import that has already begun.
    """

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if value:
            return
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        notify = vars(self).pop("_trl_hotfix", None)
        module = sys.modules.get(self.name)
        # A failed import has already removed its module.
        if notify is None or module is None:
            return
        try:
            notify(self.name, module)
        except BaseException:
            # Python removes the module like any whose execution fails: strict mode must raise at the next import.
            sys.modules.pop(self.name, None)
            raise


def _watch(spec: "Any", notify: "Callable[[str, ModuleType], None]") -> None:
    """Have ``notify`` called when the import that uses ``spec`` ends."""
    # Any other type is watched already, or belongs to another library; then a later apply() finds the module.
    if type(spec) is ModuleSpec:
        vars(spec)["_trl_hotfix"] = notify
        spec.__class__ = _WatchedSpec


def _watch_to_the_end(spec: "Any", notify: "Callable[[str, ModuleType], None]") -> bool:
    """Watch an import that is under way. Return False if it has ended without a call of ``notify``."""
    _watch(spec, notify)
    if type(spec) is not _WatchedSpec or spec._initializing:
        return True
    # The import may have ended since the caller's check. Only the thread that removes the mark calls back.
    spec.__class__ = ModuleSpec  # type: ignore[assignment]
    return vars(spec).pop("_trl_hotfix", None) is None
