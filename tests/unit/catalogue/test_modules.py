"""Every shipped patch has a module, and every function of the module is named in patches.yaml."""

from __future__ import annotations

import ast
import types
from importlib import import_module
from pathlib import Path

import pytest
from helpers.example_entry import SHIPPED

import trl_hotfix.patches
from trl_hotfix.catalogue import modules
from trl_hotfix.model import Patch

IDS = [patch.id for patch in SHIPPED]
MODULES = sorted(Path(trl_hotfix.patches.__file__).parent.glob("*.py"))


def test_every_id_has_a_module() -> None:
    assert {modules.module_of(patch_id) for patch_id in IDS} <= {f"trl_hotfix.patches.{path.stem}" for path in MODULES}


def test_every_module_has_an_id() -> None:
    stems = {path.stem for path in MODULES} - {"__init__"}
    assert stems == {patch_id.replace("-", "_") for patch_id in IDS}


@pytest.mark.parametrize("patch", SHIPPED, ids=IDS)
def test_every_public_function_is_named_in_the_catalogue(patch: Patch) -> None:
    module = import_module(modules.module_of(patch.id))
    defined = {
        name
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    assert defined == {patch.self_test, *(target.wrapper for target in patch.targets)}


@pytest.mark.parametrize("patch", SHIPPED, ids=IDS)
def test_every_named_function_is_at_the_top_of_its_module(patch: Patch) -> None:
    source = Path(import_module(modules.module_of(patch.id)).__file__ or "").read_text(encoding="utf-8")
    defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert {patch.self_test, *(target.wrapper for target in patch.targets)} <= defined


@pytest.mark.parametrize("patch", SHIPPED, ids=IDS)
def test_function_of_gives_the_functions_of_a_patch(patch: Patch) -> None:
    for name in (patch.self_test, *(target.wrapper for target in patch.targets)):
        function = modules.function_of(patch, name, {})
        assert getattr(function, "func", function).__name__ == name
