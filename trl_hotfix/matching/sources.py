"""The sources of a TRL release, read from a wheel or from an unpacked one without importing it."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from .digests import digest, parse

_Definition = ast.FunctionDef | ast.AsyncFunctionDef
_Named = _Definition | ast.ClassDef
_BLOCKS = (ast.If, ast.Try, ast.With)


class NotATrlError(ValueError):
    """The file is not a wheel of TRL, nor a folder that TRL is installed in."""


class Release:
    """The sources of one TRL release."""

    def __init__(self, path: Path) -> None:
        self._root: Path | zipfile.Path = path
        if path.is_file():
            try:
                self._root = zipfile.Path(path)
            except zipfile.BadZipFile as error:
                raise NotATrlError(f"{path} is not a wheel: {error}") from error
        found = (
            [re.fullmatch(r"trl-([^-]+)\.dist-info", each.name) for each in self._root.iterdir()]
            if path.exists()
            else []
        )
        versions = [match[1] for match in found if match]
        if len(versions) != 1:
            raise NotATrlError(f"{path} is not a wheel of TRL: expected one trl-<version>.dist-info, found {versions}")
        self.version = versions[0]
        self._tree = functools.cache(self._parse)

    def body(self, module: str, attribute: str) -> str | None:
        """The digest of ``attribute`` in ``module``, inherited and imported names followed; None if it is gone."""
        definition = self._definition(module, attribute)
        return digest(definition) if definition is not None else None

    def text(self, module: str, attribute: str) -> str | None:
        """What the digest is made of, as text: ``attribute`` without comments and docstring; None if it is gone."""
        definition = self._definition(module, attribute)
        if definition is None:
            return None
        if ast.get_docstring(definition) is not None:
            definition = type(definition)(**{**vars(definition), "body": definition.body[1:] or [ast.Pass()]})
        return ast.unparse(definition)

    def _definition(self, module: str, attribute: str) -> _Definition | None:
        *owner, name = attribute.split(".")
        return self._method(module, owner[0], name, set()) if owner else self._function(module, name, set())

    def modules(self) -> list[str]:
        """The names of all modules of TRL."""
        return list(_modules(self._file("trl"), "trl"))

    def attributes(self, module: str) -> list[str]:
        """What ``module`` defines itself that may be a target: its functions, and the methods of its classes."""
        tree = self._tree(module)
        found = [each for each in _statements(tree.body) if isinstance(each, _Named)] if tree is not None else []
        names = [each.name for each in found if isinstance(each, _Definition)]
        for owner in (each for each in found if isinstance(each, ast.ClassDef)):
            methods = (each.name for each in _statements(owner.body) if isinstance(each, _Definition))
            names += [f"{owner.name}.{name}" for name in methods]
        return names

    def _file(self, *steps: str) -> Path | zipfile.Path:
        file = self._root
        for step in steps:
            file = file / step
        return file

    def _parse(self, module: str) -> ast.Module | None:
        *package, name = module.split(".")
        for file in (self._file(*package, name, "__init__.py"), self._file(*package, f"{name}.py")):
            if file.is_file():
                return parse(file.read_text(encoding="utf-8"))
        return None

    def _function(self, module: str, name: str, seen: set[tuple[str, str]]) -> _Definition | None:
        found = self._resolve(module, name, seen)
        return found[1] if found is not None and isinstance(found[1], _Definition) else None

    def _method(self, module: str, owner: str, name: str, seen: set[tuple[str, str]]) -> _Definition | None:
        found = self._resolve(module, owner, seen)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        where, definition = found[0], found[1]
        for each in _named(definition.body, name):
            return each if isinstance(each, _Definition) else None
        for base in definition.bases:
            if isinstance(base, ast.Name) and base.id != owner:
                inherited = self._method(where, base.id, name, seen)
                if inherited is not None:
                    return inherited
        return None

    def _resolve(self, module: str, name: str, seen: set[tuple[str, str]]) -> tuple[str, _Named] | None:
        """The definition that ``name`` stands for in ``module``, and the module where it stands; TRL's own only."""
        tree = self._tree(module)
        if tree is None or (module, name) in seen:
            return None
        seen = {*seen, (module, name)}
        for each in _named(tree.body, name):
            return module, each
        for statement in _statements(tree.body):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        source = self._absolute(module, statement)
                        found = self._resolve(source, alias.name, seen) if source.split(".")[0] == "trl" else None
                        if found is not None:
                            return found
        return None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        package = module.split(".")
        if not self._file(*package, "__init__.py").is_file():
            package = package[:-1]
        package = package[: len(package) - (statement.level - 1)]
        return ".".join([*package, *([statement.module] if statement.module else [])])


def installed() -> Release | None:
    """The TRL that is installed here, if its sources lie beside its metadata: not so for an editable one."""
    with contextlib.suppress(metadata.PackageNotFoundError, NotATrlError):
        folder = Path(str(metadata.distribution("trl").locate_file("")))
        return Release(folder) if (folder / "trl").is_dir() else None
    return None


def _modules(folder: Path | zipfile.Path, package: str) -> Iterator[str]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _modules(each, f"{package}.{each.name}")
        elif each.name.endswith(".py"):
            yield package if each.name == "__init__.py" else f"{package}.{each.name.removesuffix('.py')}"


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those in ``if``, ``try`` and ``with`` blocks included."""
    for statement in body:
        yield statement
        if isinstance(statement, _BLOCKS):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _named(body: Iterable[ast.stmt], name: str) -> Iterator[_Named]:
    """The definitions of ``name``, the one that wins (the last) first."""
    yield from reversed([each for each in _statements(body) if isinstance(each, _Named) and each.name == name])
