"""Other finders and loaders, of wrapt and of editable installs among others, keep working."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import wrapt

from trl_hotfix.import_hooks import Finder

from helpers.callbacks import Calls, Failing, patch_value

# Specs and loaders


def test_a_looked_up_spec_has_the_usual_loader(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 1\n")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    spec = importlib.util.find_spec("hook_leaf")
    assert spec is not None
    assert type(spec) is importlib.machinery.ModuleSpec
    assert type(spec.loader) is importlib.machinery.SourceFileLoader
    assert spec.loader.get_source("hook_leaf") == "value = 1\n"
    assert calls == []


def test_a_module_is_called_back_after_a_lookup(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    importlib.util.find_spec("hook_leaf")
    importlib.import_module("hook_leaf")
    assert len(calls) == 1


def test_a_module_made_from_its_spec_is_called_back(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 'raw'")
    finder.when_imported("hook_leaf", patch_value)
    spec = importlib.util.find_spec("hook_leaf")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.value == "patched"


def test_the_source_of_a_module_can_still_be_read(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="def function():\n    return 1\n")
    finder.when_imported("hook_leaf", Calls())
    module = importlib.import_module("hook_leaf")
    assert inspect.getsource(module.function) == "def function():\n    return 1\n"
    assert module.__loader__.get_source("hook_leaf") == inspect.getsource(module)


def test_the_loader_has_no_additional_attributes(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="", hook_plain="")
    finder.when_imported("hook_leaf", Calls())
    leaf, plain = importlib.import_module("hook_leaf"), importlib.import_module("hook_plain")
    assert vars(leaf.__loader__).keys() == vars(plain.__loader__).keys()


def test_a_loader_with_fixed_attributes_still_loads(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        __slots__ = ()

        def create_module(self, spec: object) -> None:
            return None

        def exec_module(self, module: ModuleType) -> None:
            vars(module)["value"] = "made up"

    class Other(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            return importlib.util.spec_from_loader(name, cast(Loader, Fixed())) if name == "hook_leaf" else None

    monkeypatch.setattr(sys, "meta_path", [Other(), *sys.meta_path])
    finder.when_imported("hook_leaf", Calls())
    events: list[str] = []
    finder.before_import("hook_leaf", lambda: events.append("late"))
    assert importlib.import_module("hook_leaf").value == "made up"
    assert events == ["late"]


def test_a_loader_that_cannot_be_watched_loads_with_a_warning(
    finder: Finder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Odd:
        def create_module(self, spec: object) -> None:
            return None

        def exec_module(self, module: ModuleType) -> None:
            vars(module)["value"] = "made up"

        def __setattr__(self, name: str, value: object) -> None:
            raise NotImplementedError(name)

    class Other(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            return importlib.util.spec_from_loader(name, cast(Loader, Odd())) if name == "hook_leaf" else None

    monkeypatch.setattr(sys, "meta_path", [Other(), *sys.meta_path])
    finder.when_imported("hook_leaf", Calls())
    assert importlib.import_module("hook_leaf").value == "made up"
    errors = capsys.readouterr().err
    assert errors.count("WARNING") == 1
    assert "the import of hook_leaf cannot be watched (NotImplementedError: exec_module)" in errors


def test_a_shared_loader_calls_back_for_the_right_module(
    finder: Finder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "modules.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("hook_leaf.py", "")
        packed.writestr("hook_other.py", "")
    monkeypatch.syspath_prepend(str(archive))
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    importlib.util.find_spec("hook_leaf")
    importlib.import_module("hook_other")
    importlib.import_module("hook_leaf")
    assert [module.__name__ for module in calls] == ["hook_leaf"]


def test_two_modules_of_a_shared_loader_are_looked_up_any_number_of_times(
    finder: Finder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "modules.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("hook_leaf.py", "value = 'raw'")
        packed.writestr("hook_other.py", "value = 'raw'")
    monkeypatch.syspath_prepend(str(archive))
    another = Finder()
    for waiting in (finder, another):
        waiting.when_imported("hook_leaf", patch_value)
        waiting.when_imported("hook_other", patch_value)
    try:
        for _ in range(sys.getrecursionlimit()):
            importlib.util.find_spec("hook_leaf")
            importlib.util.find_spec("hook_other")
        leaf, other = importlib.import_module("hook_leaf"), importlib.import_module("hook_other")
    finally:
        another.forget("hook_leaf")
        another.forget("hook_other")
    assert leaf.value == other.value == "patched"
    assert leaf.__loader__ is other.__loader__
    assert not hasattr(leaf.__loader__, "__dict__") or "exec_module" not in vars(leaf.__loader__)


class AsksAgain(importlib.abc.MetaPathFinder):
    """A finder that asks all of ``sys.meta_path`` again, as those of wrapt and of profilers do."""

    def __init__(self) -> None:
        self.busy, self.found = False, 0

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        self.found += spec is not None
        return spec


# Finders


@pytest.mark.parametrize("first", [True, False])
def test_a_finder_that_asks_all_finders_does_not_recurse(
    finder: Finder, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    write(hook_leaf="")
    calls, recursive = Calls(), AsksAgain()
    finder.when_imported("hook_leaf", calls)
    monkeypatch.setattr(
        sys, "meta_path", [recursive, *sys.meta_path] if first else [finder, recursive, *sys.meta_path[1:]]
    )
    importlib.import_module("hook_leaf")
    assert len(calls) == 1
    assert recursive.found == 1


@pytest.mark.parametrize("before_wrapt", [True, False])
def test_the_hook_of_wrapt_and_ours_are_called_once(
    finder: Finder, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch, before_wrapt: bool
) -> None:
    # wrapt 1.14 never forgets which names it has called back for: each case has a name of its own.
    name = f"hook_leaf_{before_wrapt}"
    write(**{name: "value = 1"})
    calls, wrapt_calls = Calls(), Calls()
    finder.when_imported(name, calls)
    wrapt.register_post_import_hook(wrapt_calls, name)
    # wrapt installs its finder once per process, so the order is set here.
    wrapt_finder = next(
        other_finder for other_finder in sys.meta_path if isinstance(other_finder, wrapt.importer.ImportHookFinder)
    )
    finders = [other_finder for other_finder in sys.meta_path if other_finder not in (finder, wrapt_finder)]
    monkeypatch.setattr(
        sys, "meta_path", [finder, wrapt_finder, *finders] if before_wrapt else [wrapt_finder, finder, *finders]
    )
    importlib.import_module(name)
    assert [module.value for module in calls] == [1]
    assert [module.value for module in wrapt_calls] == [1]


def test_a_module_of_another_finder_is_called_back(
    finder: Finder, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loader(importlib.abc.Loader):
        def exec_module(self, module: ModuleType) -> None:
            vars(module)["value"] = "made up"

    class Other(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            return importlib.util.spec_from_loader(name, Loader()) if name == "hook_leaf" else None

    monkeypatch.setattr(sys, "meta_path", [Other(), *sys.meta_path])
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    importlib.import_module("hook_leaf")
    assert [module.value for module in calls] == ["made up"]


def test_a_finder_that_leaves_does_not_hide_the_next(
    finder: Finder, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None]
) -> None:
    class Loader(importlib.abc.Loader):
        def exec_module(self, module: ModuleType) -> None:
            vars(module)["value"] = "made up"

    class Editable(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            return importlib.util.spec_from_loader(name, Loader()) if name == "hook_leaf" else None

    monkeypatch.setattr(sys, "meta_path", [Editable(), *sys.meta_path])
    finder.before_import("hook_leaf", lambda: None)
    assert importlib.import_module("hook_leaf").value == "made up"


# In front of ours


class InFront(importlib.abc.MetaPathFinder):
    """A finder that answers for every module, as jaxtyping, typeguard and pytest do for theirs."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        return importlib.machinery.PathFinder.find_spec(name, path, target)


