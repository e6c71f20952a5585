from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import trl_hotfix
from trl_hotfix.commands import NAMES

PACKAGE = Path(trl_hotfix.__file__).parent
LAYERS = (
    {"conditions", "errors", "limits", "model", "references", "startup"},
    {"authoring", "catalogue", "fingerprint", "freeze", "gates", "packs", "stubs", "wheels"},
    {"conflicts", "import_hooks", "install"},
    {"engine", "guard", "log", "parts", "scan", "scripts"},
    {"__init__", "__main__", "callback", "cli", "commands", "evidence", "ranks", "report", "trail", "verify"},
)
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
UPWARD_WHEN_CALLED = {
    *(("startup", "import_hooks"), ("startup", "engine"), ("startup", "callback")),
    ("model", "report"),
}
"""The interpreter starts at the bottom: startup reaches up, but only once somebody imports TRL.

A notebook asks the report itself how it looks, and the words for that are at the top.
"""

MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))
COMMANDS = sorted((PACKAGE / "commands").glob("*.py"))
PATCHES = sorted(path for path in (PACKAGE / "patches").glob("*.py") if path.stem != "__init__")


@dataclass(frozen=True)
class Import:
    """One imported module: ``.model`` within the package, ``torch`` outside."""

    name: str
    line: int
    at_top: bool
    for_types: bool


def imports(path: Path) -> list[Import]:
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")).body, at_top=True, for_types=False))


def _imports(nodes: list[ast.AST] | list[ast.stmt], *, at_top: bool, for_types: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_top, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots, module = "." * node.level, node.module or ""
            # `from . import engine` names a module; `from . import __version__` a constant of the package.
            names = [f"{dots}{module}"] if module else [f"{dots}{alias.name}" for alias in node.names]
            yield from (Import(name, node.lineno, at_top, for_types) for name in names if name != ".__version__")
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from _imports(node.body, at_top=at_top, for_types=True)
            yield from _imports(node.orelse, at_top=at_top, for_types=for_types)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(list(ast.iter_child_nodes(node)), at_top=at_top and not inside, for_types=for_types)


def of_module(module: str) -> list[Import]:
    return imports(PACKAGE / f"{module}.py")


def own(module: str) -> list[tuple[str, Import]]:
    """What ``module`` imports from this package: the module's name and the import."""
    return [(each.name.lstrip(".").split(".")[0], each) for each in of_module(module) if each.name.startswith(".")]


def test_every_module_has_a_place_in_a_layer() -> None:
    assert set(MODULES) <= set(LAYER)


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_its_own_package_by_its_absolute_name(module: str) -> None:
    assert [each for each in of_module(module) if each.name.split(".")[0] == "trl_hotfix"] == []


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"__init__"}))
def test_a_module_imports_from_its_own_layer_or_below(module: str) -> None:
    upward = [
        (wanted, each.line)
        for wanted, each in own(module)
        if LAYER[wanted] > LAYER[module] and ((module, wanted) not in UPWARD_WHEN_CALLED or each.at_top)
    ]
    assert upward == []


def test_errors_and_model_import_nothing_of_this_package_when_they_are_loaded() -> None:
    assert own("errors") == []
    assert [(wanted, each.at_top) for wanted, each in own("model")] == [("report", False)]


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {wanted for wanted, each in own(module) if each.at_top and not each.for_types} for module in MODULES
    }
    order = list(TopologicalSorter(graph).static_order())
    assert set(MODULES) <= set(order)


@pytest.mark.parametrize("module", ["__init__", "startup", "import_hooks"])
def test_what_runs_at_interpreter_start_imports_only_the_standard_library(module: str) -> None:
    at_top = {each.name.split(".")[0] for each in of_module(module) if each.at_top and not each.for_types}
    assert at_top <= sys.stdlib_module_names


def test_digests_are_made_where_nothing_is_installed() -> None:
    """They are compared between all the interpreters that a machine has, and these have no libraries."""
    waiting, seen = ["fingerprint"], set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        at_top = [each for each in of_module(module) if each.at_top and not each.for_types]
        outside = {each.name.split(".")[0] for each in at_top if not each.name.startswith(".")}
        assert outside <= sys.stdlib_module_names, module
        waiting += {wanted for wanted, each in own(module) if each in at_top} - seen
    assert seen == {"fingerprint", "errors", "packs"}


def test_the_package_itself_imports_nothing_at_its_top() -> None:
    at_top = {each.name for each in of_module("__init__") if each.at_top and not each.for_types}
    assert at_top == set()


# The callback is a subclass of one of transformers', and loaded when that is there.
@pytest.mark.parametrize("module", sorted(set(MODULES) - {"callback"}))
def test_no_module_imports_trl_torch_or_transformers_at_its_top(module: str) -> None:
    heavy = {"trl", "torch", "transformers", "accelerate", "deepspeed", "datasets", "numpy"}
    assert [each for each in of_module(module) if each.at_top and each.name.split(".")[0] in heavy] == []


@pytest.mark.parametrize("module", ["errors", "model", "catalogue", "gates", "engine", "parts", "log"])
def test_what_lists_the_patches_does_not_wait_for_wrapt(module: str) -> None:
    at_top = {each.name.split(".")[0] for each in of_module(module) if each.at_top and not each.for_types}
    assert "wrapt" not in at_top
    assert not {wanted for wanted, each in own(module) if each.at_top and not each.for_types} & {"install", "conflicts"}


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_command_is_known_to_the_command_line_only_and_loads_without_torch_and_wrapt(path: Path) -> None:
    at_top = {each.name.split(".")[0] for each in imports(path) if each.at_top and not each.name.startswith(".")}
    assert at_top <= sys.stdlib_module_names | {"click", "msgspec", "packaging", "rich", "yaml"}
    assert [module for module in MODULES if module != "cli" and "commands" in dict(own(module))] == []
    assert path.stem in {"__init__", *NAMES}


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_module_imports_at_its_top_only_what_a_patch_may_use(path: Path) -> None:
    at_top = [each.name for each in imports(path) if each.at_top]
    strangers = [
        name
        for name in at_top
        if name not in ("..model", "..authoring", "..stubs") and name.split(".")[0] not in sys.stdlib_module_names
    ]
    assert strangers == []


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_module_reaches_nothing_else_of_this_package(path: Path) -> None:
    ours = {each.name for each in imports(path) if each.name.startswith(".") or each.name.startswith("trl_hotfix")}
    assert ours <= {"..model", "..authoring", "..stubs"}
