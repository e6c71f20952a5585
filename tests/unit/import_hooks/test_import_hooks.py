"""A callback is called after the import of its module."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from trl_hotfix.import_hooks import Finder

from helpers.callbacks import Calls, Failing, patch_value


def test_the_callback_runs_after_the_last_line_of_the_module(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 1\nlast = 2")
    defined: list[set[str]] = []
    finder.when_imported("hook_leaf", lambda module: defined.append({"value", "last"} & set(vars(module))))
    importlib.import_module("hook_leaf")
    assert defined == [{"value", "last"}]


def test_the_callback_runs_before_names_are_imported(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 'raw'", hook_user="from hook_leaf import value")
    finder.when_imported("hook_leaf", patch_value)
    assert importlib.import_module("hook_user").value == "patched"


def test_the_callback_gets_the_module_in_sys_modules(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    importlib.import_module("hook_leaf")
    assert calls == [sys.modules["hook_leaf"]]


def test_a_second_import_does_not_call_again(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    for _ in range(3):
        importlib.import_module("hook_leaf")
    assert len(calls) == 1


def test_an_imported_module_is_called_back_at_once(finder: Finder, write: Callable[..., None]) -> None:
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
def test_an_import_after_deletion_calls_again(finder: Finder, write: Callable[..., None], when: str) -> None:
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


def test_a_module_that_raises_is_not_called_back(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="raise KeyError('mine')")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    with pytest.raises(KeyError, match="mine"):
        importlib.import_module("hook_leaf")
    assert calls == []


def test_an_absent_module_is_an_ordinary_error(finder: Finder) -> None:
    finder.when_imported("hook_missing", Calls())
    with pytest.raises(ModuleNotFoundError, match="hook_missing"):
        importlib.import_module("hook_missing")


def test_a_later_callback_replaces_the_earlier_one(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    earlier, later = Calls(), Calls()
    finder.when_imported("hook_leaf", earlier)
    finder.when_imported("hook_leaf", later)
    importlib.import_module("hook_leaf")
    assert (len(earlier), len(later)) == (0, 1)


def test_the_callback_may_import(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="", hook_other="value = 1")
    values: list[int] = []
    finder.when_imported("hook_leaf", lambda module: values.append(importlib.import_module("hook_other").value))
    importlib.import_module("hook_leaf")
    assert values == [1]


def test_a_module_of_a_package_is_called_back(finder: Finder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hook_package").mkdir()
    (tmp_path / "hook_package" / "__init__.py").write_text("from .leaf import value")
    (tmp_path / "hook_package" / "leaf.py").write_text("value = 'raw'")
    monkeypatch.syspath_prepend(str(tmp_path))
    finder.when_imported("hook_package.leaf", patch_value)
    assert importlib.import_module("hook_package").value == "patched"


def test_a_module_of_a_namespace_package_is_called_back(
    finder: Finder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hook_space").mkdir()
    (tmp_path / "hook_space" / "leaf.py").write_text("value = 'raw'")
    monkeypatch.syspath_prepend(str(tmp_path))
    finder.when_imported("hook_space", Calls())
    finder.when_imported("hook_space.leaf", patch_value)
    assert importlib.import_module("hook_space.leaf").value == "patched"
    assert list(sys.modules["hook_space"].__path__) == [str(tmp_path / "hook_space")]


def test_eight_concurrent_imports_are_one_import(finder: Finder, write: Callable[..., None]) -> None:
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


def test_callbacks_run_without_the_import_lock(finder: Finder, write: Callable[..., None]) -> None:
    """A callback that waits for an importing thread, as apply() waits for another apply(), would wait for ever."""
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


# Callbacks that raise


def test_a_callback_that_raises_is_tried_again(finder: Finder, write: Callable[..., None]) -> None:
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


def test_a_callback_for_an_imported_module_raises_at_once(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    module = importlib.import_module("hook_leaf")
    with pytest.raises(RuntimeError, match="strict"):
        finder.when_imported("hook_leaf", Failing())
    assert sys.modules["hook_leaf"] is module


# sys.meta_path


def test_the_finder_is_first_and_present_once(finder: Finder) -> None:
    finder.when_imported("hook_leaf", Calls())
    finder.when_imported("hook_other", Calls())
    finder.before_import("hook_third", lambda: None)
    assert sys.meta_path[0] is finder
    assert sys.meta_path.count(finder) == 1


def test_a_finder_without_names_is_not_installed(finder: Finder) -> None:
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


def test_a_forgotten_name_is_not_called_back(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="", hook_other="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    finder.when_imported("hook_other", Calls())
    finder.forget("hook_leaf")
    importlib.import_module("hook_leaf")
    assert calls == []


def test_a_name_forgotten_before_the_import_is_not_called_back(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    calls = Calls()
    finder.when_imported("hook_leaf", calls)
    spec = importlib.util.find_spec("hook_leaf")
    assert spec is not None
    assert spec.loader is not None
    finder.forget("hook_leaf")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert calls == []
