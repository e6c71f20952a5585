"""The scopes of a script: where its names get their values, and which value a name has at a line."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..errors import plain

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPE_NODES = (*FUNCTIONS, ast.ClassDef, ast.Lambda, *COMPREHENSIONS)


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """One place where a name gets its value: an expression, an imported name, or a class or function.

    ``reason`` is why the value is unknown, if the binding has none of these. If it is not ``unconditional``, its line
    may not be reached, or more than once.
    """

    line: int
    unconditional: bool
    value: ast.expr | None = None
    reason: str = ""
    dotted: str = ""
    definition: ast.AST | None = None


@dataclass(slots=True, eq=False)
class Scope:
    """The names of a module, a class, a function, a lambda or a comprehension.

    ``attributes`` has assignments such as ``args.beta = 1`` under ``("args", "beta")``. ``outer_names`` are those that
    the scope declares ``global`` or ``nonlocal``.
    """

    parent: Scope | None
    of_class: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    attributes: dict[tuple[str, str], list[Binding]] = field(default_factory=dict)
    outer_names: set[str] = field(default_factory=set)

    def bind(self, name: str, binding: Binding) -> None:
        """Add a binding. That of an outer name goes to the module, and depends on whether its function is called."""
        scope = self
        if name in self.outer_names:
            while scope.parent is not None:
                scope = scope.parent
            binding = replace(binding, unconditional=False)
        scope.bindings.setdefault(name, []).append(binding)

    def find(self, name: str, line: int) -> BoundName | None:
        """Return what ``name`` is bound to at ``line`` of this scope, or None if the file does not bind it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.bindings and (scope is self or not scope.of_class):
                return BoundName(_choose(name, scope.bindings[name], line if scope is self else None), scope)
            scope = scope.parent
        return None


class BoundName(NamedTuple):
    """The binding of a name or an attribute, and the scope that has it."""

    binding: Binding
    scope: Scope

    def value(self) -> ScopedExpression | None:
        """Return the expression that is assigned, if there is one."""
        if self.binding.value is None:
            return None
        return ScopedExpression(self.binding.value, self.scope, self.binding.line)


@dataclass(frozen=True, slots=True)
class ScopedExpression:
    """An expression, with the scope and the line at which its names are looked up."""

    node: ast.expr
    scope: Scope
    line: int

    def with_node(self, node: ast.expr) -> ScopedExpression:
        """Return another expression whose names are looked up at the same place."""
        return ScopedExpression(node, self.scope, self.line)

    def find(self, name: ast.Name) -> BoundName | None:
        """Return what a name in this expression is bound to, or None if the file does not bind it."""
        return self.scope.find(name.id, self.line)


def _choose(name: str, bindings: list[Binding], line: int | None) -> Binding:
    """Return the binding that holds at ``line``, if the text tells which one does.

    ``line`` is None if the name is used in an inner scope: the text does not tell when a function is called.
    """
    if len(bindings) == 1:
        return bindings[0]
    imports = [binding for binding in bindings if binding.dotted]
    if len(imports) == len(bindings):  # try: from trl import ... except ImportError: from trl.experimental import ...
        return next((binding for binding in imports if binding.dotted.split(".")[0] == "trl"), imports[-1])
    before = [binding for binding in bindings if line is not None and binding.line < line]
    if before and all(binding.unconditional for binding in before):
        return before[-1]
    lines = ", ".join(str(binding.line) for binding in bindings[:5])
    return Binding(bindings[-1].line, False, reason=f"{name} is assigned more than once (lines {lines})")


def source_text(node: ast.AST | None) -> str:
    """Return a piece of the script on one line, shortened to 60 characters."""
    try:
        text = " ".join(ast.unparse(node).split()) if node is not None else ""
    except RecursionError:
        text = "a long expression"
    return plain(text if len(text) <= 60 else f"{text[:57]}...")
