"""Call back when a module is about to be imported, or has finished importing.

This is a finder of its own, since a module such as ``trl.trainer.dpo_trainer`` must be patched after its last line ran
and before other code takes a name from it. wrapt's importer is lost on reload, ends the user's import when a hook
raises, fires on half-initialised modules and passes on the discarded module of a lazy package.

No lock is held during an import or a callback. Only the standard library is imported: this runs at interpreter start.
"""

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

    def forget(self, name: str) -> None:
        """Undo ``when_imported``. The finder leaves ``sys.meta_path`` when it waits for no module any more."""
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
        if spec is not None and spec.loader is not None:
            try:
                _around_execution(spec, self.run_before_import, self._notify)
            # A loader of an unexpected kind must not end the user's import.
            except Exception as error:
                from .settings import warn

                warn(f"the import of {fullname} cannot be watched ({type(error).__name__}: {error})")
        return spec

    def _notify(self, name: str, module: "ModuleType") -> None:
        callback = self._imports.get(name)
        if callback is not None:
            callback(module)

    def _be_first(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def _leave_if_idle(self) -> None:
        if not self._before and not self._imports and self in sys.meta_path:
            # This makes a new list: the import system may be iterating over the old one, and would skip a finder.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


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


def _around_execution(
    spec: "ModuleSpec", before: "Callable[[str], None]", notify: "Callable[[str, ModuleType], None]"
) -> None:
    """Shadow ``exec_module`` on this loader instance, so that the class of the loader is not changed."""
    loader: Any = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return
    name = spec.name
    shadowed = getattr(loader, "__dict__", {}).get("exec_module")
    if getattr(shadowed, "watches", None) == name:
        return

    def exec_module(module: "ModuleType") -> None:
        if getattr(module.__spec__, "name", None) != name:
            execute(module)  # zipimport has one loader for many modules.
            return
        if vars(loader).get("exec_module") is exec_module:
            del loader.exec_module
            if shadowed is not None:
                loader.exec_module = shadowed
        before(name)
        execute(module)
        if type(module.__spec__) is not _WatchedSpec:
            notify(name, module)

    def before_and_notify(name: str, module: "ModuleType") -> None:
        before(name)
        notify(name, module)

    exec_module.watches = name  # type: ignore[attr-defined]
    try:
        loader.exec_module = exec_module
    except AttributeError:
        # This loader takes no attributes. Both callbacks are called after the import, which is better than not at all.
        _watch(spec, before_and_notify)


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
            # The module is removed like any module whose execution fails: strict mode must raise at the next import.
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
