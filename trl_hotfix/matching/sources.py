"""Read the sources of a TRL release from a wheel or an installed folder, without importing it."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from .. import regular_files
from ..errors import NotATrlError, plain, reason
from .digests import digest, parse
from .versions import is_version

_Definition = ast.FunctionDef | ast.AsyncFunctionDef
_Named = _Definition | ast.ClassDef
_BLOCKS = (ast.If, ast.Try, ast.With)


_LARGEST_WHEEL = 1 << 26
_LARGEST_MODULE = 1 << 21
_MOST_FILES = 10_000
_LONGEST_NAME = 1_000
"""A wheel of TRL has a megabyte in some hundred files, and its longest module a fifth of a megabyte."""


class Release:
    """The sources of one TRL release. Every method raises ``NotATrlError`` for a module that cannot be read."""

    def __init__(self, path: Path) -> None:
        self._shown = plain(str(path))
        try:
            self._root: Path | zipfile.Path = path if path.is_dir() else _archive(path)
            names = [entry.name for entry in self._root.iterdir()]
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
            raise NotATrlError(f"{self._shown} is not a wheel of TRL: {reason(error)}; {_EXPECTED}") from None
        versions = [match[1] for name in names if (match := re.fullmatch(r"trl-([^-]{1,99})\.dist-info", name))]
        if len(versions) != 1 or not is_version(versions[0]):
            found = ", ".join(map(plain, versions[:9])) or "none"
            raise NotATrlError(
                f"{self._shown} is not a wheel of TRL: it should have one trl-<version>.dist-info, and has {found}; "
                f"{_EXPECTED}"
            )
        self.version = versions[0]
        self._tree = functools.cache(self._parse)
        self._digest = functools.cache(digest)

    def body(self, module: str, attribute: str) -> str | None:
        """Return the digest of ``attribute``, which ``module`` may inherit or import, or None if it is gone."""
        definition = self._definition(module, attribute)
        return self._digest(definition) if definition is not None else None

    def inherits(self, module: str, attribute: str) -> str | None:
        """Return what ``attribute`` is in another package, such as ``transformers:Trainer.training_step``.

        None if TRL defines it, or if its class has no base outside TRL. The base itself is not read.
        """
        owner, dot, name = attribute.partition(".")
        if not dot or self._definition(module, attribute) is not None:
            return None
        base = next(self._foreign_bases(module, owner, set()), None)
        return f"{base}.{name}" if base is not None else None

    def text(self, module: str, attribute: str) -> str | None:
        """Return the source of ``attribute`` without comments and docstring, or None if it is gone."""
        definition = self._definition(module, attribute)
        if definition is None:
            return None
        if ast.get_docstring(definition) is not None:
            definition = type(definition)(**{**vars(definition), "body": definition.body[1:] or [ast.Pass()]})
        return ast.unparse(definition)

    def _definition(self, module: str, attribute: str) -> _Definition | None:
        *owner, name = attribute.split(".")
        return self._method(module, owner[0], name, set()) if owner else self._function(module, name, set())

    def class_definition(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return the module that defines the class which ``name`` is in ``module``, and its definition."""
        resolved = self._resolve(module, name, set())
        return (resolved[0], resolved[1]) if resolved is not None and isinstance(resolved[1], ast.ClassDef) else None

    def classes(self, module: str) -> list[str]:
        """Return the names of the classes that ``module`` defines itself."""
        tree = self._tree(module)
        statements = _statements(tree.body) if tree is not None else ()
        return [statement.name for statement in statements if isinstance(statement, ast.ClassDef)]

    def modules(self) -> list[str]:
        """Return the names of all modules of TRL."""
        return list(_modules(self._file("trl"), "trl"))

    def attributes(self, module: str) -> list[str]:
        """Return the possible targets that ``module`` defines itself: its functions, and the methods of its classes."""
        tree = self._tree(module)
        statements = list(_statements(tree.body)) if tree is not None else []
        names = [statement.name for statement in statements if isinstance(statement, _Definition)]
        for owner in (statement for statement in statements if isinstance(statement, ast.ClassDef)):
            methods = (statement.name for statement in _statements(owner.body) if isinstance(statement, _Definition))
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
                try:
                    return parse(_text(file))
                # A member of an archive may be damaged, encrypted, or compressed in a way that Python does not know.
                except (OSError, ValueError, SyntaxError, RuntimeError, MemoryError, zipfile.BadZipFile) as error:
                    raise NotATrlError(
                        f"{self._shown}: the module {plain(module)} cannot be read: {reason(error)}; {_EXPECTED}"
                    ) from None
        return None

    def _function(self, module: str, name: str, visited: set[tuple[str, str]]) -> _Definition | None:
        resolved = self._resolve(module, name, visited)
        return resolved[1] if resolved is not None and isinstance(resolved[1], _Definition) else None

    def _method(self, module: str, owner: str, name: str, visited: set[tuple[str, str]]) -> _Definition | None:
        resolved = self._resolve(module, owner, visited)
        if resolved is None or not isinstance(resolved[1], ast.ClassDef):
            return None
        home, class_definition = resolved[0], resolved[1]
        for definition in _named(class_definition.body, name):
            return definition if isinstance(definition, _Definition) else None
        for base in class_definition.bases:
            if isinstance(base, ast.Name) and base.id != owner:
                inherited = self._method(home, base.id, name, visited)
                if inherited is not None:
                    return inherited
        return None

    def _foreign_bases(self, module: str, name: str, visited: set[tuple[str, str]]) -> Iterator[str]:
        """Yield the classes of other packages from which a class derives, as ``package:name``."""
        resolved = self._resolve(module, name, visited)
        if resolved is None:
            yield from self._imported_from_outside(module, name)
        elif isinstance(resolved[1], ast.ClassDef) and (resolved[0], resolved[1].name) not in visited:
            visited = {*visited, (resolved[0], resolved[1].name)}
            for base in resolved[1].bases:
                if isinstance(base, ast.Name):
                    yield from self._foreign_bases(resolved[0], base.id, visited)

    def _imported_from_outside(self, module: str, name: str) -> Iterator[str]:
        tree = self._tree(module)
        for statement in _statements(tree.body) if tree is not None else ():
            if isinstance(statement, ast.ImportFrom) and not statement.level:
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        yield f"{str(statement.module).partition('.')[0]}:{alias.name}"

    def _resolve(self, module: str, name: str, visited: set[tuple[str, str]]) -> tuple[str, _Named] | None:
        """Return the module and the definition that ``name`` refers to in ``module``. It reads TRL's modules alone."""
        tree = self._tree(module)
        if tree is None or (module, name) in visited:
            return None
        visited = {*visited, (module, name)}
        for definition in _named(tree.body, name):
            return module, definition
        for statement in _statements(tree.body):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        source = self._absolute(module, statement)
                        resolved = self._resolve(source, alias.name, visited) if source.split(".")[0] == "trl" else None
                        if resolved is not None:
                            return resolved
        return None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        package = module.split(".")
        if not self._file(*package, "__init__.py").is_file():
            package = package[:-1]
        package = package[: len(package) - (statement.level - 1)]
        return ".".join([*package, *([statement.module] if statement.module else [])])


