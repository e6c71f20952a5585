"""Digests of TRL's functions, classes and modules by release, to see whether two releases are equal in some of them."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import get_ident
from typing import Any

from trl_hotfix.matching import digests
from trl_hotfix.matching.digests import parse

from bench.releases.layout import BENCH
from bench.results import keys

Call = str
"""``module:function``, ``module:Class.method`` or, for the body of a class outside of its methods, ``module:Class``."""


def key(release: str, calls: Iterable[Call]) -> str:
    """Return the key of TRL's part in a run: equal in two releases where all that the run called is equal."""
    pieces = _pieces(release)

    def piece(call: Call) -> str:
        # A call that is not in the sources stands for its module, and one without a module for the whole release.
        return pieces.get(call) or pieces.get(f"{call.partition(':')[0]}:") or release

    return keys.digest_of({call: piece(call) for call in sorted(calls)})


def module_key(release: str, modules: Iterable[str]) -> str:
    """Return a digest of whole modules of a release; None stands for one that it does not have."""
    pieces = _pieces(release)
    return keys.digest_of({module: pieces.get(f"{module}:") for module in sorted(modules)})


@functools.lru_cache(maxsize=70)
def _pieces(release: str) -> dict[Call, str]:
    """Return the digest of every function, class body and module of a release. It is kept: releases do not change."""
    reader = hashlib.sha256(Path(digests.__file__).read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    file = BENCH / "code" / reader / f"{release}.json"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Two threads may read the same release at once.
        partial = file.with_suffix(f".{get_ident()}.partial")
        partial.write_text(json.dumps(dict(_read(BENCH / "overlay" / release))))
        partial.replace(file)
    pieces: dict[Call, str] = json.loads(file.read_text())
    return pieces


def _read(folder: Path) -> Iterator[tuple[Call, str]]:
    for path in sorted((folder / "trl").rglob("*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        try:
            tree = parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # A template that is not Python.
            continue
        yield f"{module}:", keys.digest_of(keys.tree_of(tree))
        constants = {
            name: keys.tree_of(statement)
            for statement in keys.statements(tree.body)
            if not isinstance(statement, keys.Definition)
            for name in keys.names_defined(statement)
        }
        yield from _definitions(module, "", tree.body, constants)


def _definitions(
    module: str, prefix: str, body: Iterable[ast.stmt], constants: dict[str, Any]
) -> Iterator[tuple[Call, str]]:
    for statement in keys.statements(body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} & constants.keys()
            content = [keys.tree_of(statement), {name: constants[name] for name in sorted(used)}]
            yield f"{module}:{prefix}{statement.name}", keys.digest_of(content)
        elif isinstance(statement, ast.ClassDef):
            outside = [part for part in statement.body if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))]
            content = [keys.tree_of(outside), keys.tree_of(statement.bases), keys.tree_of(statement.decorator_list)]
            yield f"{module}:{prefix}{statement.name}", keys.digest_of(content)
            yield from _definitions(module, f"{prefix}{statement.name}.", statement.body, constants)
