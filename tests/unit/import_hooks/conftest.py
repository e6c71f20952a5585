from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl_hotfix.import_hooks import Finder

from helpers.callbacks import PREFIX


@pytest.fixture(autouse=True)
def no_module_stays() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith(PREFIX)]:
        del sys.modules[name]


@pytest.fixture
def finder() -> Iterator[Finder]:
    fresh = Finder()
    yield fresh
    fresh._before.clear()
    fresh._imports.clear()
    fresh._leave_if_idle()


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
    """The module ``hook_shared`` that a temporary module imports."""
    namespace = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "hook_shared", namespace)
    return namespace
