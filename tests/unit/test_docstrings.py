"""The docstring of a package names its modules: who looks for something finds it there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trl_hotfix
from trl_hotfix.catalogue import modules

PACKAGE = Path(trl_hotfix.__file__).parent
PACKAGES = {
    str(file.parent.relative_to(PACKAGE.parent)): file.parent
    for file in sorted(PACKAGE.rglob("__init__.py"))
    # patches.yaml has the modules of a family, in a section.
    if file.parent.parent.name != "patches" or file.parent.name not in modules.families()
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_names_its_modules(name: str) -> None:
    folder = PACKAGES[name]
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    inside = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    inside |= {file.parent.name for file in folder.glob("*/__init__.py")}
    assert {module for module in inside if not re.search(rf"``{module}``", said)} == set()
