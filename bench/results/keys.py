"""What a result depends on, as a key: it changes when, and only when, something changes that can change the result.

Of our own code these are the functions, classes and constants that a wrapper, a self-test or a proof uses, found by
name and transitively; a comment, a docstring, an unrelated helper and another patch are none of it, nor is a mark: what
says to the witness that a wrapper acts changes no result. No key has a path or the name of a module of ours, so a file
may move. Of TRL they are the functions that the run has called, with the constants and the class bodies around them.
And there is the stack.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import modules
from trl_hotfix.matching.digests import canonical, parse
from trl_hotfix.model import Patch

from bench.releases import layout
from bench.releases.layout import CHECKOUT, Place

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Piece = tuple[str, str]
"""A module and a name at its top level."""
Content = tuple[str, tuple[tuple[str, Piece], ...]]
"""The digest of a piece, and the pieces that it uses, each with the word for it."""


def digest_of(value: Any) -> str:
    """Return 16 hexadecimal digits for what JSON can hold."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tree_of(value: Any) -> Any:
    """Return a syntax tree as lists and dicts, without comments, layout and docstrings."""
    return json.loads(canonical(value))


@dataclass
class Module:
    """The pieces of one module: what it defines, and what its names stand for elsewhere in our code."""

    definitions: dict[str, list[ast.AST]] = field(default_factory=dict)
    imported: dict[str, Piece] = field(default_factory=dict)
    """Name -> module and name there; an empty name is the module itself."""
    foreign: dict[str, str] = field(default_factory=dict)
    """Name -> ``module`` or ``module.name`` of a library."""


