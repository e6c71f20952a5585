"""Every shipped patch has a module, and every function of the module is named in patches.yaml."""

from __future__ import annotations

import ast
import signal
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest
from msgspec.structs import replace

import trl_hotfix.patches
from trl_hotfix.catalogue import functions, modules
from trl_hotfix.errors import DamagedError
from trl_hotfix.model import Patch

from helpers.example_entry import SHIPPED

IDS = [patch.id for patch in SHIPPED]
MODULES = sorted(Path(trl_hotfix.patches.__file__).parent.glob("*/*.py"))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "ModuleNotFoundError: No module named 'trl_hotfix.patches.no_good'"),
        ("", "AttributeError: module 'trl_hotfix.patches.no_good' has no attribute 'is_gone'"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def", "SyntaxError: invalid syntax (no_good.py, line 1)"),
    ],
)
def test_a_module_that_cannot_be_used_is_one_error_with_a_remedy(
    content: str | None, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "no_good.py").write_text(content)
    monkeypatch.setattr(trl_hotfix.patches, "__path__", [*trl_hotfix.patches.__path__, str(tmp_path)])
    with pytest.raises(DamagedError) as caught:
        modules.function_of(replace(SHIPPED[0], id="no-good"), "is_gone", {})
    assert str(caught.value) == f"trl_hotfix.patches.no_good cannot be read ({error}); install trl_hotfix again"
    assert "trl_hotfix.patches.no_good" not in modules.PATCH_MODULES
    sys.modules.pop("trl_hotfix.patches.no_good", None)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no signals of users")
def test_what_a_signal_handler_or_a_full_memory_raises_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "told_to_end.py").write_text("import signal\nsignal.raise_signal(signal.SIGUSR1)\n")
    (tmp_path / "too_large.py").write_text("raise MemoryError\n")
    monkeypatch.setattr(trl_hotfix.patches, "__path__", [*trl_hotfix.patches.__path__, str(tmp_path)])

    def end(*_: object) -> None:
        sys.exit(3)

    before = signal.signal(signal.SIGUSR1, end)
    try:
        for patch_id, error in {"told-to-end": SystemExit, "too-large": MemoryError}.items():
            patch = replace(SHIPPED[0], id=patch_id)
            with pytest.raises(error):
                modules.function_of(patch, "is_gone", {})
            with pytest.raises(error):
                list(functions.check_functions(patch, lambda *steps: 1, ""))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_every_id_has_a_module() -> None:
    assert {modules.module_of(patch_id) for patch_id in IDS} <= {
        f"trl_hotfix.patches.{path.parent.name}.{path.stem}" for path in MODULES
    }


def test_every_module_has_an_id() -> None:
    stems = sorted(path.stem for path in MODULES if path.stem != "__init__")
    assert stems == sorted(patch_id.replace("-", "_") for patch_id in IDS)


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
