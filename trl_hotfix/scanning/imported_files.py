"""The files of its project that a script imports, and what these set on TRL's classes when they are imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .beside import Beside
from .bindings import ScriptBindings

_PACKAGES = frozenset(["accelerate", "peft", "transformers", "trl"])
"""A file that imports none of these sets nothing of a trainer."""


def imported(script: ScriptBindings, beside: Beside, importer: Path) -> list[tuple[int, Path]]:
    """Return the files that a script imports, each once, with the line."""
    files: dict[Path, int] = {}
    for scope in (script.module, *script.scopes.values()):
        names = {
            binding.dotted: binding.line for found in scope.bindings.values() for binding in found if binding.dotted
        }
        for dotted, line in {**names, **{f"{module}.*": line for module, line in scope.star_imports.items()}}.items():
            located = beside.file(dotted, importer)
            if located is not None:
                files.setdefault(located[0], line)
    return sorted((line, file) for file, line in files.items())


def set_by_imports(script: ScriptBindings) -> Mapping[str, tuple[str, int]]:
    """Return the attributes that imported files set on classes and modules, such as ``beta`` of ``DPOConfig.beta``.

    Each has the name of the file, and the line of the script that imports it.
    """
    if script.set_by_imports is None:
        script.set_by_imports = _found(script, script.beside) if script.beside is not None else {}
    return script.set_by_imports


def _found(script: ScriptBindings, beside: Beside) -> Mapping[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    visited = {beside.script}
    files = imported(script, beside, beside.script)
    while files:
        line, file = files.pop(0)
        bindings = beside.bindings(file) if file not in visited else None
        visited.add(file)
        if bindings is not None:
            if _packages(bindings) & _PACKAGES:
                found = {**dict.fromkeys(bindings.set_on_modules, (file.name, line)), **found}
            files += [(line, one) for _, one in imported(bindings, beside, file)]
    return found


def _packages(script: ScriptBindings) -> set[str]:
    scopes = (script.module, *script.scopes.values())
    bound = (one.dotted for scope in scopes for found in scope.bindings.values() for one in found)
    starred = (module for scope in scopes for module in scope.star_imports)
    return {dotted.partition(".")[0] for dotted in (*bound, *starred)}
