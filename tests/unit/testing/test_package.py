from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from trl_hotfix import authoring, testing


@pytest.mark.parametrize("package", [authoring, testing], ids=["authoring", "testing"])
def test_a_package_exports_all_public_names(package: object) -> None:
    modules = [import_module(f"{package.__name__}.{info.name}") for info in iter_modules(package.__path__)]  # type: ignore[attr-defined]
    defined = set()
    for module in modules:
        for node in ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    public = {name for name in defined if not name.startswith("_")}
    of_the_ground = {"Call", "Mark", "act", "act_of_this_call", "wrapper"} if package is authoring else set()
    assert set(package.__all__) == public | of_the_ground  # type: ignore[attr-defined]


def test_the_map_of_the_package_names_everything_in_it() -> None:
    for name in set(testing.__all__) - {"ONE_PROCESS"}:
        assert f"``{name}``" in str(testing.__doc__), name
