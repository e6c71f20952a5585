"""A callback for a module whose import has begun is called when the module is complete."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from trl_hotfix.import_hooks import Finder

from helpers.callbacks import Calls, Failing, patch_value


def test_a_module_under_way_is_called_back_when_complete(
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


def test_a_module_registered_before_and_during_is_called_once(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.register()\n")
    calls = Calls()
    shared.register = lambda: finder.when_imported("hook_leaf", calls)
    shared.register()
    importlib.import_module("hook_leaf")
    assert len(calls) == 1


def test_a_module_registered_twice_during_is_called_once(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.register()\nhook_shared.register()\n")
    calls = Calls()
    shared.register = lambda: finder.when_imported("hook_leaf", calls)
    importlib.import_module("hook_leaf")
    assert len(calls) == 1


def test_a_module_under_way_gets_its_own_spec_back(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.register()\n", hook_plain="")
    shared.register = lambda: finder.when_imported("hook_leaf", Calls())
    module, plain = importlib.import_module("hook_leaf"), importlib.import_module("hook_plain")
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    assert vars(module.__spec__).keys() == vars(plain.__spec__).keys()


def test_a_module_that_raises_later_is_not_called_back(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.register()\nraise KeyError('mine')\n")
    calls = Calls()
    shared.register = lambda: finder.when_imported("hook_leaf", calls)
    with pytest.raises(KeyError, match="mine"):
        importlib.import_module("hook_leaf")
    assert calls == []


def test_a_callback_that_raises_is_tried_again(
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


def test_a_module_of_another_thread_is_called_back_when_complete(
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