class Sources:
    """Our own code by module: ``trl_hotfix`` and, with tests/ among the folders, ``tiny`` and the proofs."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self.module = functools.cache(self._read)
        self._content = functools.cache(self._content_of_piece)

    def closure(self, pieces: Iterable[Piece]) -> dict[Piece, str]:
        """Return the digest of each of these pieces and of all that they use. Raises ``LookupError``."""
        return {piece: digest for piece, (digest, _) in self._found(pieces).items()}

    def code(self, pieces: Iterable[Piece], within: Callable[[Piece], bool] = lambda piece: True) -> list[Any]:
        """Return what JSON can hold of the same pieces, without the names of their modules. Raises ``LookupError``.

        Each piece is its digest and, by the words that it uses, the numbers of other pieces. They are numbered as they
        are found from the first on. Pieces that are not ``within`` are left out.
        """
        found = {piece: content for piece, content in self._found(pieces).items() if within(piece)}
        numbers = {piece: number for number, piece in enumerate(found)}
        return [
            [digest, [[word, numbers[piece]] for word, piece in uses if piece in numbers]]
            for digest, uses in found.values()
        ]

    def _found(self, pieces: Iterable[Piece]) -> dict[Piece, Content]:
        waiting = [self._defining(*piece) for piece in pieces][::-1]
        found: dict[Piece, Content] = {}
        while waiting:
            piece = waiting.pop()
            if piece not in found:
                found[piece] = self._content(*piece)
                waiting += [used for _, used in reversed(found[piece][1])]
        return found

    def _defining(self, module: str, name: str) -> Piece:
        """Return the piece that is meant where ``module`` only hands on what it imports from another of ours."""
        while module not in ENGINE and name:
            source = self.module(module)
            if source is None or name in source.definitions or name not in source.imported:
                break
            module, name = source.imported[name]
        return module, name

    def _content_of_piece(self, module: str, name: str) -> Content:
        if module in ENGINE:
            return "the engine", ()  # Its key is MACHINERY: a proof that asks for the status depends on it like others.
        source = self.module(module)
        if source is None:
            raise LookupError(f"there is no module {module} of ours")
        if not name:
            return "module", ()
        if name not in source.definitions:
            if "__getattr__" in source.definitions and name != "__getattr__":
                return "by __getattr__", (("__getattr__", (module, "__getattr__")),)
            if self.module(f"{module}.{name}") is not None:
                return "module", ()
            raise LookupError(f"{module} has no {name}")
        nodes = source.definitions[name]
        used = (each for node in nodes for each in self._uses(module, source, node))
        uses = tuple(dict.fromkeys((word, self._defining(*piece)) for word, piece in used))
        names = {child.id for node in nodes for child in ast.walk(node) if isinstance(child, ast.Name)}
        foreign = {name: source.foreign[name] for name in sorted(names & source.foreign.keys())}
        return digest_of([[tree_of(self._without_own_imports(module, node)) for node in nodes], foreign]), uses

    def _without_own_imports(self, module: str, node: ast.AST) -> ast.AST:
        """Return a definition without the imports of ours in it: what they stand for is among what it uses."""
        inner = [child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom)]
        own = set()
        for statement in inner:
            imports = Module()
            self._collect_imports(module, [statement], imports)
            if imports.imported:
                own.add(ast.unparse(statement))
        return _Without(own).visit(copy.deepcopy(node)) if own else node  # type: ignore[no-any-return]

    def _uses(self, module: str, source: Module, node: ast.AST) -> Iterator[tuple[str, Piece]]:
        local = Module()
        self._collect_imports(module, ast.walk(node), local)
        names = {**source.imported, **local.imported}
        attributes: dict[str, set[str]] = {}
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
                attributes.setdefault(child.value.id, set()).add(child.attr)
        for child in ast.walk(node):
            if not isinstance(child, ast.Name):
                continue
            if child.id in names:
                target, piece = names[child.id]
                if piece:
                    yield child.id, (target, piece)
                else:
                    # `tiny.llama`: of a module that is used by its name, what is taken from it.
                    taken = sorted(attributes.get(child.id, ()))
                    yield from ((f"{child.id}.{attribute}", (target, attribute)) for attribute in taken)
            elif child.id in source.definitions:
                yield child.id, (module, child.id)

    def _read(self, module: str) -> Module | None:
        path = self._path(module)
        if path is None:
            return None
        source = Module()
        body = list(statements(parse(path.read_text(encoding="utf-8")).body))
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        self._collect_imports(module, body, source, package)
        marks = {name for name in _MARKS if source.imported.get(name) in _MARKS[name]}
        for statement in body:
            if marks:
                _WithoutMarks(marks).visit(statement)
            for name in names_defined(statement):
                source.definitions.setdefault(name, []).append(statement)
        return source

    def _collect_imports(
        self, module: str, nodes: Iterable[ast.AST], source: Module, package: str | None = None
    ) -> None:
        if package is None:
            path = self._path(module)
            package = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if self._path(alias.name) is not None:
                        source.imported[alias.asname or alias.name] = (alias.name, "")
                    else:
                        source.foreign[alias.asname or alias.name.partition(".")[0]] = alias.name
            elif isinstance(node, ast.ImportFrom):
                origin = _absolute(package, node)
                if self._path(origin) is None:
                    source.foreign |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
                    continue
                for alias in node.names:
                    inner = f"{origin}.{alias.name}"
                    is_module = self._path(inner) is not None
                    source.imported[alias.asname or alias.name] = (inner, "") if is_module else (origin, alias.name)

    @functools.cache  # noqa: B019  one for each run of the bench
    def _path(self, module: str) -> Path | None:
        for folder in self._folders:
            base = folder.joinpath(*module.split("."))
            for path in (base / "__init__.py", base.with_suffix(".py")):
                if path.is_file():
                    return path
        return None


class _Without(ast.NodeTransformer):
    """Removes these imports from a definition."""

    def __init__(self, imports: set[str]) -> None:
        self._imports = imports

    def visit_ImportFrom(self, statement: ast.ImportFrom) -> ast.stmt | None:
        return None if ast.unparse(statement) in self._imports else statement

    visit_Import = visit_ImportFrom  # type: ignore[assignment]


_MARKS = {
    name: [("trl_hotfix.authoring", name), ("trl_hotfix.call", name)] for name in ("act", "act_of_this_call", "wrapper")
}
_LOOKS_ONLY = {"all", "any", "getattr", "hasattr", "isinstance", "len"}


class _WithoutMarks(ast.NodeTransformer):
    """Removes the statements ``act()`` and ``act = act_of_this_call()`` from a definition.

    ``act`` may be the variable of that assignment: a wrapper leaves it to what is called later. A condition goes with
    its mark if nothing else depends on it and it only looks. A wrapper that takes a ``call`` says ``call.act()`` and
    ``act = call.act_later()``.
    """

    def __init__(self, marks: set[str]) -> None:
        self._marks = {"act()"}
        if "act_of_this_call" in marks:
            self._marks.add("act = act_of_this_call()")
        if "wrapper" in marks:
            self._marks |= {"call.act()", "act = call.act_later()"}

    def visit_Expr(self, statement: ast.Expr) -> ast.Expr | None:
        return None if ast.unparse(statement) in self._marks else statement

    visit_Assign = visit_Expr  # type: ignore[assignment]

    def visit_If(self, statement: ast.If) -> ast.AST | None:
        self.generic_visit(statement)
        if not statement.body and not statement.orelse and _only_looks(statement.test):
            return None
        return statement


def _only_looks(test: ast.expr) -> bool:
    for node in ast.walk(test):
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            return False
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _LOOKS_ONLY):
            return False
    return True


def _absolute(package: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    steps = package.split(".")
    steps = steps[: len(steps) - (node.level - 1)]
    return ".".join([*steps, *([node.module] if node.module else [])])


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Give the statements of a module, those in ``if``, ``try`` and ``with`` blocks included."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody"):
                yield from statements(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from statements(handler.body)


def names_defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, Definition):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def policy_of(patch: Any, targets_here: Iterable[Any]) -> Mapping[str, Any]:
    """Return what an entry decides in one place, without its prose."""
    here = {target.name for target in targets_here}
    return {
        "revision": patch.revision,
        "requires": dict(patch.requires),
        "options": {name: [sorted(option.choices), option.default] for name, option in patch.options.items()},
        "targets": [
            [target.module, target.attribute, target.wrapper, target.traced, target.name in here]
            for target in patch.targets
        ],
    }


MACHINERY = 1
"""Raise it where a change of the engine or of the bench changes what is seen: nothing else makes all results stale."""

ENGINE = ("trl_hotfix", "trl_hotfix.call", "trl_hotfix.patching.engine", "trl_hotfix.witness")
"""Modules of which no key has the code: MACHINERY is for them too."""

SOURCES = Sources(CHECKOUT, layout.TESTS)
PROOF_NAMES = ("train", "unaffected", "DATA", "OVERLAYS")
"""What a run of a proof depends on in its module."""


def cell_key(patch: Patch, place: Place) -> str:
    """Return the key of our part in a cell: wrapper, self-test, the entry without its prose, the stack."""
    return _key(patch, place, _code(patch.id, (patch.self_test, *_wrappers(patch))))


def proof_key(patch: Patch, place: Place) -> str:
    """Return the key of our part in a proof: as that of a cell, with the code of the proof for the self-test's."""
    return _key(patch, place, _code(patch.id, _wrappers(patch), proof=True))