_EXPECTED = "expected a wheel (pip download --no-deps trl==VERSION), or the folder into which one was installed"


def _archive(path: Path) -> zipfile.Path:
    """Return the root of an archive. Raises ``OSError``, ``ValueError`` or ``zipfile.BadZipFile``."""
    archive = zipfile.ZipFile(io.BytesIO(regular_files.read(path, _LARGEST_WHEEL)))
    names = archive.namelist()
    # For each name there is one for each of its folders.
    if len(names) > _MOST_FILES or any(len(name) > _LONGEST_NAME for name in names):
        raise ValueError("it has too many files, or too long names")
    return zipfile.Path(archive)


def _text(file: Path | zipfile.Path) -> str:
    if isinstance(file, Path):
        return regular_files.read(file, _LARGEST_MODULE).decode("utf-8")
    with file.open("rb") as stream:
        content: bytes = stream.read(_LARGEST_MODULE + 1)
    if len(content) > _LARGEST_MODULE:
        raise ValueError(f"it has more than {_LARGEST_MODULE >> 20} MiB")
    return content.decode("utf-8")


def installed() -> Release | None:
    """Return the installed TRL, or None if its sources are not beside its metadata, as in an editable install."""
    with contextlib.suppress(metadata.PackageNotFoundError, NotATrlError):
        folder = Path(str(metadata.distribution("trl").locate_file("")))
        return Release(folder) if (folder / "trl").is_dir() else None
    return None


def _modules(folder: Path | zipfile.Path, package: str) -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _modules(path, f"{package}.{path.name}")
        elif path.name.endswith(".py"):
            yield package if path.name == "__init__.py" else f"{package}.{path.name.removesuffix('.py')}"


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those in ``if``, ``try`` and ``with`` blocks included."""
    for statement in body:
        yield statement
        if isinstance(statement, _BLOCKS):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _named(body: Iterable[ast.stmt], name: str) -> Iterator[_Named]:
    """Yield the definitions of ``name``, the last first, since that is the one in effect."""
    definitions = [statement for statement in _statements(body) if isinstance(statement, _Named)]
    yield from reversed([definition for definition in definitions if definition.name == name])
