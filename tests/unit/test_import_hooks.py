from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import wrapt

from trl_hotfix.import_hooks import Finder

PREFIX = "hook_"


@pytest.fixture
def finder() -> Iterator[Finder]:
    fresh = Finder()
    yield fresh
    if fresh in sys.meta_path:
        sys.meta_path.remove(fresh)


@pytest.fixture(autouse=True)
def no_module_stays() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith(PREFIX)]:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**modules: str) -> None:
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        importlib.invalidate_caches()

    return write


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a temporary module finds when it says ``import hook_shared``."""
    namespace = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "hook_shared", namespace)
    return namespace


class Calls(list[ModuleType]):
    """A callback that keeps the modules it was called with."""

    def __call__(self, module: ModuleType) -> None:
        self.append(module)


class Failing:
    """A callback that raises until ``well`` is set."""

    def __init__(self) -> None:
        self.well, self.calls = False, 0

    def __call__(self, *modules: ModuleType) -> None:
        self.calls += 1
        if not self.well:
            raise RuntimeError("strict")


def patch_value(module: ModuleType) -> None:
    module.value = "patched"


# when_imported


def test_the_callback_runs_after_the_last_line_of_the_module(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 1\nlast = 2")
    defined: list[set[str]] = []
    finder.when_imported("hook_leaf", lambda module: defined.append({"value", "last"} & set(vars(module))))
    importlib.import_module("hook_leaf")
    assert defined == [{"value", "last"}]


def test_the_callback_runs_before_a_from_import_has_its_names(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 'raw'", hook_user="from hook_leaf import value")
    finder.when_imported("hook_leaf", patch_value)
    assert importlib.import_module("hook_user").value == "patched"


def test_the_callback_gets_the_module_that_is_in_sys_modules(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    importlib.import_module("hook_leaf")
    assert calls == [sys.modules["hook_leaf"]]


def test_importing_a_module_again_does_not_call_again(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    for _ in range(3):
        importlib.import_module("hook_leaf")
    assert len(calls) == 1


def test_a_module_that_is_imported_already_is_called_back_at_once(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    module = importlib.import_module("hook_leaf")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    assert calls == [module]


def test_a_module_without_a_spec_is_called_back_at_once(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("hook_leaf")
    del module.__spec__
    monkeypatch.setitem(sys.modules, "hook_leaf", module)
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    assert calls == [module]


def test_other_modules_are_not_called_back(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="", hook_other="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    importlib.import_module("hook_other")
    assert calls == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_reload_calls_again(finder: Finder, write: Callable[..., None], when: str) -> None:
    write(hook_leaf="value = 'raw'")
    if when == "after":
        importlib.import_module("hook_leaf")
    finder.when_imported("hook_leaf", patch_value)
    module = importlib.import_module("hook_leaf")
    module.value = "raw"
    assert importlib.reload(module).value == "patched"


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_import_after_deletion_from_sys_modules_calls_again(
    finder: Finder, write: Callable[..., None], when: str
) -> None:
    write(hook_leaf="")
    if when == "after":
        importlib.import_module("hook_leaf")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    first = importlib.import_module("hook_leaf")
    del sys.modules["hook_leaf"]
    second = importlib.import_module("hook_leaf")
    assert first is not second
    assert calls == [first, second]


def test_a_module_that_raises_while_it_is_imported_is_not_called_back(
    finder: Finder, write: Callable[..., None]
) -> None:
    write(hook_leaf="raise KeyError('mine')")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    with pytest.raises(KeyError, match="mine"):
        importlib.import_module("hook_leaf")
    assert calls == []


def test_a_module_that_is_not_there_is_an_ordinary_error(finder: Finder) -> None:
    finder.when_imported("hook_missing", Calls())
    with pytest.raises(ModuleNotFoundError, match="hook_missing"):
        importlib.import_module("hook_missing")


def test_the_later_callback_for_a_name_takes_the_place_of_the_earlier(
    finder: Finder, write: Callable[..., None]
) -> None:
    write(hook_leaf="")
    earlier, later = Calls(), Calls()
    finder.when_imported("hook_leaf", earlier)
    finder.when_imported("hook_leaf", later)
    importlib.import_module("hook_leaf")
    assert (len(earlier), len(later)) == (0, 1)


# Imports under way


def test_a_module_under_way_in_this_thread_is_called_back_when_it_is_complete(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(
        hook_leaf="import hook_helper\nvalue = 'raw'\n",
        hook_helper="import hook_shared\nhook_shared.register()\n",
        hook_user="from hook_leaf import value",
    )
    defined: list[set[str]] = []

    def callback(module: ModuleType) -> None:
        defined.append({"value"} & set(vars(module)))
        patch_value(module)

    def register() -> None:
        finder.when_imported("hook_leaf", callback)
        assert defined == []

    shared.register = register
    assert importlib.import_module("hook_user").value == "patched"
    assert defined == [{"value"}]


def test_a_module_registered_before_and_while_it_is_imported_is_called_back_once(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.register()\n")
    calls = Calls()
    shared.register = lambda: finder.when_imported("hook_leaf", calls)
    shared.register()
    importlib.import_module("hook_leaf")
    assert len(calls) == 1


def test_a_module_registered_twice_while_it_is_imported_is_called_back_once(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.register()\nhook_shared.register()\n")
    calls = Calls()
    shared.register = lambda: finder.when_imported("hook_leaf", calls)
    importlib.import_module("hook_leaf")
    assert len(calls) == 1


def test_a_module_under_way_has_its_own_spec_back_afterwards(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.register()\n", hook_plain="")
    shared.register = lambda: finder.when_imported("hook_leaf", Calls())
    module, plain = importlib.import_module("hook_leaf"), importlib.import_module("hook_plain")
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    assert vars(module.__spec__).keys() == vars(plain.__spec__).keys()


def test_a_module_under_way_that_then_raises_is_not_called_back(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.register()\nraise KeyError('mine')\n")
    calls = Calls()
    shared.register = lambda: finder.when_imported("hook_leaf", calls)
    with pytest.raises(KeyError, match="mine"):
        importlib.import_module("hook_leaf")
    assert calls == []


def test_a_callback_that_raises_for_a_module_under_way_is_tried_again(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.register()\n")
    callback = Failing()
    shared.register = lambda: finder.when_imported("hook_leaf", callback)
    with pytest.raises(RuntimeError, match="strict"):
        importlib.import_module("hook_leaf")
    shared.register = lambda: None
    with pytest.raises(RuntimeError, match="strict"):
        importlib.import_module("hook_leaf")


def test_a_module_under_way_in_another_thread_is_called_back_when_it_is_complete(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.begun.set()\nhook_shared.go_on.wait(30)\nvalue = 1\n")
    shared.begun, shared.go_on = threading.Event(), threading.Event()
    calls = Calls()
    importing = threading.Thread(target=importlib.import_module, args=("hook_leaf",))
    importing.start()
    assert shared.begun.wait(30)
    finder.when_imported("hook_leaf", calls)
    before = list(calls)
    shared.go_on.set()
    importing.join(30)
    assert before == []
    assert [module.value for module in calls] == [1]


def test_eight_threads_that_import_at_once_are_one_import(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 'raw'")
    calls = Calls()

    def callback(module: ModuleType) -> None:
        calls(module)
        patch_value(module)

    finder.when_imported("hook_leaf", callback)
    barrier, values = threading.Barrier(8), []

    def go() -> None:
        barrier.wait(30)
        values.append(importlib.import_module("hook_leaf").value)

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert values == ["patched"] * 8
    assert len(calls) == 1


def test_the_callback_may_import(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="", hook_other="value = 1")
    values: list[int] = []
    finder.when_imported("hook_leaf", lambda module: values.append(importlib.import_module("hook_other").value))
    importlib.import_module("hook_leaf")
    assert values == [1]


# Callbacks that raise


def test_a_callback_that_raises_ends_the_import_and_is_tried_again(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    callback = Failing()
    finder.when_imported("hook_leaf", callback)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="strict"):
            importlib.import_module("hook_leaf")
        assert "hook_leaf" not in sys.modules
    callback.well = True
    importlib.import_module("hook_leaf")
    assert callback.calls == 3


def test_a_callback_that_raises_for_an_imported_module_raises_at_once(
    finder: Finder, write: Callable[..., None]
) -> None:
    write(hook_leaf="")
    module = importlib.import_module("hook_leaf")
    with pytest.raises(RuntimeError, match="strict"):
        finder.when_imported("hook_leaf", Failing())
    assert sys.modules["hook_leaf"] is module


# Others who look for modules


def test_a_spec_that_is_only_looked_up_has_the_usual_loader(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 1\n")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    spec = importlib.util.find_spec("hook_leaf")
    assert spec is not None
    assert type(spec) is importlib.machinery.ModuleSpec
    assert type(spec.loader) is importlib.machinery.SourceFileLoader
    assert spec.loader.get_source("hook_leaf") == "value = 1\n"
    assert calls == []


def test_a_module_is_called_back_after_it_was_looked_up(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    importlib.util.find_spec("hook_leaf")
    importlib.import_module("hook_leaf")
    assert len(calls) == 1


def test_a_module_made_from_its_spec_by_hand_is_called_back(finder: Finder, write: Callable[..., None]) -> None:
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


def test_nothing_of_ours_is_left_on_the_loader(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="", hook_plain="")
    finder.when_imported("hook_leaf", Calls())
    leaf, plain = importlib.import_module("hook_leaf"), importlib.import_module("hook_plain")
    assert vars(leaf.__loader__).keys() == vars(plain.__loader__).keys()


class AsksAgain(importlib.abc.MetaPathFinder):
    """Finds by asking all of ``sys.meta_path`` again, as wrapt and the profilers do."""

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


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_asks_everybody_again_does_not_recurse(
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
def test_wrapts_own_hook_and_ours_are_both_called_once(
    finder: Finder, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch, before_wrapt: bool
) -> None:
    # wrapt 1.14 remembers for ever which names it has called back for: each case has one of its own.
    name = f"hook_leaf_{before_wrapt}"
    write(**{name: "value = 1"})
    calls, wrapt_calls = Calls(), Calls()
    finder.when_imported(name, calls)
    wrapt.register_post_import_hook(wrapt_calls, name)
    # wrapt puts its finder in once a process, so the order is made here.
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


def test_what_another_finder_finds_is_called_back(
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


def test_a_loader_whose_attributes_cannot_be_set_still_loads(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_loader_that_cannot_be_watched_at_all_still_loads_with_one_warning(
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


def test_a_loader_that_several_modules_share_calls_back_for_the_right_one(
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


def test_a_namespace_package_is_imported_and_a_module_in_it_is_called_back(
    finder: Finder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hook_space").mkdir()
    (tmp_path / "hook_space" / "leaf.py").write_text("value = 'raw'")
    monkeypatch.syspath_prepend(str(tmp_path))
    finder.when_imported("hook_space", Calls())
    finder.when_imported("hook_space.leaf", patch_value)
    assert importlib.import_module("hook_space.leaf").value == "patched"
    assert list(sys.modules["hook_space"].__path__) == [str(tmp_path / "hook_space")]


def test_a_module_of_a_package_is_called_back(finder: Finder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hook_package").mkdir()
    (tmp_path / "hook_package" / "__init__.py").write_text("from .leaf import value")
    (tmp_path / "hook_package" / "leaf.py").write_text("value = 'raw'")
    monkeypatch.syspath_prepend(str(tmp_path))
    finder.when_imported("hook_package.leaf", patch_value)
    assert importlib.import_module("hook_package").value == "patched"


# sys.meta_path


def test_the_finder_stands_first_and_once(finder: Finder) -> None:
    finder.when_imported("hook_leaf", Calls())
    finder.when_imported("hook_other", Calls())
    finder.before_import("hook_third", lambda: None)
    assert sys.meta_path[0] is finder
    assert sys.meta_path.count(finder) == 1


def test_a_finder_that_waits_for_nothing_is_not_there(finder: Finder) -> None:
    assert finder not in sys.meta_path
    finder.forget("hook_leaf")
    assert finder not in sys.meta_path


def test_the_finder_leaves_when_the_last_name_is_forgotten(finder: Finder) -> None:
    finder.when_imported("hook_leaf", Calls())
    finder.when_imported("hook_other", Calls())
    finder.forget("hook_leaf")
    assert finder in sys.meta_path
    finder.forget("hook_other")
    assert finder not in sys.meta_path


def test_a_name_that_was_forgotten_is_not_called_back(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="", hook_other="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    finder.when_imported("hook_other", Calls())
    finder.forget("hook_leaf")
    importlib.import_module("hook_leaf")
    assert calls == []


def test_a_name_that_is_forgotten_between_look_up_and_import_is_not_called_back(
    finder: Finder, write: Callable[..., None]
) -> None:
    write(hook_leaf="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    spec = importlib.util.find_spec("hook_leaf")
    assert spec is not None
    assert spec.loader is not None
    finder.forget("hook_leaf")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert calls == []


def test_a_finder_that_leaves_does_not_hide_the_one_behind_it(
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


# before_import


def test_what_comes_before_an_import_is_done_before_its_first_line_and_once(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.events.append('import')")
    shared.events = []
    finder.before_import("hook_leaf", lambda: shared.events.append("before"))
    importlib.import_module("hook_leaf")
    del sys.modules["hook_leaf"]
    importlib.import_module("hook_leaf")
    assert shared.events == ["before", "import", "import"]


def test_the_finder_leaves_after_what_comes_before(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    finder.before_import("hook_leaf", lambda: None)
    importlib.import_module("hook_leaf")
    assert finder not in sys.meta_path


def test_what_comes_before_may_raise_ends_the_import_and_is_tried_again(
    finder: Finder, write: Callable[..., None]
) -> None:
    write(hook_leaf="")
    callback = Failing()
    finder.before_import("hook_leaf", callback)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="strict"):
            importlib.import_module("hook_leaf")
    callback.well = True
    importlib.import_module("hook_leaf")
    del sys.modules["hook_leaf"]
    importlib.import_module("hook_leaf")
    assert callback.calls == 3


def test_what_comes_before_may_arm_the_name(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 'raw'")
    finder.before_import("hook_leaf", lambda: finder.when_imported("hook_leaf", patch_value))
    assert importlib.import_module("hook_leaf").value == "patched"


def test_what_comes_before_may_look_the_same_name_up(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    specs: list[object] = []
    finder.before_import("hook_leaf", lambda: specs.append(importlib.util.find_spec("hook_leaf")))
    importlib.import_module("hook_leaf")
    assert len(specs) == 1
    assert specs[0] is not None


def test_a_name_that_is_only_looked_up_is_not_imported(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    events: list[str] = []
    finder.before_import("hook_leaf", lambda: events.append("before"))
    assert importlib.util.find_spec("hook_leaf") is not None
    assert importlib.util.find_spec("hook_missing") is None
    assert events == []


def test_what_comes_before_is_done_at_once_when_it_is_asked_for_and_not_again(
    finder: Finder, write: Callable[..., None]
) -> None:
    write(hook_leaf="")
    events: list[str] = []

    def callback() -> None:
        events.append("before")
        finder.do_now("hook_leaf")  # as apply() does, which this calls

    finder.before_import("hook_leaf", callback)
    finder.do_now("hook_leaf")
    importlib.import_module("hook_leaf")
    assert events == ["before"]
    assert finder not in sys.meta_path


def test_the_import_systems_one_lock_is_not_held_while_something_is_called_back(
    finder: Finder, write: Callable[..., None]
) -> None:
    """Whoever waited there for a thread that imports, as apply() waits for another apply(), would wait for ever."""
    write(hook_leaf="", hook_other="value = 1")
    finished: list[bool] = []

    def waits_for_a_thread_that_imports(*modules: ModuleType) -> None:
        thread = threading.Thread(target=importlib.import_module, args=("hook_other",), daemon=True)
        thread.start()
        thread.join(20)
        finished.append(not thread.is_alive())
        sys.modules.pop("hook_other", None)

    finder.before_import("hook_leaf", waits_for_a_thread_that_imports)
    finder.when_imported("hook_leaf", waits_for_a_thread_that_imports)
    importlib.import_module("hook_leaf")
    assert finished == [True, True]