def own_key(patch: Patch) -> str:
    """Return the key of what the modules of the patch and of its proof have of it, whatever they use elsewhere."""
    own = {modules.module_of(patch.id), _proof(patch.id)}
    pieces = _pieces(patch.id, (patch.self_test, *_wrappers(patch)), proof=True)
    return digest_of([SOURCES.code(pieces, lambda piece: piece[0] in own), policy_of(patch, patch.targets)])


def _key(patch: Patch, place: Place, code: str) -> str:
    special = layout.settings()["special"].get(place.release, {})
    stack = layout.stack_key(place.stack)
    # Most patches have none, and their keys are as if there were no overlays.
    beside = [[layout.settings()["overlays"][overlay] for overlay in place.overlays_of(patch)], place.transformers]
    policy = policy_of(patch, place.targets_of(patch))
    return digest_of([MACHINERY, code, policy, stack, special, *filter(None, beside)])


def _proof(patch_id: str) -> str:
    return f"proofs.{modules.family_of(patch_id)}.{patch_id.replace('-', '_')}"


def _wrappers(patch: Patch) -> tuple[str, ...]:
    return tuple(dict.fromkeys(target.wrapper for target in patch.targets))


@functools.cache
def _code(patch_id: str, names: tuple[str, ...], *, proof: bool = False) -> str:
    return digest_of(SOURCES.code(_pieces(patch_id, names, proof=proof)))


def _pieces(patch_id: str, names: tuple[str, ...], *, proof: bool) -> list[Piece]:
    pieces = [(modules.module_of(patch_id), name) for name in names]
    if proof:
        module = _proof(patch_id)
        source = SOURCES.module(module)
        defined = source.definitions if source is not None else {}
        # Without a proof, `train` is looked up and raises.
        pieces += [(module, name) for name in PROOF_NAMES if name in defined or name == "train"]
    return pieces