@pytest.mark.parametrize("again", [False, True])
def test_a_finder_in_front_hides_no_module(
    finder: Finder, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    write(hook_leaf="value = 'raw'")
    events: list[str] = []
    finder.before_import("hook_leaf", lambda: events.append("before"))
    finder.when_imported("hook_leaf", patch_value)
    monkeypatch.setattr(sys, "meta_path", [InFront(), *sys.meta_path])
    if again:
        monkeypatch.setattr(sys, "meta_path", [found for found in sys.meta_path if found is not finder])
    module = importlib.import_module("hook_leaf")
    assert (events, module.value) == (["before"], "patched")
    module.value = "raw"
    assert importlib.reload(module).value == "patched"


def test_a_strict_callback_is_raised_behind_a_finder_in_front(
    finder: Finder, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(hook_leaf="", hook_user="import hook_leaf")
    strict = Failing()
    finder.before_import("hook_leaf", strict)
    monkeypatch.setattr(sys, "meta_path", [InFront(), *sys.meta_path])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="strict"):
            importlib.import_module("hook_user")
    assert "hook_leaf" not in sys.modules
    strict.well = True
    importlib.import_module("hook_user")
    assert strict.calls == 3


def load_by_hand(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def test_a_package_that_was_executed_by_hand_is_noticed_at_the_import_of_a_module_of_it(
    finder: Finder, write: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "hook_leaf").mkdir()
    write(**{"hook_leaf/__init__": "", "hook_leaf/part": "", "hook_other": ""})
    strict = Failing()
    finder.before_import("hook_leaf", strict)
    load_by_hand("hook_leaf", tmp_path / "hook_leaf" / "__init__.py")
    # Other imports may be part of an import that is under way, in which a callback could not import anything.
    importlib.import_module("hook_other")
    assert strict.calls == 0
    with pytest.raises(RuntimeError, match="strict"):
        importlib.import_module("hook_leaf.part")
    strict.well = True
    importlib.import_module("hook_leaf.part")
    assert not finder.waits_for("hook_leaf")


def test_the_import_system_is_as_before_when_nothing_is_waited_for(finder: Finder, write: Callable[..., None]) -> None:
    system: Any = importlib.machinery.ModuleSpec.__init__.__globals__
    before = system["_find_spec"]
    write(hook_leaf="")
    finder.when_imported("hook_leaf", Calls())
    assert finder.waits_for("hook_leaf")
    assert system["_find_spec"] is not before
    finder.forget("hook_leaf")
    assert system["_find_spec"] is before
    assert not finder.waits_for("hook_leaf")


def test_other_code_that_observes_the_import_system_too_goes_on_working(
    finder: Finder, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(hook_leaf="value = 'raw'", hook_other="value = 'raw'")
    system: Any = importlib.machinery.ModuleSpec.__init__.__globals__
    finder.when_imported("hook_leaf", patch_value)
    ours, asked = system["_find_spec"], []

    def on_top(name: str, *arguments: Any) -> Any:
        asked.append(name)
        return ours(name, *arguments)

    monkeypatch.setitem(system, "_find_spec", on_top)
    finder.forget("hook_leaf")
    assert system["_find_spec"] is on_top
    assert importlib.import_module("hook_leaf").value == "raw"
    finder.when_imported("hook_other", patch_value)
    assert importlib.import_module("hook_other").value == "patched"
    assert asked[:2] == ["hook_leaf", "hook_other"]
