"""A callback is called before the first line of its module."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from trl_hotfix.import_hooks import Finder

from helpers.callbacks import Failing, patch_value


def test_the_callback_runs_once_before_the_first_line(
    finder: Finder, write: Callable[..., None], shared: SimpleNamespace
) -> None:
    write(hook_leaf="import hook_shared\nhook_shared.events.append('import')")
    shared.events = []
    finder.before_import("hook_leaf", lambda: shared.events.append("before"))
    importlib.import_module("hook_leaf")
    del sys.modules["hook_leaf"]
    importlib.import_module("hook_leaf")
    assert shared.events == ["before", "import", "import"]


def test_the_finder_leaves_after_the_callback(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    finder.before_import("hook_leaf", lambda: None)
    importlib.import_module("hook_leaf")
    assert finder not in sys.meta_path


def test_a_callback_that_raises_is_tried_again(finder: Finder, write: Callable[..., None]) -> None:
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


def test_the_callback_may_register_another_callback(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="value = 'raw'")
    finder.before_import("hook_leaf", lambda: finder.when_imported("hook_leaf", patch_value))
    assert importlib.import_module("hook_leaf").value == "patched"


def test_the_callback_may_look_up_the_same_name(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    specs: list[object] = []
    finder.before_import("hook_leaf", lambda: specs.append(importlib.util.find_spec("hook_leaf")))
    importlib.import_module("hook_leaf")
    assert len(specs) == 1
    assert specs[0] is not None


def test_a_lookup_does_not_call_the_callback(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    events: list[str] = []
    finder.before_import("hook_leaf", lambda: events.append("before"))
    assert importlib.util.find_spec("hook_leaf") is not None
    assert importlib.util.find_spec("hook_missing") is None
    assert events == []


def test_a_callback_run_early_is_not_run_again(finder: Finder, write: Callable[..., None]) -> None:
    write(hook_leaf="")
    events: list[str] = []

    def callback() -> None:
        events.append("before")
        finder.run_before_import("hook_leaf")  # as apply() does

    finder.before_import("hook_leaf", callback)
    finder.run_before_import("hook_leaf")
    importlib.import_module("hook_leaf")
    assert events == ["before"]
    assert finder not in sys.meta_path
