"""Which imports are at the top of a module, where they slow down each start; import-linter cannot check this."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipapp
from collections.abc import Iterator
from pathlib import Path

import pytest

import trl_hotfix

PACKAGE = Path(trl_hotfix.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
PATCHES = sorted((PACKAGE / "patches").rglob("*.py"))
HEAVY = {"trl", "torch", "transformers", "accelerate", "deepspeed", "datasets", "numpy"}
START = ("__init__.py", "autostart.py", "import_hooks.py", "settings.py")


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported_at_top(path: Path) -> set[str]:
    """Return the top-level names of what a module imports when it is loaded; ours begin with a dot."""
    return {name.split(".")[0] or "." for name in _imports(ast.parse(path.read_text(encoding="utf-8")).body)}


def _imports(nodes: list[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module or ''}"
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from _imports(node.orelse)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _imports([child for child in ast.walk(node) if isinstance(child, (ast.Import, ast.ImportFrom))])


@pytest.mark.parametrize("name", START)
def test_a_start_loads_only_the_standard_library(name: str) -> None:
    assert imported_at_top(PACKAGE / name) <= {".", *sys.stdlib_module_names}


def test_the_package_imports_nothing_at_its_top() -> None:
    assert imported_at_top(PACKAGE / "__init__.py") == set()


# The callback is a subclass of one of transformers, and loaded after it.
@pytest.mark.parametrize("path", [path for path in MODULES if name_of(path) != "recording/callback.py"], ids=name_of)
def test_no_module_loads_torch_or_trl_at_its_top(path: Path) -> None:
    assert imported_at_top(path) & HEAVY == set()


@pytest.mark.parametrize("path", PATCHES, ids=name_of)
def test_a_patch_loads_only_the_standard_library_and_ours(path: Path) -> None:
    assert imported_at_top(path) <= {".", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_within_the_package_are_relative(path: Path) -> None:
    assert "trl_hotfix" not in {
        name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }


def test_list_imports_neither_wrapt_nor_torch() -> None:
    code = (
        "import sys; from trl_hotfix.commands.main import main\n"
        "try: main(['list'])\nexcept SystemExit: pass\n"
        f"print(sorted({{'wrapt', *{sorted(HEAVY)!r}}} & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "line", ["import trl_hotfix", "import trl_hotfix; trl_hotfix.apply()", "import trl_hotfix.api"]
)
def test_a_zipapp_gets_one_import_error(line: str, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "patches")
    shutil.copytree(PACKAGE, tmp_path / "app" / "trl_hotfix", ignore=ignored)
    (tmp_path / "app" / "__main__.py").write_text(line)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    process = subprocess.run(
        [sys.executable, str(tmp_path / "app.pyz")], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert process.returncode == 1
    *_, last = process.stderr.splitlines()
    assert last.startswith(f"ImportError: trl_hotfix cannot run from a zip file, and this is one: {tmp_path}/app.pyz")
    assert process.stderr.count("Error") == 1
