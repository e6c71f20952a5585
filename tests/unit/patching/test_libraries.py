"""Whose code a function has: TRL and the libraries beneath it, or another one."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import trl.trainer.dpo_trainer
import wrapt

from trl_hotfix.patching import libraries


def is_of_trl(function: Any) -> bool:
    return libraries.is_of_trl(function)


def test_a_method_of_trl_is_of_trl() -> None:
    assert is_of_trl(trl.trainer.dpo_trainer.DPOTrainer.dpo_loss)


def test_functions_of_other_packages_are_not_of_trl() -> None:
    assert not is_of_trl(wrapt.decorator)
    assert not is_of_trl(test_a_method_of_trl_is_of_trl)


def test_a_package_with_a_similar_name_is_not_trl() -> None:
    folder = libraries.folder_of("trl")
    code = compile("def f(): ...", f"{folder}x{os.sep}trainer.py", "exec")
    namespace: dict[str, object] = {}
    exec(code, namespace)
    assert not is_of_trl(namespace["f"])


def test_a_module_without_a_file_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blocked", None)
    assert libraries.folder_of("blocked") is None
    assert libraries.folder_of("no_such_package") is None
